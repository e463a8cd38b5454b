/**
 * Jinja templates of strangers, run under limits of steps, of the size of every value, and of time. The library runs them
 * without access to the host, but without an end of its own.
 */
import * as library from '@huggingface/jinja';
import { withTimeLimit } from '../time-limit.js';

type Program = object;
interface Value {
  readonly value: unknown;
}
interface Environment {
  set(name: string, value: unknown): unknown;
}

/** The used part of the library: its type declarations do not resolve under NodeNext. */
const { Environment, Interpreter, parse, tokenize } = library as unknown as {
  readonly Environment: new () => Environment;
  readonly Interpreter: new (
    environment: Environment,
  ) => {
    run(program: Program): Value;
    /** Calls itself for every part of a program. */
    evaluate(part: object | undefined, environment: Environment): Value;
  };
  readonly parse: (tokens: unknown) => Program;
  readonly tokenize: (source: string, options: Readonly<Record<string, boolean>>) => unknown;
};

/** Honest templates take some hundred steps for a message. */
const STEPS = 500_000;
const STEPS_PER_MESSAGE = 2_000;
const MILLISECONDS = 1_000;
const MILLISECONDS_PER_MESSAGE = 1;
const MAX_CHARACTERS = 2 ** 26;
const MAX_ITEMS = 1_000_000;

/** Parses a template; rendering it again does not parse it again. */
export class LimitedTemplate {
  readonly #program: Program;

  constructor(source: string) {
    const read = () => parse(tokenize(source, { lstrip_blocks: true, trim_blocks: true }));
    this.#program = withTimeLimit(MILLISECONDS, read, () => {
      throw new Error('it takes more than 1 s to read; use another one');
    });
  }

  render(variables: Readonly<Record<string, unknown>>, messages: number): string {
    const milliseconds = MILLISECONDS + MILLISECONDS_PER_MESSAGE * messages;
    const run = () => {
      const interpreter = new LimitedInterpreter(globals(variables), STEPS + STEPS_PER_MESSAGE * messages);
      return interpreter.run(this.#program).value as string;
    };
    return withTimeLimit(milliseconds, run, () => {
      throw new Error(`it takes more than ${milliseconds / 1000} s; use another one`);
    });
  }
}

class LimitedInterpreter extends Interpreter {
  readonly #limit: number;
  #steps = 0;

  constructor(environment: Environment, steps: number) {
    super(environment);
    this.#limit = steps;
  }

  override evaluate(part: object | undefined, environment: Environment): Value {
    if (++this.#steps > this.#limit) throw new Error(`it takes more than ${this.#limit} steps; use another one`);
    const result = super.evaluate(part, environment);
    const { value } = result;
    if (typeof value === 'string' && value.length > MAX_CHARACTERS)
      throw new Error(`it makes a text of more than ${MAX_CHARACTERS} characters; use another one`);
    if (Array.isArray(value) && value.length > MAX_ITEMS) throw tooLong();
    return result;
  }
}

function tooLong(): Error {
  return new Error(`it makes a list of more than ${MAX_ITEMS} items; use another one`);
}

/** The variables of a template, and the functions that transformers gives to templates. */
function globals(variables: Readonly<Record<string, unknown>>): Environment {
  const environment = new Environment();
  const functions = { raise_exception: raiseException, range, strftime_now: strftimeNow };
  const constants = { false: false, true: true, none: null, False: false, True: true, None: null };
  for (const [name, value] of Object.entries({ ...constants, ...functions, ...variables }))
    environment.set(name, value);
  return environment;
}

function raiseException(message: unknown): never {
  throw new Error(String(message));
}

/** As in Python. */
function range(first: number, second?: number, step: number = 1): number[] {
  const [start, stop] = second === undefined ? [0, first] : [first, second];
  if (step === 0) throw new Error('range() step must not be zero');
  const count = Math.max(0, Math.ceil((stop - start) / step));
  if (!(count <= MAX_ITEMS)) throw tooLong();
  return Array.from({ length: count }, (_, i) => start + i * step);
}

/** The local time now, with the directives that templates use. */
function strftimeNow(format: unknown): string {
  const now = new Date();
  const month = (style: 'long' | 'short') => new Intl.DateTimeFormat('en', { month: style }).format(now);
  const two = (value: number) => String(value).padStart(2, '0');
  const directives: Readonly<Record<string, () => string>> = {
    Y: () => String(now.getFullYear()),
    m: () => two(now.getMonth() + 1),
    d: () => two(now.getDate()),
    b: () => month('short'),
    B: () => month('long'),
    H: () => two(now.getHours()),
    M: () => two(now.getMinutes()),
    S: () => two(now.getSeconds()),
    '%': () => '%',
  };
  return String(format).replace(/%([YmdbBHMS%])/g, (_, name: string) => directives[name]());
}
