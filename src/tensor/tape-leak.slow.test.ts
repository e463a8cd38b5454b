/** Needs a process of its own: in a shared one the tapes of other tests are collected too. */
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { expect, it } from 'vitest';
import { cpu } from '../testing/devices.js';
import { Tape } from './tape.js';
import type { Tensor } from './tensor.js';

it('a tape that was never ended gives a warning when it is collected', async () => {
  cpu().pool.trace();
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc') as () => void;
  const warnings: string[] = [];
  const listen = (warning: Error) => void warnings.push(warning.message);
  process.on('warning', listen);
  let owned: Tensor | null = null;
  const forget = () => {
    owned = new Tape(cpu()).zeros([1024]);
  };
  forget();
  for (let i = 0; i < 6000 && warnings.length === 0; i++) {
    collect();
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  process.off('warning', listen);
  owned!.free();
  expect(warnings).toHaveLength(1);
  expect(warnings[0]).toMatch(/a Tape was garbage-collected without end\(\): 4096 bytes of device memory are lost/);
  expect(warnings[0]).toMatch(/created at .*tape-leak\.slow\.test\.ts/);
});
