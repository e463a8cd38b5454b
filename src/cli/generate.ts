/** `trefoil generate`: generates text with a trained model and prints it token by token. */
import { randomInt } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { type Command, InvalidArgumentError } from 'commander';
import { requireChatTemplate } from '../data/chat.js';
import { UsageError } from '../errors.js';
import { fileError } from '../files.js';
import { parseAnswer } from '../infer/answer-parser.js';
import { Chat, Conversation, encodeChatPrompt, encodeToolPrompt } from '../infer/chat.js';
import { DEFAULT_MAX_CONTEXT, DEFAULT_NEW_TOKENS, type FinishReason } from '../infer/engine/request.js';
import { MAX_BIAS, MAX_SHIFT, type SamplingOptions } from '../infer/engine/sampler.js';
import { modelEnvironmentWarnings, withEnvironment } from '../infer/environment.js';
import { generateAll } from '../infer/generate.js';
import { loadModel } from '../infer/load.js';
import { compileSchema, type JsonSchema } from '../infer/structured/schema.js';
import type { ResponseFormat } from '../infer/structured/structured-output.js';
import type { Generation, TextPiece } from '../infer/texts.js';
import { inFile } from '../model/saved-model.js';
import { shellQuote, visible } from '../text.js';
import { converse, INTERACTIVE_HELP } from './generate-interactive.js';
import { deviceOption, openDevice } from './shared/device.js';
import { type Io, printJson } from './shared/io.js';
import {
  adapterOption,
  addOptions,
  choice,
  flag,
  jsonOption,
  modelOption,
  type OptionValues,
  parsed,
  repeated,
  threadsOption,
  weightsOption,
  wholeNumber,
} from './shared/options.js';

/** The standard input. */
export type Input = AsyncIterable<Uint8Array | string> & { readonly isTTY?: boolean };

/** Answers are longer than continuations, and end by themselves. */
const CHAT_NEW_TOKENS = 1024;

const OPTIONS = {
  model: modelOption(),
  adapter: adapterOption(),
  prompt: repeated('--prompt <text>', 'text to continue; repeatable: all prompts are decoded as one batch').conflicts(
    'promptFile',
  ),
  promptFile: flag('--prompt-file <file>', 'read the prompt from a file, without its last newline'),
  chat: flag('--chat', 'prompts are messages to a chat model, written through its chat template'),
  tools: flag('--tools <file>', 'tools that a chat may call: a JSON list as of the OpenAI API'),
  toolChoice: flag('--tool-choice <name>', 'auto, required or the name of a tool (default: auto)'),
  system: flag('--system <text>', 'first message of a chat: how the model should behave'),
  maxNewTokens: parsed(
    '--max-new-tokens <n>',
    `maximum number of generated tokens (default: ${DEFAULT_NEW_TOKENS}, ${CHAT_NEW_TOKENS} with --chat)`,
    wholeNumber(1),
  ),
  maxContext: parsed(
    '--max-context <n>',
    'maximum number of tokens, prompt included',
    wholeNumber(2),
    DEFAULT_MAX_CONTEXT,
  ),
  temperature: parsed('--temperature <t>', 'divides the logits; 0 = greedy', temperature, 0.8),
  topK: parsed('--top-k <k>', 'sample from the k most probable tokens; 0 = all', wholeNumber(0), 0),
  topP: parsed('--top-p <p>', 'sample from the most probable tokens with total probability p', share, 1),
  minP: parsed('--min-p <p>', 'sample from tokens at least p times as probable as the best', fraction, 0),
  repetitionPenalty: parsed(
    '--repetition-penalty <x>',
    'above 1, tokens of the context become less probable',
    positive,
    1,
  ),
  frequencyPenalty: parsed(
    '--frequency-penalty <x>',
    'subtracted from a logit each time its token was written',
    shift,
    0,
  ),
  presencePenalty: parsed('--presence-penalty <x>', 'subtracted from the logits of tokens that were written', shift, 0),
  logitBias: repeated('--logit-bias <id=x>', 'add x to the logit of a token, -100 to ban it; repeatable'),
  seed: parsed('--seed <n>', 'random seed (default: a random one, printed)', wholeNumber(0)),
  greedy: flag('--greedy', 'always choose the most probable token').conflicts('temperature'),
  stop: repeated('--stop <text>', 'end before this text; repeatable'),
  jsonSchema: flag('--json-schema <file>', 'the text is a JSON document of this schema').conflicts(['stop', 'tools']),
  prefixCacheDir: flag('--prefix-cache-dir <folder>', 'folder for prefixes of prompts, as of serve (default: none)'),
  device: deviceOption('where to compute'),
  precision: choice('--precision <name>', 'type of activations (default: bf16 on CUDA, else fp32)', ['fp32', 'bf16']),
  weights: weightsOption(),
  threads: threadsOption(),
  json: jsonOption('{prompt, text, tokens, tokens_per_s, finish_reason}, with --tools also tool_calls; or a list'),
};
type Options = OptionValues<typeof OPTIONS>;

