/** How tokens are chosen: the sampling controls of the playground. */
import type { ComponentChildren } from 'preact';
import { Card } from './ui.js';

const FIELDS = [
  { name: 'max_tokens', initial: 256, label: 'Maximum tokens', min: 1, max: 100_000, step: 1 },
  { name: 'temperature', initial: 0.8, label: 'Temperature', min: 0, max: 5, step: 0.05 },
  { name: 'top_p', initial: 1, label: 'Top p', min: 0.01, max: 1, step: 0.01 },
  { name: 'top_k', initial: 0, label: 'Top k (0 = all)', min: 0, max: 100_000, step: 1 },
  { name: 'min_p', initial: 0, label: 'Min p', min: 0, max: 1, step: 0.01 },
  { name: 'repetition_penalty', initial: 1, label: 'Repetition penalty', min: 0.1, max: 5, step: 0.05 },
  { name: 'frequency_penalty', initial: 0, label: 'Frequency penalty', min: -2, max: 2, step: 0.1 },
  { name: 'presence_penalty', initial: 0, label: 'Presence penalty', min: -2, max: 2, step: 0.1 },
] as const;

export type SamplingValues = Readonly<Record<(typeof FIELDS)[number]['name'], number>> & {
  /** Empty: another one for each request. */
  readonly seed: string;
  /** Empty: none. `\\n` is a line break. */
  readonly stop: string;
};

export const SAMPLING = {
  ...Object.fromEntries(FIELDS.map(({ name, initial }) => [name, initial])),
  seed: '',
  stop: '',
} as SamplingValues;

/** The fields of a request. */
export function samplingFields({ seed, stop, ...numbers }: SamplingValues): Record<string, unknown> {
  return {
    ...numbers,
    ...(seed.trim() === '' ? {} : { seed: Number(seed) }),
    ...(stop === '' ? {} : { stop: stop.replaceAll('\\n', '\n') }),
  };
}

export function SamplingForm(props: {
  readonly value: SamplingValues;
  readonly onChange: (value: SamplingValues) => void;
  readonly children?: ComponentChildren;
}) {
  const { value, onChange } = props;
  const text = (name: 'seed' | 'stop', label: string, placeholder: string) => (
    <label class="field">
      <span>{label}</span>
      <input
        value={value[name]}
        placeholder={placeholder}
        inputMode={name === 'seed' ? 'numeric' : 'text'}
        onInput={(event) => onChange({ ...value, [name]: event.currentTarget.value })}
      />
    </label>
  );
  return (
    <Card title="Sampling">
      <div class="fields">
        {FIELDS.map(({ name, label, min, max, step }) => (
          <label key={name} class="field">
            <span>{label}</span>
            <input
              type="number"
              {...{ min, max, step }}
              value={value[name]}
              onInput={(event) => {
                const next = event.currentTarget.valueAsNumber;
                if (Number.isFinite(next)) onChange({ ...value, [name]: next });
              }}
            />
          </label>
        ))}
        {text('seed', 'Seed', 'random')}
        {text('stop', 'Stop at', 'none')}
        {props.children}
      </div>
    </Card>
  );
}
