/** Bodies of other protocols as chats, and chat answers in their form. */
import { describe, expect, it } from 'vitest';
import { HttpError } from '../../http/error.js';
import { chatOfMessages, MessagesTranslation, messagesError } from './messages.js';
import { chatOfResponses, ResponsesTranslation } from './responses.js';
import type { ChatUsage } from './translation.js';

const request = { id: 'x_0', model: 'm', created: 1, promptTokens: 7, echoed: '{"tools":[]}' };
const usage: ChatUsage = {
  ...{ prompt_tokens: 7, completion_tokens: 5, total_tokens: 12 },
  prompt_tokens_details: { cached_tokens: 3 },
};
const call = (name: string, id: string) => ({ index: 0, id, function: { name, arguments: '' } });
const piece = (text: string) => ({ index: 0, function: { arguments: text } });
const CHUNKS = [
  { delta: { reasoning_content: 'so' }, finish_reason: null },
  { delta: { content: 'a' }, finish_reason: null },
  { delta: { content: 'b' }, finish_reason: null },
  { delta: { tool_calls: [call('f', 'c1')] }, finish_reason: null },
  { delta: { tool_calls: [piece('{"x"')] }, finish_reason: null },
  { delta: { tool_calls: [piece(':1}')] }, finish_reason: null },
  { delta: { tool_calls: [call('g', 'c2')] }, finish_reason: null },
  { delta: { tool_calls: [piece('{}')] }, finish_reason: null },
  { delta: {}, finish_reason: 'tool_calls' },
];
const MESSAGE = {
  message: {
    ...{ reasoning_content: 'so', content: 'ab' },
    tool_calls: [
      { id: 'c1', function: { name: 'f', arguments: '{"x":1}' } },
      { id: 'c2', function: { name: 'g', arguments: '{}' } },
    ],
  },
  finish_reason: 'tool_calls',
};

type Event = { readonly type: string; readonly [field: string]: unknown };
function events(frames: string): Event[] {
  return frames
    .split('\n\n')
    .filter(Boolean)
    .map((frame) => {
      const [, name, data] = /^event: (\S+)\ndata: (.*)$/s.exec(frame) ?? [];
      const event = JSON.parse(data) as Event;
      expect(event.type).toBe(name);
      return event;
    });
}

