/** The curves of runs and their controls: axis, scale, smoothing, and a zoom that all charts share. Pages and reports use it. */
import type { ComponentChildren } from 'preact';
import { useCallback, useMemo, useRef, useState } from 'preact/hooks';
import { CHARTS, type ChartName, type ChartSpec, METRIC_ENTRIES, SCALARS } from '../../run/metrics.js';
import type { ChartSource } from '../chart-data.js';
import { Chart, type Line, markColour, type PlacedMark, type Range } from './chart.js';
import { clock, number, percent, short, whole } from './format.js';
import type { Axis, RunData } from './run-data.js';
import { lineColour, useTheme } from './theme.js';
import { Segmented } from './ui.js';

const FORMATS = { number, short, percent: (value: number) => percent(value) };

interface Curve {
  readonly log: ChartSource;
  readonly column: string;
  readonly label: string;
  /** Evaluations are dots, steps a line. */
  readonly dots: boolean;
}

/** A chart of a page and its curves, as the table of metrics defines them. */
export function chartsOf(page: ChartSpec['page']) {
  const charts = (Object.entries(CHARTS) as [ChartName, ChartSpec][]).filter(([, spec]) => spec.page === page);
  return charts.map(([name, { title, unit, log = false, format }]) => ({
    ...{ title, log, fromZero: !log, format: FORMATS[format], ...(unit && { unit }) },
    curves: SCALARS.flatMap(({ name: column, log: file, chart }): Curve[] => {
      const label = chart?.[name];
      return label === undefined ? [] : [{ log: file as ChartSource, column, label, dots: file === 'val' }];
    }),
  }));
}

const RUN_CHARTS = chartsOf('run');

/** A chart for each metric of the program's own. */
function ownCharts(runs: readonly RunData[]) {
  const names = [...new Set(runs.flatMap(({ ownMetrics }) => ownMetrics))];
  return names.map((name) => ({
    ...{ title: name, log: true, fromZero: false, format: number, unit: 'own metric' },
    curves: [{ log: 'own', column: name, label: name, dots: false } as const],
  }));
}

/** A chart for each metric by source of a mixture, with a curve for each source. */
function sourceCharts(runs: readonly RunData[]) {
  const columns = [...new Set(runs.flatMap(({ sourceMetrics }) => sourceMetrics))];
  return METRIC_ENTRIES.flatMap(([metric, { named }]) => {
    if (named?.chart === undefined) return [];
    const { title, unit, log = false, format }: ChartSpec = CHARTS[named.chart];
    return {
      ...{ title, log, fromZero: !log, format: FORMATS[format], ...(unit && { unit }) },
      curves: columns.flatMap((column): Curve[] => {
        if (!column.startsWith(`${metric}/`)) return [];
        return [{ log: 'source', column, label: column.slice(metric.length + 1), dots: false }];
      }),
    };
  });
}

const MAX_MARKS = 300;
export function Curves(props: {
  readonly runs: readonly RunData[];
  /** Changes when the runs have new rows. */
  readonly version: number;
  /** The run whose events are marked on the curves. */
  readonly marked?: RunData | undefined;
  /** More controls. */
  readonly children?: ComponentChildren;
}) {
  const { runs, version, marked } = props;
  const [axis, setAxis] = useState<Axis>('step');
  const [isLog, setIsLog] = useState(false);
  const [smoothing, setSmoothing] = useState(0);
  const { range, zoom, detail } = useZoom(runs, axis);
  const theme = useTheme();
  const charts = useMemo(
    () =>
      [...RUN_CHARTS, ...sourceCharts(runs), ...ownCharts(runs)]
        .map((spec) => ({ spec, lines: linesOf(spec.curves, runs, axis) }))
        .filter(({ lines }) => lines.length > 0),
    [runs, axis, version, detail, theme],
  );
  const marks = useMemo(() => (marked ? marksOf(marked, axis) : []), [marked, axis, version]);
  const formatX = axis === 'time' ? clock : short;
  return (
    <>
      <div class="toolbar">
        <Segmented
          label="Horizontal axis"
          value={axis}
          options={[
            ['step', 'Steps'],
            ['tokens', 'Tokens'],
            ['time', 'Time'],
          ]}
          onChange={(value) => {
            zoom(null);
            setAxis(value);
          }}
        />
        <label class="toggle">
          <input type="checkbox" checked={isLog} onChange={() => setIsLog(!isLog)} />
          Log scale
        </label>
        <label class="slider">
          Smoothing
          <input
            type="range"
            min={0}
            max={0.99}
            step={0.01}
            value={smoothing}
            onInput={(event) => setSmoothing(Number(event.currentTarget.value))}
          />
          <output>{smoothing.toFixed(2)}</output>
        </label>
        {props.children}
        {range ? (
          <button type="button" class="button" onClick={() => zoom(null)}>
            Show all
          </button>
        ) : (
          <span class="muted hint">Drag to zoom</span>
        )}
      </div>
      <MarkLegend marks={marks} />
      <ReadProgress runs={runs} />
      {charts.length === 0 ? <p class="muted nothing">No steps yet. Curves appear with the first one.</p> : null}
      <div class="charts">
        {charts.map(({ spec, lines }) => (
          <Chart
            key={spec.title}
            {...spec}
            log={isLog && (spec.log ?? false)}
            {...{ lines, smoothing, range, formatX, marks }}
            onRange={zoom}
            formatY={spec.format}
          />
        ))}
      </div>
    </>
  );
}