export function configure(command: Command, io: Io, stdin: Input = process.stdin): void {
  addOptions(command, OPTIONS)
    .addHelpText('after', HELP)
    .action((options: Options) => run(options, io, stdin));
}

/** `trefoil chat`: the same with `--chat`. */
export function configureChat(command: Command, io: Io, stdin: Input = process.stdin): void {
  const { chat, ...others } = OPTIONS;
  addOptions(command, others)
    .addHelpText('after', CHAT_HELP)
    .action((options: Options) => run({ ...options, chat: true }, io, stdin));
}

const CHAT_HELP = `
The same as trefoil generate --chat. Without --prompt and --prompt-file it is a
conversation on a terminal:
${INTERACTIVE_HELP}.
The model needs a chat template (chat_template.jinja or tokenizer_config.json
beside its tokenizer.json). Answers go to stdout, everything else to stderr.

Examples:
  trefoil chat --model SmolLM2-135M-Instruct
  trefoil chat --model artifacts/chat --system "Be brief." --prompt "Hello"
`;

const HELP = `
Without --prompt and --prompt-file the prompt is read from stdin if it is
piped. On a terminal the model continues line by line:
${INTERACTIVE_HELP}.
With an empty prompt the model starts a document. Text goes to stdout,
everything else to stderr. Several prompts are decoded as one batch; each gets
the text it would get alone, printed after a line with its number.

With --json-schema the text is always a whole document of the schema, within
--max-new-tokens. Keywords that are not supported are refused by name.

With --chat --tools the answer may call tools, in the form of the model's own
template; --json prints the calls. Arguments are always a whole document of
the tool's schema.

With --prefix-cache-dir what was read of a prompt is stored in files, at most
16 GiB. A later prompt with the same beginning, of this command or of a server,
continues from there. The text is the same.

With --chat each prompt is a message and the text is the answer; on a terminal
without a prompt it is a conversation. The template is the model's own
(chat_template.jinja or tokenizer_config.json beside its tokenizer.json).

Examples:
  trefoil generate --model artifacts/quickstart --prompt "Once upon a time"
  trefoil generate --model artifacts/quickstart --greedy --json < prompt.txt
  trefoil generate --model SmolLM2-135M-Instruct --chat --system "Be brief."
  trefoil generate --model SmolLM2-135M-Instruct --chat \\
    --json-schema find.json --prompt "What did Mia find, and how many?"
`;

