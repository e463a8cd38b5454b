/**
 * The reader: a text as a model read it. A token shows the blocks it selected, its gates, and the probability of the token
 * that followed; a block shows the tokens that read it.
 */
import { useEffect, useMemo, useRef, useState } from 'preact/hooks';
import type { TraceReaders, TraceText, TraceToken } from '../../evaluate/trace-view.js';
import { api } from './api.js';
import { percent, whole } from './format.js';
import { lineColour } from './theme.js';
import { Card, Empty, Legend, runAddress, Select, useLoaded } from './ui.js';

/** Where a trace comes from: a file of a run, or the model of the playground. */
export interface TraceSource {
  /** Differs between traces. */
  readonly key: string;
  text(): Promise<TraceText>;
  token(index: number): Promise<TraceToken>;
  readers(block: number): Promise<TraceReaders>;
}

export function ReaderPage({ name, trace }: { readonly name: string; readonly trace: string | undefined }) {
  const overview = useLoaded(name, () => api.overview(name));
  if (overview.error)
    return (
      <Empty title="This run cannot be shown">
        <p>{overview.error}</p>
      </Empty>
    );
  if (!overview.value) return <p class="loading">Reading {name}…</p>;
  const { traces } = overview.value;
  const chosen = trace ?? traces[0];
  if (chosen === undefined)
    return (
      <Empty title="No traces yet">
        <p>A trace records what a model reads in a text. Save one with the model of this run:</p>
        <pre>npx trefoil eval selection --model RUN --text-file TEXT --trace</pre>
      </Empty>
    );
  return (
    <>
      <div class="page-head">
        <h1>Reader</h1>
        <ReaderHint />
        <Select
          label="Trace"
          value={chosen}
          onChange={(trace) => location.assign(runAddress(name, 'reader', trace))}
          options={traces.map((one) => [one, one])}
        />
      </div>
      <Reader key={chosen} source={savedTrace(name, chosen)} />
    </>
  );
}

export function ReaderHint() {
  return (
    <p class="muted">
      Point at a token to see which blocks it read. Click to hold it; click a block in the list to see who else read it.
    </p>
  );
}

function savedTrace(name: string, trace: string): TraceSource {
  return {
    key: `${name}/${trace}`,
    text: () => api.trace(name, trace),
    token: (index) => api.traceToken(name, trace, index),
    readers: (block) => api.traceReaders(name, trace, block),
  };
}

/** `held`: the token that is held at first. */
export function Reader({ source, held = null }: { readonly source: TraceSource; readonly held?: number | null }) {
  const { value: text, error } = useLoaded(source.key, () => source.text());
  if (error)
    return (
      <Empty title="This trace cannot be shown">
        <p>{error}</p>
      </Empty>
    );
  if (!text) return <p class="loading">Reading the trace…</p>;
  return <Text source={source} text={text} first={held} />;
}

/**
 * Whether the panel is beside the text (as in app.css). Above it, a panel that follows the mouse would move the text away
 * from under the mouse: there only clicks count.
 */
function isBeside(): boolean {
  return window.matchMedia('(min-width: 1001px)').matches;
}

/** The highlighted item: the blocks that a token read, or the tokens that read a block. */
type Focus = { readonly kind: 'token'; readonly index: number } | { readonly kind: 'block'; readonly index: number };

