import { expect, it } from 'vitest';
import { cpuSockets } from './sockets.js';

it('counts processor packages, not cores', () => {
  const core = (socket: number) => `processor\t: 0\nphysical id\t: ${socket}\ncore id\t\t: 0\n\n`;
  expect(cpuSockets(() => core(0) + core(0) + core(1) + core(1))).toBe(2);
  expect(cpuSockets(() => 'processor\t: 0\nBogoMIPS\t: 50.00\n')).toBe(1); // ARM names no packages
  const missing = () => {
    throw Object.assign(new Error('no such file'), { code: 'ENOENT' });
  };
  expect(cpuSockets(missing)).toBe(1);
  expect(cpuSockets()).toBeGreaterThanOrEqual(1);
});
