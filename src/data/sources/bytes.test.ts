import { spawnSync } from 'node:child_process';
import { gzipSync } from 'node:zlib';
import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { collect, testFolder } from '../testing/folder.js';
import { readBytes } from './bytes.js';

const folder = testFolder();
const lines = Array.from({ length: 60_000 }, (_, line) => `{"text":"line ${line * 7919} of many"}`).join('\n');

async function read(path: string): Promise<string> {
  return Buffer.concat(await collect(readBytes(path))).toString();
}

/** "hello hello hello\n" in one frame with a checksum, by the zstd program: a fixture for machines without it. */
const ZSTANDARD_HELLO = Buffer.from('KLUv/QRobQAAOGhlbGxvIAoBADFKEaOqdM4=', 'base64');
const hasZstandard = spawnSync('zstd', ['--version']).status === 0;
const compress = (text: string, ...options: string[]): Buffer =>
  spawnSync('zstd', ['-q', '-c', ...options], { input: text, maxBuffer: 1 << 28 }).stdout;

describe('readBytes', () => {
  it('reads plain files', async () => {
    expect(await read(folder.write('plain.jsonl', lines))).toBe(lines);
  });

  it('decompresses gzip, of several members too', async () => {
    const members = Buffer.concat([gzipSync(lines), gzipSync('more')]);
    expect(await read(folder.write('a.gz', members))).toBe(`${lines}more`);
  });

  it('decompresses zstd', async () => {
    expect(await read(folder.write('hello.zst', ZSTANDARD_HELLO))).toBe('hello hello hello\n');
    const twice = Buffer.concat([ZSTANDARD_HELLO, ZSTANDARD_HELLO]);
    expect(await read(folder.write('twice.zst', twice))).toBe('hello hello hello\n'.repeat(2));
  });

  it('decompresses what the zstd program writes at any level', async ({ skip }) => {
    if (!hasZstandard) skip('zstd is not installed (Debian: apt-get install zstd)');
    for (const level of ['-1', '-3', '-19']) {
      expect(await read(folder.write(`level${level}.zst`, compress(lines, level)))).toBe(lines);
    }
  });

  it.each([
    ['gz', gzipSync('x'.repeat(10_000)).subarray(0, 20)],
    ['zst', ZSTANDARD_HELLO.subarray(0, -6)],
    ['gz', Buffer.from('this is not compressed at all')],
    ['zst', Buffer.from('this is not compressed at all')],
  ])('refuses a damaged .%s file by name', async (ending, content) => {
    const path = folder.write(`damaged-${content.length}.${ending}`, content);
    await expect(read(path)).rejects.toThrow(UsageError);
    await expect(read(path)).rejects.toThrow(`data.path: cannot read ${path}: `);
  });

  it.each(['none.jsonl', 'none.gz', 'none.zst'])('names a missing file (%s)', async (name) => {
    await expect(read(folder.path(name))).rejects.toThrow(`cannot read ${folder.path(name)}: ENOENT`);
  });

  it('can be left before the end', async () => {
    const path = folder.write('left.gz', gzipSync(lines));
    for await (const chunk of readBytes(path)) {
      expect(chunk.length).toBeGreaterThan(0);
      break;
    }
  });
});
