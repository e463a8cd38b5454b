/**
 * Opens the device in WebAssembly in a browser. Where the page is cross-origin isolated, helpers are workers that share its
 * memory; elsewhere the same file runs on one thread. A page's main thread may launch kernels: it spins until
 * the helpers are done, since pages may not wait.
 */
import { TrefoilError, UsageError } from '../../errors.js';
import type { HostDevice } from '../device.js';
import { type HelperStart, WasmDevice } from './device.js';
import { Wasm } from './webassembly.js';

/** With fused products, and without. */
const FILES = { fused: 'kernels-fma.wasm', plain: 'kernels.wasm' } as const;

const REMEDIES = {
  memory: 'use a smaller model, train.batch_size or train.seq_len, or train with Trefoil in Node',
  crash: 'reload the page, and report it if it comes again',
};

/** A module of one relaxed product: browsers without these instructions refuse it, and get the plain file. */
const RELAXED = Uint8Array.of(
  ...[0x00, 0x61, 0x73, 0x6d, 0x01, 0x00, 0x00, 0x00], // \0asm, version 1
  ...[0x01, 0x05, 0x01, 0x60, 0x00, 0x01, 0x7b], // type: () → v128
  ...[0x03, 0x02, 0x01, 0x00, 0x0a, 0x13, 0x01, 0x11, 0x00], // one function, its code
  ...[0x41, 0x00, 0xfd, 0x0f, 0x41, 0x00, 0xfd, 0x0f, 0x41, 0x00, 0xfd, 0x0f], // three vectors of zeros
  ...[0xfd, 0x85, 0x02, 0x0b], // f32x4.relaxed_madd, end
);

/** Code of a helper. It is in this file as text, so that a bundle of any tool contains it. */
const HELPER = `onmessage = ({ data: { module, memory, id, stack, tls, failed } }) => {
  let outcome = 1;
  const env = {
    memory,
    seconds: () => performance.now() / 1000,
    fail: (bytes) => {
      if (bytes > 0) outcome = 2;
      throw new Error('a helper cannot go on');
    },
    read_file: () => 0,
  };
  try {
    const { exports } = new WebAssembly.Instance(module, { env });
    exports.__stack_pointer.value = stack;
    exports.__wasm_init_tls(tls);
    exports.trefoil_help(id);
  } catch {
    Atomics.store(new Int32Array(memory.buffer, failed, 1), 0, outcome);
  }
};`;

/** The part of a browser's globals that is used here. */
interface Page {
  readonly crossOriginIsolated?: boolean;
  readonly navigator?: { readonly hardwareConcurrency?: number };
  readonly Worker?: new (url: string) => { postMessage(message: HelperStart): void };
}
const page = globalThis as unknown as Page;

/** How `openDevice` of `trefoil/browser` opens the device. */
export interface BrowserDeviceOptions {
  /** Folder of the kernels (`kernels-fma.wasm`, `kernels.wasm`, `kernels.json`). Default: that of this module. */
  readonly kernels?: URL | string;
  /** Threads that run kernels. Default: all processors where the page is cross-origin isolated, else 1. */
  readonly threads?: number;
  /** Takes the kernels without fused products. */
  readonly plain?: boolean;
}

/** Whether threads can share memory here: the server of the page sends two headers (docs/guide/browser.md). */
export function hasThreads(): boolean {
  return page.crossOriginIsolated === true && page.Worker !== undefined;
}

/** The processor through WebAssembly. */
export async function openDevice(options: BrowserDeviceOptions = {}): Promise<HostDevice> {
  const folder = new URL(options.kernels ?? '.', import.meta.url);
  const isFused = !options.plain && Wasm.validate(RELAXED);
  const name = isFused ? FILES.fused : FILES.plain;
  const [bytes, manifest] = await Promise.all([
    fetched(new URL(name, folder)),
    fetched(new URL('kernels.json', folder)),
  ]);
  const { key } = JSON.parse(new TextDecoder().decode(manifest)) as { readonly key: string };
  const startHelper = hasThreads() ? createHelpers() : null;
  const device = await openModule(bytes, name, key, startHelper);
  // Relaxed instructions may round twice, as on a processor without FMA: then the plain file says so by its name.
  if (isFused && !device.kernelSource.isFused) return openDevice({ ...options, plain: true });
  device.threads = options.threads ?? (startHelper ? (page.navigator?.hardwareConcurrency ?? 1) : 1);
  return device;
}

async function openModule(
  bytes: Uint8Array,
  name: string,
  hash: string,
  startHelper: ((start: HelperStart) => void) | null,
): Promise<WasmDevice> {
  if (!Wasm.validate(bytes))
    throw new UsageError(
      'this browser cannot run kernels in WebAssembly: use one of 2023 or later, with SIMD and threads',
    );
  return new WasmDevice({
    module: await Wasm.compile(bytes),
    name: 'a browser',
    source: { name, hash },
    threads: 1,
    host: { seconds: () => performance.now() / 1000, readFile: null },
    startHelper,
    // A page is not told what is free: memory that cannot grow is an error of its own.
    freeMemory: () => 2 ** 32,
    remedies: REMEDIES,
  });
}

function createHelpers(): (start: HelperStart) => void {
  const url = URL.createObjectURL(new Blob([HELPER], { type: 'text/javascript' }));
  return (start) => new page.Worker!(url).postMessage(start);
}

async function fetched(url: URL): Promise<Uint8Array> {
  const response = await fetch(url);
  if (!response.ok) throw new TrefoilError(`${url.href}: the server answers ${response.status}; publish this file too`);
  return new Uint8Array(await response.arrayBuffer());
}
