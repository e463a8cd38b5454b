import { spawnSync } from 'node:child_process';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, it } from 'vitest';
import { temporaryFolder } from '../testing/run.js';
import { tarEnd, tarHeader, tarPadding } from './tar.js';

it('writes archives that tar reads: sizes around a block, long names, other alphabets', () => {
  const folder = temporaryFolder();
  try {
    const long = `${'folder-'.repeat(14)}x/${'file'.repeat(20)}.txt`;
    const files = [
      ['empty', ''],
      ['a/b/one', 'x'],
      ['exact', 'y'.repeat(512)],
      ['more', 'z'.repeat(513)],
      ['größe', 'ä'],
      [long, 'deep'],
    ];
    const parts = files.flatMap(([name, text]) => {
      const bytes = Buffer.from(text);
      return [tarHeader({ name, size: bytes.length, mtime: 1_700_000_000.5 }), bytes, tarPadding(bytes.length)];
    });
    const archive = join(folder.path, 'a.tar');
    writeFileSync(archive, Buffer.concat([...parts, tarEnd()]));
    const out = join(folder.path, 'out');
    mkdirSync(out);
    const result = spawnSync('tar', ['-xf', archive, '-C', out], { encoding: 'utf8' });
    expect(result.stderr).toBe('');
    for (const [name, text] of files) expect(readFileSync(join(out, name), 'utf8'), name).toBe(text);
  } finally {
    folder.remove();
  }
});

it('takes sizes beyond what octal digits hold, and refuses names no archive takes', () => {
  const size = 20 * 2 ** 30 + 7;
  const folder = temporaryFolder();
  const archive = join(folder.path, 'a.tar');
  writeFileSync(archive, tarHeader({ name: 'large', size, mtime: 0 }));
  const listed = spawnSync('tar', ['-tvf', archive], { encoding: 'utf8' });
  folder.remove();
  expect(listed.stdout).toContain(` ${size} `); // the bytes are missing, the size was understood
  expect(() => tarHeader({ name: 'x'.repeat(200), size: 0, mtime: 0 })).toThrow('too long');
});
