/** Logits of every token of a sequence, in chunks: those of a long text with a large vocabulary do not fit into memory. */
import { UsageError } from '../errors.js';
import type { LanguageModel } from '../model/language-model.js';
import { operand } from '../ops/cast/op.js';
import { linear } from '../ops/linear/op.js';
import { Tape } from '../tensor/tape.js';

/** Numbers of a chunk, about. */
const CHUNK = 1 << 23;

/** Yields [rows, vocabulary] of consecutive tokens until all of `ids` are covered. */
export function* sequenceLogits(model: LanguageModel, ids: ArrayLike<number>): Generator<Float32Array> {
  const { device, shape } = model;
  const wrong = Array.from(ids).find((id) => !(Number.isInteger(id) && id >= 0 && id < shape.vocabSize));
  if (wrong !== undefined)
    throw new UsageError(`token ${wrong} is not in the model's vocabulary of ${shape.vocabSize} tokens`);
  if (ids.length === 0) return;
  const tape = new Tape(device, { record: false });
  try {
    const x = model.hidden(tape, tape.from(ids, [ids.length], 'i32'), { lengths: [ids.length] });
    const rows = Math.max(1, Math.floor(CHUNK / shape.vocabSize));
    for (let from = 0; from < ids.length; from += rows) {
      const chunk = x.rows(from, Math.min(ids.length, from + rows));
      const logits = linear(tape, chunk, operand(model.head, chunk));
      yield Float32Array.from(logits.read());
      tape.drop(logits);
    }
  } finally {
    tape.end();
  }
}
