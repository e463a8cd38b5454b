/** The device in WebAssembly: its files, its threads, and how it fails. What it computes is tested with every operation. */
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { describe, expect, it } from 'vitest';
import { OutOfMemory, TrefoilError, UsageError } from '../../errors.js';
import { linear } from '../../ops/linear/op.js';
import { fillNormal } from '../../tensor/random/op.js';
import { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { root } from '../../testing/cli.js';
import { defineKernels } from '../device.js';
import { chooseKernels } from '../kernel-choice.js';
import { openDevice } from '../open.js';
import { openWasmDevice, readManifest } from './node.js';
import { Wasm } from './webassembly.js';

function messageOf(work: () => unknown, kind: new (...words: never[]) => Error): string {
  try {
    work();
  } catch (error) {
    expect(error).toBeInstanceOf(kind);
    const { message } = error as Error;
    expect(message).not.toContain('\n');
    return message;
  }
  return expect.unreachable('no error');
}

describe('the files in WebAssembly', () => {
  it('were made from the sources of the kernels: after a change run `npm run kernels -- wasm`', () => {
    const program = "import('./scripts/kernels.mjs').then(({ sourcesKey }) => console.log(sourcesKey()))";
    const key = execFileSync(process.execPath, ['-e', program], { cwd: root, encoding: 'utf8' });
    expect(readManifest().key).toBe(key.trim());
  });

  it('hold every kernel of the processor but those of ranks', () => {
    const names = readdirSync(join(root, 'src'), { recursive: true, encoding: 'utf8' });
    const folders = names
      .filter((name) => /(^|\/)cpu\.cpp$/.test(name) && !/(^|\/)(testing|mpi)\//.test(name))
      .map(dirname);
    const declared = names
      .filter((name) => folders.includes(dirname(name)) && name.endsWith('.ts') && !name.endsWith('.test.ts'))
      .flatMap((name) => [
        ...readFileSync(join(root, 'src', name), 'utf8').matchAll(/^ +(\w+): \[\s*'(?:ptr|struct|i64)'/gm),
      ])
      .map(([, name]) => name);
    expect(declared.length).toBeGreaterThan(70);
    const device = openWasmDevice({ threads: 1, plain: true });
    const missing = declared.filter((name) => {
      try {
        device.kernels(defineKernels(import.meta.url, { [name]: [] }));
        return false;
      } catch (error) {
        if (!(error instanceof UsageError)) throw error;
        return true;
      }
    });
    expect(missing).toEqual([]);
  });

  it('are valid here without relaxed instructions', () => {
    expect(Wasm.validate(readFileSync(new URL('./kernels.wasm', import.meta.url)))).toBe(true);
    const source = openWasmDevice({ threads: 1, plain: true }).kernelSource;
    expect(source).toEqual({ kind: 'wasm', name: 'kernels.wasm', isFused: false, hash: readManifest().key });
  });
});

/** Bytes of a product that helpers take part in. */
function product(threads: number): Uint8Array {
  const device = openWasmDevice({ threads });
  const tape = new Tape(device);
  const [x, w] = [tape.empty([301, 257]), tape.empty([193, 257])];
  fillNormal(x, { seed: 1, stream: 0 });
  fillNormal(w, { seed: 1, stream: 1 });
  const bytes = linear(tape, x, w).readBytes();
  tape.end();
  return bytes;
}

describe('the device', () => {
  it('gives the same bits for 1 and 3 threads', async () => {
    const alone = product(1);
    await setTimeout(50);
    expect(product(3)).toEqual(alone);
  });

  it('says what fits when a tensor does not, and goes on', () => {
    const device = openWasmDevice({ threads: 1 });
    const tensors: Tensor[] = [];
    const message = messageOf(() => {
      for (;;) tensors.push(Tensor.empty(device, [2 ** 26]));
    }, OutOfMemory);
    expect(message).toMatch(
      /^out of memory: 256 MiB could not be allocated for a tensor; kernels in WebAssembly reach 4096 MiB/,
    );
    expect(tensors.length).toBeGreaterThanOrEqual(14); // 3.5 GiB at least
    // The last of them lie beyond 2 GiB, where addresses are negative as 32-bit integers.
    const last = tensors.at(-1)!;
    expect(last.pointer).toBeGreaterThan(2n ** 31n);
    last.rows(0, 1).write([7]);
    expect(last.rows(0, 1).item()).toBe(7);
    for (const tensor of tensors) tensor.free();
    device.pool.trim();
    const again = Tensor.empty(device, [2 ** 27]);
    again.free();
  });

  it('says which kernel crashed, and refuses all that follow', () => {
    const device = openWasmDevice({ threads: 1 });
    const wild = { pointer: 2n ** 32n - 64n };
    const { scale } = device.kernels(defineKernels(import.meta.url, { scale: ['ptr', 'ptr', 'i64', 'f32', 'i64'] }));
    const message = messageOf(() => scale(wild, wild, 1000, 1, 0), TrefoilError);
    expect(message).toMatch(/^scale crashed in WebAssembly \(.*kernels.*\.wasm \w+\): report it; native kernels/);
    const x = Tensor.empty(device, [16]);
    expect(messageOf(() => fillNormal(x, { seed: 1, stream: 0 }), TrefoilError)).toBe(message);
  });

  it('refuses a number for a tensor and a wrong count of arguments', () => {
    const device = openWasmDevice({ threads: 1 });
    const { scale } = device.kernels(defineKernels(import.meta.url, { scale: ['ptr', 'ptr', 'i64', 'f32', 'i64'] }));
    expect(messageOf(() => scale(5 as never, null, 0, 1, 0), UsageError)).toContain('argument 1 must be a tensor');
    expect(messageOf(() => (scale as (...values: unknown[]) => void)(null), UsageError)).toContain('takes 5 arguments');
    const unknown = defineKernels(import.meta.url, { no_such_kernel: [] });
    expect(messageOf(() => device.kernels(unknown), UsageError)).toContain('no_such_kernel is not among the kernels');
  });
});

describe('TREFOIL_KERNELS', () => {
  it('chooses; auto takes WebAssembly where there is no compiler, with a remedy', () => {
    const cache = mkdtempSync(join(tmpdir(), 'trefoil-no-compiler-'));
    try {
      const none = { cache, candidates: ['no-such-compiler'] };
      expect(chooseKernels({ TREFOIL_KERNELS: 'wasm' }, none)).toMatchObject({ kind: 'wasm', warning: null });
      expect(chooseKernels({ TREFOIL_KERNELS: 'native' }, none)).toMatchObject({ kind: 'native', warning: null });
      const { kind, warning } = chooseKernels({}, none);
      expect(kind).toBe('wasm');
      expect(warning).toMatch(
        /^kernels run in WebAssembly, at about half the speed: there is no C\+\+ compiler \(Debian:/,
      );
      expect(chooseKernels({}).kind).toBe('native'); // tests run where there is one
      expect(messageOf(() => chooseKernels({ TREFOIL_KERNELS: 'gpu' }), UsageError)).toContain(
        'expected auto, native, prebuilt, wasm',
      );
    } finally {
      rmSync(cache, { recursive: true, force: true });
    }
  });

  it('opens the device that it names', () => {
    const before = process.env['TREFOIL_KERNELS'];
    process.env['TREFOIL_KERNELS'] = 'wasm';
    try {
      expect(openDevice('cpu', { threads: 1 }).kernelSource.kind).toBe('wasm');
    } finally {
      if (before === undefined) delete process.env['TREFOIL_KERNELS'];
      else process.env['TREFOIL_KERNELS'] = before;
    }
  });
});
