/** The health of sparse attention: gates and selection by layer and over time, and retrieval. */
import { useMemo, useState } from 'preact/hooks';
import { type AttentionRecord, api, type NeedleRow } from './api.js';
import { Chart, type Range } from './chart.js';
import { chartsOf, linesOf } from './curves.js';
import { number, percent, short, whole } from './format.js';
import { HeatMap } from './heat-map.js';
import { RunData } from './run-data.js';
import { lineColour, useTheme } from './theme.js';
import { Card, Empty, Legend, Select, useLoaded } from './ui.js';

/** Entropy of three equal gates in nats: the most there is. */
const MAX_ENTROPY = Math.log(3);

export function AttentionPage({ name }: { readonly name: string }) {
  const { value, error } = useLoaded(name, async () => {
    const run = new RunData(name);
    const [attention] = await Promise.all([api.attention(name), run.load()]);
    return { ...attention, run };
  });
  if (error)
    return (
      <Empty title="This run cannot be shown">
        <p>{error}</p>
      </Empty>
    );
  if (!value) return <p class="loading">Reading {name}…</p>;
  if (!hasAttention(value))
    return (
      <Empty title="No attention statistics">
        <p>
          Runs with dense attention have no gates, and <code>runtime.aux_stats: false</code> turns the statistics off.
        </p>
      </Empty>
    );
  return (
    <>
      <div class="page-head">
        <h1>Sparse attention</h1>
        <p class="muted">
          How the model divides its attention between the compressed, the selected and the window branch.
        </p>
      </div>
      <AttentionParts {...value} />
      {needleRows(value.needle).length === 0 ? <NoNeedle name={name} /> : null}
    </>
  );
}

/** Data about attention from the files of a run. */
export interface AttentionData {
  readonly run: RunData;
  readonly records: readonly AttentionRecord[];
  readonly needle: { readonly rows?: readonly NeedleRow[] } | null;
}

const GATE_CHARTS = chartsOf('attention');

function hasGates(run: RunData): boolean {
  return GATE_CHARTS.some(({ curves }) => linesOf(curves, [run], 'step').length > 0);
}

export function hasAttention({ run, records, needle }: AttentionData): boolean {
  return hasGates(run) || records.some(isRecord) || needleRows(needle).length > 0;
}

export function AttentionParts({ run, records, needle }: AttentionData) {
  const valid = records.filter(isRecord);
  return (
    <>
      {hasGates(run) ? <GateCharts run={run} /> : null}
      {valid.length > 0 ? (
        <Layers records={valid} />
      ) : (
        <p class="muted nothing">
          This run has no <code>attention.jsonl</code>: statistics by layer are not available.
        </p>
      )}
      {needleRows(needle).length > 0 ? <Needle rows={needleRows(needle)} /> : null}
    </>
  );
}

/** A file may hold anything: records without the required arrays, or with something else in place of one, are left out. */
function isRecord(record: AttentionRecord): boolean {
  const { entropy, forced, neighbours, layers, sparse_layers: indices, distance } = record;
  const isNumbers = (values: unknown) => Array.isArray(values) && values.every((value) => typeof value === 'number');
  const isOptional = (values: unknown) => values === undefined || isNumbers(values);
  return (
    [entropy, record.collapse, record.cmp, record.sel, record.win].every(
      (values) => isNumbers(values) && values.length === entropy.length && values.length > 0,
    ) &&
    [forced, neighbours, layers, indices, record.scorer_loss].every(isOptional) &&
    [record.coverage, record.coverage_forced, record.coverage_best].every(isOptional) &&
    (distance === undefined || (Array.isArray(distance) && distance.every(isNumbers)))
  );
}

/** The results of eval needle; whatever else the file holds is left out. */
function needleRows(needle: AttentionData['needle']): NeedleRow[] {
  const rows: readonly (NeedleRow | null)[] = Array.isArray(needle?.rows) ? needle.rows : [];
  return rows.filter(
    (row) => row !== null && [row.length, row.depth, row.accuracy].every(Number.isFinite),
  ) as NeedleRow[];
}

function GateCharts({ run }: { readonly run: RunData }) {
  const [range, setRange] = useState<Range | null>(null);
  const theme = useTheme();
  const charts = useMemo(
    () =>
      GATE_CHARTS.map((spec) => ({ ...spec, lines: linesOf(spec.curves, [run], 'step') })).filter(
        ({ lines }) => lines.length > 0,
      ),
    [run, theme],
  );
  return (
    <div class="charts">
      {charts.map((spec) => (
        <Chart key={spec.title} {...{ ...spec, range }} onRange={setRange} formatX={short} formatY={spec.format} />
      ))}
    </div>
  );
}

