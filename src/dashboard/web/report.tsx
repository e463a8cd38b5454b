/** The charts of a report: those of the run page and of the attention page, over data in the file itself. */
import { render } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import type { ReportRun } from '../answers.js';
import { type ChartSource, decodeChartData } from '../chart-data.js';
import type { AttentionRecord, NeedleRow, Sample } from './api.js';
import { AttentionParts, hasAttention } from './attention-page.js';
import { Curves } from './curves.js';
import { Health, SampleCard } from './panels.js';
import { RunData } from './run-data.js';
import { applyTheme, lineColour } from './theme.js';
import { ThemeSwitch } from './ui.js';

function runData({ name, columns, marks, tokensPerStep }: ReportRun): RunData {
  const run = new RunData(name, {
    columns: (_, { log }) => {
      const bytes = Uint8Array.from(atob(columns[log as ChartSource]), (character) => character.charCodeAt(0));
      return Promise.resolve(decodeChartData(bytes.buffer));
    },
  });
  run.marks = [...marks];
  run.tokensPerStep = tokensPerStep;
  return run;
}

function Report({ given }: { readonly given: readonly ReportRun[] }) {
  const [runs] = useState(() => given.map(runData));
  const [isLoaded, setIsLoaded] = useState(false);
  useEffect(() => {
    void Promise.all(runs.map((run) => run.load())).then(() => setIsLoaded(true));
  }, []);
  if (!isLoaded) return null;
  return (
    <>
      {given.length === 1 ? <Alerts {...given[0]} /> : null}
      <Curves runs={runs} version={0} marked={runs.length === 1 ? runs[0] : undefined} />
      {given.map((one, i) => (
        <RunPart key={one.name} {...{ one, run: runs[i] }} isSingle={runs.length === 1} index={i} />
      ))}
    </>
  );
}

function Alerts({ health, problems, damaged }: ReportRun) {
  return <Health rows={health} {...{ problems, damaged }} />;
}

function RunPart(props: {
  readonly one: ReportRun;
  readonly run: RunData;
  readonly isSingle: boolean;
  readonly index: number;
}) {
  const { one, run } = props;
  // The server side passes records on as they are in the files; the components check them.
  const attention = {
    run,
    records: one.attention as unknown as AttentionRecord[],
    needle: one.needle as { rows?: NeedleRow[] } | null,
  };
  return (
    <section class="report-run">
      {props.isSingle ? null : (
        <h2>
          <i style={{ background: lineColour(props.index) }} />
          {one.name} <span class="muted">{one.summary}</span>
        </h2>
      )}
      {props.isSingle ? null : <Alerts {...one} />}
      {hasAttention(attention) ? (
        <>
          <h2 class="section">Sparse attention</h2>
          <AttentionParts {...attention} />
        </>
      ) : null}
      {one.samples.length > 0 ? <SampleCard samples={one.samples as unknown as Sample[]} /> : null}
    </section>
  );
}

applyTheme();
const data = JSON.parse(document.getElementById('data')!.textContent!) as ReportRun[];
render(<ThemeSwitch />, document.getElementById('switch')!);
render(<Report given={data} />, document.getElementById('curves')!);
