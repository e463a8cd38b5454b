import { describe, expect, it } from 'vitest';
import { densityMap, heatMap, percent } from './heat-map.js';

const MAP = {
  title: 'Found & lost',
  x: 'tokens',
  y: 'depth',
  columns: ['64', '128'],
  rows: ['0 %', '50 %', '100 %'],
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

  it('is wide enough for its titles', () => {
    const title = 'a title that is much longer than the only column of the table is wide';
    const narrow = heatMap({ ...MAP, title, columns: ['64'], tables: [{ title, values: [[1], [1], [1]] }] });
    const width = Number(/^<svg [^>]*width="(\d+)" height="\d+"/.exec(narrow)![1]);
    expect(width).toBeGreaterThan(60 + 7 * title.length);
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

it('densityMap has a darker cell for a larger share and nothing for 0', () => {
  const values = [
    [1, 0, 0],
    [0.25, 1, 0],
  ];
  const svg = densityMap({
    title: 'Blocks',
    x: 'block',
    y: 'token',
    ends: ['0', '15'],
    tables: [{ title: 'layer 0', values }],
  });
  const shades = [...svg.matchAll(/<path d="(M[^"]*)" fill="rgb\((\d+) /g)].map(([, path, shade]) => ({
    cells: path.match(/M/g)!.length,
    shade: Number(shade),
  }));
  expect(shades.map(({ cells }) => cells)).toEqual([1, 2]);
  expect(shades[0].shade).toBeGreaterThan(shades[1].shade);
  expect(svg).toMatch(/^<svg [^>]*width="\d+" height="\d+"[\s\S]*<\/svg>$/);
});
