import { Writable } from 'node:stream';
import { describe, expect, it } from 'vitest';
import { LiveLine } from '../live-line.js';
import { duration, progressText, stepLine } from './report.js';

const line = {
  step: 20,
  loss: 5.43214,
  learningRate: 3e-4,
  tokensPerSecond: 51234.4,
  mfu: 0.412,
  gradientNorm: 0.871,
  fetchSeconds: 0.0032,
  fetchP50Ms: 2,
  fetchP95Ms: 9,
  gates: null,
  selection: null,
  attention: null,
  sparseStart: null,
  memoryMib: { allocated: 1, reserved: 2 },
  counters: {},
  data: 'text',
};

describe('progress', () => {
  it('prints the step line of the runbooks', () => {
    expect(stepLine(line)).toBe(
      'step 0020 | loss 5.4321 | lr 3.00e-04 | toks/s 51234 | mfu 41.2% | grad_norm 0.87 | fetch 3ms | fetch_p50 2ms | fetch_p95 9ms',
    );
    expect(stepLine({ ...line, mfu: null, learningRate: 1e-10 })).toContain('lr 1.00e-10 | toks/s 51234 | grad_norm');
    const sparseStart = { nSel: 32, releasedShare: 0.125 };
    expect(stepLine({ ...line, sparseStart })).toMatch(/fetch_p95 9ms \| n_sel 32 \| gate_released 12\.5%$/);
    expect(stepLine(line, 7)).toMatch(/ \| log_dropped 7$/);
  });

  it('prints durations', () => {
    expect(duration(9)).toBe('0:09');
    expect(duration(3725)).toBe('1:02:05');
    expect(duration(Number.POSITIVE_INFINITY)).toBe('?');
  });

  it('writes a live line to a terminal only', () => {
    const written: string[] = [];
    const stream = new Writable({
      write(chunk, _, done) {
        written.push(String(chunk));
        done();
      },
    });
    new LiveLine(stream).show('nothing');
    expect(written).toEqual([]);
    const live = new LiveLine(Object.assign(stream, { isTTY: true }));
    live.show(progressText({ step: 1, loss: 3, tokensPerSecond: 400 }, 2, 65));
    expect(written.join('')).toContain('1/2  loss 3.000  400 tok/s  1:05 left');
    live.clear();
    live.clear();
    expect(written).toHaveLength(2);
  });
});