async function run(options: Options, io: Io, stdin: Input): Promise<void> {
  for (const warning of modelEnvironmentWarnings(io.env, 'generate')) io.warn(warning);
  if (options.system !== undefined && !options.chat)
    throw new UsageError('--system: is the first message of a chat; add --chat');
  if (options.tools !== undefined && !options.chat) throw new UsageError('--tools: are called in chats; add --chat');
  if (options.toolChoice !== undefined && options.tools === undefined)
    throw new UsageError('--tool-choice: names one of the tools; add --tools FILE');
  const { json = false, chat = false, system, maxContext, topK, topP, minP, repetitionPenalty, stop = [] } = options;
  const maxNewTokens = options.maxNewTokens ?? (chat ? CHAT_NEW_TOKENS : DEFAULT_NEW_TOKENS);
  const isInteractive = stdin.isTTY && io.stdout.isTTY && !json && !options.prompt && options.promptFile === undefined;
  if (isInteractive && options.jsonSchema !== undefined)
    throw new UsageError('--json-schema: the text is one document; add --prompt or --prompt-file');
  if (isInteractive && options.tools !== undefined)
    throw new UsageError('--tools: calls are printed, not run, so there is no conversation; add --prompt');
  const tools = options.tools === undefined ? [] : readTools(options.tools);
  const schemaFormat = options.jsonSchema === undefined ? undefined : readSchema(options.jsonSchema);
  const logitBias = biasesOf(options.logitBias);
  const prompts = isInteractive ? [] : await readPrompts(options, stdin);
  const greedy = options.greedy || options.temperature === 0;
  const seed = options.seed ?? randomInt(2 ** 32);
  const device = openDevice(options);
  const precision = options.precision ?? (device.kind === 'cuda' ? 'bf16' : 'fp32');
  const dtype = precision === 'bf16' ? 'bf16' : 'f32';
  const { model, tokenizer, config, path, step, warnings, endTokens } = loadModel(
    device,
    options.model,
    dtype,
    options,
  );
  try {
    for (const warning of warnings) io.warn(warning);
    const adapted = options.adapter === undefined ? '' : ` with ${options.adapter}`;
    io.err(`model: ${path}${adapted} (step ${step}, ${model.parameterCount.toLocaleString('en')} parameters)`);
    const source = { model, tokenizer, endTokens, config: withEnvironment(config, io.env) };
    const temperature = greedy ? 0 : options.temperature;
    const { frequencyPenalty, presencePenalty } = options;
    const penalties = { repetitionPenalty, frequencyPenalty, presencePenalty, logitBias };
    const sampling: Required<SamplingOptions> = { temperature, topK, topP, minP, ...penalties, seed };
    const { prefixCacheDir } = options;
    const cached = prefixCacheDir === undefined ? {} : { prefixCacheDir };
    const generation = { maxNewTokens, maxContext, stop, sampling, ...cached };
    // Before the first line is typed: a model without a template cannot chat at all.
    if (chat) requireChatTemplate(tokenizer);
    else if (tokenizer.chat?.templates.has('default'))
      io.err(
        `this model has a chat template and continues text here; to talk to it: trefoil chat --model ${shellQuote(options.model)}`,
      );
    if (isInteractive) {
      const talk = chat ? new Chat(source, { ...generation, system }) : new Conversation(source, generation);
      await interact(talk, io, stdin);
      return;
    }
    const choice = options.toolChoice === undefined ? {} : { toolChoice: options.toolChoice };
    const withTools = prompts.map((prompt) =>
      tools.length === 0 ? null : encodeToolPrompt(source, prompt, { system, tools, ...choice }),
    );
    const inputs = prompts.map(
      (prompt, i) => withTools[i]?.context ?? (chat ? encodeChatPrompt(source, prompt, system) : prompt),
    );
    // The form depends on the template, not on the prompt.
    const responseFormat = withTools[0]?.responseFormat ?? schemaFormat;
    const started = performance.now();
    const elapsed = () => (performance.now() - started) / 1000;
    // Time to the first text: reads the prompt and, the first time on a machine, compiles kernels.
    let first = 0;
    const stream = generateAll(source, inputs, { ...generation, ...(responseFormat && { responseFormat }) });
    const results = await named('response_format', '--json-schema', () =>
      print(stream, prompts.length, io, json, () => {
        first ||= elapsed();
      }),
    );
    if (results === null) return;
    const seconds = elapsed();
    const perSecond = (count: number) => count / seconds;
    if (json) {
      const rows = results.map(({ text, tokens, finishReason }, i) => ({
        prompt: prompts[i],
        ...(withTools[i] ? answerOf(withTools[i].answer, text) : { text }),
        tokens: tokens.length,
        tokens_per_s: perSecond(tokens.length),
        finish_reason: finishReason,
      }));
      printJson(io, rows.length === 1 ? rows[0] : rows);
    }
    const total = results.reduce((sum, { tokens }) => sum + tokens.length, 0);
    const reasonTexts = withTools[0]
      ? { ...REASONS, stop: 'the calls are complete' }
      : responseFormat
        ? { ...REASONS, stop: 'the document is complete' }
        : REASONS;
    const reasons = [...new Set(results.map(({ finishReason }) => reasonTexts[finishReason]))].join('; ');
    io.err(
      `${total} tokens in ${seconds.toFixed(1)} s, ${perSecond(total).toFixed(1)} tok/s; ` +
        `${first > 0 ? `first text after ${first.toFixed(1)} s; ` : ''}` +
        `${reasons}${greedy ? '' : `; seed ${seed}`}`,
    );
  } finally {
    model.free();
  }
}

