/** Random schemas and random draws: every text is a document of its schema and within its tokens. */
import { describe, expect, it } from 'vitest';
import { createTokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import type { JsonSchema } from './schema.js';
import { StructuredOutput } from './structured-output.js';
import { isValid, random, randomDocument } from './testing/validate.js';

const byte = createTokenizer('byte');
const gpt2 = createTokenizer('gpt2');
const outputs = {
  byte: new StructuredOutput(byte, 256, [0]),
  gpt2: new StructuredOutput(gpt2, 50257, [50256]),
};
const tokenizers = { byte, gpt2 };
type Name = keyof typeof outputs;

interface Drawn {
  readonly text: string;
  readonly tokens: readonly number[];
  readonly isCut: boolean;
}

/** Draws evenly from the allowed tokens until the text ends, and pauses after each token. */
function* drawing(
  name: Name,
  schema: JsonSchema,
  budget: number,
  next: () => number,
  bias: (token: number) => number = () => 0,
  output = outputs[name],
): Generator<void, Drawn> {
  const mask = output.mask({ type: 'json_schema', schema }, budget);
  const { separator, vocabSize } = tokenizers[name];
  const tokens: number[] = [];
  const sample = (logits: Float32Array) => {
    const allowed = [...logits.keys()].filter((token) => logits[token] !== Number.NEGATIVE_INFINITY);
    if (allowed.length === 0)
      throw new Error(`no token is allowed after ${JSON.stringify(tokenizers[name].decode(tokens))}`);
    const best = Math.max(...allowed.slice(0, 1000).map((token) => logits[token]));
    const among = best === 0 ? allowed : allowed.filter((token) => logits[token] === best);
    return among[Math.floor(next() * among.length)];
  };
  let isEnd = false;
  while (!mask.isComplete && tokens.length < budget && !isEnd) {
    const logits = Float32Array.from({ length: vocabSize }, (_, token) => bias(token));
    mask.apply(logits);
    let token = sample(logits);
    if (mask.narrow(token, logits)) token = sample(logits);
    mask.accept(token);
    isEnd = token === separator;
    if (!isEnd) tokens.push(token);
    yield;
  }
  const bytes = Buffer.concat(tokens.map((token) => tokenizers[name].tokenBytes!(token)!));
  return { text: new TextDecoder('utf-8', { fatal: true }).decode(bytes), tokens, isCut: mask.isCut };
}

/** The results of texts that are drawn in turns. */
function inTurns(texts: readonly Generator<void, Drawn>[]): Drawn[] {
  const results = new Map<Generator<void, Drawn>, Drawn>();
  while (results.size < texts.length)
    for (const text of texts) {
      const { done, value } = results.has(text) ? {} : text.next();
      if (done) results.set(text, value as Drawn);
    }
  return texts.map((text) => results.get(text)!);
}

const draw = (...words: Parameters<typeof drawing>): Drawn => inTurns([drawing(...words)])[0];

const fewest = (name: Name, schema: JsonSchema) =>
  outputs[name].mask({ type: 'json_schema', schema }, 1e6).fewestTokens;

const isLong = process.env['TREFOIL_LONG'] === '1';
if (!isLong) console.log('structured output: 300 of 5000 random schemas (all with TREFOIL_LONG=1)');

describe('random schemas and random draws', () => {
  it.each<[Name, number]>([
    ['byte', isLong ? 4000 : 250],
    ['gpt2', isLong ? 1000 : 50],
  ])('always give a document of the schema within the tokens: %s', (name, count) => {
    const seen = { cut: 0, whole: 0, unsatisfiable: 0 };
    for (let seed = 1; seed <= count; seed++) {
      const next = random(seed);
      const schema = randomDocument(next);
      let least: number;
      try {
        least = fewest(name, schema);
      } catch (error) {
        if (!(error instanceof UsageError) || !error.message.includes('no finite document')) throw error;
        seen.unsatisfiable += 1;
        continue;
      }
      for (const extra of [0, 3, 60]) {
        const { text, tokens, isCut } = draw(name, schema, least + extra, next);
        const where = `seed ${seed}: ${JSON.stringify(schema)} gave ${text}`;
        expect(tokens.length, where).toBeLessThanOrEqual(least + extra);
        expect(isValid(JSON.parse(text), schema), where).toBe(true);
        seen[isCut ? 'cut' : 'whole'] += 1;
      }
    }
    expect(seen.cut).toBeGreaterThan(count / 4);
    expect(seen.whole).toBeGreaterThan(count / 4);
    expect(seen.unsatisfiable).toBeLessThan(count / 4);
  });
});

describe('a text does not depend on others', () => {
  const fresh = () => new StructuredOutput(byte, 256, [0]);
  const begin = (output: StructuredOutput, schema: JsonSchema, budget: number, seed: number) =>
    drawing('byte', schema, budget, random(seed), undefined, output);
  it.each<[string, JsonSchema, number]>([
    ['of an object', { type: 'object', properties: { a: { type: 'number' }, b: { type: 'string' } } }, 60],
    ['of more states than are kept', { type: 'string', pattern: '^[ab]{6000}$' }, 6002],
    // More ways to go on than are followed.
    ['of one of 3,000 constants', { enum: Array.from({ length: 3000 }, (_, i) => `${i * 7919}`.padEnd(9, 'x')) }, 20],
    ['of a list of lists', { $defs: { a: { type: 'array', items: { $ref: '#/$defs/a' } } }, $ref: '#/$defs/a' }, 90],
  ])('%s', (_, schema, budget) => {
    const seeds = [1, 2, 3];
    const alone = inTurns(seeds.map((seed) => begin(fresh(), schema, budget, seed)));
    const used = fresh();
    const [before] = inTurns([begin(used, schema, budget, 1)]);
    expect([before, ...inTurns(seeds.map((seed) => begin(used, schema, budget, seed)))]).toEqual([alone[0], ...alone]);
  });
});

/** Whether the text can be drawn byte by byte. */
function accepts(schema: JsonSchema, text: string): boolean {
  const mask = outputs.byte.mask({ type: 'json_schema', schema }, 1e6);
  for (const token of Buffer.from(text, 'utf8')) {
    const logits = new Float32Array(256);
    mask.apply(logits);
    if (logits[token] !== 0) return false;
    mask.accept(token);
  }
  const logits = new Float32Array(256);
  mask.apply(logits);
  return mask.isComplete || logits[0] === 0;
}

describe('documents that a schema allows', () => {
  const person: JsonSchema = {
    type: 'object',
    properties: {
      name: { type: 'string' },
      age: { type: 'integer', minimum: 0, maximum: 150 },
      tags: { type: 'array', items: { enum: ['a', 'b'] } },
    },
    required: ['name'],
    additionalProperties: false,
  };
  const list: JsonSchema = {
    $ref: '#/$defs/L',
    $defs: {
      L: { anyOf: [{ type: 'null' }, { type: 'object', properties: { n: { $ref: '#/$defs/L' } }, required: ['n'] }] },
    },
  };
  it.each<[JsonSchema, string[], string[]]>([
    [
      person,
      ['{"name":"x"}', '{"name": "é\\n\\u00e9🙂", "age": 42}', '{\n  "name": "",\n  "tags": ["a", "b"]\n}'],
      [
        '{}',
        '{"age":1,"name":"x"}',
        '{"name":"x","age":151}',
        '{"name":"x","b":1}',
        '{"name":"x",}',
        '{"name":"x","tags":["c"]}',
        '{"name":"\\ud800"}',
        '{"name":"a\nb"}',
      ],
    ],
    [list, ['null', '{"n":{"n":null}}'], ['{}', '{"n":1}']],
    [{ type: 'number' }, ['0', '-0.5', '12.25e-3', '1E9'], ['01', '.5', '1.', '+1', '1e', '1e999', 'NaN']],
    [{ type: 'number', minimum: 0, exclusiveMaximum: 1 }, ['0', '0.1', '0.999', '-0'], ['1', '-1', '0.1e3', '-0.1']],
    [{ type: 'number', exclusiveMinimum: 1000 }, ['1000.1', '2000', '99999'], ['1000', '1000.0', '999']],
    [
      { type: 'integer', minimum: -12, maximum: 105 },
      ['-12', '0', '99', '100', '105'],
      ['-13', '106', '1.0', '1e1', '-100'],
    ],
    [{ type: 'string', minLength: 2, maxLength: 3 }, ['"ab"', '"é🙂\\n"'], ['"a"', '"abcd"']],
    [{ type: 'string', pattern: '^a[^"]*"$' }, ['"ab\\""', '"a\\""'], ['"a"', '"b\\""', '"a\\"\\""']],
    [
      { type: 'object', additionalProperties: { type: 'integer' }, properties: { ab: { type: 'null' } } },
      ['{}', '{"ab":null}', '{"a":1,"abc":2}', '{"x\\u0061":1}'],
      ['{"ab":1}', '{"\\u0061b":1}', '{"a":1,"ab":null}'],
    ],
    [
      { type: 'array', prefixItems: [{ type: 'null' }], items: { type: 'boolean' }, minItems: 1, maxItems: 3 },
      ['[null]', '[null, true,false]'],
      ['[]', '[true]', '[null,true,true,true]'],
    ],
    [{ type: 'object' }, ['{}', '{"a": [1, {"b": null}]}'], ['[]', '1', '{"a"}']],
    [true, ['[]', '"x"', '-1.5', '{"a":{}}'], ['x', '']],
  ])('%j', (schema, right, wrong) => {
    expect(right.filter((text) => !accepts(schema, text))).toEqual([]);
    expect(wrong.filter((text) => accepts(schema, text))).toEqual([]);
  });

  const zodDay = '\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30))';
  it.each<[string, JsonSchema, string]>([
    ['a URI', { type: 'string', format: 'uri' }, '"https://example.org:80/a/%20b?c=d#e"'],
    ['a host', { type: 'string', format: 'hostname' }, '"a.example-1.org"'],
    [
      'a format beside its pattern',
      {
        type: 'string',
        format: 'date-time',
        pattern: `^${zodDay}T(?:(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d+)?(?:Z))$`,
      },
      '"2026-01-31T23:59:59.5Z"',
    ],
    [
      'an id with its pattern',
      {
        ...{ type: 'string', format: 'uuid' },
        pattern: '^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$',
      },
      '"0188A1b2-0000-7000-8000-00000000000f"',
    ],
    [
      'a map',
      { type: 'object', propertyNames: { type: 'string' }, additionalProperties: { type: 'string' } },
      '{"a":"b","c":""}',
    ],
    ['an annotated text', { type: 'string', contentMediaType: 'text/html' }, '"<p>"'],
  ])('as libraries write schemas: %s', (_, schema, text) => {
    expect(accepts(schema, text)).toBe(true);
    for (let seed = 1; seed <= 10; seed++) {
      const drawn = draw('byte', schema, 90, random(seed));
      expect(isValid(JSON.parse(drawn.text), schema), drawn.text).toBe(true);
    }
  });

  it('are the same until the tokens run out, then end as soon as they can', () => {
    const schema: JsonSchema = {
      type: 'object',
      properties: { story: { type: 'string' }, done: { type: 'boolean' } },
      required: ['story', 'done'],
    };
    // A writer that prefers "x" to the end of the string.
    const bias = (token: number) => (token === 120 ? 1 : 0);
    const long = draw('byte', schema, 300, random(1), bias);
    const short = draw('byte', schema, 60, random(1), bias);
    expect([long.isCut, short.isCut, short.tokens.length]).toEqual([true, true, 60]);
    expect(JSON.parse(short.text)).toMatchObject({ story: expect.stringMatching(/xxx$/) });
    const same = [...short.text].findIndex((character, i) => character !== long.text[i]);
    expect(same).toBe(60 - '","done":true}'.length);
  });
});

const nested = (depth: number) => JSON.parse(`${'{"items":'.repeat(depth)}{}${'}'.repeat(depth)}`);

describe('refusals', () => {
  const refusal = (schema: unknown, budget = 100) => {
    try {
      outputs.byte.check({ type: 'json_schema', schema: schema as JsonSchema }, budget);
    } catch (error) {
      return error instanceof UsageError ? error.message : String(error);
    }
    return null;
  };
  it.each<[unknown, string]>([
    [{ type: 'object', patternProperties: {} }, 'the keyword "patternProperties" is not supported'],
    [{ properties: { a: { type: 'number', multipleOf: 2 } } }, 'schema /properties/a: the keyword "multipleOf"'],
    [{ not: {} }, 'the keyword "not"'],
    [{ type: 'array', uniqueItems: true }, '"uniqueItems"'],
    [{ if: {} }, 'the keyword "if"'],
    [{ type: 'date' }, '"date" is not a type'],
    [{ type: 'string', pattern: '(?=a)b' }, 'the group (?='],
    [{ type: 'string', pattern: 'a\\b' }, '\\b is not supported'],
    [{ type: 'string', pattern: '(' }, 'unfinished end'],
    [{ type: 'string', format: 'idn-email' }, '"format" "idn-email"'],
    [{ type: 'string', format: 'email', minLength: 9 }, 'minLength and maxLength are not supported together with'],
    [{ type: 'object', propertyNames: { pattern: 'a' } }, '"propertyNames" is supported as'],
    [{ $ref: 'https://example.org/x' }, 'must point into the schema'],
    [{ $ref: '#/$defs/x%' }, 'points to nothing'],
    [{ $ref: '#' }, 'no finite document'],
    [{ anyOf: [{ $ref: '#' }, { type: 'null' }] }, 'refers to itself'],
    [{ type: 'object', properties: { a: { $ref: '#' } }, required: ['a'] }, 'no finite document'],
    [{ type: 'integer', minimum: 3, maximum: 2 }, 'no finite document'],
    [{ anyOf: [{ type: 'string' }], type: 'string' }, '"type" beside "anyOf"'],
    [{ allOf: [{}, {}] }, '"allOf" of several'],
    [{ oneOf: [{ type: 'number' }, { type: 'integer' }] }, 'may overlap'],
    [{ type: 'string', minLength: 1e9 }, '"minLength" must be a whole number'],
    [{ type: 'array', items: {}, minItems: 1e9 }, '"minItems"'],
    [{ enum: [] }, '"enum" must be a list'],
    [7, 'must be an object'],
    [{ type: 'string', minLength: 99 }, 'the shortest document has 101 tokens, and at most 100'],
    [nested(200), 'nested deeper'],
    [nested(20_000), 'nested deeper'],
  ])('%#', (schema, message) => expect(refusal(schema)).toContain(message));

  it('a tokenizer whose texts depend on their neighbours', () => {
    const { tokenBytes: _, ...without } = byte;
    expect(() => new StructuredOutput(without, 256, [0]).check({ type: 'json_object' }, 10)).toThrow('fixed bytes');
  });
});