function Layers({ records }: { readonly records: readonly AttentionRecord[] }) {
  const [index, setIndex] = useState<number | null>(null);
  const at = Math.min(index ?? records.length - 1, records.length - 1);
  const record = records[at];
  const layers = record.entropy.map((_, i) => layerName(record, i));
  const steps = records.map(({ step }) => short(step));
  const map = (pick: (one: AttentionRecord) => readonly number[]) =>
    layers.map((_, layer) => records.map((one) => pick(one)[layer] ?? Number.NaN));
  const axes = { rows: layers, columns: steps, rowName: 'layer', columnName: 'step' };
  const share = (value: number) => percent(value, 0);
  // One scale for the three branches: their shades can be compared.
  const mostShare = highest(records.flatMap(({ cmp, sel, win }) => [cmp, sel, win]));
  return (
    <>
      <h2 class="section">By layer, over time</h2>
      <div class="heats">
        <HeatMap
          {...axes}
          title="Gate entropy"
          note="Strong: several branches count. Faint: one has taken over."
          values={map(({ entropy }) => entropy)}
          scale={[0, MAX_ENTROPY]}
          format={number}
        />
        <HeatMap
          {...axes}
          title="Collapsed gates"
          note="Share of tokens and heads that one branch takes over."
          values={map(({ collapse }) => collapse)}
          scale={[0, Math.max(0.5, highest(map(({ collapse }) => collapse)))]}
          format={share}
        />
        <HeatMap
          {...axes}
          title="Compressed branch"
          note="Share of the gates' weight."
          values={map(({ cmp }) => cmp)}
          scale={[0, mostShare]}
          format={share}
        />
        <HeatMap
          {...axes}
          title="Selected branch"
          note="Share of the gates' weight."
          values={map(({ sel }) => sel)}
          scale={[0, mostShare]}
          format={share}
        />
        <HeatMap
          {...axes}
          title="Window branch"
          note="Share of the gates' weight."
          values={map(({ win }) => win)}
          scale={[0, mostShare]}
          format={share}
        />
        {record.coverage_best ? (
          <HeatMap
            {...axes}
            title="Coverage of the choice"
            note="Attention in the chosen blocks, as a share of the best choice's; forced blocks left out."
            values={map((one) => coverageOf(one))}
            scale={[0, 1]}
            format={share}
          />
        ) : null}
        {record.scorer_loss ? (
          <HeatMap
            {...axes}
            title="Scorer loss"
            note="Distance of the scores of chosen blocks from their attention, in nats."
            values={map(({ scorer_loss: losses }) => losses ?? [])}
            scale={[0, highest(map(({ scorer_loss: losses }) => losses ?? []))]}
            format={number}
          />
        ) : null}
        {record.neighbours ? (
          <HeatMap
            {...axes}
            title="Overlap of neighbouring tokens"
            note="Share of blocks that the previous token selected too."
            values={map(({ neighbours }) => neighbours ?? [])}
            scale={[0, 1]}
            format={share}
          />
        ) : null}
      </div>
      <h2 class="section">At one step</h2>
      <label class="slider wide-slider">
        step {whole(record.step)}
        <input
          type="range"
          min={0}
          max={records.length - 1}
          value={at}
          onInput={(event) => setIndex(Number(event.currentTarget.value))}
        />
      </label>
      <div class="cards">
        <Card title="Branches by layer">
          <Bars
            rows={layers.map((layer, i) => ({ name: layer, parts: [record.cmp[i], record.sel[i], record.win[i]] }))}
            names={['compressed', 'selected', 'window']}
          />
        </Card>
        {record.distance ? <Distances record={record} /> : null}
        {record.forced ? (
          <Card
            title="Forced and chosen blocks"
            note="The first, the own and the previous block are always read; the rest is chosen by score."
          >
            <Bars
              rows={layers.map((layer, i) => ({ name: layer, parts: [1 - record.forced![i], record.forced![i]] }))}
              names={['chosen', 'forced']}
            />
          </Card>
        ) : null}
        {record.layers && record.layers.length > 0 ? (
          <Card
            title="Overlap between layers"
            note="Share of a layer's blocks that the layer below selected too, for the same tokens."
          >
            <Bars
              rows={record.layers.map((value, i) => ({ name: `${layers[i]}–${layers[i + 1]}`, parts: [value] }))}
              names={['shared']}
            />
          </Card>
        ) : null}
      </div>
    </>
  );
}

