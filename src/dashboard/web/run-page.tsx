/** The curves of one run, or of several over each other, while they train. */
import { useCallback, useEffect, useMemo, useRef, useState } from 'preact/hooks';
import type { Overview, RunRow } from '../answers.js';
import { api } from './api.js';
import { Chart, type Line, type PlacedMark, type Range } from './chart.js';
import { Controls } from './controls.js';
import { clock, duration, number, percent, short, whole } from './format.js';
import { Configs, Environment, Events, Health, Ranks, Samples } from './panels.js';
import { type Axis, follow, type LogName, RunData } from './run-data.js';
import { lineColour, useTheme } from './theme.js';
import { Empty, Segmented, StatePill, useNow } from './ui.js';

interface CurveSpec {
  readonly title: string;
  readonly unit?: string;
  readonly fromZero?: boolean;
  /** Can be drawn on a logarithmic axis. */
  readonly log?: boolean;
  readonly format: (value: number) => string;
  readonly curves: readonly {
    readonly log: LogName;
    readonly column: string;
    readonly label: string;
    readonly dots?: boolean;
  }[];
}

const beat = (column: string, label: string) => ({ log: 'heartbeat' as const, column, label });

const CHARTS: readonly CurveSpec[] = [
  {
    title: 'Loss',
    unit: 'nats per token',
    log: true,
    format: number,
    curves: [beat('loss', 'training'), { log: 'val', column: 'val_loss', label: 'validation', dots: true }],
  },
  { title: 'Gradient norm', log: true, format: number, curves: [beat('grad_norm', 'norm')] },
  { title: 'Learning rate', log: true, format: number, curves: [{ log: 'training', column: 'lr', label: 'rate' }] },
  { title: 'Throughput', unit: 'tokens/s', fromZero: true, format: short, curves: [beat('toks_per_s', 'tokens/s')] },
  {
    title: 'MFU',
    unit: 'share of the peak',
    fromZero: true,
    format: (value) => percent(value),
    curves: [beat('mfu', 'mfu')],
  },
  {
    title: 'Memory',
    unit: 'MiB',
    fromZero: true,
    format: short,
    curves: [beat('gpu_mem_alloc', 'allocated'), beat('gpu_mem_reserved', 'reserved')],
  },
  {
    title: 'Fetch time',
    unit: 'ms',
    fromZero: true,
    format: number,
    curves: [beat('fetch_p50_ms', 'p50'), beat('fetch_p95_ms', 'p95')],
  },
  {
    title: 'Gates',
    unit: 'share of each branch',
    fromZero: true,
    format: (value: number) => percent(value),
    curves: [beat('share_cmp', 'compressed'), beat('share_sel', 'selected'), beat('share_win', 'window')],
  },
];

/** Kinds of events that are drawn on the charts. */
const MARKED = new Set(['boot', 'checkpoint', 'eval', 'halt', 'stop', 'loader_error', 'non-finite']);
const MOST_MARKS = 300;
const SLOW_MS = 5_000;

