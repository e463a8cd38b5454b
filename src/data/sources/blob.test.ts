import { rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { temporaryFolder } from '../../testing/run.js';
import { BlobOpener } from './blob.js';
import type { CorpusFile } from './spec.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

function fileOf(name: string): CorpusFile {
  const location = join(folder.path, name);
  writeFileSync(location, `text of ${name}`);
  return { kind: 'text', name, location, size: 8 + name.length, identity: name, parts: 2 };
}
const SPEC = { http: undefined, cache: undefined } as unknown as ConstructorParameters<typeof BlobOpener>[0];
const text = async (opener: BlobOpener, file: CorpusFile) => {
  const blob = await opener.open(file);
  try {
    return Buffer.from(await blob.read(0, file.size)).toString();
  } finally {
    await blob.close();
  }
};

describe('local files', () => {
  it('are closed with their last reader, and opened again by name', async () => {
    const opener = new BlobOpener(SPEC);
    const file = fileOf('a');
    const [first, second] = [await opener.open(file), await opener.open(file)];
    await first.close();
    rmSync(file.location);
    expect(Buffer.from(await second.read(8, 9)).toString()).toBe('a'); // the file is still open for the second reader
    await second.close();
    await expect(text(opener, file)).rejects.toThrow(`data.path: cannot read ${file.location}`);
  });

  it('stay open without a reader, the last few of them', async () => {
    const opener = new BlobOpener(SPEC, { keptOpen: 2 });
    const files = ['a', 'b', 'c'].map(fileOf);
    for (const file of files) expect(await text(opener, file)).toBe(`text of ${file.name}`);
    for (const file of files) rmSync(file.location);
    expect(await text(opener, files[1])).toBe('text of b');
    expect(await text(opener, files[2])).toBe('text of c');
    await expect(text(opener, files[0])).rejects.toThrow('cannot read');
    writeFileSync(files[0].location, 'text of a');
    expect(await text(opener, files[0])).toBe('text of a'); // a failure is not remembered
    await expect(text(opener, files[1])).rejects.toThrow('cannot read'); // the oldest made room
  });

  it('that end early are an error', async () => {
    const blob = await new BlobOpener(SPEC).open(fileOf('a'));
    await expect(blob.read(0, 100)).rejects.toThrow('ends early');
    await blob.close();
  });
});
