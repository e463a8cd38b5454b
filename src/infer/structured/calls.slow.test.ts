/**
 * Random tools, forms, seeds and budgets: every call is a document of its schema, within the tokens, and the parts of an answer do
 * not depend on how its text was cut.
 */
import { describe, expect, it } from 'vitest';
import type { AnswerForm } from '../../data/answer-form.js';
import { templateForm } from '../../data/template-form.js';
import { TEMPLATES } from '../../data/testing/chat-templates.js';
import { createTokenizer, type Tokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import { AnswerParser, joinParts, parseAnswer } from '../answer-parser.js';
import type { CallableTool, ToolCalls } from './calls.js';
import { StructuredOutput } from './structured-output.js';
import { isValid, random, randomDocument } from './testing/validate.js';

const variables = { bos_token: '<s>', eos_token: '</s>' };
const FORMS = (['qwen25', 'hermes', 'llama31', 'llama32', 'mistral', 'mistral11'] as const).map((name) => {
  const { calls } = templateForm({ templates: new Map([['default', TEMPLATES[name]]]), variables });
  return [name, calls!] as const;
});
const qwen = createTokenizer(new URL('../../../test/golden/hf/tokenizer-qwen', import.meta.url).pathname);
const tokenizers = { byte: createTokenizer('byte'), gpt2: createTokenizer('gpt2'), qwen };
type Name = keyof typeof tokenizers;
const outputs = Object.fromEntries(
  Object.entries(tokenizers).map(([name, tokenizer]) => [
    name,
    new StructuredOutput(tokenizer, tokenizer.vocabSize, [tokenizer.separator]),
  ]),
) as Record<Name, StructuredOutput>;

const isLong = process.env['TREFOIL_LONG'] === '1';
if (!isLong) console.log('calls: 139 of 3000 random requests (all with TREFOIL_LONG=1)');

/** A random schema as the schema of an argument, so that references still point into the document. */
function randomTools(next: () => number): CallableTool[] {
  return Array.from({ length: 1 + Math.floor(next() * 4) }, (_, i) => {
    const schema = randomDocument(next);
    const { $defs, ...rest } = (typeof schema === 'object' ? schema : { type: 'null' }) as Record<string, unknown>;
    const properties = { value: rest, 'né"1': { enum: ['a', 1, null] } };
    const required = next() < 0.5 ? ['value'] : [];
    return {
      name: `tool_${i}${next() < 0.3 ? '-x' : ''}`,
      schema: { type: 'object', properties, required, ...($defs === undefined ? {} : { $defs }) },
    };
  });
}

interface Drawn {
  readonly text: string;
  readonly tokens: number;
  readonly isComplete: boolean;
  readonly isCut: boolean;
}

/** Writes the script as far as it is allowed, then draws evenly from the allowed tokens until the text ends. */
function draw(name: Name, format: ToolCalls, budget: number, script: string, next: () => number): Drawn {
  const tokenizer: Tokenizer = tokenizers[name];
  const mask = outputs[name].mask(format, budget);
  const scripted = Array.from(tokenizer.encode(script, { parseSpecial: true }));
  const decoder = tokenizer.createStreamDecoder();
  let [text, count] = ['', 0];
  while (!mask.isComplete && count < budget) {
    const logits = new Float32Array(tokenizer.vocabSize);
    mask.apply(logits);
    const allowed = () => [...logits.keys()].filter((token) => logits[token] !== Number.NEGATIVE_INFINITY);
    const sample = () => {
      const wanted = scripted[count];
      if (wanted !== undefined && logits[wanted] !== Number.NEGATIVE_INFINITY) return wanted;
      const all = allowed();
      if (all.length === 0) throw new Error(`no token is allowed after ${JSON.stringify(text)}`);
      return all[Math.floor(next() * all.length)];
    };
    let token = sample();
    if (mask.narrow(token, logits)) token = sample();
    mask.accept(token);
    if (token === tokenizer.separator) return { text, tokens: count, isComplete: true, isCut: mask.isCut };
    text += decoder.push(token);
    count += 1;
  }
  return { text: text + decoder.end(), tokens: count, isComplete: mask.isComplete, isCut: mask.isCut };
}

/** The answer from a text that arrives in random pieces. */
function inPieces(form: AnswerForm, text: string, next: () => number) {
  const parser = new AnswerParser(form);
  const parts = [];
  for (let at = 0; at < text.length; ) {
    const length = 1 + Math.floor(next() * 5);
    parts.push(...parser.push(text.slice(at, at + length)));
    at += length;
  }
  return joinParts([...parts, ...parser.end()]);
}

function expectCalls({ text, tokens }: Drawn, format: ToolCalls, budget: number, where: string): number {
  const { calls } = parseAnswer(format.form, text);
  expect(tokens, where).toBeLessThanOrEqual(budget);
  for (const { name, arguments: given } of calls) {
    const tool = format.tools.find((one) => one.name === name);
    expect(tool, `${where}: ${text}`).toBeDefined();
    expect(isValid(JSON.parse(given), tool!.schema), `${where}: ${given}`).toBe(true);
  }
  return calls.length;
}

describe('random tools, forms, seeds and budgets', () => {
  it.each<[Name, number]>([
    ['byte', isLong ? 2000 : 110],
    ['qwen', isLong ? 500 : 25],
    ['gpt2', isLong ? 500 : 4],
  ])('give documents of the schemas: %s', (name, count) => {
    const seen = { cut: 0, whole: 0, parallel: 0, free: 0, called: 0, reasoned: 0, unsatisfiable: 0 };
    for (let seed = 1; seed <= count; seed++) {
      const next = random(seed);
      const [formName, calls] = FORMS[seed % FORMS.length];
      const tools = randomTools(next);
      const reasoning = next() < 0.3 ? ('open' as const) : null;
      const isParallel = next() < 0.6;
      const format: ToolCalls = {
        type: 'tool_calls',
        ...{ form: { calls, reasoning }, tools, isRequired: true, isParallel, document: null },
      };
      const where = `${name}, ${formName}, seed ${seed}: ${JSON.stringify(tools)}`;
      let least: number;
      try {
        least = outputs[name].mask(format, 1e6).fewestTokens;
      } catch (error) {
        if (!(error instanceof UsageError) || !error.message.includes('no finite document')) throw error;
        seen.unsatisfiable += 1;
        continue;
      }
      for (const extra of [0, 5, 80]) {
        const script = reasoning && next() < 0.7 ? 'I think so.\n</think>\n\n' : '';
        const drawn = draw(name, format, least + extra, script, next);
        const number = expectCalls(drawn, format, least + extra, where);
        expect(number, `${where} gave ${drawn.text}`).toBeGreaterThan(0);
        if (!isParallel || calls.between === null) expect(number, where).toBe(1);
        else if (number > 1) seen.parallel += 1;
        seen[drawn.isCut ? 'cut' : 'whole'] += 1;
        expect(inPieces(format.form, drawn.text, next)).toEqual(parseAnswer(format.form, drawn.text));
        if (parseAnswer(format.form, drawn.text).reasoning !== '') seen.reasoned += 1;
      }
      const free = { ...format, isRequired: false };
      for (const budget of [10, least + 30, least + 120]) {
        const hasCall = next() < 0.8;
        const before = `${reasoning ? `no ${calls.marker} yet</think>\n\n` : ''}${calls.isFirst || next() < 0.5 ? '' : 'Let me see. '}`;
        const drawn = draw(name, free, budget, hasCall ? before + calls.marker : 'é plain text', next);
        const number = expectCalls(drawn, free, budget, where);
        seen[number > 0 ? 'called' : 'free'] += 1;
        const answer = parseAnswer(free.form, drawn.text);
        expect(inPieces(free.form, drawn.text, next)).toEqual(answer);
        if (number > 0 && before.includes('Let me')) expect(answer.content.trimEnd()).toBe('Let me see.');
      }
    }
    expect(seen.cut).toBeGreaterThan(count / 4);
    expect(seen.whole).toBeGreaterThan(0);
    expect(seen.called).toBeGreaterThan(count / 4);
    expect(seen.free).toBeGreaterThan(count / 4);
    if (count > 10) expect(seen.reasoned).toBeGreaterThan(count / 10);
    if (name === 'byte') expect(seen.parallel).toBeGreaterThan(0);
  });
});

it('special tokens are drawn where a form has their text, and not inside of strings', () => {
  const base = createTokenizer('byte');
  const special = new Map([[255, '<tool_call>']]);
  const tokenizer: Tokenizer = {
    ...base,
    tokenBytes: (id) => (special.has(id) ? null : base.tokenBytes!(id)),
    decode: (ids, options) => Array.from(ids, (id) => special.get(id) ?? base.decode([id], options)).join(''),
  };
  const output = new StructuredOutput(tokenizer, 256, [0]);
  const { calls } = templateForm({ templates: new Map([['default', TEMPLATES.qwen25]]), variables });
  const tools = [{ name: 'f', schema: { type: 'object', properties: { a: { type: 'string' } }, required: ['a'] } }];
  const format = { form: { calls, reasoning: null }, tools, isRequired: true, isParallel: false, document: null };
  const mask = output.mask({ type: 'tool_calls', ...format }, 200);
  const isAllowed = () => {
    const logits = new Float32Array(256);
    mask.apply(logits);
    return logits[255] === 0;
  };
  expect(isAllowed()).toBe(true);
  mask.accept(255);
  for (const byte of Buffer.from('\n{"name": "f", "arguments": {"a":"')) {
    expect(isAllowed()).toBe(false);
    mask.accept(byte);
  }
  expect(isAllowed()).toBe(false);
});

describe('hostile tools', () => {
  const output = outputs.gpt2;
  const [[, calls]] = FORMS;
  const many = (count: number, schema: (i: number) => unknown): CallableTool[] =>
    Array.from({ length: count }, (_, i) => ({ name: `tool_${i}`, schema: schema(i) as CallableTool['schema'] }));
  const pattern = (text: string) => ({ type: 'object', properties: { a: { type: 'string', pattern: text } } });
  it.each<[string, CallableTool[]]>([
    ['10,000 tools', many(10_000, (i) => ({ type: 'object', properties: { [`p${i}`]: { type: 'string' } } }))],
    ['1,000 tools', many(1000, (i) => ({ type: 'object', properties: { [`p${i}`]: { type: 'string' } } }))],
    ['patterns that grow', many(50, () => pattern('^(((a{1,100}){1,100}){1,100}){1,100}$'))],
    ['optional letters', many(100, () => pattern('^(a?){500}$'))],
    [
      '40 levels of properties',
      many(3, () => JSON.parse(`${'{"type":"object","properties":{"a":'.repeat(40)}{}${'}}'.repeat(40)}`)),
    ],
    ['a schema that refers to itself', many(2, () => ({ type: 'object', $ref: '#' }))],
    ['references in a circle', many(2, () => ({ $ref: '#/$defs/a', $defs: { a: { $ref: '#/$defs/a' } } }))],
  ])('%s are refused or served within a few seconds', (_, tools) => {
    const format: ToolCalls = {
      type: 'tool_calls',
      ...{ form: { calls, reasoning: null }, tools, isRequired: true, isParallel: true, document: null },
    };
    output.mask({ type: 'json_object' }, 100); // builds the tree of tokens
    const startedAt = performance.now();
    try {
      const mask = output.mask(format, 30_000);
      for (let i = 0; i < 20 && !mask.isComplete; i++) {
        const logits = Float32Array.from({ length: 50_257 }, (_, at) => Math.sin(at * 7 + i));
        mask.apply(logits);
        const best = logits.reduce((at, value, token) => (value > logits[at] ? token : at), 0);
        if (best === 50_256 || mask.narrow(best, logits)) break;
        mask.accept(best);
      }
    } catch (error) {
      expect(error).toBeInstanceOf(UsageError);
      expect((error as Error).message.length).toBeLessThan(300);
    }
    expect(performance.now() - startedAt).toBeLessThan(8000);
  });
});
