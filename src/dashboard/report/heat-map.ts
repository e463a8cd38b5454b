/** Shares from 0 to 1 as SVG: a table of coloured cells with their values, or a dense map without them. */
import { wrapText } from '../../text.js';
import { CHARACTER, coordinate, svgHead, text } from './svg.js';

export interface HeatTable {
  readonly title: string;
  /** By row; NaN leaves a cell empty. */
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
/** Colours of 0, 0.5 and 1. Lightness rises with the value, so the map is readable without colour. */
const [LOW, HIGH] = [
  [68, 1, 84],
  [253, 231, 37],
] as const;
const MIDDLE = [33, 145, 140] as const;

export function heatMap({ title, x, y, columns, rows, tables }: HeatMap): string {
  const tableWidth = columns.length * CELL.width;
  const titles = tables.map((table) => CHARACTER * table.title.length);
  const stride = Math.max(tableWidth, ...titles) + GAP;
  const width = Math.ceil(
    Math.max(MARGIN.left + tables.length * stride - GAP + MARGIN.right, 2 * MARGIN.left + CHARACTER * title.length),
  );
  const bottom = MARGIN.top + rows.length * CELL.height;
  const height = bottom + MARGIN.bottom;
  const parts = tables.flatMap((table, i) => {
    const left = MARGIN.left + i * stride;
    return [
      text(left, MARGIN.top - 26, table.title, 'start', 'font-weight="bold"'),
      ...columns.map((name, c) => text(left + (c + 0.5) * CELL.width, bottom + 16, name, 'middle')),
      ...table.values.flatMap((row, r) => row.map((value, c) => cell(value, left + c * CELL.width, r))),
      text(left + tableWidth / 2, bottom + 34, x, 'middle'),
    ];
  });
  return [
    ...svgHead(width, height, title),
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

/** Rounded down, so that 100 % means all. */
export function percent(share: number): string {
  return `${Number((Math.floor(share * 1000) / 10).toFixed(1))} %`;
}

function color(value: number): string {
  const [from, to, at] = value < 0.5 ? [LOW, MIDDLE, 2 * value] : [MIDDLE, HIGH, 2 * value - 1];
  return `rgb(${from.map((channel, i) => Math.round(channel + at * (to[i] - channel))).join(' ')})`;
}

/** A map of many small cells: rows down, columns to the right. */
export interface DensityMap {
  readonly title: string;
  readonly x: string;
  readonly y: string;
  readonly tables: readonly HeatTable[];
  /** Labels of the first and the last row. */
  readonly ends: readonly [first: string, last: string];
}

const MAP = { width: 320, height: 320, perRow: 3, gap: 60, top: 44, left: 70 };
const LEVELS = 8;

/** Small maps side by side, at most three in a row. White is 0; the darker a cell, the larger its share. */
export function densityMap({ title, x, y, tables, ends }: DensityMap): string {
  const across = Math.min(MAP.perRow, tables.length);
  const width = MAP.left + across * (MAP.width + MAP.gap);
  const titleLines = wrapText(title, Math.floor((width - 2 * MAP.left) / CHARACTER));
  const top = MAP.top + 16 * (titleLines.length - 1);
  const height = top + Math.ceil(tables.length / across) * (MAP.height + MAP.gap);
  const parts = tables.flatMap((table, i) => {
    const left = MAP.left + (i % across) * (MAP.width + MAP.gap);
    const above = top + Math.floor(i / across) * (MAP.height + MAP.gap);
    const bottom = above + MAP.height;
    return [
      text(left, above - 6, table.title, 'start'),
      ...levelPaths(table.values, left, above),
      `<path d="M${left} ${above}V${bottom}H${left + MAP.width}" fill="none" stroke="#333"/>`,
      text(left - 6, above + 12, ends[0], 'end'),
      text(left - 6, bottom, ends[1], 'end'),
      text(left - 6, above + MAP.height / 2, y, 'end'),
      text(left, bottom + 16, '0', 'middle'),
      text(left + MAP.width / 2, bottom + 16, x, 'middle'),
      text(left + MAP.width, bottom + 16, String((table.values[0]?.length ?? 1) - 1), 'middle'),
    ];
  });
  const heading = titleLines.map((line, i) => text(MAP.left, 16 + 16 * i, line, 'start', 'font-weight="bold"'));
  return [...svgHead(width, height, title), ...heading, ...parts, '</svg>'].join('\n');
}

/** One path for each level of grey: far smaller than a rectangle for each cell. */
function levelPaths(values: HeatTable['values'], left: number, top: number): string[] {
  const cellHeight = MAP.height / values.length;
  const paths = new Array<string>(LEVELS + 1).fill('');
  values.forEach((row, r) => {
    const cellWidth = MAP.width / row.length;
    row.forEach((value, c) => {
      const level = value > 0 ? Math.max(1, Math.round(value * LEVELS)) : 0;
      const at = `${coordinate(left + c * cellWidth)} ${coordinate(top + r * cellHeight)}`;
      if (level > 0)
        paths[level] += `M${at}h${coordinate(cellWidth)}v${coordinate(cellHeight)}h-${coordinate(cellWidth)}z`;
    });
  });
  return paths.flatMap((path, level) => {
    const shade = Math.round(235 - (215 * level) / LEVELS);
    return path ? [`<path d="${path}" fill="rgb(${shade} ${shade} ${Math.min(255, shade + 20)})"/>`] : [];
  });
}
