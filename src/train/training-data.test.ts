import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { temporaryFolder } from '../testing/run.js';
import { openTrainingData } from './training-data.js';

const folder = temporaryFolder();
afterAll(() => folder.remove());
const path = join(folder.path, 'text.txt');
writeFileSync(path, 'some words of text '.repeat(200));

/** Opens a text source with an empty cache; returns what was written to the terminal and printed. */
async function open(isTTY: boolean, data: object = {}) {
  const [written, said]: [string[], string[]] = [[], []];
  const config = parseConfig({ data: { path, ...data }, train: { seq_len: 16 } });
  const loader = await openTrainingData(
    config,
    (line) => said.push(line),
    () => {},
    {
      environment: { TREFOIL_CACHE: join(folder.path, `cache-${Math.random()}`) },
      terminal: { isTTY, columns: 60, write: (text) => written.push(text) },
    },
  );
  loader.close();
  return { written, said };
}

describe('tokenising', () => {
  it('shows a live line with counts on a terminal, no longer than the terminal is wide, and removes it', async () => {
    const { written } = await open(true);
    expect(written[0].startsWith('\r\x1b[K')).toBe(true);
    const text = written[0].replace('\r\x1b[K', '');
    expect(text).toMatch(/^tokenised 1 documents, \d+ tokens, \d\/1 parts/);
    expect(text.length).toBeLessThan(60);
    expect(written.at(-1)).toBe('\r\x1b[K');
  });

  it('writes nothing to a stream that is not a terminal, and names the files', async () => {
    const { written, said } = await open(false);
    expect(written).toEqual([]);
    expect(said).toEqual([
      expect.stringMatching(/^data: 1 file taken, \d+\.\d kB: text\.txt$/),
      expect.stringMatching(/^data: text .*text\.txt, \d+ training tokens, \d+ validation samples$/),
    ]);
  });

  it('prints a line every data.report_docs documents elsewhere', async () => {
    const { said } = await open(false, { report_docs: 1 });
    expect(said[0]).toMatch(/^tokenised 1 documents, \d+ tokens, \d\/1 parts, [\d.]+ MB\/s$/);
  });

  it('is silent with data.report_docs 0', async () => {
    expect((await open(true, { report_docs: 0 })).written.join('')).not.toContain('tokenised');
  });
});