async function interact(talk: Conversation | Chat, io: Io, stdin: Input): Promise<void> {
  io.err(INTERACTIVE_HELP);
  try {
    await converse(talk, io, stdin as Input & NodeJS.ReadableStream); // a terminal is one
  } finally {
    await talk.free();
  }
}

const REASONS: Record<FinishReason, string> = {
  separator: 'the model ended the text',
  stop: 'a --stop text was reached',
  length: '--max-new-tokens was reached',
  context: '--max-context is full: raise it for more',
  aborted: 'the generation was aborted',
};

/**
 * Streams one text as it is generated; prints several when all are done, unless they go into JSON. Returns null if stdout
 * was closed.
 */
async function print(
  stream: AsyncGenerator<TextPiece, Generation[]>,
  count: number,
  io: Io,
  json: boolean,
  onText: () => void,
): Promise<(Generation & { text: string })[] | null> {
  let isOpen = true;
  const close = () => {
    isOpen = false;
  };
  const write = (text: string) => io.stdout.write(io.stdout.isTTY ? visible(text) : text);
  const streams = count === 1 && !json;
  io.stdout.once('error', close);
  try {
    const texts = new Array<string>(count).fill('');
    for (;;) {
      const { done, value } = await stream.next();
      if (done) {
        if (streams) write('\n');
        else if (!json) texts.forEach((text, i) => void write(`--- ${i + 1}\n${text}\n`));
        return value.map((generation, i) => ({ ...generation, text: texts[i] }));
      }
      onText();
      texts[value.index] += value.text;
      if (streams) write(value.text);
      if (!isOpen) {
        await stream.return([]);
        return null;
      }
    }
  } finally {
    io.stdout.off('error', close);
  }
}

async function readPrompts({ prompt, promptFile }: Options, stdin: Input): Promise<readonly string[]> {
  if (prompt !== undefined) return prompt;
  if (promptFile !== undefined) return [promptText(promptFile, readFile(promptFile))];
  if (stdin.isTTY) return [''];
  const pieces: Uint8Array[] = [];
  for await (const piece of stdin) pieces.push(typeof piece === 'string' ? Buffer.from(piece) : piece);
  return [promptText('stdin', Buffer.concat(pieces))];
}

/** A schema that compiles: one that does not is refused before the model is loaded. */
function readSchema(path: string): ResponseFormat {
  const schema = readJson(path, '--json-schema needs a JSON schema') as JsonSchema;
  inFile(path, () => compileSchema(schema));
  return { type: 'json_schema', schema };
}

function readJson(path: string, need: string): unknown {
  try {
    return JSON.parse(promptText(path, readFile(path)));
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    throw new UsageError(`${path}: is not JSON (${error.message}); ${need}`, { cause: error });
  }
}

