/** Small parts that several pages use. */
import type { ComponentChildren } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import type { RunRow } from '../answers.js';
import { lineColour, toggleTheme, useTheme } from './theme.js';

export function runAddress(name: string, ...rest: string[]): string {
  return `#/${['run', name, ...rest].map(encodeURIComponent).join('/')}`;
}

export function StatePill({ row }: { readonly row: Pick<RunRow, 'state' | 'status' | 'reason' | 'synthetic'> }) {
  return (
    <span class={`pill pill-${row.state} pill-${row.status.replaceAll(' ', '-')}`} title={row.synthetic ?? row.reason}>
      <i />
      {row.status}
      {row.synthetic === null ? '' : ', SYNTHETIC data'}
    </span>
  );
}

export function Segmented<Value extends string>(props: {
  readonly label: string;
  readonly value: Value;
  readonly options: readonly (readonly [Value, string])[];
  readonly onChange: (value: Value) => void;
}) {
  return (
    <fieldset class="segmented">
      <legend class="hidden">{props.label}</legend>
      {props.options.map(([value, text]) => (
        <button key={value} type="button" aria-pressed={value === props.value} onClick={() => props.onChange(value)}>
          {text}
        </button>
      ))}
    </fieldset>
  );
}

/** A drop-down list; its label is for screen readers. */
export function Select(props: {
  readonly label: string;
  readonly value: string;
  readonly options: readonly (readonly [value: string, text: string])[];
  readonly onChange: (value: string) => void;
}) {
  return (
    <label class="select">
      <span class="hidden">{props.label}</span>
      <select value={props.value} onChange={(event) => props.onChange(event.currentTarget.value)}>
        {props.options.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

/** Names beside the colours of their lines or bars. */
export function Legend({ names }: { readonly names: readonly string[] }) {
  return (
    <div class="legend">
      {names.map((name, i) => (
        <span key={name} class="legend-item">
          <i style={{ background: lineColour(i) }} />
          {name}
        </span>
      ))}
    </div>
  );
}

export function Card(props: {
  readonly title?: string;
  readonly note?: string;
  readonly children: ComponentChildren;
  readonly class?: string;
}) {
  return (
    <section class={`card ${props.class ?? ''}`}>
      {props.title ? <h2>{props.title}</h2> : null}
      {props.note ? <p class="note">{props.note}</p> : null}
      {props.children}
    </section>
  );
}

export function Empty({ title, children }: { readonly title: string; readonly children?: ComponentChildren }) {
  return (
    <div class="empty">
      <svg viewBox="0 0 32 32" width="40" height="40" aria-hidden="true">
        <Leaf />
      </svg>
      <h2>{title}</h2>
      {children}
    </div>
  );
}

export function ThemeSwitch() {
  const theme = useTheme();
  return (
    <button
      type="button"
      class="icon"
      onClick={toggleTheme}
      aria-label={`Switch to ${theme === 'dark' ? 'light' : 'dark'} colours`}
    >
      {theme === 'dark' ? '☀' : '☾'}
    </button>
  );
}

/** The trefoil. */
export function Leaf() {
  return (
    <g fill="none" stroke="currentColor" stroke-width="1.8">
      <circle cx="16" cy="9.5" r="6" />
      <circle cx="9.3" cy="19.5" r="6" />
      <circle cx="22.7" cy="19.5" r="6" />
      <path d="M16 17v12" stroke-linecap="round" />
    </g>
  );
}

/** The value of a promise; reloads when `key` changes. */
export function useLoaded<Value>(
  key: string,
  load: () => Promise<Value>,
): { value: Value | null; error: string | null } {
  const [state, setState] = useState<{ key: string; value: Value | null; error: string | null }>({
    key,
    value: null,
    error: null,
  });
  useEffect(() => {
    let isCurrent = true;
    load().then(
      (value) => isCurrent && setState({ key, value, error: null }),
      (error: Error) => isCurrent && setState({ key, value: null, error: error.message }),
    );
    return () => {
      isCurrent = false;
    };
  }, [key]);
  return state.key === key ? state : { value: null, error: null };
}

/** Re-renders every `seconds`, for ages. */
export function useNow(seconds: number): number {
  const [now, setNow] = useState(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000), 1000 * seconds);
    return () => clearInterval(timer);
  }, [seconds]);
  return now;
}

export function Sparkline({ values }: { readonly values: readonly number[] }) {
  if (values.length < 2) return null;
  const [min, max] = [Math.min(...values), Math.max(...values)];
  const path = values
    .map(
      (value, i) =>
        `${((68 * i) / (values.length - 1) + 1).toFixed(1)},${(17 - (14 * (value - min)) / (max - min || 1)).toFixed(1)}`,
    )
    .join(' ');
  return (
    <svg class="spark" viewBox="0 0 70 20" width="70" height="20" aria-hidden="true">
      <polyline points={path} />
    </svg>
  );
}
