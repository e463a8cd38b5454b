/** Line charts as SVG, with round axis numbers, a legend, and gaps where a value is not finite. No script, no style sheet. */
import { wrapText } from '../../text.js';

export interface Series {
  readonly name: string;
  readonly points: readonly (readonly [x: number, y: number])[];
  /** The area around the line, such as the range of several runs. */
  readonly band?: readonly (readonly [x: number, low: number, high: number])[];
}

export interface Chart {
  readonly title: string;
  readonly x: string;
  readonly y: string;
  readonly series: readonly Series[];
  /** Start the y axis at 0. */
  readonly fromZero?: boolean;
  /** The x of every point is a logarithm to base 2: the axis shows the powers. */
  readonly hasPowersOfTwo?: boolean;
}

const [WIDTH, PLOT_HEIGHT] = [760, 242];
const MARGIN = { left: 70, right: 20, top: 34, bottom: 44 };
/** The palette of Okabe and Ito, distinguishable with any colour vision. */
const COLORS = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000', '#8a7500'];
const TICKS = 5;
const ROW = 16;
/** Estimated width of a character of 12 px bold text. */
export const CHARACTER = 7.5;

export function lineChart({ title, x, y, series, fromZero = false, hasPowersOfTwo = false }: Chart): string {
  const points = series.flatMap((one) => one.points).filter(isFinitePoint);
  const bands = series.flatMap(({ band = [] }) => band.flatMap(([, low, high]) => [low, high])).filter(Number.isFinite);
  const [xs, ys] = [points.map(([value]) => value), [...points.map(([, value]) => value), ...bands]];
  const xAxis = axis(range(xs, false));
  const yAxis = axis(range(ys, fromZero));
  const right = WIDTH - MARGIN.right;
  const titleLines = wrapText(title, Math.floor((right - MARGIN.left - CHARACTER * (y.length + 2)) / CHARACTER));
  const legendTop = MARGIN.top - 8 + (titleLines.length - 1) * ROW;
  const legend = series.length > 1 ? legendOf(series, legendTop) : { parts: [], rows: 1 };
  const top = legendTop + 8 + (legend.rows - 1) * ROW;
  const bottom = top + PLOT_HEIGHT;
  const height = bottom + MARGIN.bottom;
  const toX = (value: number) => MARGIN.left + ((value - xAxis.low) / (xAxis.high - xAxis.low)) * (right - MARGIN.left);
  const toY = (value: number) => bottom - ((value - yAxis.low) / (yAxis.high - yAxis.low)) * (bottom - top);
  const grid = [
    ...yAxis.ticks.map((value) => {
      const at = coordinate(toY(value));
      return `<path d="M${MARGIN.left} ${at}H${right}" stroke="#ddd"/>${text(MARGIN.left - 8, toY(value) + 4, label(value), 'end')}`;
    }),
    ...xAxis.ticks
      .filter((value) => !hasPowersOfTwo || Number.isInteger(value))
      .map((value) => text(toX(value), bottom + 18, label(hasPowersOfTwo ? 2 ** value : value), 'middle')),
  ];
  const lines = series.flatMap(({ points: own, band = [] }, index) => {
    const edge = (side: 1 | 2) => band.map((point) => `${coordinate(toX(point[0]))} ${coordinate(toY(point[side]))}`);
    const area = band.length > 1 ? `M${[...edge(1), ...edge(2).reverse()].join('L')}Z` : '';
    const path = pathOf(own, toX, toY);
    const dots = lonePoints(own).map(
      ([a, b]) => `<circle cx="${coordinate(toX(a))}" cy="${coordinate(toY(b))}" r="3" fill="${colorOf(index)}"/>`,
    );
    return [
      area && `<path d="${area}" fill="${colorOf(index)}" fill-opacity="0.18"/>`,
      path && `<path d="${path}" fill="none" stroke="${colorOf(index)}" stroke-width="1.5"/>`,
      ...dots,
    ];
  });
  const empty = points.length === 0 ? text((MARGIN.left + right) / 2, (top + bottom) / 2, 'no data', 'middle') : '';
  return [
    ...svgHead(WIDTH, height, title),
    ...titleLines.map((line, i) => text(MARGIN.left, 14 + i * ROW, line, 'start', 'font-weight="bold"')),
    ...legend.parts,
    ...(points.length > 0 ? grid : []),
    `<path d="M${MARGIN.left} ${top}V${bottom}H${right}" fill="none" stroke="#333"/>`,
    ...lines,
    empty,
    text((MARGIN.left + right) / 2, height - 8, x, 'middle'),
    text(right, 14, y, 'end'),
    '</svg>',
  ]
    .filter((part) => part !== '')
    .join('\n');
}

