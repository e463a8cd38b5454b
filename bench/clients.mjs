// Drives a server with the official clients, each in its default way, and prints a table: what works, what does not and why.
//
//   node bench/clients.mjs --url URL [--reasoning-url URL] [--model NAME] [--json]
//
// `--reasoning-url`: a server whose chat template opens the reasoning. The clients of bench/clients.json are installed into
// .trefoil/clients on the first run (59 packages, 270 MB, which is why they are no dev dependencies). Exit code 1 if a cell fails.
//
// The model may have random weights: calls and documents are right by construction, and texts are not looked at.
import { spawnSync } from 'node:child_process';
import { copyFileSync, existsSync, mkdirSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';

const { values } = parseArgs({
  options: {
    url: { type: 'string' },
    'reasoning-url': { type: 'string' },
    model: { type: 'string', default: 'tiny' },
    only: { type: 'string' },
    json: { type: 'boolean', default: false },
  },
});
if (values.url === undefined) throw new Error('usage: node bench/clients.mjs --url URL [--reasoning-url URL]');
const { url, model } = values;
const reasoningUrl = values['reasoning-url'] ?? url;

const folder = join(import.meta.dirname, '../.trefoil/clients');
const list = join(import.meta.dirname, 'clients.json');
if (
  !existsSync(join(folder, 'package.json')) ||
  !readFileSync(list).equals(readFileSync(join(folder, 'package.json')))
) {
  mkdirSync(folder, { recursive: true });
  const { status, stderr } = spawnSync(
    'npm',
    ['install', '--no-audit', '--no-fund', '--no-package-lock', '--prefix', folder, ...wanted()],
    {
      encoding: 'utf8',
    },
  );
  if (status !== 0) throw new Error(`the clients could not be installed (npm install needs its registry): ${stderr}`);
  copyFileSync(list, join(folder, 'package.json'));
}
function wanted() {
  return Object.entries(JSON.parse(readFileSync(list, 'utf8')).dependencies).map(
    ([name, version]) => `${name}@${version}`,
  );
}
const require = createRequire(join(folder, 'package.json'));
const load = async (name) => {
  const of = JSON.parse(readFileSync(join(folder, 'node_modules', name, 'package.json'), 'utf8'));
  const root = of.exports?.['.'] ?? of.exports;
  const entry = [root?.import, root?.node?.import, root?.default, of.module]
    .map((one) => (typeof one === 'object' ? one?.default : one))
    .find((one) => typeof one === 'string');
  return import(pathToFileURL(entry ? join(folder, 'node_modules', name, entry) : require.resolve(name)));
};

const { OpenAI } = await load('openai');
const { z } = await load('zod');
const ai = await load('ai');
const { createOpenAI } = await load('@ai-sdk/openai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
const agents = await load('@openai/agents');
const { ChatOpenAI } = await load('@langchain/openai');
const { default: Anthropic } = await load('@anthropic-ai/sdk');
const { zodResponseFormat, zodTextFormat } = await import(
  pathToFileURL(join(folder, 'node_modules/openai/helpers/zod.mjs'))
);

const City = z.object({ city: z.enum(['Paris', 'Rome']), days: z.int().min(1).max(9) });
const Sum = z.object({ a: z.int().min(0).max(99), b: z.int().min(0).max(99) });
const Done = z.object({ done: z.boolean() });
const schemaOf = (schema) => {
  const { $schema: _, ...rest } = z.toJSONSchema(schema);
  return rest;
};
const schemas = { get_weather: City, add: Sum };
const question = 'How is the weather in Paris, and how much is 2 and 2?';
const TOKENS = 400;

function expect(condition, what) {
  if (!condition) throw new Error(what);
}
/** Calls as [name, arguments as a value]; each must satisfy its schema. */
function expectCalls(calls, { least = 1, name } = {}) {
  expect(calls.length >= least, `${calls.length} calls`);
  for (const [called, given] of calls) {
    expect(name === undefined || called === name, `called ${called}`);
    schemas[called].parse(given);
  }
}
/** The abort must reach the caller, and the server must go on. */
async function expectAborted(work) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), 20);
  const ended = await work(abort.signal).then(
    () => 'ended',
    (error) => error,
  );
  clearTimeout(timer);
  expect(abort.signal.aborted || ended !== 'ended', 'it ended before it was aborted');
  const { status } = await fetch(`${url}/health`);
  expect(status === 200, `health is ${status}`);
}