describe('/v1/responses', () => {
  it('writes the events of the API in their order, and ends with the items of a whole answer', () => {
    const translation = new ResponsesTranslation(request);
    const all = events(
      translation.begin() + CHUNKS.map((chunk) => translation.chunk(chunk)).join('') + translation.end(usage),
    );
    expect(all.map(({ sequence_number: number }) => number)).toEqual(all.map((_, i) => i));
    const item = ['output_item.added', 'output_item.done'];
    expect(all.map(({ type }) => type.replace('response.', ''))).toEqual([
      ...['created', 'in_progress'],
      ...[item[0], 'reasoning_summary_part.added', 'reasoning_summary_text.delta'],
      ...['reasoning_summary_text.done', 'reasoning_summary_part.done', item[1]],
      ...[item[0], 'content_part.added', 'output_text.delta', 'output_text.delta'],
      ...['output_text.done', 'content_part.done', item[1]],
      ...[item[0], 'function_call_arguments.delta', 'function_call_arguments.delta'],
      ...['function_call_arguments.done', item[1]],
      ...[item[0], 'function_call_arguments.delta', 'function_call_arguments.done', item[1]],
      'completed',
    ]);
    const whole = JSON.parse(new ResponsesTranslation(request).whole(MESSAGE, usage));
    expect((all.at(-1) as unknown as { response: object }).response).toEqual(whole);
    expect((all.at(-1) as unknown as { response: object }).response).toMatchObject({
      status: 'completed',
      usage: { input_tokens: 7, output_tokens: 5, input_tokens_details: { cached_tokens: 3 } },
    });
  });

  it('an answer that is cut is incomplete, one that fails has failed', () => {
    const ending = { message: { content: 'a' }, finish_reason: 'length' };
    const cut = JSON.parse(new ResponsesTranslation(request).whole(ending, usage));
    expect(cut).toMatchObject({ status: 'incomplete', incomplete_details: { reason: 'max_output_tokens' } });
    const translation = new ResponsesTranslation(request);
    const frames = translation.chunk(CHUNKS[1]) + translation.fail(new HttpError(500, 'gone'));
    expect(events(frames).at(-1)).toMatchObject({ type: 'response.failed', response: { error: { message: 'gone' } } });
    expect(cut).toMatchObject({ output: [{ type: 'message', status: 'incomplete' }] });
    const ended = new ResponsesTranslation(request);
    const all = events(
      [...CHUNKS.slice(1, 6), { delta: {}, finish_reason: 'length' }].map((chunk) => ended.chunk(chunk)).join('') +
        ended.end({ ...usage, completion_tokens_details: { reasoning_tokens: 2 } }),
    );
    // The text ended by itself; arguments are whole also where the tokens decided that they end.
    expect(all.at(-1)).toMatchObject({
      type: 'response.incomplete',
      response: {
        output: [
          { type: 'message', status: 'completed' },
          { type: 'function_call', status: 'completed' },
        ],
        usage: { output_tokens_details: { reasoning_tokens: 2 } },
      },
    });
  });

  it('makes one message of the items of a turn', () => {
    const { body, unknown } = chatOfResponses({
      ...{
        model: 'm',
        instructions: 'Be brief.',
        store: true,
        zz: 1,
        max_output_tokens: 9,
        reasoning: { effort: 'low' },
      },
      input: [
        { role: 'user', content: [{ type: 'input_text', text: 'Hi' }] },
        { type: 'reasoning', summary: [{ type: 'summary_text', text: 'so' }] },
        { type: 'message', role: 'assistant', content: [{ type: 'output_text', text: 'Well' }] },
        { type: 'function_call', call_id: 'c', name: 'f', arguments: '{}' },
        { type: 'function_call_output', call_id: 'c', output: '4' },
      ],
      tools: [{ type: 'function', name: 'f', parameters: {}, strict: true }],
      tool_choice: { type: 'function', name: 'f' },
      text: { format: { type: 'json_schema', name: 's', schema: {} } },
    });
    expect(unknown).toEqual(['zz']);
    expect(body).toEqual({
      ...{ model: 'm', max_completion_tokens: 9, reasoning_effort: 'low' },
      messages: [
        { role: 'system', content: 'Be brief.' },
        { role: 'user', content: 'Hi' },
        {
          ...{ role: 'assistant', content: 'Well', reasoning_content: 'so' },
          tool_calls: [{ id: 'c', type: 'function', function: { name: 'f', arguments: '{}' } }],
        },
        { role: 'tool', content: '4', tool_call_id: 'c' },
      ],
      tools: [{ type: 'function', function: { name: 'f', parameters: {}, strict: true } }],
      tool_choice: { type: 'function', function: { name: 'f' } },
      response_format: { type: 'json_schema', json_schema: { name: 's', schema: {} } },
    });
  });

  it('repeats what was asked, with the defaults of the API', () => {
    const defaults = {
      ...{ instructions: null, tools: [], tool_choice: 'auto', parallel_tool_calls: true, metadata: {} },
      ...{ text: { format: { type: 'text' } }, reasoning: { effort: null, summary: null } },
      ...{ max_output_tokens: null, temperature: 1, top_p: 1 },
    };
    expect(chatOfResponses({ input: 'a' }).echoed).toEqual(defaults);
    const tool = { type: 'function', name: 'f', description: 'd', parameters: { type: 'object' }, strict: false };
    const asked = {
      ...{ instructions: 'Be brief.', tools: [tool], tool_choice: { type: 'function', name: 'f' }, user: 'u' },
      ...{ parallel_tool_calls: false, metadata: { a: 'b' }, reasoning: { effort: 'low', summary: 'auto' } },
      text: { format: { type: 'json_schema', name: 's', schema: {} }, verbosity: 'low' },
      ...{ max_output_tokens: 9, temperature: 0, top_p: 0.5 },
    };
    expect(chatOfResponses({ input: 'a', ...asked }).echoed).toEqual(asked);
    expect(chatOfResponses({ input: 'a', tools: [{ type: 'function', name: 'f' }] }).echoed).toMatchObject({
      tools: [{ type: 'function', name: 'f', parameters: null, strict: true }],
    });
    const answer = new ResponsesTranslation({ ...request, echoed: JSON.stringify(asked) });
    const frames =
      answer.begin() + answer.chunk({ delta: { content: 'a' }, finish_reason: 'stop' }) + answer.end(usage);
    const responses = events(frames).flatMap(({ response }) => (response === undefined ? [] : [response]));
    expect(responses).toHaveLength(3);
    for (const response of responses) expect(response).toMatchObject(asked);
  });

  it.each<[object, string]>([
    [{ previous_response_id: 'r' }, 'previous_response_id: this server keeps no answers'],
    [{ background: true }, 'background: this server keeps no answers'],
    [{ input: [{ type: 'item_reference', id: 'msg_1' }] }, 'input.0: this server keeps no items'],
    [{ input: [{ type: 'web_search_call' }] }, 'input.0.type: items of the type web_search_call'],
    [{ input: [{ role: 'user', content: [{ type: 'input_image' }] }] }, 'input.0.content: expected a text'],
    [{ tools: [{ type: 'web_search' }] }, 'tools.0.type: only tools of the type function'],
    [{ input: 7 }, 'input: expected a text or a list'],
    [{ top_logprobs: 2 }, 'top_logprobs is not supported here'],
  ])('refuses %j', (body, message) => expect(() => chatOfResponses({ input: 'a', ...body })).toThrow(message));
});

