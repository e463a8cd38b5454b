/** Conversations as training documents: tokens, and which of them the model would write itself. */

import { UsageError } from '../../../errors.js';
import * as z from '../../../zod.js';
import { applyChatTemplate, type ChatMessage } from '../../chat.js';
import type { Tokenizer } from '../../tokenizer.js';

/** A conversation as tokens. */
export interface EncodedChat {
  readonly tokens: Int32Array;
  /** 1 for the tokens of the assistant, with the one that ends its turn: the targets of training. */
  readonly counted: Uint8Array;
}

const Chat = z.looseObject({
  messages: z.array(z.looseObject({ role: z.string() })).min(1),
  tools: z.array(z.unknown()).nullish(),
});

/**
 * The documents of a line `{"messages": [{"role": …, "content": …}, …]}`; `tools` is passed to the template. Normally it is
 * one. A template that writes older answers differently from the last one (without their reasoning, for example) makes one
 * document per answer, so that each is trained on as the model would have written it. Returns [] without an answer.
 */
export function encodeChatLine(line: string, tokenizer: Tokenizer): EncodedChat[] {
  const { messages, tools } = parseLine(line);
  const variables = tools ? { tools } : {};
  const render = (count: number, addGenerationPrompt = false) =>
    applyChatTemplate(tokenizer, messages.slice(0, count), { addGenerationPrompt, variables });
  const encode = (text: string) => tokenizer.encode(text, { parseSpecial: true });
  const turns = messages.flatMap(({ role }, i) => {
    if (role !== 'assistant') return [];
    const [prompt, upTo] = [render(i, true), render(i + 1)];
    if (upTo.startsWith(prompt)) return [{ prompt, upTo }];
    throw new UsageError(
      `message ${i + 1}: the chat template does not continue its generation prompt with the assistant's message, so its ` +
        'tokens cannot be told from the rest; use a template that does',
    );
  });
  if (turns.length === 0) return [];
  const whole = render(messages.length);
  const documents = turns.every(({ upTo }) => whole.startsWith(upTo))
    ? [{ text: whole, answers: turns }]
    : turns.map((turn) => ({ text: turn.upTo, answers: [turn] }));
  return documents.map(({ text, answers }) => {
    const tokens = encode(text);
    const counted = new Uint8Array(tokens.length);
    for (const { prompt, upTo } of answers) {
      // In tokens, not in characters: a token that crosses the border belongs to the answer.
      const start = commonLength(tokens, encode(prompt));
      const end = upTo === text ? tokens.length : commonLength(tokens, encode(upTo));
      counted.fill(1, start, endOfTurn(tokens, start, end, tokenizer));
    }
    return { tokens, counted };
  });
}

function parseLine(line: string): { messages: readonly ChatMessage[]; tools?: readonly unknown[] | null | undefined } {
  let value: unknown;
  try {
    value = JSON.parse(line);
  } catch (cause) {
    throw new UsageError('not valid JSON; fix or remove this line', { cause });
  }
  const { success, data } = Chat.safeParse(value);
  if (success) return data;
  throw new UsageError('not a chat; each line must be like {"messages": [{"role": "user", "content": "…"}, …]}');
}

function commonLength(a: Int32Array, b: Int32Array): number {
  let length = 0;
  while (length < a.length && length < b.length && a[length] === b[length]) length++;
  return length;
}

/** After the last end token: what a template writes behind it, such as a newline, is not the model's. */
function endOfTurn(tokens: Int32Array, start: number, end: number, tokenizer: Tokenizer): number {
  const endTokens = tokenizer.endTokens ?? [tokenizer.separator];
  for (let i = end - 1; i >= start; i--) if (endTokens.includes(tokens[i])) return i + 1;
  return end;
}