/** Reading it takes longer than the time until an abort, also with a small model. */
const long = 'How is the weather? '.repeat(350);
const longMessages = [{ role: 'user', content: long }];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'any', maxRetries: 0 });
const thinker = new OpenAI({ baseURL: `${reasoningUrl}/v1`, apiKey: 'any', maxRetries: 0 });
const messages = [{ role: 'user', content: question }];
const chatTools = Object.entries(schemas).map(([name, schema]) => ({
  type: 'function',
  function: { name, description: `Calls ${name}`, parameters: schemaOf(schema) },
}));
const chatCalls = ({ choices: [{ message }] }) =>
  (message.tool_calls ?? []).map(({ function: of }) => [of.name, JSON.parse(of.arguments)]);
const chat = (body) => openai.chat.completions.create({ model, messages, max_tokens: TOKENS, ...body });

const openaiChat = {
  chat: async () => expect((await chat({})).choices[0].message.content !== '', 'no text'),
  stream: async () => {
    const stream = openai.chat.completions.stream({ model, messages, max_tokens: 40 });
    let text = '';
    stream.on('content', (delta) => {
      text += delta;
    });
    const { choices } = await stream.finalChatCompletion().catch((error) => {
      if (error.name !== 'LengthFinishReasonError' && !/length limit/.test(error.message)) throw error;
      return { choices: [{ message: { content: text } }] };
    });
    expect(choices[0].message.content === text && text !== '', 'the pieces do not add up');
  },
  auto: async () => expectCalls(chatCalls(await chat({ tools: chatTools })), { least: 0 }),
  required: async () => expectCalls(chatCalls(await chat({ tools: chatTools, tool_choice: 'required' }))),
  named: async () => {
    const tool_choice = { type: 'function', function: { name: 'add' } };
    expectCalls(chatCalls(await chat({ tools: chatTools, tool_choice })), { name: 'add' });
  },
  parallel: async () => {
    const stream = await chat({ tools: chatTools, tool_choice: 'required', stream: true });
    const calls = [];
    for await (const { choices } of stream)
      for (const { index, function: of } of choices[0]?.delta.tool_calls ?? []) {
        calls[index] ??= ['', ''];
        calls[index] = [calls[index][0] + (of.name ?? ''), calls[index][1] + (of.arguments ?? '')];
      }
    expectCalls(calls.map(([name, given]) => [name, JSON.parse(given)]));
    const one = await chat({ tools: chatTools, tool_choice: 'required', parallel_tool_calls: false });
    expect(chatCalls(one).length === 1, 'not one call');
  },
  structured: async () => {
    const answer = await openai.chat.completions.parse({
      ...{ model, messages, max_tokens: TOKENS },
      response_format: zodResponseFormat(City, 'city'),
    });
    City.parse(answer.choices[0].message.parsed);
  },
  reasoning: async () => {
    const answer = await thinker.chat.completions.create({ model, messages, max_tokens: 40 });
    expect(answer.choices[0].message.reasoning_content, 'no reasoning_content');
  },
  abort: () =>
    expectAborted((signal) =>
      openai.chat.completions.create({ model, messages: longMessages, max_tokens: 900 }, { signal }),
    ),
};

const responseTools = Object.entries(schemas).map(([name, schema]) => ({
  ...{ type: 'function', name, description: `Calls ${name}`, parameters: schemaOf(schema), strict: true },
}));
const respond = (body) => openai.responses.create({ model, input: question, max_output_tokens: TOKENS, ...body });
const responseCalls = ({ output }) =>
  output.flatMap((item) => (item.type === 'function_call' ? [[item.name, JSON.parse(item.arguments)]] : []));
