/** Interactive mode of `trefoil generate`: the model continues each line that is typed. */
import { createInterface } from 'node:readline/promises';
import type { Conversation } from '../infer/conversation.js';
import { visible } from '../text.js';
import type { Io } from './shared/io.js';

export const INTERACTIVE_HELP = '/new starts over, Ctrl-C stops a text, Ctrl-D exits';

/** Returns at the end of the input, or on Ctrl-C at the prompt. */
export async function converse(talk: Conversation, io: Io, input: NodeJS.ReadableStream): Promise<void> {
  const lines = createInterface({ input, output: io.stdout, prompt: '> ' });
  let isWriting = false;
  let isStopped = false;
  lines.on('SIGINT', () => {
    if (isWriting) isStopped = true;
    else lines.close();
  });
  lines.prompt();
  for await (const line of lines) {
    if (line.trim() === '/new') {
      talk.reset();
      io.err('started over');
    } else {
      isWriting = true;
      await answer(talk, line, io, () => isStopped);
      isWriting = false;
      isStopped = false;
    }
    lines.prompt();
  }
  io.stdout.write('\n');
}

async function answer(talk: Conversation, line: string, io: Io, isStopped: () => boolean): Promise<void> {
  const started = performance.now();
  let tokens = 0;
  const before = talk.length;
  try {
    for await (const text of talk.say(line)) {
      io.stdout.write(visible(text));
      if (isStopped()) break;
    }
    tokens = talk.length - before;
  } catch (error) {
    // An error of one line (too long, unknown tokens) does not end the conversation.
    io.err(error instanceof Error ? error.message : String(error));
    return;
  }
  const seconds = (performance.now() - started) / 1000;
  io.stdout.write('\n');
  io.err(`[${talk.length} tokens of context, ${(tokens / seconds).toFixed(1)} tok/s including the prompt]`);
}
