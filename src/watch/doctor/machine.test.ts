import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { defaultCompilerOptions, findCompiler, KernelCompiler } from '../../device/cpu/compile.js';
import { CpuDevice } from '../../device/cpu/cpu.js';
import { fillNormal } from '../../tensor/random/op.js';
import { Tensor } from '../../tensor/tensor.js';
import { machineRows } from './machine.js';

const cache = mkdtempSync(join(tmpdir(), 'trefoil-doctor-'));
afterAll(() => rmSync(cache, { recursive: true, force: true }));

it('does not say that kernels compile where there is no compiler', { timeout: 60_000 }, () => {
  const env = { PATH: process.env['PATH'], TREFOIL_CACHE: cache };
  const options = defaultCompilerOptions(env);
  const kernels = (more: object) => machineRows({ ...env, ...more }).find(({ check }) => check === 'kernels')!;
  // Fills the cache with the two kernels that the check runs.
  const device = new CpuDevice({ compiler: options });
  const tensor = Tensor.empty(device, [4]);
  fillNormal(tensor, { seed: 1, stream: 0 });
  tensor.free();
  expect(findCompiler(options.candidates).command).not.toBe('');
  const { total } = new KernelCompiler(options).stock;
  expect(kernels({})).toMatchObject({
    level: 'green',
    found: expect.stringContaining(`2 of ${total} are in the cache`),
  });
  const fallback = kernels({ CXX: 'no-such-compiler' });
  expect(fallback).toMatchObject({ level: 'yellow', remedy: expect.stringContaining('there is no C++ compiler') });
  expect(fallback.found).toMatch(/^run in WebAssembly on .+: kernels(-fma)?\.wasm, sources \w+$/);
  expect(kernels({ CXX: 'no-such-compiler', TREFOIL_KERNELS: 'wasm' }).level).toBe('green');
  const row = kernels({ CXX: 'no-such-compiler', TREFOIL_KERNELS: 'native' });
  expect(row).toMatchObject({ level: 'yellow', remedy: expect.stringContaining('install a compiler') });
  expect(row.found).toContain(`2 of ${total} are in the cache, and there is no compiler for the others`);
  expect(row.found).not.toMatch(/\bcompile and\b/);
});