/** The share of what there was to choose; NaN where nothing was. */
function coverageOf({ coverage, coverage_forced: forced, coverage_best: best }: AttentionRecord): number[] {
  return (coverage ?? []).map((chosen, i) => (chosen - (forced?.[i] ?? 0)) / ((best?.[i] ?? 0) - (forced?.[i] ?? 0)));
}

function highest(values: readonly (readonly number[])[]): number {
  return values.flat().reduce((most, value) => Math.max(most, value), 0);
}

/** The index of the sparse layer that entry `i` of the arrays is about. */
function layerName({ sparse_layers: indices }: AttentionRecord, i: number): string {
  return String(indices?.[i] ?? i);
}

/** How far back the selected blocks of a layer lie. */
function Distances({ record }: { readonly record: AttentionRecord }) {
  const [layer, setLayer] = useState('all');
  const all = record.distance ?? [];
  const bins = Math.max(...all.map((bins) => bins.length));
  const chosen = layer === 'all' ? all : [all[Number(layer)] ?? []];
  const counts = Array.from({ length: bins }, (_, bin) => chosen.reduce((sum, one) => sum + (one[bin] ?? 0), 0));
  const total = counts.reduce((sum, count) => sum + count, 0);
  const name = (bin: number) => (bin < 2 ? String(bin) : `${2 ** (bin - 1)}–${2 ** bin - 1}`);
  return (
    <Card title="Distance of selected blocks" note="In blocks before the token's own.">
      <Select
        label="Layer"
        value={layer}
        onChange={setLayer}
        options={[['all', 'all layers'], ...all.map((_, i) => [`${i}`, `layer ${layerName(record, i)}`] as const)]}
      />
      <Bars
        rows={counts.map((count, bin) => ({ name: name(bin), parts: [total > 0 ? count / total : 0] }))}
        names={['share']}
      />
    </Card>
  );
}

function Bars(props: {
  readonly rows: readonly { readonly name: string; readonly parts: readonly number[] }[];
  readonly names: readonly string[];
}) {
  const { rows, names } = props;
  const theme = useTheme();
  return (
    <div class="bars" data-theme-key={theme}>
      {names.length > 1 ? <Legend names={names} /> : null}
      <ul>
        {rows.map(({ name, parts }) => (
          <li key={name}>
            <span class="bar-name">{name}</span>
            <span class="bar-track">
              {parts.map((part, i) => (
                <i key={names[i]} style={{ width: `${100 * part}%`, background: lineColour(i) }} />
              ))}
            </span>
            <span class="bar-value">{parts.map((part) => percent(part, 0)).join(' · ')}</span>
          </li>
        ))}
      </ul>
    </div>
  );
}

function NoNeedle({ name }: { readonly name: string }) {
  return (
    <>
      <h2 class="section">Retrieval</h2>
      <p class="muted nothing">
        No needle results. For a model trained with <code>data.source: needle</code>, run{' '}
        <code>
          trefoil eval needle --model {name} --out-dir {name}
        </code>
        .
      </p>
    </>
  );
}

const BRANCHES: Readonly<Record<string, string>> = { cmp: 'compressed', sel: 'selected', win: 'window' };

function Needle({ rows }: { readonly rows: readonly NeedleRow[] }) {
  const withouts = [...new Set(rows.map(({ without }) => without ?? null))];
  const lengths = [...new Set(rows.map(({ length }) => length))].sort((a, b) => a - b);
  const depths = [...new Set(rows.map(({ depth }) => depth))].sort((a, b) => a - b);
  return (
    <>
      <h2 class="section">Retrieval</h2>
      <div class="heats">
        {withouts.map((without) => (
          <HeatMap
            key={String(without)}
            title={
              without === null
                ? 'Needles found, by depth and length'
                : `Without the ${BRANCHES[without] ?? without} branch`
            }
            note="Down: depth of the needle in percent of the context. Across: tokens of context."
            rows={depths.map(String)}
            columns={lengths.map(whole)}
            rowName="depth"
            columnName="length"
            values={depths.map((depth) =>
              lengths.map(
                (length) =>
                  rows.find((row) => (row.without ?? null) === without && row.length === length && row.depth === depth)
                    ?.accuracy ?? Number.NaN,
              ),
            )}
            scale={[0, 1]}
            format={(value) => percent(value, 0)}
            showValues
          />
        ))}
      </div>
    </>
  );
}
