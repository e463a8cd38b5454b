/**
 * Divides the tokens into training and validation, without overlap.
 *
 * With enough documents, whole documents are set aside by a hash of their number, so that validation resembles training
 * whatever the order of the corpus. With few documents (a book, a folder of code) the end of the stream is set aside.
 */

import { UsageError } from '../../errors.js';
import { singleRange, type TokenRanges } from '../batch.js';
import { absorb, Purpose } from '../hash.js';

const MIN_DOCUMENTS = 50;

export interface SplitRequest {
  /** Name of the corpus in messages. */
  readonly name: string;
  readonly tokens: number;
  readonly documentStarts: Float64Array;
  readonly valFraction: number;
  readonly seed: number;
  readonly sequenceLength: number;
}

export interface Split {
  readonly train: TokenRanges;
  /** Undefined when val_fraction is 0. */
  readonly validation: TokenRanges | undefined;
  readonly method: 'none' | 'documents' | 'tail';
}

/** Throws unless each side holds at least one sample. */
export function splitCorpus(request: SplitRequest): Split {
  const { name, tokens, valFraction, sequenceLength } = request;
  const sample = sequenceLength + 1;
  if (tokens < sample) {
    throw new UsageError(
      `${name} has ${tokens} tokens, fewer than one sample of ${sample}; add text or lower train.seq_len (--seq-len)`,
    );
  }
  if (valFraction === 0) return { train: singleRange(0, tokens), validation: undefined, method: 'none' };
  return splitByDocument(request) ?? splitTail(request);
}

/** Undefined if a side would be too small, or if the chosen documents hold more than twice the fraction. */
function splitByDocument(request: SplitRequest): Split | undefined {
  const { documentStarts, tokens, valFraction, seed, sequenceLength } = request;
  if (documentStarts.length < MIN_DOCUMENTS) return undefined;
  const start = absorb(absorb(0, Purpose.split), seed);
  const isValidation = (document: number): boolean => absorb(start, document) < valFraction * 2 ** 32;

  const endOf = (document: number): number => documentStarts[document + 1] ?? tokens;
  let validationTokens = 0;
  // Neighbours on the same side share a range, so the number of ranges is the number of changes of side.
  const ranges = { train: 0, validation: 0 };
  let previous: boolean | undefined;
  for (let document = 0; document < documentStarts.length; document++) {
    const side = isValidation(document);
    if (side) validationTokens += endOf(document) - documentStarts[document];
    if (side !== previous) ranges[side ? 'validation' : 'train']++;
    previous = side;
  }
  const sample = sequenceLength + 1;
  if (validationTokens < sample || tokens - validationTokens < sample) return undefined;
  if (validationTokens > 2 * valFraction * tokens) return undefined;

  const train = new RangeBuilder(ranges.train);
  const validation = new RangeBuilder(ranges.validation);
  for (let document = 0; document < documentStarts.length; document++) {
    (isValidation(document) ? validation : train).add(documentStarts[document], endOf(document));
  }
  return { train: train.ranges, validation: validation.ranges, method: 'documents' };
}

/**
 * The cut lies after the last target of a training sample, so that training has no rest before it. Validation has at least
 * one sample.
 */
function splitTail({ name, tokens, valFraction, sequenceLength }: SplitRequest): Split {
  const wanted = Math.max(Math.round(valFraction * tokens), sequenceLength + 1);
  const samples = Math.floor((tokens - wanted - 1) / sequenceLength);
  if (samples < 1) {
    throw new UsageError(
      `${name} has ${tokens} tokens, too few for training and validation samples of ${sequenceLength + 1}; ` +
        'add text, lower train.seq_len (--seq-len) or set data.val_fraction to 0',
    );
  }
  const cut = samples * sequenceLength + 1;
  return { train: singleRange(0, cut), validation: singleRange(cut, tokens), method: 'tail' };
}

/** Joins neighbouring documents to ranges, in arrays of known size. */
class RangeBuilder {
  readonly ranges: TokenRanges;
  #count = 0;
  #end = -1;

  constructor(count: number) {
    this.ranges = { starts: new Float64Array(count), offsets: new Float64Array(count + 1) };
  }

  add(start: number, end: number): void {
    const { starts, offsets } = this.ranges;
    if (start !== this.#end) {
      starts[this.#count++] = start;
      offsets[this.#count] = offsets[this.#count - 1];
    }
    offsets[this.#count] += end - start;
    this.#end = end;
  }
}
