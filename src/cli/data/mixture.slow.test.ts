import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { temporaryFolder } from '../../testing/run.js';
import { runCli } from '../testing/run.js';

const folder = temporaryFolder();
afterAll(() => folder.remove());
const at = (name: string) => join(folder.path, name);
const env = { TREFOIL_CACHE: at('cache') };

// Bytes are tokens: 2,000 and 600 of them, with the separators.
writeFileSync(at('long.txt'), 'x'.repeat(1999));
writeFileSync(at('short.jsonl'), `${JSON.stringify({ text: 'y'.repeat(599) })}\n`);
writeFileSync(
  at('mixed.yaml'),
  `data:
  val_fraction: 0
  sources:
    - { name: long, path: ${at('long.txt')}, weight: 0.75 }
    - { name: short, path: ${at('short.jsonl')}, weight: 0.25, epochs: 2 }
train: { seq_len: 10, batch_size: 2, accumulate_grad_batches: 2, steps: 40 }
`,
);
const inspect = (...words: string[]) => runCli(['data', 'inspect', '--config', at('mixed.yaml'), ...words], { env });

describe('data inspect of a mixture', () => {
  it('says what a run takes from each source, and which one ends first', async () => {
    const { code, stdout, stderr } = await inspect('--json');
    expect(code, stderr).toBe(0);
    const { steps, tokens, sources, ends } = JSON.parse(stdout);
    expect([steps, tokens, ends]).toEqual([40, 40 * 4 * 10, null]);
    expect(sources).toEqual([
      expect.objectContaining({ name: 'long', weight: 0.75, tokens_per_epoch: 2000, max_epochs: 1 }),
      expect.objectContaining({ name: 'short', weight: 0.25, tokens_per_epoch: 600, max_epochs: 2 }),
    ]);
    expect(sources[0].tokens + sources[1].tokens).toBe(tokens);
    for (const { share, weight, epochs, tokens: taken, tokens_per_epoch: all } of sources) {
      expect(Math.abs(share - weight)).toBeLessThan(0.02);
      expect(epochs).toBeCloseTo(taken / all, 10);
    }
    expect(stderr).toContain('data.sources: short: source: jsonl, as the lines of short.jsonl are documents');
  });

  it('for other steps and ranks, as a table', async () => {
    const { stdout } = await inspect('--steps', '100', '--ranks', '2');
    expect(stdout).toMatch(/^100 steps take 8000 tokens$/m);
    expect(stdout).toMatch(/^long +75\.00 % +7\d\.\d\d % +\d+ +2000 +[\d.]+ +1$/m);
    // 200 samples of long, at three of four.
    const [, last] = /^long ends after step (\d+), and the run with it: raise its epochs/m.exec(stdout)!;
    expect(Math.abs(Number(last) - 200 / 0.75 / 8)).toBeLessThan(2);
  });

  it('names the source that cannot be opened', async () => {
    const words = ['--set', `data.sources=[{name: gone, source: text, path: ${at('none.txt')}, weight: 1}]`];
    const { code, stderr } = await inspect(...words);
    expect(code).toBe(2);
    expect(stderr.trim().split('\n').at(-1)).toBe(
      `trefoil: data.sources: gone: no such file or folder: ${at('none.txt')}`,
    );
  });
});
