/** A line chart with a shared cursor and zoom. The mouse and the keyboard do the same things. */
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from 'preact/hooks';
import uPlot from 'uplot';
import { type Points, smooth } from './run-data.js';
import { colour, useTheme } from './theme.js';

export interface Line extends Points {
  readonly label: string;
  readonly colour: string;
  /** Dots instead of a line through many points. */
  readonly dots?: boolean;
  /** Dashes and gaps in pixels: tells lines of one colour apart. */
  readonly dash?: readonly number[];
  /** Not smoothed. */
  readonly plain?: boolean;
}

export interface PlacedMark {
  readonly x: number;
  readonly kind: string;
  readonly text: string;
}

export type Range = readonly [from: number, to: number];

interface Props {
  readonly title: string;
  readonly unit?: string;
  readonly lines: readonly Line[];
  readonly marks?: readonly PlacedMark[];
  readonly log?: boolean;
  /** Weight of the past in the smoothed line; 0 draws only the raw line. */
  readonly smoothing?: number;
  readonly range: Range | null;
  readonly onRange: (range: Range | null) => void;
  readonly formatX: (x: number) => string;
  readonly formatY: (y: number) => string;
  readonly fromZero?: boolean;
}

/** All charts of a page share the cursor. */
const SYNC = 'charts';
const HEIGHT = 204;
/** Pixels between the cursor and a mark whose text is shown. */
const NEAR = 6;
const MARK_COLOURS: Readonly<Record<string, string>> = {
  checkpoint: 'muted',
  eval: 'accent',
  boot: 'line-1',
  'non-finite': 'red',
  halt: 'red',
  stop: 'ink',
  loader_error: 'amber',
  alert: 'amber',
};

export function markColour(kind: string): string {
  return MARK_COLOURS[kind] ?? 'muted';
}

export function Chart(props: Props) {
  const { title, unit, lines, log = false, smoothing = 0 } = props;
  const theme = useTheme();
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const [at, setAt] = useState<Cursor | null>(null);

  const isSmoothed = smoothing > 0;
  const data = useMemo(() => tableOf(lines, log, smoothing), [lines, log, smoothing]);
  const structure = JSON.stringify([
    lines.map(({ label, colour, dots, dash }) => [label, colour, dots, dash]),
    log,
    isSmoothed,
    theme,
  ]);

  // The chart is created anew only when its lines or scales change; new values go into the existing one. Layout effects run
  // before the page is shown or printed.
  useLayoutEffect(() => {
    const element = host.current!;
    const created = new uPlot(options(latest, element.clientWidth, setAt), data, element);
    plot.current = created;
    const observer = new ResizeObserver(() => created.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      created.destroy();
      plot.current = null;
    };
  }, [structure]);

  useLayoutEffect(() => {
    const current = plot.current;
    if (!current) return;
    current.batch(() => {
      current.setData(data, false);
      const [min, max] = props.range ?? extent(data[0]);
      current.setScale('x', { min, max });
    });
  }, [data, props.range]);
  useEffect(() => plot.current?.redraw(false), [props.marks]);

  return (
    <figure class="chart">
      <figcaption>
        <h3>
          {title}
          {unit ? <span class="unit">{unit}</span> : null}
        </h3>
        <Legend {...props} at={at} />
      </figcaption>
      <div
        class="plot"
        ref={host}
        role="img"
        aria-label={describe(props)}
        tabIndex={0}
        onKeyDown={(event) => plot.current && onKey(event, plot.current, latest.current)}
      />
    </figure>
  );
}

interface Cursor {
  readonly x: number;
  readonly values: readonly (number | null)[];
  readonly mark: PlacedMark | null;
}