export function RunPage({ names }: { readonly names: readonly string[] }) {
  const [ranks, setRanks] = useState('0');
  const { runs, overviews, version, isLive, error, reload } = useRuns(names, ranks);
  const [axis, setAxis] = useState<Axis>('step');
  const [isLog, setIsLog] = useState(false);
  const [smoothing, setSmoothing] = useState(0);
  const { range, zoom, detail } = useZoom(runs, axis);
  const theme = useTheme();
  const charts = useMemo(
    () => CHARTS.map((spec) => ({ spec, lines: linesOf(spec, runs, axis) })).filter(({ lines }) => lines.length > 0),
    [runs, axis, version, detail, theme],
  );
  const marks = useMemo(() => (names.length === 1 ? marksOf(runs[0], axis) : []), [runs, axis, version]);
  const formatX = axis === 'time' ? clock : short;

  if (error)
    return (
      <Empty title="This run cannot be shown">
        <p>{error}</p>
        <p>
          <a href="#/">All runs</a>
        </p>
      </Empty>
    );
  const overview = overviews[0];
  if (!overview) return <p class="loading">Reading {names.join(', ')}…</p>;
  const isSingle = names.length === 1;
  return (
    <>
      {isSingle ? (
        <Head overview={overview} run={runs[0]} isLive={isLive} />
      ) : (
        <CompareHead names={names} overviews={overviews} />
      )}
      {isSingle && overview.row.state === 'broken' ? (
        <Empty title="This folder is not a readable run">
          <p>{overview.row.detail}</p>
        </Empty>
      ) : (
        <>
          {isSingle ? (
            <Health rows={overview.health} problems={overview.row.problems} damaged={overview.damaged} />
          ) : null}
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
            {isSingle && overview.row.ranks.length > 1 ? (
              <RankSelect row={overview.row} value={ranks} onChange={setRanks} />
            ) : null}
            {range ? (
              <button type="button" class="button" onClick={() => zoom(null)}>
                Show all
              </button>
            ) : (
              <span class="muted hint">Drag to zoom</span>
            )}
          </div>
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
          {isSingle ? (
            <div class="panels">
              <Ranks row={overview.row} />
              <Samples name={names[0]} />
              <Events marks={runs[0]?.marks ?? []} />
              <Configs names={names} overviews={overviews} />
              <Environment environment={overview.environment} metrics={overview.metrics} />
              <Controls row={overview.row} onDone={reload} />
            </div>
          ) : (
            <Configs names={names} overviews={overviews} />
          )}
        </>
      )}
    </>
  );
}