/** Tools in the form of the OpenAI API. */
function readTools(path: string): ReturnType<typeof toolOf>[] {
  const tools = readJson(path, '--tools needs a JSON list of tools');
  if (!Array.isArray(tools) || tools.length === 0) throw new UsageError(`${path}: expected a list of tools, not empty`);
  const all = tools.map((tool, i) => toolOf(tool, `${path}: tool ${i}`));
  for (const { name, schema } of all) inFile(`${path}: ${name}`, () => compileSchema(schema));
  return all;
}

function toolOf(tool: unknown, place: string): { name: string; description?: string; schema: JsonSchema } {
  const { name, description, parameters } = (tool as { function?: Record<string, unknown> } | null)?.function ?? {};
  if (typeof name !== 'string' || !/^[\w.:/-]{1,128}$/.test(name))
    throw new UsageError(`${place}: expected {"type": "function", "function": {"name", "description", "parameters"}}`);
  const schema = (parameters ?? { type: 'object', additionalProperties: false }) as JsonSchema;
  return { name, ...(typeof description === 'string' ? { description } : {}), schema };
}

/** The parts of an answer with tools. */
function answerOf(form: Parameters<typeof parseAnswer>[0], text: string): object {
  const { content, reasoning, calls } = parseAnswer(form, text);
  const tool_calls = calls.map((call) => ({
    name: call.name,
    arguments: JSON.parse(call.arguments || '{}') as unknown,
  }));
  return { text: content, ...(reasoning === '' ? {} : { reasoning }), tool_calls };
}

/** Runs `body`; its messages name the flag instead of the field of the API. */
async function named<T>(field: string, flag: string, body: () => Promise<T>): Promise<T> {
  try {
    return await body();
  } catch (error) {
    if (!(error instanceof UsageError && error.message.startsWith(`${field}: `))) throw error;
    throw new UsageError(flag + error.message.slice(field.length), { cause: error });
  }
}

function readFile(path: string): Uint8Array {
  try {
    return readFileSync(path);
  } catch (error) {
    throw fileError('read', path, error);
  }
}

/** Removes the last newline, which editors and `echo` add to a text. */
function promptText(name: string, bytes: Uint8Array): string {
  try {
    return new TextDecoder('utf-8', { fatal: true }).decode(bytes).replace(/\r?\n$/, '');
  } catch (error) {
    throw new UsageError(`${name}: is not UTF-8 text; encode the prompt as UTF-8`, { cause: error });
  }
}

function temperature(text: string): number {
  const value = Number(text);
  if (text.trim() === '' || !(Number.isFinite(value) && value >= 0))
    throw new InvalidArgumentError('It must be a number >= 0.');
  return value;
}

function share(text: string): number {
  const value = Number(text);
  if (!(value > 0 && value <= 1)) throw new InvalidArgumentError('It must be a number > 0 and <= 1.');
  return value;
}

function fraction(text: string): number {
  const value = Number(text);
  if (text.trim() === '' || !(value >= 0 && value <= 1))
    throw new InvalidArgumentError('It must be a number >= 0 and <= 1.');
  return value;
}

function shift(text: string): number {
  const value = Number(text);
  if (text.trim() === '' || !(Math.abs(value) <= MAX_SHIFT))
    throw new InvalidArgumentError(`It must be a number from -${MAX_SHIFT} to ${MAX_SHIFT}.`);
  return value;
}

/** `50256=-100` as a token and its bias. */
function biasesOf(texts: readonly string[] = []): Record<string, number> {
  return Object.fromEntries(
    texts.map((text) => {
      const [, token, bias] = /^(\d{1,9})=(-?[\d.]+)$/.exec(text) ?? [];
      if (token === undefined || !(Math.abs(Number(bias)) <= MAX_BIAS))
        throw new UsageError(
          `--logit-bias ${text}: use ID=X with X from -${MAX_BIAS} to ${MAX_BIAS}, such as 256=-100`,
        );
      return [token, Number(bias)];
    }),
  );
}

function positive(text: string): number {
  const value = Number(text);
  if (!(Number.isFinite(value) && value > 0)) throw new InvalidArgumentError('It must be a number > 0.');
  return value;
}