/** Names of the kinds of events that are drawn on the charts. */
const MARKED: Readonly<Record<string, string>> = {
  boot: 'start or restart',
  checkpoint: 'checkpoint',
  eval: 'evaluation',
  halt: 'halt',
  stop: 'stop',
  loader_error: 'error of the data loader',
  'non-finite': 'loss or gradient not finite',
  alert: 'a counter of failures grew',
};

function MarkLegend({ marks }: { readonly marks: readonly PlacedMark[] }) {
  const kinds = Object.keys(MARKED).filter((kind) => marks.some((mark) => mark.kind === kind));
  if (kinds.length === 0) return null;
  return (
    <p class="mark-legend">
      {kinds.map((kind) => (
        <span key={kind}>
          <i style={{ color: `var(--${markColour(kind)})` }}>▼</i>
          {MARKED[kind]}
        </span>
      ))}
    </p>
  );
}

function ReadProgress({ runs }: { readonly runs: readonly RunData[] }) {
  const share = Math.min(1, ...runs.map(({ progress }) => progress));
  if (share >= 0.999) return null;
  return (
    <p class="reading" role="status">
      <progress value={share} max={1} aria-label="Reading the log" /> Reading the log: {Math.floor(100 * share)} %
    </p>
  );
}

/** The zoomed range, and a counter of the details that were read for it. */
function useZoom(runs: readonly RunData[], axis: Axis) {
  const [range, setRange] = useState<Range | null>(null);
  const [detail, setDetail] = useState(0);
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  const zoom = useCallback(
    (next: Range | null) => {
      setRange(next);
      clearTimeout(timer.current);
      timer.current = setTimeout(() => {
        const steps = (run: RunData) =>
          next && ([Math.floor(run.stepAt(next[0], axis)) - 1, Math.ceil(run.stepAt(next[1], axis)) + 1] as const);
        void Promise.all(runs.map((run) => run.zoom(steps(run)))).then(
          () => setDetail((count) => count + 1),
          () => {}, // the coarse curve stays
        );
      }, 120);
    },
    [runs, axis],
  );
  return { range, zoom, detail };
}

const DASHES = [
  [8, 4],
  [2, 3],
] as const;

export function linesOf(curves: readonly Curve[], runs: readonly RunData[], axis: Axis): Line[] {
  const lineCount = curves.filter(({ dots }) => !dots).length;
  const all = runs.flatMap((run, r) =>
    curves.map(({ log, column, label, dots }, c): Line => {
      if (runs.length === 1) return { label, colour: lineColour(c), dots, ...run.points(log, column, axis) };
      // Each of several runs has a colour; its lines differ by their dashes.
      const isOnlyLine = lineCount === 1 && !dots;
      return {
        label: isOnlyLine ? run.label : `${run.label} ${label}`,
        colour: lineColour(r),
        dots,
        ...(c > 0 && !dots && { dash: DASHES[(c - 1) % DASHES.length] }),
        ...run.points(log, column, axis),
      };
    }),
  );
  return all.filter(({ y }) => y.some((value) => value !== null));
}

function marksOf(run: RunData, axis: Axis): PlacedMark[] {
  return run.marks
    .filter(({ kind }) => Object.hasOwn(MARKED, kind))
    .slice(-MAX_MARKS)
    .map(({ step, ts, kind, detail }) => ({
      x: run.place(step, ts, axis),
      kind,
      text: `${kind === 'boot' && step > 0 ? 'restart' : kind} · step ${whole(step)}${kind === 'eval' || kind === 'alert' ? ` · ${detail}` : ''}`,
    }));
}