function Legend({ lines, at, formatX, formatY }: Props & { readonly at: Cursor | null }) {
  return (
    <div class="legend">
      {at ? <span class="legend-x">{formatX(at.x)}</span> : null}
      {lines.map((line, i) => {
        const value = at ? at.values[i] : lastOf(line.y);
        return (
          <span key={line.label} class="legend-item">
            <i style={{ background: swatch(line) }} />
            <span class="legend-name">{line.label}</span>
            <b>{value === null ? '–' : formatY(value)}</b>
          </span>
        );
      })}
      {at?.mark ? <span class={`mark-text mark-${at.mark.kind}`}>{at.mark.text}</span> : null}
    </div>
  );
}

function swatch({ colour, dash }: Line): string {
  return dash
    ? `repeating-linear-gradient(90deg, ${colour} 0 ${dash[0] / 2}px, transparent 0 ${(dash[0] + dash[1]) / 2}px)`
    : colour;
}

function lastOf(values: readonly (number | null)[]): number | null {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return null;
}

function describe({ title, lines, formatY }: Props): string {
  const parts = lines.map(({ label, y }) => {
    const value = lastOf(y);
    return `${label}: ${value === null ? 'no values' : formatY(value)}`;
  });
  return `${title}. Newest values: ${parts.join(', ')}. Arrow keys move the cursor, plus and minus zoom, 0 shows all.`;
}

/** One table with a common x column: raw lines, then the smoothed ones. */
function tableOf(lines: readonly Line[], log: boolean, smoothing: number): uPlot.AlignedData {
  const positive = (value: number | null) => (value === null || value > 0 ? value : null);
  const clean = (y: readonly (number | null)[]) => (log ? y.map(positive) : [...y]);
  const tables = lines.map(({ x, y }) => [[...x], clean(y)] as uPlot.AlignedData);
  if (smoothing > 0)
    lines.forEach(({ x, y, dots, plain }) => {
      tables.push([[...x], dots || plain ? x.map(() => null) : smooth(clean(y), smoothing)] as uPlot.AlignedData);
    });
  if (tables.length === 0) return [[]];
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

function extent(x: ArrayLike<number>): Range {
  if (x.length === 0) return [0, 1];
  const [min, max] = [x[0], x[x.length - 1]];
  return min === max ? [min - 0.5, max + 0.5] : [min, max];
}

function options(
  latest: { readonly current: Props },
  width: number,
  setAt: (cursor: Cursor | null) => void,
): uPlot.Options {
  const { lines, log = false, smoothing = 0 } = latest.current;
  const [text, grid] = [colour('muted'), colour('grid')];
  const axis: uPlot.Axis = {
    stroke: text,
    font: '11px system-ui, sans-serif',
    grid: { stroke: grid, width: 1 },
    ticks: { show: false },
  };
  const raw = lines.map((line): uPlot.Series => {
    const isFaint = smoothing > 0 && !line.dots && !line.plain;
    return {
      label: line.label,
      stroke: line.colour,
      width: line.dots ? 0 : isFaint ? 1 : 1.5,
      alpha: isFaint ? 0.3 : 1,
      spanGaps: true,
      ...(line.dash && { dash: [...line.dash] }),
      points: line.dots
        ? { show: true, size: 7, fill: colour('surface'), stroke: line.colour, width: 2 }
        : { show: line.x.length === 1 },
    };
  });
  const smoothed =
    smoothing > 0
      ? lines.map(
          (line): uPlot.Series => ({
            stroke: line.colour,
            width: 2,
            spanGaps: true,
            points: { show: false },
            ...(line.dash && { dash: [...line.dash] }),
          }),
        )
      : [];
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    padding: [8, 18, 0, 0],
    series: [{}, ...raw, ...smoothed],
    scales: {
      x: { time: false },
      y: log ? { distr: 3 } : { range: (_, min, max) => yRange(min, max, latest.current.fromZero ?? false) },
    },
    axes: [
      { ...axis, space: 70, size: 24, values: (_, splits) => splits.map((value) => latest.current.formatX(value)) },
      {
        ...axis,
        size: 56,
        values: (_, splits) => splits.map((value) => (value === null ? '' : latest.current.formatY(value))),
      },
    ],
    cursor: {
      sync: { key: SYNC, scales: ['x', null] },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
      bind: {
        dblclick: () => () => {
          latest.current.onRange(null);
          return null;
        },
      },
    },
    hooks: {
      draw: [(u) => drawMarks(u, latest.current.marks ?? [])],
      setCursor: [(u) => setAt(cursorOf(u, latest.current))],
      setSelect: [
        (u) => {
          const { left, width: selected } = u.select;
          if (selected < 4) return;
          const range: Range = [u.posToVal(left, 'x'), u.posToVal(left + selected, 'x')];
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          latest.current.onRange(range);
        },
      ],
    },
  };
}

