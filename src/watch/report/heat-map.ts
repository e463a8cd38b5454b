/** Shares from 0 to 1 as a table of coloured cells with their values in percent, several tables beside each other. As SVG. */
import { coordinate, escapeXml, text } from './svg.js';

export interface HeatTable {
  readonly title: string;
  /** Row by row; NaN leaves a cell empty. */
  readonly values: readonly (readonly number[])[];
}

export interface HeatMap {
  readonly title: string;
  readonly x: string;
  readonly y: string;
  readonly columns: readonly string[];
  readonly rows: readonly string[];
  readonly tables: readonly HeatTable[];
}

const CELL = { width: 78, height: 24 };
const MARGIN = { left: 60, right: 20, top: 62, bottom: 44 };
const GAP = 50;
/** From nothing to everything: lightness rises with the value, so it reads without colour too. */
const [LOW, HIGH] = [
  [68, 1, 84],
  [253, 231, 37],
] as const;
const MIDDLE = [33, 145, 140] as const;

export function heatMap({ title, x, y, columns, rows, tables }: HeatMap): string {
  const tableWidth = columns.length * CELL.width;
  const width = MARGIN.left + tables.length * (tableWidth + GAP) - GAP + MARGIN.right;
  const bottom = MARGIN.top + rows.length * CELL.height;
  const height = bottom + MARGIN.bottom;
  const parts = tables.flatMap((table, i) => {
    const left = MARGIN.left + i * (tableWidth + GAP);
    return [
      text(left, MARGIN.top - 26, table.title, 'start', 'font-weight="bold"'),
      ...columns.map((name, c) => text(left + (c + 0.5) * CELL.width, bottom + 16, name, 'middle')),
      ...table.values.flatMap((row, r) => row.map((value, c) => cell(value, left + c * CELL.width, r))),
      text(left + tableWidth / 2, bottom + 34, x, 'middle'),
    ];
  });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="12" role="img">`,
    `<title>${escapeXml(title)}</title>`,
    `<rect width="${width}" height="${height}" fill="#fff"/>`,
    text(MARGIN.left, 16, title, 'start', 'font-weight="bold"'),
    text(MARGIN.left - 8, MARGIN.top - 8, y, 'end'),
    ...rows.map((name, r) => text(MARGIN.left - 8, MARGIN.top + (r + 0.5) * CELL.height + 4, name, 'end')),
    ...parts,
    '</svg>',
  ].join('\n');
}

function cell(value: number, left: number, row: number): string {
  const top = MARGIN.top + row * CELL.height;
  const box = `x="${coordinate(left)}" y="${top}" width="${CELL.width - 1}" height="${CELL.height - 1}"`;
  if (!Number.isFinite(value)) return `<rect ${box} fill="#eee"/>`;
  const ink = value > 0.5 ? '#000' : '#fff';
  const label = text(left + CELL.width / 2, top + CELL.height / 2 + 4, percent(value), 'middle', `fill="${ink}"`);
  return `<rect ${box} fill="${color(value)}"/>${label}`;
}

/** Never rounded up to what was not reached. */
export function percent(share: number): string {
  return `${Number((Math.floor(share * 1000) / 10).toFixed(1))} %`;
}

function color(value: number): string {
  const [from, to, at] = value < 0.5 ? [LOW, MIDDLE, 2 * value] : [MIDDLE, HIGH, 2 * value - 1];
  return `rgb(${from.map((channel, i) => Math.round(channel + at * (to[i] - channel))).join(' ')})`;
}
