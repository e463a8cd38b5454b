/** What the thread that saves checkpoints is told, and what it answers. */
import type { SavedCheckpoint } from './save.js';

/** A tensor of f32 in the copy. */
export interface CopiedTensor {
  readonly name: string;
  readonly shape: readonly number[];
  /** Its bytes in the copy. */
  readonly from: number;
  readonly to: number;
}

export interface SaveTask {
  readonly runDir: string;
  readonly step: number;
  /** The copy, handed over and handed back. */
  readonly memory: ArrayBuffer;
  readonly model: readonly CopiedTensor[];
  readonly optimizer: readonly CopiedTensor[];
  readonly state: Record<string, unknown>;
  readonly keepLast: number | undefined;
}

export type SaveAnswer = { readonly memory: ArrayBuffer } & (
  | { readonly saved: SavedCheckpoint }
  /** The disk refused it. */
  | { readonly refused: string }
  /** A bug, or a state that no checkpoint can hold. */
  | { readonly error: unknown }
);
