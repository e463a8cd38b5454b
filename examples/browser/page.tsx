/** Trefoil in a tab: trains the story model in a worker, writes with it, asks it, saves it, and runs models dropped on the page. */
import { render } from 'preact';
import { useEffect, useMemo, useRef, useState } from 'preact/hooks';
import { Chart, type Range } from '../../src/dashboard/web/chart.js';
import { percent, whole } from '../../src/dashboard/web/format.js';
import { Reader } from '../../src/dashboard/web/reader-page.js';
import { applyTheme, lineColour, useTheme } from '../../src/dashboard/web/theme.js';
import { Card, Leaf, ThemeSwitch } from '../../src/dashboard/web/ui.js';
import type { Answer, EvaluationPoint, Event, Machine, ModelFacts, Request, Settings, StepPoint } from './protocol.js';
import { traceSource } from './trace.js';

/** Milliseconds between two drawings of the curves. */
const DRAW_EVERY = 250;
const PROMPT = 'Once upon a time';

/** `?steps=20&threads=1&plain`: for tests and slow machines. */
function settingsOf(address: URLSearchParams): Settings {
  const number = (name: string) => (address.has(name) ? Number(address.get(name)) : null);
  return { steps: number('steps'), threads: number('threads'), plain: address.has('plain') };
}

interface State {
  readonly machine: Machine | null;
  readonly model: ModelFacts | null;
  /** File name of a model that was loaded; null for the page's own. */
  readonly loaded: string | null;
  readonly isTraining: boolean;
  readonly isWriting: boolean;
  readonly isAsking: boolean;
  readonly story: string;
  readonly answer: Answer | null;
  readonly error: string | null;
  readonly isDead: boolean;
}

const FIRST: State = {
  machine: null,
  model: null,
  loaded: null,
  isTraining: false,
  isWriting: false,
  isAsking: false,
  story: '',
  answer: null,
  error: null,
  isDead: false,
};

/** The curves, outside of the state: a step comes more often than the page is drawn. */
interface Curves {
  readonly steps: StepPoint[];
  readonly evaluations: EvaluationPoint[];
}

function useWorker() {
  const [state, setState] = useState(FIRST);
  const [drawn, setDrawn] = useState(0);
  const curves = useRef<Curves>({ steps: [], evaluations: [] });
  const worker = useRef<Worker | null>(null);
  const startedAt = useRef<{ readonly time: number; readonly step: number } | null>(null);
  const change = (part: Partial<State>) => setState((now) => ({ ...now, ...part }));

  useEffect(() => {
    const settings = settingsOf(new URLSearchParams(location.search));
    const started = new Worker(new URL('./worker.js', import.meta.url), {
      type: 'module',
      name: JSON.stringify(settings),
    });
    worker.current = started;
    started.onmessage = ({ data }: MessageEvent<Event>) => onEvent(data);
    started.onerror = ({ message }) =>
      change({ error: `the worker ended: ${message || 'it could not start'}`, isDead: true });
    const timer = setInterval(
      () => setDrawn(curves.current.steps.length + curves.current.evaluations.length),
      DRAW_EVERY,
    );
    return () => {
      clearInterval(timer);
      started.terminate();
    };
  }, []);

  const onEvent = (event: Event) => {
    switch (event.type) {
      case 'ready':
        return change({ machine: event.machine, model: event.model });
      case 'model':
        curves.current = { steps: [], evaluations: [] };
        return change({ model: event.model, loaded: event.name, story: '', answer: null, error: null });
      case 'step':
        startedAt.current ??= { time: performance.now(), step: event.point.step };
        curves.current.steps.push(event.point);
        return;
      case 'evaluation':
        curves.current.evaluations.push(event.point);
        return;
      case 'training':
        startedAt.current = null;
        return change({ isTraining: event.isRunning });
      case 'piece':
        return setState((now) => ({ ...now, story: now.story + event.text }));
      case 'written':
        return change({ isWriting: false });
      case 'answer':
        return change({ answer: event.answer, isAsking: false });
      case 'saved':
        download(event.weights, 'model.safetensors');
        return download(event.config, 'config.json');
      case 'error':
        return setState((now) => ({
          ...now,
          ...{ error: event.message, isWriting: false, isAsking: false },
          isDead: now.isDead || event.isFatal,
        }));
    }
  };

  const ask = (request: Request) => {
    if (request.type === 'write') change({ story: request.prompt, isWriting: true, error: null });
    if (request.type === 'ask') change({ isAsking: true, error: null });
    worker.current?.postMessage(request);
  };
  return { state, ask, change, curves: curves.current, startedAt, drawn };
}

