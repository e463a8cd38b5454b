import { appendFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { cpuMs } from '../../testing/cpu-time.js';
import fc from '../../testing/properties.js';
import { temporaryFolder } from '../../testing/run.js';
import { sampleHeartbeats } from './heartbeat-history.js';

let folder: { path: string; remove: () => void };
let path: string;
beforeEach(() => {
  folder = temporaryFolder();
  path = join(folder.path, 'heartbeat_rank0.jsonl');
});
afterEach(() => folder.remove());

const line = (step: number, ts: number, more = {}) =>
  `${JSON.stringify({ ts, iso: '', pid: 1, rank: 0, step, msg: 'progress', ...more })}\n`;

describe('sampleHeartbeats', () => {
  it('finds exactly the lines of a time span when they are fewer than asked for', () => {
    writeFileSync(path, Array.from({ length: 1000 }, (_, i) => line(i, 100 + i)).join(''));
    // Far more samples than lines: every line of the span is hit.
    expect(sampleHeartbeats(path, 350, 360, 500).map(({ step }) => step)).toEqual([
      250, 251, 252, 253, 254, 255, 256, 257, 258, 259,
    ]);
    expect(sampleHeartbeats(path, 0, 103, 500).map(({ step }) => step)).toEqual([0, 1, 2]);
    expect(sampleHeartbeats(path, 1098, 9999, 500).map(({ step }) => step)).toEqual([998, 999]);
    expect(sampleHeartbeats(path, 5000, 9999, 500)).toEqual([]);
  });

  it('spreads a few samples over many lines', () => {
    writeFileSync(path, Array.from({ length: 5000 }, (_, i) => line(i, i)).join(''));
    const steps = sampleHeartbeats(path, 1000, 3000, 20).map(({ step }) => step);
    expect(steps.length).toBe(20);
    expect(Math.min(...steps)).toBe(1000);
    expect(Math.max(...steps)).toBeGreaterThan(2800);
    expect(Math.max(...steps)).toBeLessThan(3000);
  });

  it('agrees with reading everything, for any lengths of lines, garbage and a half line at the end', () => {
    const shape = fc.record({
      lines: fc.array(fc.tuple(fc.integer({ min: 0, max: 3 }), fc.integer({ min: 0, max: 300 }), fc.boolean()), {
        maxLength: 60,
      }),
      from: fc.integer({ min: 0, max: 100 }),
      span: fc.integer({ min: 0, max: 60 }),
    });
    fc.assert(
      fc.property(shape, ({ lines, from, span }) => {
        let ts = 0;
        let text = '';
        const expected: number[] = [];
        lines.forEach(([wait, padding, garbage], step) => {
          ts += wait;
          if (garbage) text += `${'#'.repeat(padding)}\n`;
          text += line(step, ts, { detail: 'x'.repeat(padding) });
          if (ts >= from && ts < from + span) expected.push(step);
        });
        writeFileSync(path, text);
        appendFileSync(path, line(999, from).slice(0, 20));
        expect(sampleHeartbeats(path, from, from + span, 20_000).map(({ step }) => step)).toEqual(expected);
      }),
      { numRuns: 60 },
    );
  });

  it('searches a file full of lines that are no heartbeats at a bounded cost', () => {
    const garbage = { newlines: '\n', braces: '{\n', arrays: `{"a":[${Array(8_000).fill('1')}]}\n` };
    for (const [name, text] of Object.entries(garbage)) {
      writeFileSync(path, line(1, 1) + text.repeat(Math.ceil(2e6 / text.length)) + line(2, 2));
      let steps: number[] = [];
      const ms = cpuMs(() => {
        steps = sampleHeartbeats(path, 0, Number.POSITIVE_INFINITY, 256).map(({ step }) => step);
      });
      expect(steps, name).toContain(1);
      expect(ms, name).toBeLessThan(2000);
    }
  });

  it('has none for a missing or an empty file', () => {
    expect(sampleHeartbeats(path, 0, 1, 10)).toEqual([]);
    writeFileSync(path, '');
    expect(sampleHeartbeats(path, 0, 1, 10)).toEqual([]);
  });
});
