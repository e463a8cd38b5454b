/** Interactive mode of `trefoil generate`: the model continues each line that is typed, or answers it with `--chat`. */
import { createInterface } from 'node:readline/promises';
import type { Generation } from '../infer/texts.js';
import { visible } from '../text.js';
import type { Io } from './shared/io.js';

export const INTERACTIVE_HELP = '/reset starts over, /exit leaves, /help shows this, Ctrl-C stops a text';

/** A `Conversation` or a `Chat`. */
export interface Talk {
  readonly length: number;
  say(line: string): AsyncGenerator<string, Generation, void>;
  reset(): void;
}

/** Returns at the end of the input, at `/exit`, or on Ctrl-C at the prompt. */
export async function converse(talk: Talk, io: Io, input: NodeJS.ReadableStream): Promise<void> {
  const lines = createInterface({ input, output: io.stdout, prompt: '> ' });
  let isWriting = false;
  let isStopped = false;
  lines.on('SIGINT', () => {
    if (isWriting && !isStopped) isStopped = true;
    else lines.close();
  });
  let isOpen = true;
  lines.once('close', () => {
    isOpen = false;
  });
  lines.prompt();
  for await (const line of lines) {
    const command = line.trim();
    if (command === '/exit') break;
    if (command === '/reset') {
      talk.reset();
      io.err('started over');
    } else if (command === '/help') {
      io.err(INTERACTIVE_HELP);
    } else {
      isWriting = true;
      await answer(talk, line, io, () => isStopped);
      isWriting = false;
      isStopped = false;
    }
    if (isOpen) lines.prompt();
  }
  lines.close();
  io.stdout.write('\n');
}

async function answer(talk: Talk, line: string, io: Io, isStopped: () => boolean): Promise<void> {
  const started = performance.now();
  let end: Generation | null = null;
  try {
    const stream = talk.say(line);
    for (;;) {
      const { done, value } = await stream.next();
      if (done) end = value;
      else io.stdout.write(visible(value));
      if (done || isStopped()) break;
    }
    await stream.return({ tokens: [], finishReason: 'aborted' });
  } catch (error) {
    // An error of one line (too long, unknown tokens) does not end the conversation.
    io.err(error instanceof Error ? error.message : String(error));
    return;
  }
  const seconds = (performance.now() - started) / 1000;
  io.stdout.write('\n');
  const speed = end ? `, ${(end.tokens.length / seconds).toFixed(1)} tok/s including the prompt` : ', stopped';
  const cut = end && CUT[end.finishReason] ? `; ${CUT[end.finishReason]}` : '';
  io.err(`[${talk.length} tokens of context${speed}${cut}]`);
}

/** Messages about answers that the model did not end itself. */
const CUT: Partial<Record<Generation['finishReason'], string>> = {
  length: '--max-new-tokens was reached',
  context: '--max-context is full: /reset, or raise it',
};