function Text(props: { readonly source: TraceSource; readonly text: TraceText; readonly first: number | null }) {
  const { source, text, first } = props;
  const [held, setHeld] = useState<Focus | null>(first === null ? null : { kind: 'token', index: first });
  const [hovered, setHovered] = useState<number | null>(null);
  const [layer, setLayer] = useState('all');
  const [group, setGroup] = useState('all');
  const focus: Focus | null = held ?? (hovered === null ? null : { kind: 'token', index: hovered });
  const token = useToken(source, focus?.kind === 'token' ? focus.index : null);
  const readers = useReaders(source, focus?.kind === 'block' ? focus.index : null);
  const host = useRef<HTMLDivElement>(null);
  const weights = useMemo(
    () => (token ? blockWeights(token, layer, group) : new Map<number, number>()),
    [token, layer, group],
  );
  usePaint(host, text, focus, weights, readers);

  const jump = (block: number) =>
    host.current?.querySelector(`[data-block="${block}"]`)?.scrollIntoView({ block: 'center', behavior: 'smooth' });
  const tokenAt = (event: Event) => {
    const index = (event.target as HTMLElement).dataset?.['i'];
    return index === undefined ? null : Number(index);
  };
  const onKey = (event: KeyboardEvent) => {
    const last = text.pieces.length - 1;
    const current = focus?.kind === 'token' ? focus.index : 0;
    const moves: Record<string, number> = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -text.blockSize,
      ArrowDown: text.blockSize,
    };
    if (event.key === 'Escape') setHeld(null);
    else if (event.key === 'End') setHeld({ kind: 'token', index: last });
    else if (event.key === 'Home') setHeld({ kind: 'token', index: 0 });
    else if (moves[event.key] !== undefined) {
      const index = Math.min(last, Math.max(0, current + moves[event.key]));
      setHeld({ kind: 'token', index });
      host.current?.querySelector(`[data-i="${index}"]`)?.scrollIntoView({ block: 'nearest' });
    } else return;
    event.preventDefault();
  };
  return (
    <div class="reader">
      <div class="reader-text">
        <Minimap text={text} focus={focus} weights={weights} readers={readers} onJump={jump} />
        <div
          class="text"
          ref={host}
          tabIndex={0}
          role="group"
          aria-label="Text. Arrow keys move from token to token, up and down by a block, Escape releases."
          onKeyDown={onKey}
          onMouseOver={(event) => isBeside() && setHovered(tokenAt(event))}
          onMouseLeave={() => setHovered(null)}
          onClick={(event) => {
            const index = tokenAt(event);
            if (index !== null)
              setHeld(held?.kind === 'token' && held.index === index ? null : { kind: 'token', index });
          }}
        >
          <Blocks text={text} />
        </div>
      </div>
      <aside class="reader-side">
        {focus === null ? (
          <Card title="This text">
            <dl class="facts">
              <dt>model</dt>
              <dd>
                {text.model}
                {text.step ? `, step ${whole(text.step)}` : ''}
              </dd>
              <dt>length</dt>
              <dd>
                {whole(text.pieces.length)} tokens in blocks of {text.blockSize}
              </dd>
              <dt>each token reads</dt>
              <dd>
                {text.slots} blocks per layer and group, the last {whole(text.window)} tokens, and a summary of the rest
              </dd>
              <dt>mean probability</dt>
              <dd>{percent(Math.exp(meanOf(text.logprobs)))} of the token that followed (geometric)</dd>
            </dl>
          </Card>
        ) : focus.kind === 'token' ? (
          <TokenPanel
            {...{ text, token, layer, group, setLayer, setGroup, weights, jump }}
            index={focus.index}
            onBlock={(block) => setHeld({ kind: 'block', index: block })}
          />
        ) : (
          <BlockPanel
            text={text}
            block={focus.index}
            readers={readers}
            onToken={(index) => {
              setHeld({ kind: 'token', index });
              jump(Math.floor(index / text.blockSize));
            }}
            onClose={() => setHeld(null)}
          />
        )}
      </aside>
    </div>
  );
}

/** The whole text. It never changes, so it is rendered once; highlights are set on the elements directly. */
function Blocks({ text }: { readonly text: TraceText }) {
  return useMemo(() => {
    const count = Math.ceil(text.pieces.length / text.blockSize);
    return (
      <>
        {Array.from({ length: count }, (_, block) => {
          const first = block * text.blockSize;
          return (
            <span key={String(block)} class="block" data-block={block}>
              {text.pieces.slice(first, first + text.blockSize).map((piece, i) => (
                <span key={i} data-i={first + i}>
                  {visible(piece)}
                </span>
              ))}
            </span>
          );
        })}
      </>
    );
  }, [text]);
}

/** Sets classes on the blocks and tokens that are highlighted now. Re-rendering 64k tokens at each move would be slow. */
function usePaint(
  host: { readonly current: HTMLDivElement | null },
  text: TraceText,
  focus: Focus | null,
  weights: ReadonlyMap<number, number>,
  readers: ReadonlyMap<number, number>,
): void {
  useEffect(() => {
    const root = host.current;
    if (!root) return;
    const painted: HTMLElement[] = [];
    const paint = (selector: string, name: string, strength?: number) => {
      const element = root.querySelector<HTMLElement>(selector);
      if (!element) return;
      element.classList.add(name);
      if (strength !== undefined) element.style.setProperty('--strength', strength.toFixed(2));
      painted.push(element);
    };
    const most = Math.max(1, ...weights.values());
    if (focus?.kind === 'token') {
      for (const [block, weight] of weights) paint(`[data-block="${block}"]`, 'read', weight / most);
      paint(`[data-i="${focus.index}"]`, 'token');
      const from = Math.max(0, focus.index - text.window + 1);
      paint(`[data-i="${from}"]`, 'window-start');
    } else if (focus) {
      paint(`[data-block="${focus.index}"]`, 'asked');
      const strongest = Math.max(1, ...readers.values());
      for (const [index, count] of readers) paint(`[data-i="${index}"]`, 'reader', count / strongest);
    }
    return () => {
      for (const element of painted) element.classList.remove('read', 'token', 'window-start', 'asked', 'reader');
    };
  }, [host, text, focus?.kind, focus?.index, weights, readers]);
}

