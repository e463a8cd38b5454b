/** Writes a trace to a file. */
import type { LanguageModel } from '../model/language-model.js';
import { writeSafetensors } from '../run/safetensors.js';
import type { TensorToWrite } from '../run/tensor-source.js';
import { bytesOf } from '../tensor/tensor.js';
import { TRACE_FORMAT, type Trace } from './trace.js';

export interface TraceFacts {
  readonly model: string;
  readonly step: number | null;
  /** The text of each token. */
  readonly pieces: readonly string[];
}

/** Writes a trace as safetensors: `token_ids`, `logprobs`, `selected`, `gates`, and the text in `pieces` and `piece_ends`. */
export function writeTrace(path: string, { shape }: LanguageModel, trace: Trace, facts: TraceFacts): void {
  const { nLayers: layers, nKvGroups: groups } = shape;
  const { lSel, nSel: slots, w } = shape.nsa;
  const length = trace.tokens.length;
  const pieces = facts.pieces.map((piece) => Buffer.from(piece));
  let end = 0;
  const ends = Int32Array.from(pieces, ({ length: bytes }) => {
    end += bytes;
    return end;
  });
  const tensors: TensorToWrite[] = [
    { name: 'token_ids', dtype: 'I32', shape: [length], data: bytesOf(Int32Array.from(trace.tokens)) },
    { name: 'piece_ends', dtype: 'I32', shape: [length], data: bytesOf(ends) },
    { name: 'logprobs', dtype: 'F32', shape: [length], data: bytesOf(trace.logprobs) },
    { name: 'selected', dtype: 'I16', shape: [layers, length, groups, slots], data: bytesOf(trace.selected) },
    { name: 'gates', dtype: 'U8', shape: [layers, length, groups, 3], data: trace.gates },
    { name: 'pieces', dtype: 'U8', shape: [end], data: Buffer.concat(pieces) },
  ];
  writeSafetensors(path, tensors, {
    format: TRACE_FORMAT,
    model: facts.model,
    step: String(facts.step ?? ''),
    l_sel: String(lSel),
    window: String(w),
  });
}
