/** A run that was begun when keys and sources had their earlier names goes on, bit for bit. */
import { createHash } from 'node:crypto';
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { oldKeys } from '../config/legacy/keys.js';
import { loadConfig } from '../config/load.js';
import type { Config } from '../config/schema.js';
import { readManifest, serializeManifest } from '../run/checkpoint/read.js';
import { runPaths } from '../run/paths.js';
import { runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';

const folder = temporaryFolder();
afterAll(() => folder.remove());

/** The sections as version 0.1.0 wrote them: every key, with the value that means the same. */
function withEarlierNames(config: Config): object {
  const { doc_batch, prefetch, queue, warmup_batches, warmup_timeout, source, ...data } = config.data;
  const { fused, fused_min_len, selection_v2_min_len, print_kernels, reference_kernels, tensorboard, ...runtime } =
    config.runtime;
  return {
    ...config,
    data: {
      ...data,
      source: source === 'files' ? 'fineweb_edu_local' : source,
      fwe_doc_batch: doc_batch,
      fwe_prefetch: prefetch,
      fwe_queue: queue,
      fwe_warmup_batches: warmup_batches,
      fwe_warmup_timeout: warmup_timeout,
    },
    runtime: {
      ...runtime,
      use_fa2: fused,
      use_fa2_win: null,
      use_fa2_cmp: null,
      fa2_min_len_win: fused_min_len,
      fa2_min_len_cmp: fused_min_len,
      sel_v2_min_s: selection_v2_min_len,
      use_sel_pack: true,
      prefill_batched: true,
      sdpa_audit: print_kernels,
      force_parity: reference_kernels,
      tb: tensorboard,
    },
  };
}

/** Rewrites the config in the state of a checkpoint, and its hash in the manifest. */
function rewriteState(checkpoint: string): void {
  const path = join(checkpoint, 'state.json');
  const state = JSON.parse(readFileSync(path, 'utf8'));
  const text = JSON.stringify({ ...state, config: withEarlierNames(state.config) });
  writeFileSync(path, text);
  const manifest = readManifest(checkpoint);
  const sha256 = createHash('sha256').update(text).digest('hex');
  const files = { ...manifest.files, 'state.json': { bytes: Buffer.byteLength(text), sha256 } };
  writeFileSync(join(checkpoint, 'manifest.json'), serializeManifest({ ...manifest, files }));
}

const configOf = (name: string) =>
  tinyConfig(folder.path, {
    data: { source: 'files', path: join(folder.path, 'text'), workers: 1, queue: 3, doc_batch: 5 },
    runtime: { fused: false, fused_min_len: 64, selection_v2_min_len: 32 },
    train: { steps: 6, out_dir: join(folder.path, name) },
  });

it('resumes from config.yaml and a checkpoint with earlier names, and reports no difference', async () => {
  tinyConfig(folder.path); // writes the text
  const [whole, parts] = [configOf('whole'), configOf('parts')];
  await runTraining(whole);
  const stopped = await runTraining(parts, {
    onLine: (line, signals) => void (line.startsWith('step 0003') && signals.emit('SIGTERM')),
  });
  expect(stopped.result).toMatchObject({ status: 'signalled', step: 3 });

  const paths = runPaths(parts.train.out_dir);
  const earlier = withEarlierNames(parts);
  for (const { name, key } of oldKeys.filter((old) => old.note === '' && !/use_flash|fa2_enabled/.test(old.name)))
    expect(stringify(earlier), `${name} (now ${key})`).toContain(`  ${name.split('.')[1]}: `);
  writeFileSync(paths.config, stringify(earlier));
  rewriteState(join(paths.checkpoints, 'step-3'));

  const { config, warnings } = loadConfig({ env: {}, config: paths.config });
  expect(warnings).toHaveLength(1);
  expect(config).toEqual(parts);
  const { said, warned } = await runTraining(config, { resume: 'auto' });
  expect(said).toContain(`resumed from ${join(paths.checkpoints, 'step-3')} at step 3`);
  expect([...said, ...warned].filter((line) => /changed since|is now/.test(line))).toEqual([]);
  expect(readFileSync(paths.model)).toEqual(readFileSync(runPaths(whole.train.out_dir).model));
  expect(readFileSync(paths.config, 'utf8')).toContain('  doc_batch: 5\n');
});
