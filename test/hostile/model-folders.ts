/** Folders with the model of a stranger who means harm: one sound Llama, of which one part is replaced. */
import { execFileSync } from 'node:child_process';
import { mkdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { byteLevelTokenizerJson } from '../../src/data/testing/tokenizer-json.js';
import { LLAMA, writeHfFolder } from '../../src/exchange/testing/hf-folder.js';

export interface HostileCase {
  readonly kind: string;
  readonly name: string;
  readonly write: (folder: string) => void;
}

type Json = Record<string, unknown>;
const CONFIG = { ...LLAMA, vocab_size: 264, hidden_size: 16, intermediate_size: 16 };
/** The content of a file of the user, which no output may show. */
export const SECRET = 'secret-of-the-user';
const SECRET_FILE = join('/tmp', `trefoil-secret-${process.pid}`);

function sound(folder: string): void {
  writeHfFolder(folder, CONFIG);
  writeFileSync(join(folder, 'tokenizer.json'), JSON.stringify(byteLevelTokenizerJson()));
  writeFileSync(join(folder, 'chat_template.jinja'), '{% for m in messages %}{{ m.content }}{% endfor %}');
}

const put = (name: string, content: string | Uint8Array) => (folder: string) =>
  writeFileSync(join(folder, name), content);
const edit = (name: string, change: (json: Json) => void) => (folder: string) => {
  const path = join(folder, name);
  const json = JSON.parse(readFileSync(path, 'utf8')) as Json;
  change(json);
  writeFileSync(path, JSON.stringify(json));
};
const tokenizer = (change: (json: Json) => void) => edit('tokenizer.json', change);
const step = (key: string, value: unknown) => tokenizer((json) => Object.assign(json, { [key]: value }));
const config = (values: Json) => edit('config.json', (json) => Object.assign(json, values));
const repeat = (text: string, count: number) => text.repeat(count);
const nest = (open: string, inner: string, close: string, depth: number) =>
  repeat(open, depth) + inner + repeat(close, depth);

const SIZES = [30, 200, 5000, 1e5];
const LOOPS = ['range(1000000000)', 'range(999999)', 'range(0, 1, 0.0000000001)', 'messages[0].content * 99'];
const TEMPLATES: string[] = [
  ...LOOPS.flatMap((list) => [1, 2, 5].map((depth) => nest(`{% for a in ${list} %}`, 'x', '{% endfor %}', depth))),
  ...SIZES.flatMap((n) => [
    `{% set x = "ab" %}${repeat('{% set x = x ~ x %}', n)}{{ x }}`,
    `{% set x = [1] %}${repeat('{% set x = x + x %}', n)}{{ x }}`,
    `{% set x = [1] %}${repeat('{% set x = [x, x] %}', n)}{{ x | tojson(indent=2) }}`,
    `{% set x = "a" %}${repeat('{% set x = x | replace("a", "aaaaaaaa") %}', n)}{{ x }}`,
    `{{ ${nest('(', '1', ')', n)} }}`,
    `{{ ${nest('[', '1', ']', n)} }}`,
    nest('{% if true %}', 'x', '{% endif %}', n),
    `{{ "a b" | indent(${n * 1e6}) }}`,
    `{{ raise_exception("${repeat('x', n)}\\u001b[2J\\u0007") }}`,
    repeat('{{', n),
    repeat('{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}', 1) + repeat('{{ f(1) }}', Math.min(n, 100)),
  ]),
];

const EXPRESSIONS = [
  ...['(a+)+$', '(a*)*b', '(a|a)+$', '(a|aa)+$', '(.*)*x', '([a-z]+)*1', '((a+)+)+!', 'a*a*a*a*a*b', '(?=(a+)+b)x'],
  ...[
    '\\s+$',
    '(x+x+)+y',
    '(\\w+\\s?)+:',
    '^(([a-z])+.)+[A-Z]([a-z])+$',
    '(',
    '[',
    'a{99999}',
    '(?<=a+b+)c',
    '\\p{Foo}',
  ],
  repeat('(a?', 500) + repeat(')', 500),
  `${repeat('a?', 30)}${repeat('a', 30)}`,
];
const regex = (source: string) => ({ Regex: source });
const split = (source: string) => ({ type: 'Split', pattern: regex(source), behavior: 'Isolated', invert: false });
const replace = (pattern: unknown, content: string) => ({ type: 'Replace', pattern, content });
const sequence = (key: string, steps: readonly unknown[]) => ({ type: 'Sequence', [key]: steps });
const added = (count: number, content: (i: number) => string, more: Json = {}) =>
  tokenizer((json) => {
    const list = Array.from({ length: count }, (_, i) => ({ id: 263, content: content(i), special: false, ...more }));
    json['added_tokens'] = [...(json['added_tokens'] as unknown[]), ...list];
  });

const TOKENIZERS: Readonly<Record<string, (folder: string) => void>> = {
  ...Object.fromEntries(EXPRESSIONS.map((source) => [`split ${source}`, step('pre_tokenizer', split(source))])),
  ...Object.fromEntries(
    EXPRESSIONS.map((source) => [`replace ${source}`, step('normalizer', replace(regex(source), 'b'))]),
  ),
  ...Object.fromEntries(
    EXPRESSIONS.slice(0, 8).map((source) => [`decode ${source}`, step('decoder', replace(regex(source), 'b'))]),
  ),
  ...Object.fromEntries(
    SIZES.flatMap((n) => [
      [`bomb ${n}`, step('normalizer', replace({ String: 'a' }, repeat('a', n)))],
      [`prefix ${n}`, step('normalizer', { type: 'Prepend', prepend: repeat('a', 10 * n) })],
      [`chain ${n}`, step('normalizer', sequence('normalizers', Array(n).fill(replace({ String: 'a' }, 'aa'))))],
      [`splits ${n}`, step('pre_tokenizer', sequence('pretokenizers', Array(n).fill(split('a'))))],
      [`decoders ${n}`, step('decoder', sequence('decoders', Array(n).fill(replace({ String: 'a' }, 'aaaa'))))],
      [`added ${n}`, added(n, (i) => `<tok ${i}>`)],
      [`added long ${n}`, added(Math.min(n, 3000), (i) => repeat('a', i + 1), { lstrip: true, single_word: true })],
      [
        `frame ${n}`,
        step('post_processor', {
          type: 'TemplateProcessing',
          single: [...Array(n).fill({ SpecialToken: { id: 'x' } }), { Sequence: {} }],
          special_tokens: { x: { ids: [1] } },
        }),
      ],
      [`nested ${n}`, put('tokenizer.json', nest('{"normalizer":', 'null', '}', n))],
    ]),
  ),
  'a huge id': added(1, () => '<x>', { id: 2 ** 52 }),
  'a negative id': added(1, () => '<x>', { id: -1 }),
  'a huge id of the vocabulary': tokenizer(({ model }) =>
    Object.assign((model as Json)['vocab'] as Json, { zz: 1e15 }),
  ),
  'a token of 5 MB': added(1, () => repeat('x', 5e6)),
  'an id with ESC': put('tokenizer.json', '{"model":{"type":"\u001b[2J","vocab":{}}}'),
  'JSON that ends': put('tokenizer.json', '{"model": {'),
  'no file': (folder) => rmSync(join(folder, 'tokenizer.json')),
  '90 MB of spaces': put('tokenizer.json', repeat(' ', 9e7)),
};

const NUMBERS = [0, -1, 1.5, 1e6, 1e12, 2 ** 53, '9', null, [], '\u001b[31m'];
const CONFIGS: Readonly<Record<string, (folder: string) => void>> = {
  ...Object.fromEntries(
    ['num_hidden_layers', 'hidden_size', 'num_attention_heads', 'vocab_size', 'intermediate_size', 'head_dim'].flatMap(
      (key) => NUMBERS.map((value) => [`${key} ${JSON.stringify(value)}`, config({ [key]: value })]),
    ),
  ),
  'an architecture of 5 MB': config({ architectures: [repeat('x', 5e5)] }),
  'an architecture with ESC': config({ architectures: ['\u001b[2J\u0007\u009b31m'] }),
  'an activation with ESC': config({ hidden_act: '\u001b]0;x\u0007' }),
  'a rope type with ESC': config({ rope_scaling: { rope_type: '\u001b[2J', factor: 2 } }),
  'deep JSON': put('config.json', nest('{"architectures":', '[]', '}', 5e4)),
  'no JSON': put('config.json', repeat('\0', 1000)),
  'an empty file': put('config.json', ''),
};

/** A safetensors file with this header. */
function weights(header: string | Uint8Array, claimed?: number, data = 0): Uint8Array {
  const text = typeof header === 'string' ? new TextEncoder().encode(header) : header;
  const bytes = new Uint8Array(8 + text.length + data);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(claimed ?? text.length), true);
  bytes.set(text, 8);
  return bytes;
}
const tensor = (name: string, more = '') =>
  `${JSON.stringify(name)}:{"dtype":"F32","shape":[0],"data_offsets":[0,0]${more}}`;