describe('/v1/messages', () => {
  it('writes the events of the API in their order, with the blocks of a whole answer', () => {
    const translation = new MessagesTranslation(request);
    const all = events(
      translation.begin() + CHUNKS.map((chunk) => translation.chunk(chunk)).join('') + translation.end(usage),
    );
    const block = (deltas: number) =>
      ['start', ...Array(deltas).fill('delta'), 'stop'].map((of) => `content_block_${of}`);
    expect(all.map(({ type }) => type)).toEqual([
      'message_start',
      ...[block(1), block(2), block(2), block(1)].flat(),
      ...['message_delta', 'message_stop'],
    ]);
    expect(all.at(-2)).toMatchObject({ delta: { stop_reason: 'tool_use' }, usage: { output_tokens: 5 } });
    expect(JSON.parse(new MessagesTranslation(request).whole(MESSAGE, usage))).toMatchObject({
      stop_reason: 'tool_use',
      content: [
        { type: 'thinking', thinking: 'so' },
        { type: 'text', text: 'ab' },
        { type: 'tool_use', id: 'c1', name: 'f', input: { x: 1 } },
        { type: 'tool_use', id: 'c2', name: 'g', input: {} },
      ],
      usage: { input_tokens: 4, cache_read_input_tokens: 3, output_tokens: 5 },
    });
  });

  it('tells which stop string ended a text', () => {
    const choice = { message: { content: 'a' }, finish_reason: 'stop', stop_reason: 'END' };
    const whole = new MessagesTranslation(request).whole(choice, usage);
    expect(JSON.parse(whole)).toMatchObject({ stop_reason: 'stop_sequence', stop_sequence: 'END' });
  });

  it('makes messages of blocks, and results messages of their own', () => {
    const { body } = chatOfMessages({
      ...{ model: 'm', max_tokens: 9, stop_sequences: ['x'], thinking: { type: 'disabled' } },
      system: [{ type: 'text', text: 'Be brief.', cache_control: { type: 'ephemeral' } }],
      messages: [
        { role: 'user', content: 'Hi' },
        {
          role: 'assistant',
          content: [
            { type: 'thinking', thinking: 'so', signature: '' },
            { type: 'text', text: 'Well' },
            { type: 'tool_use', id: 'c', name: 'f', input: { x: 1 } },
          ],
        },
        {
          role: 'user',
          content: [
            { type: 'tool_result', tool_use_id: 'c', content: '4' },
            { type: 'text', text: 'Go on' },
          ],
        },
      ],
      tools: [{ name: 'f', description: 'd', input_schema: { type: 'object' } }],
      tool_choice: { type: 'any', disable_parallel_tool_use: true },
    });
    expect(body).toEqual({
      ...{ model: 'm', max_tokens: 9, stop: ['x'], chat_template_kwargs: { enable_thinking: false } },
      messages: [
        { role: 'system', content: 'Be brief.' },
        { role: 'user', content: 'Hi' },
        {
          ...{ role: 'assistant', content: 'Well', reasoning_content: 'so' },
          tool_calls: [{ id: 'c', type: 'function', function: { name: 'f', arguments: { x: 1 } } }],
        },
        { role: 'tool', tool_call_id: 'c', content: '4' },
        { role: 'user', content: 'Go on' },
      ],
      tools: [{ type: 'function', function: { name: 'f', description: 'd', parameters: { type: 'object' } } }],
      ...{ tool_choice: 'required', parallel_tool_calls: false },
    });
  });

  it.each<[object, string]>([
    [{ messages: [{ role: 'user', content: [{ type: 'image' }] }] }, 'messages.0.content.0: blocks of the type image'],
    [{ tools: [{ type: 'web_search_20250305', name: 'w' }] }, 'tools.0.type: only tools with an input_schema'],
    [{ tool_choice: { type: 'some' } }, 'tool_choice.type: expected auto, any, tool or none'],
    [{ messages: 'a' }, 'messages: expected a list'],
  ])('refuses %j', (body, message) =>
    expect(() => chatOfMessages({ messages: [{ role: 'user', content: 'a' }], ...body })).toThrow(message),
  );

  it.each([
    [405, 'invalid_request_error'],
    [500, 'api_error'],
    [429, 'rate_limit_error'],
  ])('has errors of its own form: %d', (status, type) => {
    expect(messagesError(new HttpError(status, 'later'))).toEqual({
      type: 'error',
      error: { type, message: 'later' },
    });
  });
});
