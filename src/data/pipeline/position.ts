/** The position of a run in its data, as a checkpoint stores it. */

import { TrefoilError, UsageError } from '../../errors.js';
import * as z from '../../zod.js';

const Count = z.number().int().min(0);

/** Fields of every position. The settings determine what sample number i is. */
const LoaderState = z.strictObject({
  version: z.literal(1),
  /** Number of the next sample in the order of the run, over all ranks. */
  sample: Count.max(Number.MAX_SAFE_INTEGER),
  epoch: Count,
  dataset: z.string(),
  seed: z.number(),
  seq_len: z.number(),
  val_fraction: z.number(),
  /** Absent where nothing is set aside, and in positions of earlier versions, whose split depended on `seed`. */
  split_seed: z.number().optional(),
  shuffle: z.boolean(),
  /** Mixtures only: the identity of every source, and how many samples of it were taken. */
  sources: z.array(z.strictObject({ name: z.string(), dataset: z.string(), taken: Count })).optional(),
});
export type SourcePosition = NonNullable<z.infer<typeof LoaderState>['sources']>[number];
/** A JSON value, the same on every rank. */
export type LoaderState = z.infer<typeof LoaderState>;

/** A position in a streamed source: also where each lane goes on; null for a lane that this rank does not read. */
const StreamState = LoaderState.extend({
  kind: z.literal('stream'),
  lanes: z.array(z.strictObject({ turn: Count, block: Count, document: Count, token: Count }).nullable()).min(1),
});
export type StreamState = z.infer<typeof StreamState>;

/** The position of a run whose source failed before it gave anything: the source begins at its start when it is back. */
export const BEGINNING = { kind: 'beginning' } as const;

export function isBeginning(state: unknown): boolean {
  return (state as Partial<typeof BEGINNING> | null)?.kind === BEGINNING.kind;
}

export type SampleSettings = Pick<LoaderState, 'seed' | 'seq_len' | 'val_fraction' | 'split_seed' | 'shuffle'>;

/** The data that a position must belong to. `place` names it in messages. */
interface Expected {
  readonly dataset: string;
  readonly place: string;
  readonly settings: SampleSettings;
}

/** Checks the position of a checkpoint: its form, its data, and the settings that determine the order. */
export function readLoaderState(value: unknown, expected: Expected): LoaderState {
  return checked(LoaderState, value, expected);
}

export function readStreamState(value: unknown, expected: Expected): StreamState {
  return checked(StreamState, value, expected);
}

function checked<State extends LoaderState>(
  schema: z.ZodType<State>,
  value: unknown,
  { dataset, place, settings }: Expected,
): State {
  const result = schema.safeParse(value);
  if (!result.success) {
    const issue = result.error.issues[0];
    throw new UsageError(`checkpoint: data position: ${issue.path.join('.') || 'value'}: ${issue.message}`);
  }
  const state = result.data;
  if (state.dataset !== dataset)
    throw new UsageError(
      `data.path: ${place} holds other data than this run was trained on (${dataset.slice(0, 12)}, ` +
        `not ${state.dataset.slice(0, 12)}); use the same data and tokenizer, or start a new run in another folder`,
    );
  for (const [key, now] of Object.entries(settings)) {
    const before = state[key as keyof SampleSettings] ?? (key === 'split_seed' ? state.seed : undefined);
    if (before === now) continue;
    throw new UsageError(
      `${key} is ${now}, but was ${before} when this run was saved, which gives another order of the data; ` +
        'set it back or start a new run in another folder',
    );
  }
  return state;
}

/** Joins the positions of all ranks to one that any number of ranks can resume from. */
export function mergeStreamStates(states: readonly StreamState[]): StreamState {
  const lanes = states[0].lanes.map(
    (_, lane) => states.find((state) => state.lanes[lane] !== null)?.lanes[lane] ?? null,
  );
  if (states.some(({ sample, dataset }) => sample !== states[0].sample || dataset !== states[0].dataset))
    throw new TrefoilError('data position: the ranks are not at the same sample of the same data');
  return { ...states[0], epoch: Math.max(...states.map(({ epoch }) => epoch)), lanes };
}
