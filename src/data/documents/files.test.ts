import { chmodSync, mkdirSync, symlinkSync, utimesSync, writeFileSync } from 'node:fs';
import { basename, relative } from 'node:path';
import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { testFolder } from '../testing/folder.js';
import { findChangedFile, resolveFiles } from './files.js';

const folder = testFolder();
for (const name of ['b.txt', 'a.md', 'sub/c.ts', 'sub/B.txt', '.hidden/x.txt', '.dot', 'sub/data.bin']) {
  folder.write(`tree/${name}`, name);
}
const names = async (...args: Parameters<typeof resolveFiles>): Promise<string[]> =>
  (await resolveFiles(...args)).map((file) => relative(folder.path('tree'), file.path));

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
    expect((await resolveFiles(path)).map((file) => file.path)).toEqual([path]);
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
    expect((await resolveFiles(folder.path('loop'))).map((file) => basename(file.path))).toEqual(['again.txt']);
  });

  it('passes over a link that leads nowhere', async () => {
    folder.write('dangling/real.txt', 'x');
    symlinkSync(folder.path('nowhere'), folder.path('dangling/link.txt'));
    expect((await resolveFiles(folder.path('dangling'))).map((file) => basename(file.path))).toEqual(['real.txt']);
  });

  it('names a path that is missing or empty', async () => {
    await expect(resolveFiles(folder.path('none'))).rejects.toThrow(`no such file or folder: ${folder.path('none')}`);
    await expect(resolveFiles(folder.path('none'))).rejects.toThrow(UsageError);
    const pattern = folder.path('tree/*.none');
    await expect(resolveFiles(pattern)).rejects.toThrow(`data.path: ${pattern} holds no file to read`);
    await expect(resolveFiles(folder.path('tree'), () => false)).rejects.toThrow('holds no file to read');
  });
});

describe('findChangedFile', () => {
  it('sees another size, another time and a missing file', async () => {
    const path = folder.write('changing/one.txt', 'first');
    const files = await resolveFiles(path);
    expect(await findChangedFile(files)).toBeUndefined();
    writeFileSync(path, 'other, longer');
    expect(await findChangedFile(files)).toBe(path);
    const again = await resolveFiles(path);
    utimesSync(path, 1, 1);
    expect(await findChangedFile(again)).toBe(path);
    chmodSync(path, 0o600);
    expect(await findChangedFile([{ ...again[0], path: folder.path('gone') }])).toBe(folder.path('gone'));
  });
});
