/** The table of runs: sorted, searched, selected for comparison, updated while runs train. */
import { useEffect, useMemo, useState } from 'preact/hooks';
import type { RunRow, Table } from '../answers.js';
import { api } from './api.js';
import { duration, number, whole } from './format.js';
import { Empty, runAddress, Sparkline, StatePill, useNow } from './ui.js';

type Key = 'name' | 'state' | 'step' | 'loss' | 'val_loss' | 'tokens_per_s' | 'seconds_left' | 'last_beat' | 'alerts';

const COLUMNS: readonly (readonly [Key, string])[] = [
  ['name', 'Run'],
  ['state', 'State'],
  ['step', 'Step'],
  ['loss', 'Loss'],
  ['val_loss', 'Validation'],
  ['tokens_per_s', 'Tokens/s'],
  ['seconds_left', 'Left'],
  ['last_beat', 'Heartbeat'],
  ['alerts', 'Alerts'],
];

const MAX_COMPARED = 6;

export function RunsPage() {
  const { table, error } = useTable();
  const [search, setSearch] = useState('');
  const [sort, setSort] = useState<{ key: Key; isDown: boolean }>({ key: 'last_beat', isDown: true });
  const [chosen, setChosen] = useState<readonly string[]>([]);
  const now = useNow(1);
  const shown = useMemo(() => {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row: RunRow) => `${row.name} ${row.status} ${row.summary}`.toLowerCase();
    const found = (table?.runs ?? []).filter((row) => words.every((word) => text(row).includes(word)));
    return found.sort((a, b) => compare(a, b, sort.key) * (sort.isDown ? -1 : 1));
  }, [table, search, sort]);

  if (error)
    return (
      <Empty title="The server does not answer">
        <p>{error}</p>
      </Empty>
    );
  if (!table) return <p class="loading">Reading runs…</p>;
  if (table.runs.length === 0)
    return (
      <Empty title="No runs yet">
        <p>
          Runs in <code>{table.dir}</code> appear here as soon as they start. A first one takes two minutes:
        </p>
        <pre>npx trefoil start</pre>
      </Empty>
    );
  const toggle = (name: string) =>
    setChosen(chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name].slice(-MAX_COMPARED));
  return (
    <>
      <div class="page-head">
        <h1>Runs</h1>
        <p class="muted">
          {whole(table.runs.length)} in <code>{table.dir}</code>
        </p>
        <input
          type="search"
          placeholder="Search"
          aria-label="Search runs"
          value={search}
          onInput={(event) => setSearch(event.currentTarget.value)}
        />
      </div>
      <div class="table-wrap">
        <table class="runs">
          <thead>
            <tr>
              <th class="check">
                <span class="hidden">Compare</span>
              </th>
              {COLUMNS.map(([key, title]) => (
                <th
                  key={key}
                  class={`col-${key}`}
                  aria-sort={sort.key === key ? (sort.isDown ? 'descending' : 'ascending') : undefined}
                >
                  <button
                    type="button"
                    onClick={() => setSort({ key, isDown: sort.key === key ? !sort.isDown : key !== 'name' })}
                  >
                    <span class="sort" aria-hidden="true">
                      {sort.key === key ? (sort.isDown ? '↓ ' : '↑ ') : ''}
                    </span>
                    {title}
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <TableRow
                key={row.name}
                row={row}
                now={now}
                isChosen={chosen.includes(row.name)}
                onToggle={() => toggle(row.name)}
              />
            ))}
          </tbody>
        </table>
        {shown.length === 0 ? <p class="muted nothing">No run matches “{search}”.</p> : null}
      </div>
      {chosen.length > 0 ? (
        <div class="compare-bar" role="status">
          <span>
            {chosen.length} selected{chosen.length === 1 ? '; select another to compare' : ''}
          </span>
          {chosen.length > 1 ? (
            <a class="button primary" href={`#/compare/${chosen.map(encodeURIComponent).join('/')}`}>
              Compare
            </a>
          ) : null}
          <button type="button" class="button" onClick={() => setChosen([])}>
            Clear
          </button>
        </div>
      ) : null}
    </>
  );
}

