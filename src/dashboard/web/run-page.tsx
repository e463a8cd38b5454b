/** The curves of one run, or of several over each other, while they train. */
import { useEffect, useMemo, useRef, useState } from 'preact/hooks';
import type { Overview, RunRow } from '../answers.js';
import { api } from './api.js';
import { Controls } from './controls.js';
import { Curves } from './curves.js';
import { duration, number, percent, whole } from './format.js';
import { Configs, Environment, Events, Health, Ranks, Samples } from './panels.js';
import { follow, RunData } from './run-data.js';
import { lineColour } from './theme.js';
import { Empty, Select, StatePill, useNow } from './ui.js';

const SLOW_MS = 5_000;

export function RunPage({ names }: { readonly names: readonly string[] }) {
  const [ranks, setRanks] = useState('0');
  const { runs, overviews, version, isLive, error, reload } = useRuns(names, ranks);

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
          <Curves {...{ runs, version }} marked={isSingle ? runs[0] : undefined}>
            {isSingle && overview.row.ranks.length > 1 ? (
              <RankSelect row={overview.row} value={ranks} onChange={setRanks} />
            ) : null}
          </Curves>
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
            <div class="panels">
              <Configs names={names} overviews={overviews} />
            </div>
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
    ['validation', number(row.val_loss)],
    ['tokens/s', whole(run?.latest('toks_per_s') ?? row.tokens_per_s)],
    ...(run?.latest('mfu') ? [['mfu', percent(run.latest('mfu'))] as const] : []),
    row.state === 'running'
      ? ['left', duration(row.seconds_left)]
      : ['last heartbeat', row.last_beat ? `${duration(now - row.last_beat)} ago` : '–'],
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
    <Select
      label="Ranks"
      value={props.value}
      onChange={props.onChange}
      options={[
        ['0', 'rank 0'],
        ...groups.map(
          (group) => [group, groups.length === 1 ? 'all ranks' : `ranks ${group.replace('-', ' to ')}`] as const,
        ),
      ]}
    />
  );
}

function runsOf(names: readonly string[], ranks: string): RunData[] {
  const [first, last] = ranks.split('-').map(Number);
  if (last === undefined || names.length > 1) return names.map((name) => new RunData(name));
  return Array.from(
    { length: last - first + 1 },
    (_, i) => new RunData(names[0], { rank: first + i, label: `rank ${first + i}` }),
  );
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
