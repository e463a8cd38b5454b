/**
 * Folders of strangers: of models (templates, tokenizers, configs, headers, indexes, links, special files) and of runs.
 * Each ends in one line within 2 s of processor time, or works. A sample here, all with TREFOIL_LONG=1. TREFOIL_DIST=DIR
 * judges another build.
 */
import { mkdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { temporaryFolder } from '../src/testing/run.js';
import { type HostileCase, MODEL_FOLDERS, SECRET } from './hostile/model-folders.js';
import { table, type Verdict, Victim } from './hostile/run.js';
import { RUN_FOLDERS } from './hostile/run-folders.js';

const LONG = process.env['TREFOIL_LONG'] === '1';
/** Cases of each class in the short form. */
const SAMPLE = 4;

let folder: { path: string; remove: () => void };
const victim = new Victim();
beforeAll(() => {
  folder = temporaryFolder();
});
afterAll(() => {
  victim.close();
  folder.remove();
});

/** Cases spread evenly over each class. */
function chosen(all: readonly HostileCase[]): readonly HostileCase[] {
  if (LONG) return all;
  return [...new Set(all.map(({ kind }) => kind))].flatMap((kind) => {
    const own = all.filter((one) => one.kind === kind);
    return Array.from({ length: Math.min(SAMPLE, own.length) }, (_, i) => own[Math.floor((i * own.length) / SAMPLE)]);
  });
}

async function judgeAll(all: readonly HostileCase[], commands: (dir: string) => readonly (readonly string[])[]) {
  const verdicts: (Verdict & { kind: string; name: string })[] = [];
  for (const { kind, name, write } of chosen(all)) {
    const dir = join(folder.path, 'case', 'hostile');
    mkdirSync(dir, { recursive: true });
    write(dir);
    verdicts.push({ kind, name, ...(await victim.judge(commands(dir), SECRET)) });
    rmSync(join(folder.path, 'case'), { recursive: true, force: true });
  }
  console.log(table(verdicts));
  const bad = verdicts.filter(({ ending }) => ending !== 'works' && ending !== 'one line');
  if (LONG || bad.length > 0)
    for (const { kind, name, detail } of bad) console.log(`${kind}: ${name.slice(0, 100)}: ${detail}`);
  return bad.map(({ kind, name, ending }) => `${kind}: ${name}: ${ending}`);
}

const PROMPT = `${'a'.repeat(400)}b ${' '.repeat(300)}x`;

describe('a stranger', () => {
  it(`who writes the folder of a model (${chosen(MODEL_FOLDERS).length} of ${MODEL_FOLDERS.length})`, async () => {
    const generate = (dir: string) => ['generate', '--model', dir, '--device', 'cpu', '--max-new-tokens', '1'];
    const bad = await judgeAll(MODEL_FOLDERS, (dir) => [
      [...generate(dir), '--chat', '--prompt', 'hi'],
      [...generate(dir), '--prompt', PROMPT],
      ['import', 'hf', dir, '--out', join(dir, '..', 'imported')],
    ]);
    expect(bad).toEqual([]);
  }, 3_600_000);

  it(`who writes the folder of a run (${chosen(RUN_FOLDERS).length} of ${RUN_FOLDERS.length})`, async () => {
    const bad = await judgeAll(RUN_FOLDERS, (dir) => [
      ['status', '--dir', dir],
      ['health', '--dir', dir],
      ['watch', '--once', '--dir', dir],
      ['check', '--dir', dir],
      ['report', '--dir', dir, '--out', join(dir, '..', 'report.md')],
    ]);
    expect(bad).toEqual([]);
  }, 3_600_000);
});
