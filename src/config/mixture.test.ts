import { describe, expect, it } from 'vitest';
import { testFolder } from '../data/testing/folder.js';
import { changeLine, checkResume } from './diff.js';
import { FlagSettings } from './flags.js';
import { guessSource } from './implied-source.js';
import { loadConfig, readConfig } from './load.js';
import type { MixedSourceInput } from './mixture.js';
import { parseConfig } from './parse.js';

const folder = testFolder();
const chat = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n';
const web = folder.write('web.jsonl', '{"text": "one"}\n{"text": "two"}\n');
const chats = folder.write('chats.jsonl', chat);

const source = (name: string, weight: number, more: object = {}): MixedSourceInput =>
  ({ name, path: web, weight, ...more }) as MixedSourceInput;
const parse = (sources: readonly object[], data: object = {}) =>
  parseConfig({ data: { sources: sources as MixedSourceInput[], ...data } });

describe('data.sources', () => {
  it('completes sources: kinds that paths imply, one epoch; the mixture is a source of its own', () => {
    const { data } = parse([
      source('web', 0.7),
      source('talk', 0.2, { path: chats }),
      { name: 'tales', source: 'stories', weight: 0.1 },
    ]);
    expect(data.source).toBe('mixture');
    expect(data.sources!.map((one) => [one.name, one.source, one.epochs])).toEqual([
      ['web', 'jsonl', 1],
      ['talk', 'chat', 1],
      ['tales', 'stories', 1],
    ]);
  });

  it.each([
    [[source('a', 0.5), source('b', 0.6)], 'data.sources: the weights sum to 1.1 (a 0.5, b 0.6); make them sum to 1'],
    [
      [source('a', -1), source('b', 2)],
      'data.sources: a: weight -1 is not allowed; a number > 0, its share of the tokens',
    ],
    [[source('a', Number.NaN)], 'data.sources: a: weight NaN is not allowed; a number > 0, its share of the tokens'],
    [
      [source('a', 'much' as unknown as number)],
      'data.sources: a: weight "much" is not allowed; a number > 0, its share of the tokens',
    ],
    [
      [source('a', 1, { source: 'jsnol' })],
      /^data.sources: a: source "jsnol" is not allowed; one of .* \(did you mean jsonl\?\)$/,
    ],
    [
      [source('a', 1, { source: 'hub' })],
      /^data.sources: a: source "hub" is not allowed; .*stage the hub with trefoil data bootstrap/,
    ],
    [[{ name: 'a', weight: 1 }], 'data.sources: a: source is missing; give it, or a path that implies it'],
    [[{ name: 'a', source: 'text', weight: 1 }], 'data.sources: a: path is missing; source text reads one'],
    [[source('a', 1, { source: 'stories' })], /^data.sources: a: source stories reads no path; leave it out/],
    [[source('a', 0.5), source('a', 0.5)], 'data.sources: two sources are named a; give each a name of its own'],
    [[source('a b', 1)], /^data.sources: a b: name "a b" is not allowed; a name of up to 40 letters/],
    [[source('a', 1, { epochs: 0 })], 'data.sources: a: epochs 0 is not allowed; an integer >= 1'],
    [[source('a', 1, { wieght: 1 })], 'data.sources: a: unknown key wieght (did you mean weight?)'],
    [[{ path: web, weight: 1 }], /^data.sources: item 1: name is missing/],
    [['web'], /^data.sources: item 1: not a source; give \{name, source, path, weight, epochs\}$/],
    [[], /^data.sources: \[\] is not allowed; a list of sources/],
  ])('refuses %j in one line', (sources, line) => {
    let message = '';
    try {
      parse(sources as object[]);
    } catch (error) {
      message = (error as Error).message;
    }
    if (typeof line === 'string') expect(message).toBe(line);
    else expect(message).toMatch(line);
    expect(message).not.toContain('\n');
  });

  it('allows three thirds, and no other keys of a single source', () => {
    parse([source('a', 0.333), source('b', 0.333), source('c', 0.333)]);
    expect(() => parse([source('a', 1)], { source: 'text' })).toThrow('data.source: text contradicts data.sources');
    expect(() => parse([source('a', 1)], { val_path: web })).toThrow('data.val_path: not read beside data.sources');
    expect(() => parse([source('a', 1)], { synthetic_on_fail: true })).toThrow(
      'data.synthetic_on_fail: true has no effect',
    );
    expect(() => parseConfig({ data: { source: 'mixture' } })).toThrow(
      'data.sources: missing; data.source mixture needs',
    );
  });

  it('gives way to a path of a higher layer, and replaces a source of a lower one', () => {
    const file = folder.write('mixed.yaml', `data:\n  sources:\n    - {name: web, path: ${web}, weight: 1}\n`);
    const mixed = loadConfig({ env: {}, config: file });
    expect(mixed.config.data.source).toBe('mixture');
    expect(mixed.origins.get('data.source')).toMatch(/^implied by /);
    expect(mixed.guesses).toEqual(['data.sources: web: source: jsonl, as the lines of web.jsonl are documents']);
    const flags = new FlagSettings().add('local-path', chats).layer;
    const { config, guesses } = loadConfig({ env: {}, config: file, flags });
    expect([config.data.source, config.data.sources]).toEqual(['chat', null]);
    expect(guesses).toEqual(['data.source: chat, as the lines of chats.jsonl have messages']);
    const written = new FlagSettings().set(`data.sources=[{name: web, path: ${web}, weight: 1}]`).layer;
    const over = loadConfig({ env: {}, config: 'quickstart', flags: written }).config.data;
    expect([over.source, over.path, over.sources!.length]).toEqual(['mixture', null, 1]);
    const shipped = readConfig('quickstart', { data: { sources: [source('here', 1, { path: 'package:docs' })] } });
    expect(shipped.data.sources![0].path).toMatch(/^\/.*docs$/);
  });
});