function Head({
  overview: { row },
  run,
  isLive,
}: {
  readonly overview: Overview;
  readonly run: RunData | undefined;
  readonly isLive: boolean;
}) {
  const now = useNow(1);
  const figures: (readonly [string, string])[] = [
    ['step', `${whole(run?.lastStep || row.step)}${row.steps ? ` of ${whole(row.steps)}` : ''}`],
    ['loss', number(run?.latest('loss') ?? row.loss)],
    ['validation', number(row.valLoss)],
    ['tokens/s', whole(run?.latest('toks_per_s') ?? row.tokensPerSecond)],
    ...(run?.latest('mfu') ? [['mfu', percent(run.latest('mfu'))] as const] : []),
    row.state === 'running'
      ? ['left', duration(row.secondsLeft)]
      : ['last heartbeat', row.lastBeat ? `${duration(now - row.lastBeat)} ago` : '–'],
    ['saved', row.checkpoint === null ? '–' : `step ${whole(row.checkpoint)}`],
  ];
  return (
    <div class="run-head">
      <div class="run-title">
        <h1>{row.name}</h1>
        <StatePill row={row} />
        {row.state === 'running' ? (
          <span class={`live ${isLive ? 'on' : ''}`}>{isLive ? 'live' : 'connecting'}</span>
        ) : null}
      </div>
      <p class="muted">{row.summary}</p>
      <dl class="figures">
        {figures.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}

function CompareHead({
  names,
  overviews,
}: {
  readonly names: readonly string[];
  readonly overviews: readonly Overview[];
}) {
  return (
    <div class="run-head">
      <h1>Compare</h1>
      <ul class="compared">
        {names.map((name, i) => (
          <li key={name}>
            <i style={{ background: lineColour(i) }} />
            <a href={`#/run/${encodeURIComponent(name)}`}>{name}</a>
            <span class="muted">{overviews[i]?.row.summary}</span>
          </li>
        ))}
      </ul>
    </div>
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

/** Ranks whose curves are drawn together. */
const RANKS_TOGETHER = 6;

/** Rank 0, or the curves of several ranks over each other, as `first-last`. */
function RankSelect(props: {
  readonly row: RunRow;
  readonly value: string;
  readonly onChange: (value: string) => void;
}) {
  const ranks = props.row.ranks.map(({ rank }) => rank);
  const groups = Array.from({ length: Math.ceil(ranks.length / RANKS_TOGETHER) }, (_, i) => {
    const some = ranks.slice(i * RANKS_TOGETHER, (i + 1) * RANKS_TOGETHER);
    return `${some[0]}-${some.at(-1)}`;
  });
  return (
    <label class="select">
      <span class="hidden">Ranks</span>
      <select value={props.value} onChange={(event) => props.onChange(event.currentTarget.value)}>
        <option value="0">rank 0</option>
        {groups.map((group) => (
          <option key={group} value={group}>
            {groups.length === 1 ? 'all ranks' : `ranks ${group.replace('-', ' to ')}`}
          </option>
        ))}
      </select>
    </label>
  );
}

function runsOf(names: readonly string[], ranks: string): RunData[] {
  const [first, last] = ranks.split('-').map(Number);
  if (last === undefined || names.length > 1) return names.map((name) => new RunData(name));
  return Array.from({ length: last - first + 1 }, (_, i) => new RunData(names[0], first + i, `rank ${first + i}`));
}

/** Loads the runs, follows them, and counts changes in `version`. */
function useRuns(names: readonly string[], ranks: string) {
  const key = JSON.stringify([names, ranks]);
  const runs = useMemo(() => runsOf(names, ranks), [key]);
  const [overviews, setOverviews] = useState<readonly Overview[]>([]);
  const [version, setVersion] = useState(0);
  const [isLive, setIsLive] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const refresh = useRef<() => void>(() => {});

  useEffect(() => {
    let isCurrent = true;
    let stop = () => {};
    let frame = 0;
    const changed = () => {
      // Many rows may arrive between two frames.
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        if (isCurrent) setVersion((count) => count + 1);
      });
    };
    const readOverviews = async () => {
      const found = await Promise.all(names.map((name) => api.overview(name)));
      for (const run of runs) {
        const overview = found[names.indexOf(run.name)];
        run.tokensPerStep = overview.tokensPerStep;
        run.marks = [...overview.marks];
      }
      if (isCurrent) setOverviews(found);
      return found;
    };
    const load = async (): Promise<void> => {
      stop();
      const found = await readOverviews();
      if (found.some(({ row }) => row.state === 'broken')) return changed();
      await Promise.all(runs.map((run) => run.load()));
      if (!isCurrent) return;
      changed();
      if (runs.some(({ progress }) => progress < 0.999)) return later(load, 300);
      stop = follow(runs, { onChange: (reload) => (reload ? later(load, 300) : changed()), onState: setIsLive });
    };
    let timer: ReturnType<typeof setTimeout>;
    const later = (work: () => Promise<void>, delay: number) => {
      clearTimeout(timer);
      timer = setTimeout(() => isCurrent && work().catch(fail), delay);
    };
    const fail = (problem: Error) => isCurrent && setError(problem.message);
    load().catch(fail);
    refresh.current = () => void readOverviews().catch(fail);
    const slow = setInterval(() => {
      readOverviews()
        .then(() => Promise.all(runs.map((run) => run.loadSmall())))
        .then(changed, () => {}); // the stream shows that the server is gone
    }, SLOW_MS);
    return () => {
      isCurrent = false;
      stop();
      clearTimeout(timer);
      clearInterval(slow);
      cancelAnimationFrame(frame);
    };
  }, [runs]);
  return { runs, overviews, version, isLive, error, reload: () => refresh.current() };
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

function linesOf({ curves }: CurveSpec, runs: readonly RunData[], axis: Axis): Line[] {
  const all = runs.flatMap((run, r) =>
    curves.map(({ log, column, label, dots }, c): Line => {
      const name = runs.length === 1 ? label : c === 0 ? run.label : `${run.label} ${label}`;
      const colour = lineColour(runs.length === 1 ? c : r);
      return { label: name, colour, dots: dots ?? false, ...run.points(log, column, axis) };
    }),
  );
  return all.filter(({ y }) => y.some((value) => value !== null));
}

function marksOf(run: RunData, axis: Axis): PlacedMark[] {
  return run.marks
    .filter(({ kind }) => MARKED.has(kind))
    .slice(-MOST_MARKS)
    .map(({ step, ts, kind, detail }) => ({
      x: run.place(step, ts, axis),
      kind,
      text: `${kind === 'boot' && step > 0 ? 'restart' : kind} · step ${whole(step)}${kind === 'eval' ? ` · ${detail}` : ''}`,
    }));
}