function download(content: Blob, name: string): void {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function App() {
  const { state, ask, change, curves, startedAt, drawn } = useWorker();
  const { machine, model, isTraining, isDead, error } = state;
  const last = curves.steps.at(-1);
  const step = last?.step ?? model?.step ?? 0;
  const isDone = model !== null && step >= model.steps;
  return (
    <>
      <header class="bar">
        <span class="brand">
          <svg viewBox="0 0 32 32" width="24" height="24" aria-hidden="true">
            <Leaf />
          </svg>
          Trefoil
        </span>
        <span class="crumb">in a tab</span>
        <ThemeSwitch />
      </header>
      <main>
        <div class="page-head">
          <h1>Train a language model in this tab</h1>
        </div>
        <div class="tab-intro">
          <p>
            A small model with sparse attention learns to write stories and to remember what was said in them. It is
            computed on your processor; nothing leaves this page.
          </p>
        </div>
        {model?.isTrainable !== false ? (
          <>
            <div class="tab-actions">
              <button
                type="button"
                class="button primary"
                disabled={!model || isDone || isDead}
                onClick={() => ask({ type: isTraining ? 'pause' : 'train' })}
              >
                {isTraining ? 'Pause' : step === 0 ? 'Train' : isDone ? 'Trained' : 'Continue'}
              </button>
              <progress value={step} max={model?.steps ?? 1} aria-label="Steps done" />
              <span>
                {model ? `step ${whole(step)} of ${whole(model.steps)}` : isDead ? 'not started' : 'starting …'}
              </span>
            </div>
            <p class="tab-status" role="status">
              {isTraining && last && startedAt.current
                ? speed(last, startedAt.current, model!)
                : machine
                  ? describe(machine)
                  : ''}
            </p>
          </>
        ) : (
          <p class="tab-status" role="status">
            {state.loaded}: {whole(model.parameters)} parameters, trained for {whole(model.step)} steps.
          </p>
        )}
        {error ? (
          <p class="error" role="alert">
            {error}
          </p>
        ) : null}
        {model?.isTrainable !== false ? <CurveCharts curves={curves} drawn={drawn} /> : null}
        <Story {...{ state, ask }} />
        {model?.hasStories && model.attention ? <Question {...{ state, ask }} /> : null}
        <Files {...{ state, ask, change }} />
      </main>
    </>
  );
}

function describe({ threads, isIsolated, kernels, isFused }: Machine): string {
  const count = `${threads} thread${threads === 1 ? '' : 's'}`;
  const why = isIsolated ? '' : ' (more where the server isolates the page)';
  return `Ready: ${count}${why}, ${kernels}, ${isFused ? 'the same bits as native kernels' : 'without fused products'}.`;
}

function speed(last: StepPoint, start: { time: number; step: number }, model: ModelFacts): string {
  const perStep = (performance.now() - start.time) / Math.max(1, last.step - start.step);
  const left = last.step > start.step ? Math.ceil((perStep * (model.steps - last.step)) / 60_000) : null;
  const rest = left === null ? '' : `, about ${left} minute${left === 1 ? '' : 's'} left`;
  return `loss ${last.loss.toFixed(3)}, ${whole(Math.round(last.tokensPerSecond))} tokens per second${rest}`;
}

function CurveCharts({ curves, drawn }: { readonly curves: Curves; readonly drawn: number }) {
  const theme = useTheme();
  const [range, setRange] = useState<Range | null>(null);
  const { steps, evaluations } = curves;
  const lines = useMemo(() => {
    const x = evaluations.map(({ step }) => step);
    return {
      loss: [
        {
          label: 'training',
          colour: lineColour(0),
          x: steps.map(({ step }) => step),
          y: steps.map(({ loss }) => loss),
        },
        { label: 'stories it never saw', colour: lineColour(1), dots: true, x, y: evaluations.map(({ loss }) => loss) },
      ],
      recall: [{ label: 'right answers', colour: lineColour(2), x, y: evaluations.map(({ recall }) => recall) }],
    };
  }, [drawn, theme, curves]);
  const shared = { range, onRange: setRange, formatX: (x: number) => whole(Math.round(x)) };
  return (
    <div class="charts">
      <h2 class="hidden">Curves</h2>
      <Chart
        title="Loss"
        unit="nats per token"
        lines={lines.loss}
        smoothing={0.9}
        formatY={(y) => y.toFixed(2)}
        {...shared}
      />
      <Chart
        title="Does it remember?"
        unit="questions 32 to 511 tokens after the fact"
        lines={lines.recall}
        fromZero
        formatY={(y) => percent(y, 0)}
        {...shared}
      />
    </div>
  );
}

interface PartProps {
  readonly state: State;
  readonly ask: (request: Request) => void;
}

function Story({ state, ask }: PartProps) {
  const [prompt, setPrompt] = useState(PROMPT);
  const [temperature, setTemperature] = useState(0.7);
  const { model, isWriting, isDead, story } = state;
  return (
    <>
      <h2 class="section">A story it writes</h2>
      <Card>
        <form
          class="tab-actions"
          onSubmit={(event) => {
            event.preventDefault();
            ask(isWriting ? { type: 'stop' } : { type: 'write', prompt, temperature });
          }}
        >
          <label class="field">
            <span>Beginning</span>
            <input value={prompt} onInput={(event) => setPrompt(event.currentTarget.value)} required />
          </label>
          <label class="field">
            <span>Temperature</span>
            <input
              type="number"
              min="0"
              max="2"
              step="0.1"
              value={temperature}
              onInput={(event) => setTemperature(Number(event.currentTarget.value))}
            />
          </label>
          <button type="submit" class="button" disabled={!model || isDead}>
            {isWriting ? 'Stop' : 'Write'}
          </button>
        </form>
        <p class="tab-story" aria-live="polite" aria-busy={isWriting}>
          {story || <span class="muted">Untrained, it writes noise; after some hundred steps, sentences.</span>}
        </p>
      </Card>
    </>
  );
}

function Question({ state, ask }: PartProps) {
  const { model, answer, isAsking, isDead } = state;
  const { nSel, lSel, w } = model!.attention!;
  const key = String(answer?.number);
  const source = useMemo(() => (answer ? traceSource(key, answer.trace) : null), [answer]);
  return (
    <>
      <h2 class="section">What does it read to remember?</h2>
      <p class="tab-intro muted">
        The question is about a fact far back in a story it never saw. Its window has {w} tokens: the fact can only come
        from the {nSel} blocks of {lSel} tokens that each group of heads selects.
      </p>
      <div class="tab-actions">
        <button type="button" class="button" disabled={isAsking || isDead} onClick={() => ask({ type: 'ask' })}>
          {isAsking ? 'Asking …' : answer ? 'Ask another question' : 'Ask a question'}
        </button>
      </div>
      {answer && source ? (
        <>
          <div class="tab-question" role="status">
            <p>
              The story said:{' '}
              <b>
                the {answer.thing} {answer.place}
              </b>
              . {answer.distance} tokens later it asks for the {answer.thing}.
            </p>
            <p>
              The model says <b>“{answer.said.trim()}”</b>, which is {answer.isCorrect ? 'right' : 'wrong'}. It{' '}
              {answer.hasReadFact ? 'read' : 'did not read'} the block of the fact.
            </p>
          </div>
          <Reader key={key} source={source} held={answer.questionAt} />
        </>
      ) : null}
    </>
  );
}

function Files({ state, ask, change }: PartProps & { readonly change: (part: Partial<State>) => void }) {
  const [isOver, setIsOver] = useState(false);
  const { model, isDead } = state;
  const open = (files: readonly File[]) => {
    const config = files.find(({ name }) => name.endsWith('.json'));
    const weights = files.find(({ name }) => name.endsWith('.safetensors'));
    if (config && weights) ask({ type: 'load', config, weights });
    else change({ error: 'a model is two files: config.json and model.safetensors; drop or choose both' });
  };
  useEffect(() => {
    const onDrag = (event: DragEvent) => {
      event.preventDefault();
      setIsOver(event.type === 'dragover');
      if (event.type === 'drop') open([...(event.dataTransfer?.files ?? [])]);
    };
    const kinds = ['dragover', 'dragleave', 'drop'] as const;
    for (const kind of kinds) addEventListener(kind, onDrag);
    return () => {
      for (const kind of kinds) removeEventListener(kind, onDrag);
    };
  }, []);
  return (
    <>
      <h2 class="section">Files</h2>
      <Card>
        <div class="tab-actions">
          <button type="button" class="button" disabled={!model || isDead} onClick={() => ask({ type: 'save' })}>
            Save the model
          </button>
          <span class="muted">model.safetensors and config.json, for trefoil generate --model FOLDER</span>
        </div>
        <div class={isOver ? 'tab-drop over' : 'tab-drop'}>
          <label>
            Run a model of yours: drop its config.json and model.safetensors on this page, or choose both{' '}
            <input
              type="file"
              multiple
              accept=".json,.safetensors"
              disabled={!model || isDead}
              onChange={(event) => open([...(event.currentTarget.files ?? [])])}
            />
          </label>
        </div>
      </Card>
    </>
  );
}

applyTheme();
render(<App />, document.getElementById('app')!);