interface TokenPanelProps {
  readonly text: TraceText;
  readonly index: number;
  readonly token: TraceToken | null;
  readonly layer: string;
  readonly group: string;
  readonly setLayer: (layer: string) => void;
  readonly setGroup: (group: string) => void;
  readonly weights: ReadonlyMap<number, number>;
  readonly jump: (block: number) => void;
  readonly onBlock: (block: number) => void;
}

function TokenPanel({ text, index, token, layer, group, setLayer, setGroup, weights, jump, onBlock }: TokenPanelProps) {
  const logprob = text.logprobs[index];
  const own = Math.floor(index / text.blockSize);
  const blocks = [...weights].sort(([a, x], [b, y]) => y - x || b - a);
  const pairs = (layer === 'all' ? text.layers : 1) * (group === 'all' ? text.groups : 1);
  return (
    <>
      <Card title="Token">
        <p class="big-token">
          <mark>{visible(text.pieces[index])}</mark>
          <span aria-hidden="true"> → </span>
          <span>{visible(text.pieces[index + 1] ?? '')}</span>
        </p>
        <dl class="facts">
          <dt>position</dt>
          <dd>
            {whole(index)}, block {own}
          </dd>
          <dt>the next token had</dt>
          <dd>{logprob === null || logprob === undefined ? '–' : `probability ${percent(Math.exp(logprob))}`}</dd>
        </dl>
      </Card>
      <Card title="Branches by layer">
        <Legend names={['compressed', 'selected', 'window']} />
        <ul class="bars">
          {(token?.gates ?? []).map((groups, l) => {
            const mean = [0, 1, 2].map(
              (branch) => groups.reduce((sum, shares) => sum + shares[branch], 0) / groups.length,
            );
            return (
              <li key={String(l)}>
                <button
                  type="button"
                  class="bar-name"
                  aria-pressed={layer === String(l)}
                  onClick={() => setLayer(layer === String(l) ? 'all' : String(l))}
                >
                  {l}
                </button>
                <span class="bar-track">
                  {mean.map((part, i) => (
                    <i key={['cmp', 'sel', 'win'][i]} style={{ width: `${100 * part}%`, background: lineColour(i) }} />
                  ))}
                </span>
                <span class="bar-value">{mean.map((part) => percent(part, 0)).join(' · ')}</span>
              </li>
            );
          })}
        </ul>
      </Card>
      <Card title="Blocks it read">
        <div class="row">
          <Select label="Layer" value={layer} onChange={setLayer} options={choices('layer', text.layers)} />
          <Select label="Group" value={group} onChange={setGroup} options={choices('group', text.groups)} />
        </div>
        <ol class="blocks-read">
          {blocks.slice(0, 24).map(([block, weight]) => (
            <li key={String(block)}>
              <button
                type="button"
                onClick={() => {
                  jump(block);
                  onBlock(block);
                }}
              >
                <span class="block-number">{block}</span>
                <span class="block-text">{excerpt(text, block)}</span>
                <small>
                  {block === own || block === own - 1 || block === 0 ? 'always read' : `${own - block} back`} ·{' '}
                  {Math.round(weight)}/{pairs}
                </small>
              </button>
            </li>
          ))}
        </ol>
      </Card>
    </>
  );
}

function BlockPanel(props: {
  readonly text: TraceText;
  readonly block: number;
  readonly readers: ReadonlyMap<number, number>;
  readonly onToken: (index: number) => void;
  readonly onClose: () => void;
}) {
  const { text, block, readers, onToken, onClose } = props;
  const far = [...readers].filter(([index]) => Math.floor(index / text.blockSize) > block + 1);
  const strongest = far.sort(([, a], [, b]) => b - a).slice(0, 24);
  return (
    <Card title={`Block ${block}`}>
      <p class="sample">{excerpt(text, block, 400)}</p>
      <p class="muted">
        Read by {whole(far.length)} tokens beyond the next block, out of{' '}
        {whole(Math.max(0, text.pieces.length - (block + 2) * text.blockSize))}.
      </p>
      <ol class="blocks-read">
        {strongest.map(([index, count]) => (
          <li key={String(index)}>
            <button type="button" onClick={() => onToken(index)}>
              <span class="block-number">{whole(index)}</span>
              <span class="block-text">
                {text.pieces
                  .slice(Math.max(0, index - 8), index + 1)
                  .map(visible)
                  .join('')}
              </span>
              <small>
                {count}/{text.layers * text.groups}
              </small>
            </button>
          </li>
        ))}
      </ol>
      <button type="button" class="button" onClick={onClose}>
        Close
      </button>
    </Card>
  );
}