function TableRow(props: {
  readonly row: RunRow;
  readonly now: number;
  readonly isChosen: boolean;
  readonly onToggle: () => void;
}) {
  const { row, now, isChosen, onToggle } = props;
  const share = row.steps ? Math.min(1, (row.step ?? 0) / row.steps) : null;
  const isRunning = row.state === 'running';
  const reds = row.alerts.filter(({ level }) => level === 'red').length;
  return (
    <tr class={isChosen ? 'chosen' : ''}>
      <td class="check">
        <input type="checkbox" checked={isChosen} onChange={onToggle} aria-label={`Compare ${row.name}`} />
      </td>
      <td class="col-name">
        <a href={runAddress(row.name)}>{row.name}</a>
        <small>{row.state === 'broken' ? row.detail : row.summary}</small>
      </td>
      <td class="col-state">
        <StatePill row={row} />
      </td>
      <td class="col-step num" data-label="Step">
        <span>
          {row.step === null ? '–' : whole(row.step)}
          {row.steps ? <span class="muted"> / {whole(row.steps)}</span> : null}
        </span>
        {share !== null ? (
          <progress class="bar-progress" value={share} max={1} aria-label={`${Math.round(100 * share)} percent`} />
        ) : null}
      </td>
      <td class="col-loss num" data-label="Loss">
        <Sparkline values={row.spark} />
        <span>{number(row.loss)}</span>
      </td>
      <td class="num col-val_loss" data-label="Validation">
        {number(row.val_loss)}
      </td>
      <td class="num col-tokens_per_s" data-label="Tokens/s">
        {whole(row.tokens_per_s)}
      </td>
      <td class="num col-seconds_left" data-label="Left">
        {isRunning ? duration(row.seconds_left) : '–'}
      </td>
      <td class="num col-last_beat" data-label="Heartbeat">
        {row.last_beat === null ? '–' : `${duration(now - row.last_beat)} ago`}
      </td>
      <td class="col-alerts">
        {row.anomaly ? <span class="alert alert-red">{row.anomaly}</span> : null}
        {row.problems.length > 0 && row.state !== 'broken' ? <span class="alert alert-yellow">files</span> : null}
        {row.alerts.length > 0 ? (
          <span
            class={`alert ${reds > 0 ? 'alert-red' : 'alert-yellow'}`}
            title={row.alerts.map(({ rule, value }) => `${rule}: ${value}`).join('\n')}
          >
            {row.alerts.length === 1 ? row.alerts[0].rule : `${row.alerts.length} alerts`}
          </span>
        ) : null}
      </td>
    </tr>
  );
}

/** The table, and its changes as they happen. */
function useTable(): { table: Table | null; error: string | null } {
  const [table, setTable] = useState<Table | null>(null);
  const [error, setError] = useState<string | null>(null);
  useEffect(() => {
    api.runs().then(setTable, (problem: Error) => setError(problem.message));
    const source = new EventSource('/api/stream');
    source.addEventListener('runs', (event) => {
      const { changed, gone } = JSON.parse((event as MessageEvent<string>).data) as {
        changed: RunRow[];
        gone: string[];
      };
      setTable((current) => {
        if (!current) return current;
        const rows = new Map(current.runs.map((row) => [row.name, row]));
        for (const row of changed) rows.set(row.name, row);
        for (const name of gone) rows.delete(name);
        return { ...current, runs: [...rows.values()] };
      });
    });
    return () => source.close();
  }, []);
  return { table, error };
}

function compare(a: RunRow, b: RunRow, key: Key): number {
  if (key === 'name') return a.name.localeCompare(b.name, undefined, { numeric: true });
  if (key === 'state') return a.status.localeCompare(b.status);
  const value = (row: RunRow) =>
    (key === 'alerts' ? row.alerts.length + row.problems.length : row[key]) ?? Number.NEGATIVE_INFINITY;
  return value(a) - value(b) || a.name.localeCompare(b.name);
}