const HEADERS: Readonly<Record<string, (folder: string) => void>> = {
  ...Object.fromEntries(
    SIZES.map((n) => [
      `${n} tensors`,
      put('model.safetensors', weights(`{${Array.from({ length: n }, (_, i) => tensor(`t${i}`)).join(',')}}`)),
    ]),
  ),
  'a flood of 90 MB': put('model.safetensors', weights(`{${repeat('"":0,', 1.8e7)}"a":1}`)),
  'one key, 90 MB of times': put('model.safetensors', weights(`{${repeat(`${tensor('a')},`, 1.6e6)}${tensor('a')}}`)),
  'deep JSON': put('model.safetensors', weights(nest('{"a":', '1', '}', 2e6))),
  'a name with ESC': put('model.safetensors', weights(`{${tensor('\u001b[2J\u0007\u202e')}}`)),
  'a name of 5 MB': put('model.safetensors', weights(`{${tensor(repeat('x', 5e6))}}`)),
  'a header that claims 2^63': put('model.safetensors', weights('{}', 2 ** 62)),
  'a header that claims more than the file': put('model.safetensors', weights('{}', 1e6)),
  'no UTF-8': put('model.safetensors', weights(new Uint8Array(1000).fill(0xff))),
  'seven bytes': put('model.safetensors', new Uint8Array(7)),
  'a shape that overflows': put(
    'model.safetensors',
    weights('{"a":{"dtype":"F32","shape":[1e300,1e300],"data_offsets":[0,0]}}'),
  ),
  'offsets that overlap': put(
    'model.safetensors',
    weights(
      '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
      undefined,
      6,
    ),
  ),
};

