import { gzipSync } from 'node:zlib';
import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { localOptions } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import { BlobOpener } from './blob.js';
import { openCorpus } from './corpus.js';
import { isJsonlName } from './lines.js';
import { CorpusOrder } from './order.js';
import { openPart } from './reader.js';

const folder = testFolder();

/** The documents of all parts, in order, without the empty ones. */
async function read(
  path: string | string[],
  textField = 'text',
  partBytes: number | 'auto' = 'auto',
): Promise<string[]> {
  const spec = await openCorpus(localOptions('jsonl', path, { textField, partBytes }));
  const order = new CorpusOrder(spec);
  const opener = new BlobOpener(spec);
  const texts: string[] = [];
  for (let unit = 0; unit < order.unitsPerEpoch; unit++) {
    const { file, part } = order.plainUnit(unit);
    const reader = await openPart({ file, part, textField, opener });
    for (let block = await reader.read(0); block !== undefined; block = await reader.read(block.next))
      texts.push(...(block.documents as string[]));
    await reader.close();
  }
  return texts.filter((text) => text !== '');
}

describe('openLines', () => {
  it('reads a document per line, past blank lines, CRLF and a byte order mark', async () => {
    const path = folder.write('a.jsonl', '\uFEFF{"text":"one"}\r\n\n  \n{"id":7,"text":"zwei\\n\\u2028 😀"}');
    expect(await read(path)).toEqual(['one', 'zwei\n\u2028 😀']);
    expect(await read(path, 'text', 3)).toEqual(['one', 'zwei\n\u2028 😀']);
  });

  it('reads several files, compressed or not, and another field', async () => {
    const paths = [
      folder.write('z.jsonl', '{"content":"first"}\n'),
      folder.write('b.jsonl.gz', gzipSync('{"content":"second"}\n{"content":"third"}\n')),
    ];
    expect(await read(paths, 'content')).toEqual(['first', 'second', 'third']);
  });

  it('takes a line of 5 MB, and lines across the ends of chunks', async () => {
    const long = 'é'.repeat(2_500_000);
    const short = Array.from({ length: 30_000 }, (_, index) => `{"text":"${index}"}`);
    const path = folder.write('long.jsonl', `${short.join('\n')}\n{"text":"${long}"}\n${short.join('\n')}\n`);
    const texts = await read(path);
    expect(texts.length).toBe(60_001);
    expect(texts[30_000]).toBe(long);
    expect(texts[60_000]).toBe('29999');
  });

  it.each([
    ['{"text":"a"}\n{"text":', 2, 'not valid JSON'],
    ['\n\n[1]\n', 3, 'not a JSON object'],
    ['"text"\n', 1, 'not a JSON object'],
    ['null\n', 1, 'not a JSON object'],
    ['{"content":"a","id":1}\n', 1, 'no text in field "text" (fields: content, id); set data.text_field'],
    ['{"text":17}\n', 1, 'no text in field "text"'],
    ['{}\n', 1, 'no text in field "text" (fields: none)'],
  ])('names file and line of %j', async (content, line, message) => {
    const path = folder.write('bad.jsonl', content);
    await expect(read(path)).rejects.toThrow(UsageError);
    await expect(read(path)).rejects.toThrow(`${path}:${line}: ${message}`);
    const compressed = folder.write('bad.jsonl.gz', gzipSync(content));
    await expect(read(compressed)).rejects.toThrow(`${compressed}:${line}: ${message}`);
  });

  it('names the line that is not UTF-8', async () => {
    const path = folder.write('latin.jsonl', Buffer.from('{"text":"ok"}\n{"text":"caf\xe9"}\n', 'latin1'));
    await expect(read(path)).rejects.toThrow(`${path}:2: not valid UTF-8`);
  });

  it('does not take an inherited property for a field', async () => {
    const path = folder.write('proto.jsonl', '{"text":"a"}\n');
    await expect(read(path, 'constructor')).rejects.toThrow('no text in field "constructor"');
  });
});

describe('isJsonlName', () => {
  it('knows the endings', () => {
    const names = ['a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.ndjson', 'a.json', 'a.txt', 'jsonl', 'a.gz'];
    expect(names.filter(isJsonlName)).toEqual(['a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.ndjson']);
  });
});