const openaiResponses = {
  chat: async () => expect((await respond({ instructions: 'Be brief.' })).output_text !== '', 'no text'),
  stream: async () => {
    const stream = openai.responses.stream({ model, input: question, max_output_tokens: 40 });
    let [text, last] = ['', -1];
    stream.on('event', (event) => {
      expect(event.sequence_number === last + 1, `event ${event.sequence_number} after ${last}`);
      last = event.sequence_number;
      if (event.type === 'response.output_text.delta') text += event.delta;
    });
    const { output_text: whole } = await stream.finalResponse();
    expect(whole === text && text !== '', 'the pieces do not add up');
  },
  auto: async () => expectCalls(responseCalls(await respond({ tools: responseTools })), { least: 0 }),
  required: async () => {
    const first = await respond({ tools: responseTools, tool_choice: 'required' });
    expectCalls(responseCalls(first));
    const results = first.output.map(({ call_id }) => ({ type: 'function_call_output', call_id, output: '4' }));
    const input = [{ role: 'user', content: question }, ...first.output, ...results];
    expect((await respond({ input, tools: responseTools })).output.length >= 0, 'no answer to results');
  },
  named: async () =>
    expectCalls(
      responseCalls(await respond({ tools: responseTools, tool_choice: { type: 'function', name: 'add' } })),
      {
        name: 'add',
      },
    ),
  parallel: async () => {
    const stream = openai.responses.stream({ model, input: question, tools: responseTools, tool_choice: 'required' });
    expectCalls(responseCalls(await stream.finalResponse()));
    const one = await respond({ tools: responseTools, tool_choice: 'required', parallel_tool_calls: false });
    expect(responseCalls(one).length === 1, 'not one call');
  },
  structured: async () => {
    const text = { format: zodTextFormat(City, 'city') };
    City.parse((await openai.responses.parse({ model, input: question, text })).output_parsed);
  },
  reasoning: async () => {
    const { output } = await thinker.responses.create({
      model,
      input: question,
      max_output_tokens: 40,
      reasoning: { effort: 'low' },
    });
    expect(output[0].type === 'reasoning' && output[0].summary[0].text !== '', 'no reasoning');
  },
  abort: () =>
    expectAborted((signal) => openai.responses.create({ model, input: long, max_output_tokens: 900 }, { signal })),
};

/** The AI SDK with one of its providers. */
function aiSdk(provider, reasoner) {
  const tools = Object.fromEntries(
    Object.entries(schemas).map(([name, inputSchema]) => [
      name,
      ai.tool({ description: name, inputSchema, execute: async () => '4' }),
    ]),
  );
  const base = { model: provider, prompt: question, maxOutputTokens: TOKENS, maxRetries: 0 };
  const calls = ({ toolCalls }) => toolCalls.map(({ toolName, input }) => [toolName, input]);
  return {
    chat: async () => expect((await ai.generateText({ ...base, system: 'Be brief.' })).text !== '', 'no text'),
    stream: async () => {
      let [text, failure] = ['', null];
      const onError = ({ error }) => {
        failure = error;
      };
      const stream = ai.streamText({ ...base, maxOutputTokens: 40, onError });
      for await (const piece of stream.textStream) text += piece;
      if (failure) throw failure;
      expect(text !== '' && text === (await stream.text), 'the pieces do not add up');
    },
    auto: async () =>
      expectCalls(calls(await ai.generateText({ ...base, tools, stopWhen: ai.stepCountIs(3) })), { least: 0 }),
    required: async () => {
      const result = await ai.generateText({
        ...{ ...base, tools, stopWhen: ai.stepCountIs(3) },
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
      });
      expectCalls(calls(result.steps[0]));
      expect(result.steps.length === 2, `${result.steps.length} steps`);
    },
    named: async () =>
      expectCalls(calls(await ai.generateText({ ...base, tools, toolChoice: { type: 'tool', toolName: 'add' } })), {
        name: 'add',
      }),
    parallel: async () => {
      const stream = ai.streamText({ ...base, tools, toolChoice: 'required' });
      expectCalls(calls({ toolCalls: await stream.toolCalls }));
    },
    structured: async () =>
      City.parse((await ai.generateText({ ...base, output: ai.Output.object({ schema: City }) })).output),
    reasoning: async () => {
      const { reasoningText } = await ai.generateText({ ...base, model: reasoner, maxOutputTokens: 40 });
      expect(reasoningText, 'no reasoning');
    },
    abort: () =>
      expectAborted((abortSignal) => ai.generateText({ ...base, prompt: long, maxOutputTokens: 900, abortSignal })),
  };
}
const aiOpenai = (base) => createOpenAI({ baseURL: `${base}/v1`, apiKey: 'any' })(model);
const aiCompatible = (base) =>
  createOpenAICompatible({ name: 'local', baseURL: `${base}/v1`, supportsStructuredOutputs: true })(model);