function yRange(min: number | null, max: number | null, fromZero: boolean): uPlot.Range.MinMax {
  if (min === null || max === null || (fromZero && min === 0 && max === 0)) return [0, 1];
  const low = fromZero ? Math.min(0, min) : min;
  const pad = (max - low || Math.abs(max) || 1) * 0.06;
  return [fromZero && min >= 0 ? 0 : low - pad, max + pad];
}

function cursorOf(u: uPlot, { lines, marks = [] }: Props): Cursor | null {
  const { idx, left } = u.cursor;
  if (idx === null || idx === undefined || left === undefined || left < 0) return null;
  const values = lines.map((_, i) => {
    // Lines of different runs have different x: take the nearest value before the cursor.
    const column = u.data[i + 1];
    for (let row = idx; row >= 0; row--) if (column[row] !== null && column[row] !== undefined) return column[row]!;
    return null;
  });
  const mark = marks.find(({ x }) => Math.abs(u.valToPos(x, 'x') - left) <= NEAR) ?? null;
  return { x: u.data[0][idx], values, mark };
}

function drawMarks(u: uPlot, marks: readonly PlacedMark[]): void {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  ctx.save();
  for (const { x, kind } of marks) {
    const at = Math.round(u.valToPos(x, 'x', true));
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = colour(markColour(kind));
    ctx.globalAlpha = 0.55;
    ctx.lineWidth = ratio;
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.beginPath();
    ctx.moveTo(at - 4 * ratio, bbox.top);
    ctx.lineTo(at + 4 * ratio, bbox.top);
    ctx.lineTo(at, bbox.top + 6 * ratio);
    ctx.fill();
  }
  ctx.restore();
}

/** Arrows move the cursor, + and - zoom around it, 0 and Escape show everything. */
function onKey(event: KeyboardEvent, u: uPlot, { onRange, range }: Props): void {
  const x = u.data[0];
  const current = u.cursor.idx ?? x.length - 1;
  const [min, max] = [u.scales['x'].min ?? 0, u.scales['x'].max ?? 1];
  const zoom = (factor: number) => {
    const middle = x[current] >= min && x[current] <= max ? x[current] : (min + max) / 2;
    const [low, high] = extent(x);
    const next: Range = [middle - (middle - min) * factor, middle + (max - middle) * factor];
    onRange(next[0] <= low && next[1] >= high ? null : next);
  };
  const move = (steps: number) => {
    const index = Math.min(x.length - 1, Math.max(0, current + steps));
    u.setCursor({ left: u.valToPos(x[index], 'x'), top: u.over.clientHeight / 2 });
  };
  const stride = Math.max(1, Math.round(x.length / 100));
  if (event.key === 'ArrowLeft') move(event.shiftKey ? -10 * stride : -stride);
  else if (event.key === 'ArrowRight') move(event.shiftKey ? 10 * stride : stride);
  else if (event.key === '+' || event.key === '=') zoom(0.5);
  else if (event.key === '-') zoom(2);
  else if (event.key === '0' || (event.key === 'Escape' && range)) onRange(null);
  else return;
  event.preventDefault();
}
