/** Opens the device in WebAssembly in Node: its two files lie beside this one, helpers are worker threads. */
import { readFileSync, readSync } from 'node:fs';
import { availableParallelism, cpus, freemem } from 'node:os';
import { basename } from 'node:path';
import { Worker } from 'node:worker_threads';
import { UsageError } from '../../errors.js';
import { type HelperStart, WasmDevice } from './device.js';
import { Wasm } from './webassembly.js';

/** With fused products, which not every version of Node runs; and without. */
const FILES = ['kernels-fma.wasm', 'kernels.wasm'] as const;

const REMEDIES = {
  memory: 'use a smaller model, train.batch_size or train.seq_len, or install a C++ compiler for native kernels',
  crash: 'report it; native kernels may do better (TREFOIL_KERNELS=native, needs a C++ compiler)',
};

/** Written beside the files by `npm run kernels -- wasm`: the hash of the sources that they were made from. */
interface Manifest {
  readonly key: string;
  readonly compiler: string;
}

const beside = (name: string) => new URL(`./${name}`, import.meta.url);

export function readManifest(): Manifest {
  return JSON.parse(readFileSync(beside('kernels.json'), 'utf8')) as Manifest;
}

/** `plain` takes the file without fused products, as versions of Node do that refuse the other one. */
export function openWasmDevice({ threads = availableParallelism(), plain = false } = {}): WasmDevice {
  const { key } = readManifest();
  for (const file of plain ? FILES.slice(1) : FILES) {
    const bytes = readFileSync(beside(file));
    if (!Wasm.validate(bytes)) continue;
    const device = new WasmDevice({
      module: new Wasm.Module(bytes),
      name: cpus()[0]?.model.trim() ?? process.arch,
      source: { name: basename(file), hash: key },
      threads: 1,
      host: { seconds: () => performance.now() / 1000, readFile },
      startHelper,
      freeMemory: freemem,
      remedies: REMEDIES,
    });
    // Relaxed instructions may round twice, as on a processor without FMA: then the plain file says so by its name.
    if (file === FILES[0] && !device.kernelSource.isFused) continue;
    device.threads = threads;
    return device;
  }
  throw new UsageError(
    `Node ${process.versions.node} cannot run kernels in WebAssembly: use Node 20 or newer, or install a C++ compiler`,
  );
}

function startHelper(start: HelperStart): void {
  const worker = new Worker(beside('helper.mjs'), { workerData: start, stdout: false, stderr: false, execArgv: [] });
  worker.unref();
}

function readFile(descriptor: number, offset: number, into: Uint8Array): boolean {
  for (let at = 0; at < into.byteLength; ) {
    const count = readSync(descriptor, into, at, into.byteLength - at, offset + at);
    if (count <= 0) return false;
    at += count;
  }
  return true;
}
