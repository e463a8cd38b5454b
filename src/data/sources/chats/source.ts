/** Opens `data.source: chat`: JSON Lines of conversations, tokenised through the chat template into memory. */
import { createHash } from 'node:crypto';
import { setImmediate } from 'node:timers/promises';
import type { Config } from '../../../config/schema.js';
import { UsageError } from '../../../errors.js';
import { requireChatTemplate } from '../../chat.js';
import { absorb, Purpose } from '../../hash.js';
import type { OpenOptions } from '../../loader.js';
import type { NumberedSource } from '../../pipeline/generated-source.js';
import type { Tokenizer } from '../../tokenizer.js';
import { readBytes } from '../bytes.js';
import { resolveFiles } from '../files.js';
import { isJsonlName, splitLines } from '../lines.js';
import { type EncodedChat, encodeChatLine } from './encode.js';
import { ChatSamples } from './samples.js';

/** A document, and the number of its conversation among those of all files. */
interface ReadChat extends EncodedChat {
  readonly line: number;
}

/** Chats between two progress reports, and turns of the event loop. */
const REPORT_EVERY = 256;

export async function openChats(
  config: Config,
  tokenizer: Tokenizer,
  options: OpenOptions,
  paths: string | readonly string[] | null = config.data.path,
): Promise<NumberedSource> {
  const { data, train } = config;
  requireChatTemplate(tokenizer);
  if (paths === null) throw new UsageError('data.path: needed by data.source chat (--local-path)');
  const { files } = await resolveFiles(paths, isJsonlName);
  const all = await readChats(
    files.map(({ path }) => path),
    tokenizer,
    train.seq_len + 1,
    options,
  );
  const seed = data.seed ?? train.seed;
  const base = { sequenceLength: train.seq_len, padding: tokenizer.separator, seed };
  const isHeld = ({ line }: ReadChat) => isValidation(line, data.split_seed, data.val_fraction);
  const training = options.evaluate === 'all' ? all : all.filter((chat) => !isHeld(chat));
  const held = options.evaluate === 'all' ? all : all.filter(isHeld);
  if (training.length === 0) throw new UsageError('data.val_fraction: leaves no chat for training; lower it');
  const validation = held.length > 0 ? new ChatSamples(held, { ...base, shuffle: false }) : undefined;
  const hash = createHash('sha256');
  for (const { tokens, counted } of all) hash.update(tokens).update(counted);
  return {
    vocabSize: data.vocab_size ?? tokenizer.vocabSize,
    identity: `chat:${hash.digest('hex')}`,
    tokensPerEpoch: training.reduce((sum, { tokens }) => sum + tokens.length, 0),
    train: new ChatSamples(training, { ...base, shuffle: data.shuffle }),
    validation,
    validationSamples: validation?.perEpoch ?? 0,
    documentMask: true,
    close: () => {},
  };
}

/** Depends on the number of the line and the seed alone: all documents of a conversation are on the same side. */
function isValidation(line: number, seed: number, fraction: number): boolean {
  return absorb(absorb(absorb(0, Purpose.chatValidation), seed), line) / 2 ** 32 < fraction;
}

async function readChats(
  files: readonly string[],
  tokenizer: Tokenizer,
  longest: number,
  { onNotice, onWarning, onProgress }: OpenOptions,
): Promise<ReadChat[]> {
  const chats: ReadChat[] = [];
  let [lines, tokens, bytes, empty, cut, parts] = [0, 0, 0, 0, 0, 0];
  const report = () => onProgress?.({ documents: chats.length, tokens, bytes, parts, totalParts: files.length });
  for (const file of files) {
    let number = 0;
    for await (const line of splitLines(readBytes(file), file)) {
      number += 1;
      const text = Buffer.from(line).toString('utf8');
      if (text.trim() === '') continue;
      const documents = encodeLine(text, `${file}:${number}`, tokenizer);
      if (documents.length === 0) empty += 1;
      for (const chat of documents) {
        const kept = { tokens: chat.tokens.slice(0, longest), counted: chat.counted.slice(0, longest), line: lines };
        if (chat.tokens.length > longest) cut += 1;
        if (kept.counted.indexOf(1, 1) < 0) empty += 1;
        else {
          chats.push(kept);
          tokens += kept.tokens.length;
        }
      }
      bytes += line.length;
      if (++lines % REPORT_EVERY > 0) continue;
      report();
      await setImmediate();
    }
    parts += 1;
    report();
  }
  if (chats.length === 0) throw new UsageError('data.path: no chat has a message of the assistant to train on');
  onNotice?.(`data: ${chats.length} chats, ${tokens} tokens`);
  if (cut > 0) onWarning?.(`${cut} chats are longer than train.seq_len (${longest - 1}) and lose their end`);
  if (empty > 0) onWarning?.(`${empty} chats have no message of the assistant within train.seq_len and are left out`);
  return chats;
}

function encodeLine(text: string, where: string, tokenizer: Tokenizer): EncodedChat[] {
  try {
    return encodeChatLine(text, tokenizer);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    throw new UsageError(`${where}: ${error.message}`, { cause: error });
  }
}
