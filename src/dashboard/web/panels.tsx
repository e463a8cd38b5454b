/** The parts of a run page below its curves: health, ranks, samples, events, config, environment. */
import { useMemo, useState } from 'preact/hooks';
import { describeRow } from '../../watch/row.js';
import type { HealthRow, Mark, Overview, RunRow } from '../answers.js';
import { api, type Sample } from './api.js';
import { markColour } from './chart.js';
import { duration, timestamp, whole } from './format.js';
import { Card, Select, useLoaded } from './ui.js';

/** One line for each rule: ranks that break the same one are listed in it. */
function groupRanks(rows: readonly HealthRow[]) {
  const groups = new Map<string, HealthRow[]>();
  for (const row of rows) {
    const key = `${row.level} ${row.rule.replace(/ rank\d+$/, '')}`;
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  return [...groups.values()].map((group) => {
    const [{ rule, level, limit, explanation }] = group;
    const isOne = group.length === 1;
    const shown = group.slice(0, RANKS_LISTED).map((row) => {
      const { value } = describeRow(row);
      return isOne ? value : `${/rank\d+$/.exec(row.rule)?.[0].replace('k', 'k ')}: ${value}`;
    });
    const more = group.length > RANKS_LISTED ? `, and ${group.length - RANKS_LISTED} more` : '';
    const bound = typeof limit === 'number' ? ` (${describeRow(group[0]).limit})` : '';
    return {
      level,
      title: (isOne ? rule : rule.replace(/ rank\d+$/, '')).replaceAll('_', ' '),
      value: `${shown.join(', ')}${more}${bound}`,
      explanation,
    };
  });
}

const RANKS_LISTED = 6;

export function Health(props: {
  readonly rows: readonly HealthRow[];
  readonly problems: readonly string[];
  readonly damaged: number;
}) {
  const { rows, problems, damaged } = props;
  const lines = [
    ...groupRanks(rows),
    ...(rows.some(({ rule }) => rule === 'files')
      ? []
      : problems.map((value) => ({ level: 'yellow', title: 'files', value, explanation: '' }))),
    ...(damaged > 0
      ? [
          {
            level: 'yellow',
            title: 'damaged log',
            value: `${damaged} lines of the heartbeat file are not records`,
            explanation: 'They were left out of the curves.',
          },
        ]
      : []),
  ];
  if (lines.length === 0) return null;
  return (
    <ul class="health" aria-label="Alerts">
      {lines.map(({ level, title, value, explanation }) => (
        <li key={title + value} class={`alert-${level}`}>
          <b>{title}</b>
          <span>{value}</span>
          <small>{explanation}</small>
        </li>
      ))}
    </ul>
  );
}

export function Ranks({ row }: { readonly row: RunRow }) {
  if (row.ranks.length < 2) return null;
  const newest = Math.max(...row.ranks.map(({ step }) => step ?? 0));
  return (
    <Card title="Ranks" class="wide">
      <div class="ranks">
        {row.ranks.map(({ rank, step, section, section_age_s: inside, heartbeat_age_s: age }) => (
          <div key={rank} class={`rank ${(step ?? 0) < newest - 1 ? 'behind' : ''}`}>
            <b>rank {rank}</b>
            <span>step {whole(step)}</span>
            <small>
              {section ? `${section} for ${duration(inside)}` : age === null ? 'no heartbeat' : `${duration(age)} ago`}
            </small>
          </div>
        ))}
      </div>
    </Card>
  );
}

export function Samples({ name }: { readonly name: string }) {
  const { value } = useLoaded(name, () => api.samples(name));
  return <SampleCard samples={value?.samples ?? []} />;
}

export function SampleCard({ samples }: { readonly samples: readonly Sample[] }) {
  const [index, setIndex] = useState<number | null>(null);
  if (samples.length === 0) return null;
  const at = Math.min(index ?? samples.length - 1, samples.length - 1);
  return (
    <Card title="Samples" note="Text the model wrote at a step, from an empty prompt.">
      {samples.length > 1 ? (
        <label class="slider">
          step {whole(samples[at].step)}
          <input
            type="range"
            min={0}
            max={samples.length - 1}
            value={at}
            onInput={(event) => setIndex(Number(event.currentTarget.value))}
          />
        </label>
      ) : (
        <p class="muted">step {whole(samples[at].step)}</p>
      )}
      <blockquote class="sample">{String(samples[at].text)}</blockquote>
    </Card>
  );
}

export function Events({ marks }: { readonly marks: readonly Mark[] }) {
  const [kind, setKind] = useState('');
  const kinds = [...new Set(marks.map((mark) => mark.kind))].sort();
  const shown = marks
    .filter((mark) => kind === '' || mark.kind === kind)
    .slice(-200)
    .reverse();
  if (marks.length === 0) return null;
  return (
    <Card title="Events">
      <Select
        label="Kind of event"
        value={kind}
        onChange={setKind}
        options={[['', 'all events'], ...kinds.map((one) => [one, one] as const)]}
      />
      <ol class="events" tabIndex={0} aria-label="Events, newest first">
        {shown.map((mark, i) => (
          <li key={`${mark.ts} ${mark.kind} ${i}`}>
            <i style={{ background: `var(--${markColour(mark.kind)})` }} />
            <time>{timestamp(mark.ts)}</time>
            <span class="event-step">{whole(mark.step)}</span>
            <b>{mark.kind}</b>
            <span class="event-detail">{mark.detail}</span>
          </li>
        ))}
      </ol>
    </Card>
  );
}

/** The config of a run, its differences to another run, or those among the compared runs. */
export function Configs({
  names,
  overviews,
}: {
  readonly names: readonly string[];
  readonly overviews: readonly Overview[];
}) {
  const [other, setOther] = useState('');
  const [search, setSearch] = useState('');
  const all = useLoaded('runs', () => api.runs());
  const otherRun = useLoaded(other, () => (other ? api.overview(other) : Promise.resolve(null)));
  const columns = [
    ...names.map((name, i) => ({ name, config: overviews[i]?.config ?? {} })),
    ...(other && otherRun.value ? [{ name: other, config: otherRun.value.config }] : []),
  ];
  const isDiff = columns.length > 1;
  const rows = useMemo(() => {
    const keys = [...new Set(columns.flatMap(({ config }) => Object.keys(config)))];
    return keys
      .map((key) => ({ key, values: columns.map(({ config }) => config[key]) }))
      .filter(({ key, values }) => {
        if (isDiff && values.every((value) => value === values[0])) return false;
        return `${key} ${values.join(' ')}`.toLowerCase().includes(search.toLowerCase());
      });
  }, [JSON.stringify(columns), search]);
  const candidates = (all.value?.runs ?? []).map(({ name }) => name).filter((name) => !names.includes(name));
  if (columns.every(({ config }) => Object.keys(config).length === 0)) return null;
  return (
    <Card title={isDiff ? 'Config: differences' : 'Config'} class={isDiff ? 'wide' : ''}>
      <div class="row">
        {names.length === 1 ? (
          <Select
            label="Compare the config with"
            value={other}
            onChange={setOther}
            options={[['', 'compare with…'], ...candidates.map((name) => [name, name] as const)]}
          />
        ) : null}
        <input
          type="search"
          placeholder="Find a key"
          aria-label="Find a config key"
          value={search}
          onInput={(event) => setSearch(event.currentTarget.value)}
        />
      </div>
      <section class="scroll" tabIndex={0} aria-label="Config values">
        <table class="config">
          {isDiff ? (
            <thead>
              <tr>
                <th>key</th>
                {columns.map(({ name }) => (
                  <th key={name}>{name}</th>
                ))}
              </tr>
            </thead>
          ) : null}
          <tbody>
            {rows.map(({ key, values }) => (
              <tr key={key}>
                <th scope="row">{key}</th>
                {values.map((value, i) => (
                  <td key={columns[i].name}>{value ?? '–'}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
        {rows.length === 0 ? <p class="muted">{isDiff ? 'No differences.' : 'No such key.'}</p> : null}
      </section>
    </Card>
  );
}

/** env.json and metrics.json, flattened. */
export function Environment(props: Pick<Overview, 'environment' | 'metrics'>) {
  const rows = [...flat(props.metrics), ...flat(props.environment)];
  if (rows.length === 0) return null;
  return (
    <Card title="Environment and result">
      <section class="scroll" tabIndex={0} aria-label="Environment values">
        <table class="config">
          <tbody>
            {rows.map(([key, value]) => (
              <tr key={key}>
                <th scope="row">{key}</th>
                <td>{value}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </section>
    </Card>
  );
}

function flat(value: unknown, prefix = ''): [key: string, value: string][] {
  // Losses and rates have more digits than anybody reads.
  if (typeof value === 'number')
    return [[prefix, String(Number(value.toPrecision(6 + (Number.isInteger(value) ? 10 : 0))))]];
  if (typeof value !== 'object' || value === null) return prefix ? [[prefix, String(value)]] : [];
  return Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key));
}