describe('a mixture on resume', () => {
  const before = parse([source('a', 0.5), source('b', 0.5)]);

  it('prints changed weights, epochs and new sources as changes', () => {
    const after = parse([source('a', 0.3, { epochs: 2 }), source('b', 0.6), source('c', 0.1)]);
    expect(checkResume(before, after).map(changeLine)).toEqual([
      'data.sources.a.weight: 0.5 -> 0.3',
      'data.sources.a.epochs: 1 -> 2',
      'data.sources.b.weight: 0.5 -> 0.6',
      expect.stringMatching(/^data.sources.c: nothing -> \{"name":"c"/),
    ]);
    expect(checkResume(before, parse([source('b', 0.5), source('a', 0.5)]))).toEqual([]);
  });

  it('refuses a missing source', () => {
    expect(() => checkResume(before, parse([source('a', 1)]))).toThrow(
      /^data.sources.b: \{"name":"b".* -> nothing is not allowed on resume; keep \{"name":"b"/,
    );
  });
});

describe('guessSource', () => {
  const kind = (name: string, content: string | Uint8Array) => guessSource(folder.write(name, content)).source;

  it('sees the kind of a file from its content', () => {
    expect(kind('a.jsonl', chat)).toBe('chat');
    expect(kind('b.jsonl', '{"text": "x"}\n')).toBe('jsonl');
    expect(kind('c.jsonl', '{"body": "x"}\n')).toBe('jsonl');
    expect(kind('d.json', chat)).toBe('chat');
    expect(kind('e.dat', '{"text": "x"}\n{"text": "y"}\n')).toBe('jsonl');
    expect(kind('f.json', '{\n  "text": "pretty"\n}\n')).toBe('text');
    expect(kind('g.json', '{"a": 1}\n')).toBe('text');
    expect(kind('h.txt', 'prose\n')).toBe('text');
    expect(kind('i.jsonl', `{"messages": [{"role": "user", "content": "${'long '.repeat(20_000)}"}]}\n`)).toBe('chat');
    expect(kind('j.jsonl', `${chat}{"text": "x"}\n`)).toBe('jsonl');
    expect(kind('k.bin', Uint8Array.of(0, 255, 1))).toBe('text');
    expect(kind('empty.jsonl', '')).toBe('jsonl');
  });
});
