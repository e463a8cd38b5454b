/**
 * `data tokenizer`: a byte-level BPE of one's own, as GPT-2's. All cores count the words of the corpus, then one learns the
 * merges. The result depends on the words and their counts alone, not on the number of threads or the order of the files.
 */

import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { UsageError } from '../../../errors.js';
import { ensureFolder, writeFileAtomic } from '../../../files.js';
import { plural } from '../../../text.js';
import { CorpusOrder } from '../../sources/order.js';
import type { CorpusSpec } from '../../sources/spec.js';
import { runUnitThreads, type SharedUnits } from '../../unit-threads.js';
import type { CountTask, FromCountWorker } from './count-worker.js';
import { learnMerges } from './merges.js';
import { tokenizerConfigJson, tokenizerJson } from './tokenizer-json.js';
import { WordCounter, type WordCounts } from './word-counter.js';

const COUNT_MODULE = new URL('./count-worker.js', import.meta.url);

const BYTES = 256;
/** A token for every byte, and one that ends a document. */
export const MIN_VOCABULARY = BYTES + 1;
export const END_OF_TEXT = '<|endoftext|>';

export interface TokenizerRequest {
  readonly spec: CorpusSpec;
  readonly vocabSize: number;
  /** Tokens of their own besides the end of a document, such as those of a chat template. */
  readonly specialTokens: readonly string[];
  readonly folder: string;
  readonly workers: number;
  readonly onCount?: (progress: CountProgress) => void;
  readonly onMerge?: (merges: number, wanted: number) => void;
}

export interface CountProgress {
  readonly bytes: number;
  readonly documents: number;
  readonly units: number;
  readonly totalUnits: number;
}

export interface TrainedTokenizer {
  /** At most what was asked for: a small corpus has no more pairs that occur twice. */
  readonly vocabSize: number;
  readonly bytes: number;
  readonly documents: number;
  readonly distinctWords: number;
}

/** Throws a `UsageError` for a vocabulary without room for bytes and special tokens, and for impossible special tokens. */
export function expectVocabulary(vocabSize: number, specialTokens: readonly string[]): void {
  const special = [END_OF_TEXT, ...specialTokens];
  const least = BYTES + special.length;
  if (!(Number.isInteger(vocabSize) && vocabSize >= least)) {
    const more = specialTokens.length > 0 ? `, ${plural(specialTokens.length, 'special token')}` : '';
    throw new UsageError(
      `--vocab-size: ${vocabSize} is less than ${least} (256 bytes, ${END_OF_TEXT}${more}); at least ${least}`,
    );
  }
  for (const [i, token] of special.entries()) {
    if (token === '' || token !== Buffer.from(token, 'utf8').toString('utf8'))
      throw new UsageError(`--special-token: ${JSON.stringify(token)} is no text; give one such as <|im_start|>`);
    if (special.indexOf(token) < i) throw new UsageError(`--special-token: ${token} is given twice; leave one out`);
  }
}

/** Writes tokenizer.json and tokenizer_config.json. */
export async function trainTokenizer(request: TokenizerRequest): Promise<TrainedTokenizer> {
  const { vocabSize, specialTokens, folder, onMerge } = request;
  expectVocabulary(vocabSize, specialTokens);
  const [file, config] = ['tokenizer.json', 'tokenizer_config.json'].map((name) => join(folder, name));
  for (const path of [file, config])
    if (existsSync(path)) throw new UsageError(`${path} exists already; choose another --out, or remove it`);
  const { words, bytes, documents } = await countWords(request);
  if (words.counts.length === 0)
    throw new UsageError(`data.path: no text in ${request.spec.files[0].location}; name files with text`);
  const special = [END_OF_TEXT, ...specialTokens];
  const wanted = vocabSize - BYTES - special.length;
  const merges = learnMerges(words, wanted, (done) => onMerge?.(done, wanted));
  const content = tokenizerJson(merges, special);
  ensureFolder(folder);
  writeFileAtomic(config, tokenizerConfigJson(special));
  writeFileAtomic(file, content);
  return {
    vocabSize: BYTES + special.length + merges.left.length,
    bytes,
    documents,
    distinctWords: words.counts.length,
  };
}

async function countWords({ spec, workers, onCount }: TokenizerRequest) {
  const units = Array.from({ length: new CorpusOrder(spec).unitsPerEpoch }, (_, unit) => unit);
  const sums = { bytes: 0, documents: 0, units: 0 };
  const all = new WordCounter();
  let first: WordCounts | undefined;
  let isJoined = false;
  await runUnitThreads<Omit<CountTask, keyof SharedUnits>, FromCountWorker>({
    module: COUNT_MODULE,
    name: 'trefoil-count',
    units,
    count: workers,
    data: { spec },
    onMessage: (message) => {
      if (message.kind === 'read') {
        sums.bytes += message.bytes;
        sums.documents += message.documents;
        sums.units += Number(message.done);
        onCount?.({ ...sums, totalUnits: units.length });
        return;
      }
      // A single thread's counts need no joining.
      if (first === undefined) {
        first = message.counts;
        return;
      }
      if (!isJoined) all.merge(first);
      isJoined = true;
      all.merge(message.counts);
    },
  });
  const none: WordCounts = { units: new Uint16Array(0), begins: Int32Array.of(0), counts: new Float64Array(0) };
  return { words: isJoined ? all.result() : (first ?? none), ...sums };
}
