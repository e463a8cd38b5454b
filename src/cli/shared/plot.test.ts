import { describe, expect, it } from 'vitest';
import { plot } from './plot.js';

describe('plot', () => {
  it('draws a falling line from the upper left to the lower right', () => {
    const lines = plot(
      [
        { x: 1, y: 4 },
        { x: 9, y: 2 },
      ],
      { width: 8, height: 3, title: 'loss' },
    ).split('\n');
    expect(lines).toHaveLength(6);
    expect(lines[0]).toContain('loss');
    expect(lines[1]).toMatch(/^ {4}4\.00 ┤[\u2801-\u28ff]/);
    expect(lines[3]).toMatch(/^ {4}2\.00 ┤\u2800+/);
    expect(lines[3].at(-1)).not.toBe('\u2800');
    expect(lines[5].trim()).toBe('1      9');
  });

  it('survives one point, equal values and values that are not finite', () => {
    expect(plot([{ x: 1, y: 1 }])).toContain('⣿');
    expect(plot([{ x: 1, y: Number.NaN }], { title: 'loss' })).toBe('loss: nothing to plot');
  });
});