function agentsSdk() {
  agents.setTracingDisabled(true);
  agents.setDefaultOpenAIClient(openai);
  const tools = Object.entries(schemas).map(([name, parameters]) =>
    agents.tool({ name, description: name, parameters, execute: async () => '4' }),
  );
  const agent = (more = {}, settings = {}) =>
    new agents.Agent({
      name: 'agent',
      instructions: 'Be brief.',
      model,
      modelSettings: settings,
      ...more,
    });
  const calls = ({ newItems }) =>
    newItems.flatMap(({ type, rawItem }) =>
      type === 'tool_call_item' ? [[rawItem.name, JSON.parse(rawItem.arguments)]] : [],
    );
  return {
    chat: async () => expect((await agents.run(agent(), question)).finalOutput !== '', 'no text'),
    stream: async () => {
      const stream = await agents.run(agent(), question, { stream: true });
      let text = '';
      for await (const piece of stream.toTextStream()) text += piece;
      await stream.completed;
      expect(text !== '' && text === stream.finalOutput, 'the pieces do not add up');
    },
    auto: async () => expectCalls(calls(await agents.run(agent({ tools }), question)), { least: 0 }),
    required: async () => expectCalls(calls(await agents.run(agent({ tools }, { toolChoice: 'required' }), question))),
    named: async () =>
      expectCalls(calls(await agents.run(agent({ tools }, { toolChoice: 'add' }), question)), { name: 'add' }),
    parallel: async () =>
      expectCalls(
        calls(await agents.run(agent({ tools }, { toolChoice: 'required', parallelToolCalls: true }), question)),
      ),
    structured: async () => City.parse((await agents.run(agent({ outputType: City }), question)).finalOutput),
    reasoning: async () => {
      // Its default provider keeps the first client that it was given.
      const runner = new agents.Runner({ modelProvider: new agents.OpenAIProvider({ openAIClient: thinker }) });
      // The answer ends inside of its reasoning, so the run has no output; its state has the response.
      const { state } = await runner.run(agent(), question, { maxTurns: 1 }).catch((error) => error);
      const output = state._modelResponses.flatMap((response) => response.output);
      expect(
        output.some(({ type }) => type === 'reasoning'),
        'no reasoning item',
      );
    },
    abort: () => expectAborted((signal) => agents.run(agent(), long, { signal })),
  };
}

function langchain() {
  const of = (base, more = {}) =>
    new ChatOpenAI({
      model,
      apiKey: 'any',
      maxTokens: TOKENS,
      maxRetries: 0,
      configuration: { baseURL: `${base}/v1` },
      ...more,
    });
  const calls = ({ tool_calls: list }) => list.map(({ name, args }) => [name, args]);
  return {
    chat: async () => expect((await of(url).invoke(question)).content !== '', 'no text'),
    stream: async () => {
      let text = '';
      for await (const { content } of await of(url, { maxTokens: 40 }).stream(question)) text += content;
      expect(text !== '', 'no text');
    },
    auto: async () => expectCalls(calls(await of(url).bindTools(chatTools).invoke(question)), { least: 0 }),
    required: async () =>
      expectCalls(calls(await of(url).bindTools(chatTools, { tool_choice: 'required' }).invoke(question))),
    named: async () =>
      expectCalls(calls(await of(url).bindTools(chatTools, { tool_choice: 'add' }).invoke(question)), { name: 'add' }),
    parallel: async () => {
      const bound = of(url).bindTools(chatTools, { tool_choice: 'required', parallel_tool_calls: false });
      expect(calls(await bound.invoke(question)).length === 1, 'not one call');
    },
    structured: async () => City.parse(await of(url).withStructuredOutput(City).invoke(question)),
    reasoning: async () => {
      const { additional_kwargs: more, content } = await of(reasoningUrl, { maxTokens: 40 }).invoke(question);
      // This client drops fields that it does not know; the content must not hold the reasoning.
      expect(more.reasoning_content !== undefined || content === '', 'the reasoning is in the content');
    },
    abort: () => expectAborted((signal) => of(url, { maxTokens: 900 }).invoke(long, { signal })),
  };
}