const index = (map: unknown) => (folder: string) => {
  rmSync(join(folder, 'model.safetensors'));
  writeFileSync(join(folder, 'model.safetensors.index.json'), JSON.stringify({ weight_map: map }));
};
const FILES = [
  'x\0.safetensors',
  '../x.safetensors',
  '/etc/passwd',
  '..',
  '\u001b[2J.safetensors',
  repeat('x', 5e5),
  'a\\b.safetensors',
  '',
];
const INDEXES: Readonly<Record<string, (folder: string) => void>> = {
  ...Object.fromEntries(FILES.map((file, i) => [`a file ${i}`, index({ 'lm_head.weight': file })])),
  ...Object.fromEntries(
    SIZES.map((n) => [
      `${n} files`,
      index(Object.fromEntries(Array.from({ length: n }, (_, i) => [`t${i}`, `f${i}.safetensors`]))),
    ]),
  ),
  'a tensor with ESC': index({ '\u001b[2J': 'x' }),
  'a tensor of 5 MB': index({ [repeat('x', 5e6)]: 'x' }),
  'no object': index('\0'),
  'an empty one': index({}),
  'deep JSON': (folder) => writeFileSync(join(folder, 'model.safetensors.index.json'), nest('[', '', ']', 1e5)),
};

const PARTS = [
  'chat_template.jinja',
  'tokenizer.json',
  'tokenizer_config.json',
  'config.json',
  'model.safetensors',
  'generation_config.json',
  'vocab.json',
  'special_tokens_map.json',
];
const linked = (name: string, target: string) => (folder: string) => {
  writeFileSync(SECRET_FILE, SECRET);
  rmSync(join(folder, name), { force: true });
  symlinkSync(target, join(folder, name));
};
const LINKS = Object.fromEntries(
  PARTS.flatMap((name) => [
    [`${name} to a file of the user`, linked(name, SECRET_FILE)],
    [`${name} to itself`, linked(name, name)],
    [
      `${name} through a folder`,
      (folder: string) => {
        linked(name, join('away', SECRET_FILE.split('/').at(-1)!))(folder);
        symlinkSync('/tmp', join(folder, 'away'));
      },
    ],
  ]),
);
const SPECIAL = Object.fromEntries(
  PARTS.flatMap((name) => [
    [
      `${name} is a pipe`,
      (folder: string) => {
        rmSync(join(folder, name), { force: true });
        execFileSync('mkfifo', [join(folder, name)]);
      },
    ],
    [
      `${name} is a folder`,
      (folder: string) => {
        rmSync(join(folder, name), { force: true });
        mkdirSync(join(folder, name));
      },
    ],
    [`${name} is /dev/zero`, linked(name, '/dev/zero')],
    [`${name} is empty`, put(name, '')],
  ]),
);

const KINDS: Readonly<Record<string, Readonly<Record<string, (folder: string) => void>>>> = {
  templates: Object.fromEntries(
    TEMPLATES.map((source, i) => [`${i}: ${source.slice(0, 60)}`, put('chat_template.jinja', source)]),
  ),
  tokenizers: TOKENIZERS,
  configs: CONFIGS,
  headers: HEADERS,
  indexes: INDEXES,
  links: LINKS,
  'special files': SPECIAL,
};

/** All cases, by kind. */
export const MODEL_FOLDERS: readonly HostileCase[] = Object.entries(KINDS).flatMap(([kind, cases]) =>
  Object.entries(cases).map(([name, spoil]) => ({
    kind,
    name,
    write: (folder: string) => {
      sound(folder);
      spoil(folder);
    },
  })),
);
