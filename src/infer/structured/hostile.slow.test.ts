/** Schemas of strangers: each is refused or served within a fraction of a second. */
import { describe, expect, it } from 'vitest';
import { createTokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import { cpuMs } from '../../testing/cpu-time.js';
import type { JsonSchema } from './schema.js';
import { StructuredOutput } from './structured-output.js';

const text = (pattern: string): JsonSchema => ({ type: 'string', pattern });
const many = <T>(count: number, make: (i: number) => T) => Array.from({ length: count }, (_, i) => make(i));

/** Objects in each other, each with two optional properties that hold the next. */
function pairs(levels: number, isRequired: boolean): JsonSchema {
  const $defs = many(levels, (i) => {
    const inner = i + 1 < levels ? { $ref: `#/$defs/${i + 1}` } : { type: 'null' };
    return { type: 'object', properties: { a: inner, b: inner }, ...(isRequired ? { required: ['a', 'b'] } : {}) };
  });
  return { $defs: { ...$defs }, $ref: '#/$defs/0' };
}

const schemas: Readonly<Record<string, JsonSchema>> = {
  '20,000 optional letters': text('^(a?){20000}$'),
  '1,900 optional letters': text('^(a?){1900}$'),
  'optional letters between any number of others': text('^(a*b?){900}$'),
  'a billion repetitions of nothing': text('^(){1000000000}$'),
  'repetitions of repetitions': text('^(((a{1,100}){1,100}){1,100}){1,100}$'),
  'loops in loops': text('^((((a*)*)*)*)*$'),
  'deep parentheses': text('('.repeat(50_000) + ')'.repeat(50_000)),
  'unfinished parentheses': text('('.repeat(500_000)),
  'a class with 15,000 overlapping ranges': text(`^[${'a-z'.repeat(5000)}]{50}$`),
  '40 levels of two optional properties': pairs(40, false),
  '40 levels of two required properties': pairs(40, true),
  '4,000 optional properties': { type: 'object', properties: Object.fromEntries(many(4000, (i) => [`p${i}`, {}])) },
  '10,000 constants': { enum: many(10_000, (i) => `constant ${i}`) },
  '5,000 objects to choose from': {
    anyOf: many(5000, (i) => ({ type: 'object', properties: { [`k${i}`]: {} }, required: [`k${i}`] })),
  },
  '5,000 objects of which one': {
    oneOf: many(5000, (i) => ({ type: 'object', properties: { k: { const: i } }, required: ['k'] })),
  },
  '300 texts to choose from': { anyOf: many(300, (i) => text(`^${'x'.repeat(i)}`)) },
};

describe('a hostile schema', () => {
  it.each(Object.keys(schemas))('%s', (name) => {
    const structured = new StructuredOutput(createTokenizer('gpt2'), 50_257, [50_256]);
    structured.mask({ type: 'json_object' }, 100); // builds the tree of tokens
    const used = cpuMs(() => {
      try {
        const mask = structured.mask({ type: 'json_schema', schema: schemas[name] }, 30_000);
        const logits = new Float32Array(50_257);
        for (let n = 0; n < 10 && !mask.isComplete; n++) {
          for (let i = 0; i < logits.length; i++) logits[i] = Math.sin(i * 7 + n);
          mask.apply(logits);
          const best = logits.reduce((at, value, i) => (value > logits[at] ? i : at), 0);
          if (best === 50_256 || mask.narrow(best, logits)) break;
          mask.accept(best);
        }
      } catch (error) {
        expect(error).toBeInstanceOf(UsageError);
        expect((error as Error).message.length).toBeLessThan(300);
      }
    });
    expect(used).toBeLessThan(2000);
  });
});
