/** The small files of a run: config, environment, metrics, samples, attention statistics, needle results. */
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { setImmediate } from 'node:timers/promises';
import { parseDocument } from 'yaml';
import { yamlRefusal } from '../config/yaml-shape.js';
import { errorCode, fileError, parseObject } from '../files.js';
import { isPlainObject } from '../json-values.js';
import { runPaths } from '../run/paths.js';
import { PIECE_BYTES, readLines, readSmallFile } from './safe-read.js';

const SMALL_FILE_BYTES = 1024 * 1024;
/** Trefoil writes some five thousand bytes; a parser of YAML needs a microsecond for each. */
export const CONFIG_BYTES = 64 * 1024;
const MAX_KEYS = 2000;
const MAX_RECORDS = 400;
const RECORDS_BYTES = 1024 * 1024 * 1024;

/** config.yaml as `section.key` to value, in the order of the file. */
export interface RunConfig {
  readonly values: ReadonlyMap<string, string>;
  /** Why the file cannot be shown. */
  readonly problem: string | null;
}

export function readConfig(dir: string): RunConfig {
  const text = readSmallFile(runPaths(dir).config, CONFIG_BYTES);
  const values = new Map<string, string>();
  if (text === undefined) return { values, problem: null };
  const refusal = yamlRefusal(text);
  if (refusal !== null) return { values, problem: `config.yaml: ${refusal}` };
  const document = parseDocument(text, { logLevel: 'error', uniqueKeys: false, prettyErrors: false });
  if (document.errors.length > 0)
    return { values, problem: `config.yaml: ${document.errors[0].message.split('\n')[0]}` };
  try {
    flatten(document.toJS({ maxAliasCount: 0 }), '', values);
  } catch (error) {
    // maxAliasCount: a file with aliases was not written by a run, and could expand without limit.
    if (!(error instanceof ReferenceError)) throw error;
    return { values: new Map(), problem: 'config.yaml: contains aliases' };
  }
  return { values, problem: null };
}

function flatten(value: unknown, prefix: string, into: Map<string, string>): void {
  if (into.size >= MAX_KEYS) return;
  if (isPlainObject(value))
    for (const [key, inner] of Object.entries(value)) flatten(inner, prefix ? `${prefix}.${key}` : key, into);
  else into.set(prefix, typeof value === 'string' ? value : JSON.stringify(value));
}

/** A JSON file of the run folder; null if it is missing or not an object. */
export function readJson(path: string): Record<string, unknown> | null {
  const text = readSmallFile(path, SMALL_FILE_BYTES);
  return (text !== undefined && parseObject(text)) || null;
}

/** Tokens of one optimizer step over all ranks; null if the config does not say. */
export function tokensPerStep({ values }: RunConfig, ranks: number): number | null {
  const factors = ['train.seq_len', 'train.batch_size', 'train.accumulate_grad_batches'].map((key) =>
    Number(values.get(key)),
  );
  const tokens = factors.reduce((product, factor) => product * factor, Math.max(1, ranks));
  return Number.isFinite(tokens) && tokens > 0 ? tokens : null;
}

/**
 * Records of a JSON Lines file by ascending step, thinned to at most 400. A record whose step is not above the last one
 * replaces those from it on: a resumed run repeats steps. Yields to the event loop between pieces of the file, and parses
 * only the lines that are kept.
 */
export async function readRecords(path: string): Promise<Record<string, unknown>[]> {
  let kept: { readonly step: number; readonly line: string }[] = [];
  let stride = 1;
  let newest: (typeof kept)[number] | undefined;
  let seen = 0;
  const add = (line: string) => {
    const step = Number(/^\{"step":(\d+)[,}]/.exec(line)?.[1] ?? parseObject(line)?.['step']);
    if (!Number.isFinite(step)) return;
    while (kept.length > 0 && kept[kept.length - 1].step >= step) kept.pop();
    newest = { step, line };
    if (seen++ % stride === 0) kept.push(newest);
    if (kept.length > MAX_RECORDS) {
      kept = kept.filter((_, i) => i % 2 === 0);
      stride *= 2;
    }
  };
  for (let position = 0; position < RECORDS_BYTES; ) {
    const found = readLines(path, position, position + PIECE_BYTES, add);
    if (!found || found.end === position) break;
    position = found.end;
    await setImmediate();
  }
  if (newest && kept.at(-1) !== newest) kept.push(newest);
  return kept.flatMap(({ step, line }) => {
    const record = parseObject(line);
    return record ? [{ ...record, step }] : [];
  });
}

/** Names of the saved traces of a run. */
export function listTraces(dir: string): string[] {
  try {
    return readdirSync(join(dir, 'traces'), { withFileTypes: true })
      .filter((entry) => entry.isFile() && entry.name.endsWith('.safetensors'))
      .map(({ name }) => name.slice(0, -'.safetensors'.length))
      .sort();
  } catch (error) {
    if (errorCode(error) === 'ENOENT' || errorCode(error) === 'ENOTDIR') return [];
    throw fileError('list', join(dir, 'traces'), error);
  }
}