function anthropic() {
  const of = (base) => new Anthropic({ baseURL: base, apiKey: 'any', maxRetries: 0 });
  const client = of(url);
  const tools = Object.entries(schemas).map(([name, schema]) => ({
    name,
    description: name,
    input_schema: schemaOf(schema),
  }));
  const base = { model, max_tokens: TOKENS, messages };
  const calls = ({ content }) =>
    content.flatMap((block) => (block.type === 'tool_use' ? [[block.name, block.input]] : []));
  return {
    chat: async () => {
      const { content, stop_reason: reason } = await client.messages.create({ ...base, system: 'Be brief.' });
      expect(content[0].text !== '' && ['end_turn', 'max_tokens'].includes(reason), reason);
      const { input_tokens: count } = await client.messages.countTokens({ model, messages });
      expect(count > 40, `${count} tokens`);
    },
    stream: async () => {
      let text = '';
      const stream = client.messages.stream({ ...base, max_tokens: 40 }).on('text', (piece) => {
        text += piece;
      });
      expect((await stream.finalText()) === text && text !== '', 'the pieces do not add up');
    },
    auto: async () => expectCalls(calls(await client.messages.create({ ...base, tools })), { least: 0 }),
    required: async () => {
      const first = await client.messages.create({ ...base, tools, tool_choice: { type: 'any' } });
      expectCalls(calls(first));
      const results = first.content.map(({ id }) => ({ type: 'tool_result', tool_use_id: id, content: '4' }));
      const next = [...messages, { role: 'assistant', content: first.content }, { role: 'user', content: results }];
      expect((await client.messages.create({ ...base, tools, messages: next })).content.length >= 0, 'no answer');
    },
    named: async () =>
      expectCalls(calls(await client.messages.create({ ...base, tools, tool_choice: { type: 'tool', name: 'add' } })), {
        name: 'add',
      }),
    parallel: async () => {
      const stream = client.messages.stream({ ...base, tools, tool_choice: { type: 'any' } });
      expectCalls(calls(await stream.finalMessage()));
      const choice = { type: 'any', disable_parallel_tool_use: true };
      expect(calls(await client.messages.create({ ...base, tools, tool_choice: choice })).length === 1, 'not one call');
    },
    structured: async () => {
      const format = { type: 'json_schema', schema: schemaOf(Done) };
      const { content } = await client.messages.create({ ...base, output_config: { format } });
      Done.parse(JSON.parse(content[0].text));
    },
    reasoning: async () => {
      const { content } = await of(reasoningUrl).messages.create({
        ...base,
        max_tokens: 2000,
        thinking: { type: 'enabled', budget_tokens: 1024 },
      });
      expect(content[0].type === 'thinking' && content[0].thinking !== '', 'no thinking');
    },
    abort: () =>
      expectAborted((signal) =>
        client.messages.create({ ...base, messages: longMessages, max_tokens: 900 }, { signal }),
      ),
  };
}

const clients = {
  'openai, chat': openaiChat,
  'openai, responses': openaiResponses,
  'ai, @ai-sdk/openai': aiSdk(aiOpenai(url), aiOpenai(reasoningUrl)),
  'ai, openai-compatible': aiSdk(aiCompatible(url), aiCompatible(reasoningUrl)),
  '@openai/agents': agentsSdk(),
  '@langchain/openai': langchain(),
  '@anthropic-ai/sdk': anthropic(),
};
const MAY_BE_EMPTY = ['chat', 'stream', 'reasoning'];
const rows = [];
for (const [client, checks] of Object.entries(clients)) {
  if (values.only !== undefined && !client.includes(values.only)) continue;
  for (const [feature, check] of Object.entries(checks)) {
    let failure = '';
    // A model with random weights may end its text before the first character.
    for (let attempt = 0; attempt < (MAY_BE_EMPTY.includes(feature) ? 3 : 1) && failure !== null; attempt++)
      failure = await Promise.resolve()
        .then(check)
        .then(
          () => null,
          (error) => `${error.name}: ${error.message}`.slice(0, 500),
        );
    rows.push({ client, feature, failure });
    if (!values.json)
      console.log(
        `${failure === null ? 'ok  ' : 'FAIL'} ${client}: ${feature}${failure === null ? '' : ` (${failure})`}`,
      );
  }
}
if (values.json) console.log(JSON.stringify(rows));
process.exit(rows.some(({ failure }) => failure !== null) ? 1 : 0);
