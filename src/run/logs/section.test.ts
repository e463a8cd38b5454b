import { mkdirSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { cpuMs } from '../../testing/cpu-time.js';
import { temporaryFolder } from '../../testing/run.js';
import { readSection } from './heartbeat.js';
import { openSection } from './log.js';

let folder: { path: string; remove: () => void };
let path: string;
beforeEach(() => {
  folder = temporaryFolder();
  path = join(folder.path, '.section_rank3');
});
afterEach(() => folder.remove());

describe('section file', () => {
  it('tells the newest section, and does not grow', () => {
    let now = 1_000_000;
    const writer = openSection(path, 3, { clock: () => now });
    writer.write({ section: 'between', step: 123_456_789 });
    const { size } = statSync(path);
    for (let step = 1; step <= 100; step++) {
      now += 1500;
      writer.write({ section: step % 2 === 0 ? 'fetch' : 'save', step });
      expect(statSync(path).size).toBe(size);
    }
    const expected = { ts: 1150, pid: process.pid, rank: 3, step: 100, section: 'fetch' };
    expect(readSection(path)).toEqual(expected);
    writer.close();
    expect(readSection(path)).toBeUndefined();
  });

  it('reads nothing from a file that is missing, empty, half or of another kind', () => {
    expect(readSection(path)).toBeUndefined();
    const writer = openSection(path, 0);
    expect(readSection(path)).toBeUndefined();
    writer.write({ section: 'step', step: 1 });
    truncateSync(path, 20);
    expect(readSection(path)).toBeUndefined();
    writer.close();
    writeFileSync(path, '{"section":"step","ts":"now"}\n');
    expect(readSection(path)).toBeUndefined();
  });

  it('refuses what is no file', () => {
    mkdirSync(path);
    expect(() => openSection(path, 0)).toThrow('is not a regular file');
  });

  it('costs microseconds', () => {
    const writer = openSection(path, 0);
    const rounds = 5000;
    const ms = cpuMs(() => {
      for (let i = 0; i < rounds; i++) writer.write({ section: 'step', step: i });
    });
    const micros = (ms / rounds) * 1000;
    writer.close();
    console.log(`a section entered: ${micros.toFixed(1)} µs`);
    expect(micros).toBeLessThan(500); // 5 to 20 on an idle machine
  });
});
