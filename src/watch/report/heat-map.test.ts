import { describe, expect, it } from 'vitest';
import { heatMap, percent } from './heat-map.js';

const MAP = {
  ...{ title: 'Found & lost', x: 'tokens', y: 'depth', columns: ['64', '128'], rows: ['0 %', '50 %', '100 %'] },
  tables: [
    {
      title: 'all',
      values: [
        [1, 0.995],
        [0.25, 0],
        [0.5, Number.NaN],
      ],
    },
    { title: 'without <sel>', values: [[0, 0], [0, 0], [0, 0]] }, // biome-ignore format: one line
  ],
};

describe('heatMap', () => {
  const svg = heatMap(MAP);

  it('is one SVG element with every cell, label and title, and nothing unescaped', () => {
    expect(svg).toMatch(/^<svg [^>]*>[\s\S]*<\/svg>$/);
    expect(svg.match(/<rect [^>]*height="23"/g)).toHaveLength(12);
    expect(svg).toContain('<title>Found &#38; lost</title>');
    expect(svg).toContain('without &#60;sel&#62;');
    for (const text of ['>64<', '>128<', '>tokens<', '>depth<']) expect(svg).toContain(text);
    for (const row of MAP.rows) expect(svg).toContain(`>${row}<`);
    for (const [text, times] of [
      ['99.5 %', 1],
      ['25 %', 1],
    ] as const)
      expect(svg.split(`>${text}<`)).toHaveLength(times + 1);
    // Eleven shares in all; the cell that is not a number has no text.
    expect(svg.match(/fill="#(?:000|fff)">[\d.]+ %</g)).toHaveLength(11);
  });

  it('is lighter where the share is higher', () => {
    const colors = [...svg.matchAll(/fill="rgb\((\d+) (\d+) (\d+)\)"/g)].map(([, ...channels]) => channels.map(Number));
    const light = ([red, green, blue]: number[]) => 0.3 * red + 0.6 * green + 0.1 * blue;
    const [full, , quarter, none, half] = colors.map(light);
    expect([none, quarter, half, full]).toEqual([none, quarter, half, full].sort((a, b) => a - b));
  });
});

it.each([
  [1, '100 %'],
  [0.9999, '99.9 %'],
  [0.99, '99 %'],
  [0.975, '97.5 %'],
  [0, '0 %'],
])('%f is %s: never rounded up to what was not reached', (share, text) => expect(percent(share)).toBe(text));