/** The whole text as a strip of blocks: what the focused token read, or who read the focused block. */
function Minimap(props: {
  readonly text: TraceText;
  readonly focus: Focus | null;
  readonly weights: ReadonlyMap<number, number>;
  readonly readers: ReadonlyMap<number, number>;
  readonly onJump: (block: number) => void;
}) {
  const { text, focus, weights, readers, onJump } = props;
  const count = Math.ceil(text.pieces.length / text.blockSize);
  const base = useMemo(() => {
    const totals = Array.from({ length: count }, (_, block) =>
      text.counts.reduce((sum, layer) => sum + (layer[block] ?? 0), 0),
    );
    // Blocks near the end have fewer tokens after them that could read them.
    return totals.map((total, block) => total / Math.max(1, text.pieces.length - block * text.blockSize));
  }, [text, count]);
  const cells = useMemo(() => {
    if (!focus) return base;
    const values = new Array<number>(count).fill(0);
    if (focus.kind === 'token') for (const [block, weight] of weights) values[block] = weight;
    else for (const [index, weight] of readers) values[Math.floor(index / text.blockSize)] += weight;
    return values;
  }, [focus?.kind, focus?.index, weights, readers, base, count, text]);
  const most = Math.max(1e-9, ...cells);
  const own = focus?.kind === 'token' ? Math.floor(focus.index / text.blockSize) : focus?.index;
  return (
    <svg
      class="minimap"
      viewBox={`0 0 ${count} 10`}
      preserveAspectRatio="none"
      role="img"
      aria-label="Map of the text by blocks; darker blocks were read more"
      onClick={(event) => {
        const box = event.currentTarget.getBoundingClientRect();
        onJump(Math.min(count - 1, Math.floor(((event.clientX - box.left) / box.width) * count)));
      }}
    >
      {cells.map((value, block) => (
        <rect
          key={block}
          x={block}
          y={0}
          width={1.02}
          height={10}
          opacity={value > 0 ? 0.15 + (0.85 * value) / most : 0}
        />
      ))}
      {own !== undefined ? <rect class="own" x={own} y={0} width={Math.max(1, count / 300)} height={10} /> : null}
    </svg>
  );
}

function useToken(source: TraceSource, index: number | null): TraceToken | null {
  const [token, setToken] = useState<{ index: number; value: TraceToken } | null>(null);
  useEffect(() => {
    if (index === null) return;
    let isCurrent = true;
    // A short pause: the mouse crosses many tokens on its way.
    const timer = setTimeout(() => {
      source.token(index).then(
        (value) => isCurrent && setToken({ index, value }),
        () => {}, // the trace was removed meanwhile; the text stays
      );
    }, 30);
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [source.key, index]);
  return token && token.index === index ? token.value : null;
}

const NO_READERS: ReadonlyMap<number, number> = new Map();

function useReaders(source: TraceSource, block: number | null): ReadonlyMap<number, number> {
  const { value } = useLoaded(`${source.key}/${block}`, () =>
    block === null ? Promise.resolve(null) : source.readers(block),
  );
  return useMemo(() => (value ? new Map(value.readers) : NO_READERS), [value]);
}

/** In how many of the chosen (layer, group) pairs each block was selected. */
function blockWeights({ selected }: TraceToken, layer: string, group: string): Map<number, number> {
  const weights = new Map<number, number>();
  selected.forEach((groups, l) => {
    groups.forEach((blocks, g) => {
      if ((layer !== 'all' && Number(layer) !== l) || (group !== 'all' && Number(group) !== g)) return;
      for (const block of blocks) weights.set(block, (weights.get(block) ?? 0) + 1);
    });
  });
  return weights;
}

function excerpt(text: TraceText, block: number, length = 60): string {
  const first = block * text.blockSize;
  return text.pieces
    .slice(first, first + text.blockSize)
    .map(visible)
    .join('')
    .replace(/\s+/g, ' ')
    .trim()
    .slice(0, length);
}

/** Control characters as their pictures; line breaks and tabs stay. */
function visible(piece: string): string {
  return piece.replace(/[^\P{Cc}\n\t]/gu, (control) =>
    String.fromCharCode(0x2400 + Math.min(0x21, control.charCodeAt(0))),
  );
}

function meanOf(values: readonly (number | null)[]): number {
  const known = values.filter((value) => value !== null);
  return known.reduce((sum, value) => sum + value, 0) / Math.max(1, known.length);
}

/** `all`, or one of `count`. */
function choices(what: string, count: number): (readonly [value: string, text: string])[] {
  return [['all', `all ${what}s`], ...Array.from({ length: count }, (_, i) => [`${i}`, `${what} ${i}`] as const)];
}