/** The opening of an SVG element with its size, an accessible title and a white background. */
export function svgHead(width: number, height: number, title: string): string[] {
  const box = `width="${width}" height="${height}"`;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" ${box} viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="12" role="img">`,
    `<title>${escapeXml(title)}</title>`,
    `<rect ${box} fill="#fff"/>`,
  ];
}

/** Names beside their colours, wrapped into rows from `top` on. */
function legendOf(series: readonly Series[], top: number): { parts: string[]; rows: number } {
  let [x, row] = [MARGIN.left, 0];
  const parts = series.map(({ name }, index) => {
    const width = 26 + 7 * name.length;
    if (x > MARGIN.left && x + width > WIDTH - MARGIN.right) [x, row] = [MARGIN.left, row + 1];
    const y = top + row * ROW;
    const part = `<path d="M${x} ${y}h14" stroke="${colorOf(index)}" stroke-width="3"/>${text(x + 18, y + 4, name, 'start')}`;
    x += width;
    return part;
  });
  return { parts, rows: row + 1 };
}

function colorOf(index: number): string {
  return COLORS[index % COLORS.length];
}

function isFinitePoint([x, y]: readonly [number, number]): boolean {
  return Number.isFinite(x) && Number.isFinite(y);
}

/** Points without a finite neighbour, which no line would show. */
function lonePoints(points: Series['points']): Series['points'] {
  const isDrawn = (point: Series['points'][number] | undefined) => point !== undefined && isFinitePoint(point);
  return points.filter((point, i) => isDrawn(point) && !isDrawn(points[i - 1]) && !isDrawn(points[i + 1]));
}

/** One subpath for each run of finite points. */
function pathOf(points: Series['points'], toX: (x: number) => number, toY: (y: number) => number): string {
  let path = '';
  let isOpen = false;
  for (const point of points) {
    if (!isFinitePoint(point)) {
      isOpen = false;
      continue;
    }
    const [x, y] = [coordinate(toX(point[0])), coordinate(toY(point[1]))];
    path += `${isOpen ? 'L' : 'M'}${x} ${y}`;
    isOpen = true;
  }
  return path;
}

/** The smallest and the largest value; always an interval of positive length. */
function range(values: readonly number[], fromZero: boolean): [number, number] {
  if (values.length === 0) return [0, 1];
  let [low, high] = [fromZero ? 0 : Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (high > low) return [low, high];
  const room = Math.abs(high) * 0.1 || 1;
  return [fromZero ? 0 : low - room, high + room];
}

/** Ticks at multiples of 1, 2 or 5 times a power of ten that enclose the range. */
function axis([low, high]: readonly [number, number]): { low: number; high: number; ticks: number[] } {
  const rough = (high - low) / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
  const [first, last] = [Math.floor(low / step), Math.ceil(high / step)];
  const ticks = Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  return { low: first * step, high: last * step, ticks };
}

function label(value: number): string {
  return Math.abs(value) >= 1e6 ? value.toExponential(1) : String(Number(value.toPrecision(6)));
}

export function coordinate(value: number): string {
  return String(Number(value.toFixed(1)));
}

export function text(x: number, y: number, content: string, anchor: string, more = ''): string {
  const attributes = `x="${coordinate(x)}" y="${coordinate(y)}" text-anchor="${anchor}"${more ? ` ${more}` : ''}`;
  return `<text ${attributes}>${escapeXml(content)}</text>`;
}

/** Text for XML and HTML, in elements and quoted attributes. Control characters, which XML forbids, become U+FFFD. */
export function escapeXml(content: string): string {
  return content
    .replace(/[^\P{Cc}\n\t]/gu, '\ufffd')
    .replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}
