import { describe, expect, it } from 'vitest';
import { lineChart } from './svg.js';

const chart = (series: { name: string; points: [number, number][] }[], more = {}) =>
  lineChart({ title: 'T', x: 'step', y: 'loss', series, ...more });

/** The points of the path of a series, by its colour. */
const pathsOf = (svg: string) =>
  [...svg.matchAll(/<path d="([^"]+)" fill="none" stroke="#0072b2"/g)].map((match) => match[1]);

describe('lineChart', () => {
  it('puts points where they belong', () => {
    const svg = chart([
      {
        name: 'a',
        points: [
          [0, 0],
          [5, 5],
          [10, 10],
        ],
      },
    ]);
    const [path] = pathsOf(svg);
    const points = [...path.matchAll(/[ML]([\d.]+) ([\d.]+)/g)].map(([, x, y]) => [Number(x), Number(y)]);
    expect(points).toHaveLength(3);
    expect(points[1][0]).toBeCloseTo((points[0][0] + points[2][0]) / 2, 0);
    expect(points[1][1]).toBeCloseTo((points[0][1] + points[2][1]) / 2, 0);
    expect(points[2][1]).toBeLessThan(points[0][1]); // up is up
  });

  it('has round ticks that hold all values', () => {
    const svg = chart([
      {
        name: 'a',
        points: [
          [1, 2.31],
          [400, 5.87],
        ],
      },
    ]);
    const labels = [...svg.matchAll(/text-anchor="end">([\d.]+)</g)].map((match) => Number(match[1]));
    expect(labels).toEqual([2, 3, 4, 5, 6]);
  });

  it('leaves gaps where a value is not finite, and shows a lone point', () => {
    const points: [number, number][] = [
      [1, 1],
      [2, Number.NaN],
      [3, 2],
      [4, 2],
      [5, Number.POSITIVE_INFINITY],
    ];
    const svg = chart([{ name: 'a', points }]);
    const [path] = pathsOf(svg);
    expect(path.match(/M/g)).toHaveLength(2);
    expect(svg.match(/<circle [^>]*r="3"/g)).toHaveLength(1);
    expect(path).not.toMatch(/NaN|Infinity/);
  });

  it('survives no data, one value and equal values', () => {
    expect(chart([])).toContain('no data');
    expect(chart([{ name: 'a', points: [] }])).toContain('no data');
    for (const value of [0, 7, -3]) {
      const svg = chart([
        {
          name: 'a',
          points: [
            [1, value],
            [2, value],
          ],
        },
      ]);
      expect(svg).not.toMatch(/NaN|Infinity/);
    }
  });

  it('breaks a long legend into rows, and makes room for it', () => {
    const names = Array.from({ length: 9 }, (_, i) => `s2048_adaptive_${i}`);
    const svg = chart(names.map((name, i) => ({ name, points: [[i, i]] })));
    const places = names.map((name) =>
      new RegExp(`x="([\\d.]+)" y="([\\d.]+)" text-anchor="start">${name}<`).exec(svg)!.slice(1).map(Number),
    );
    for (const [x] of places) expect(x + 7 * names[0].length).toBeLessThan(760);
    const rows = new Set(places.map(([, y]) => y));
    expect(rows.size).toBeGreaterThan(1);
    const top = Number(/<path d="M70 (\d+)V/.exec(svg)![1]);
    expect(top).toBeGreaterThan(Math.max(...rows));
  });

  it('has a width and a height, and room for the whole title', () => {
    const title = 'Gates of '.concat('run_with_a_long_name '.repeat(12)).trim();
    const svg = lineChart({ title, x: 'step', y: 'share of a branch', series: [{ name: 'a', points: [[1, 1]] }] });
    const [, width, height] = /^<svg [^>]*width="(\d+)" height="(\d+)" viewBox="0 0 \1 \2"/.exec(svg)!.map(Number);
    expect(width).toBe(760);
    const lines = [...svg.matchAll(/<text x="(\d+)" y="(\d+)"[^>]*bold[^>]*>([^<]*)</g)];
    expect(lines.map((match) => match[3]).join(' ')).toBe(title);
    for (const [, x, y, text] of lines) {
      expect(Number(x) + 7.5 * text.length).toBeLessThan(width);
      expect(Number(y)).toBeLessThan(height);
    }
    const top = Number(/<path d="M70 (\d+)V/.exec(svg)![1]);
    expect(top).toBeGreaterThan(Number(lines.at(-1)![2]));
  });

  it('escapes what it is given', () => {
    const svg = lineChart({
      title: '<script>',
      x: 'a&b',
      y: '"',
      series: [
        { name: '</svg>', points: [[1, 1]] },
        { name: 'b', points: [] },
      ],
    });
    expect(svg).not.toContain('<script>');
    expect(svg.match(/<\/svg>/g)).toHaveLength(1);
    expect(svg).toContain('a&#38;b');
  });
});
