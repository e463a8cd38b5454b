import { mkdirSync, symlinkSync, utimesSync, writeFileSync } from 'node:fs';
import { basename, join, relative } from 'node:path';
import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { testFolder } from '../testing/folder.js';
import { isUnchanged, resolveFiles } from './files.js';

const folder = testFolder();
for (const name of ['b.txt', 'a.md', 'sub/c.ts', 'sub/B.txt', '.hidden/x.txt', '.dot', 'sub/data.bin']) {
  folder.write(`tree/${name}`, name);
}
const names = async (...args: Parameters<typeof resolveFiles>): Promise<string[]> =>
  (await resolveFiles(...args)).files.map((file) => relative(folder.path('tree'), file.path));

describe('resolveFiles', () => {
  it('lists a folder sorted by code unit, without dot files', async () => {
    expect(await names(folder.path('tree'))).toEqual(['a.md', 'b.txt', 'sub/B.txt', 'sub/c.ts', 'sub/data.bin']);
  });

  it('keeps the order of several paths and takes each file once', async () => {
    const paths = [folder.path('tree/sub/c.ts'), folder.path('tree'), folder.path('tree/sub')];
    expect(await names(paths)).toEqual(['sub/c.ts', 'a.md', 'b.txt', 'sub/B.txt', 'sub/data.bin']);
  });

  it('expands patterns', async () => {
    expect(await names(folder.path('tree/**/*.txt'))).toEqual(['b.txt', 'sub/B.txt']);
    expect(await names(folder.path('tree/{a,b}.*'))).toEqual(['a.md', 'b.txt']);
  });

  it('takes a name that looks like a pattern literally when it exists', async () => {
    const path = folder.write('odd/notes[1].txt', 'x');
    expect((await resolveFiles(path)).files.map((file) => file.path)).toEqual([path]);
  });

  it('filters what a folder holds, but not what is named', async () => {
    const accept = (path: string): boolean => path.endsWith('.txt');
    expect(await names(folder.path('tree'), accept)).toEqual(['b.txt', 'sub/B.txt']);
    expect(await names(folder.path('tree/a.md'), accept)).toEqual(['a.md']);
  });

  it('is safe with loops of links and takes a linked file once', async () => {
    mkdirSync(folder.path('loop/inner'), { recursive: true });
    folder.write('loop/inner/only.txt', 'x');
    symlinkSync(folder.path('loop'), folder.path('loop/inner/back'));
    symlinkSync(folder.path('loop/inner/only.txt'), folder.path('loop/again.txt'));
    expect((await resolveFiles(folder.path('loop'))).files.map((file) => basename(file.path))).toEqual(['again.txt']);
  });

  it('passes over a link that leads nowhere', async () => {
    folder.write('dangling/real.txt', 'x');
    symlinkSync(folder.path('nowhere'), folder.path('dangling/link.txt'));
    expect((await resolveFiles(folder.path('dangling'))).files.map((file) => basename(file.path))).toEqual([
      'real.txt',
    ]);
  });

  it('may leave out more files than a call may have arguments', async ({ skip }) => {
    if (process.env['TREFOIL_LONG'] !== '1') skip('makes 150,000 files: TREFOIL_LONG=1');
    const path = folder.fresh();
    for (let i = 0; i < 150_000; i++) writeFileSync(join(path, `${i}.svg`), '');
    writeFileSync(join(path, 'a.txt'), 'a');
    const { files, skipped } = await resolveFiles(path);
    expect([files.length, skipped.length]).toEqual([1, 150_000]);
  });

  it('names a path that is missing or empty', async () => {
    await expect(resolveFiles(folder.path('none'))).rejects.toThrow(`no such file or folder: ${folder.path('none')}`);
    await expect(resolveFiles(folder.path('none'))).rejects.toThrow(UsageError);
    const pattern = folder.path('tree/*.none');
    await expect(resolveFiles(pattern)).rejects.toThrow(`data.path: ${pattern} holds no file to read`);
    await expect(resolveFiles(folder.path('tree'), () => false)).rejects.toThrow('holds no file to read');
  });
});

describe('what is skipped', () => {
  it('is named with its reason', async () => {
    folder.write('skips/a.txt', 'x');
    folder.write('skips/b.csv', 'x');
    folder.write('skips/empty.txt', '');
    const { files, skipped } = await resolveFiles(folder.path('skips'), (path) => path.endsWith('.txt'));
    expect(files.map((file) => file.path)).toEqual([folder.path('skips/a.txt')]);
    expect(skipped).toEqual([
      { path: folder.path('skips/b.csv'), reason: 'its name' },
      { path: folder.path('skips/empty.txt'), reason: 'empty' },
    ]);
    await expect(resolveFiles(folder.path('skips/empty.txt'))).rejects.toThrow('data.path: only empty files in');
  });
});

describe('isUnchanged', () => {
  it('compares size and time, and notices a missing file', async () => {
    const path = folder.write('changing/one.txt', 'first');
    const [file] = (await resolveFiles(path)).files;
    expect(await isUnchanged(file)).toBe(true);
    writeFileSync(path, 'other, longer');
    expect(await isUnchanged(file)).toBe(false);
    const [again] = (await resolveFiles(path)).files;
    utimesSync(path, 1, 1);
    expect(await isUnchanged(again)).toBe(false);
    expect(await isUnchanged({ ...again, path: folder.path('gone') })).toBe(false);
  });
});
