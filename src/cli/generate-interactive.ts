/** `trefoil generate` on a terminal without a prompt: line by line, the model goes on after each. */
import { createInterface } from 'node:readline/promises';
import type { Conversation } from '../infer/conversation.js';
import { visible } from '../text.js';
import type { Io } from './shared/io.js';

export const INTERACTIVE_HELP = '/new starts over,\nCtrl-C stops a text, Ctrl-D exits';

/** Ends when the input does, or by Ctrl-C at the prompt. */
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
      io.err('the text so far is forgotten');
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
    // What cannot be said (too long, tokens that the model does not have) is no reason to end the conversation.
    io.err(error instanceof Error ? error.message : String(error));
    return;
  }
  const seconds = (performance.now() - started) / 1000;
  io.stdout.write('\n');
  io.err(`[${talk.length} tokens of context, ${(tokens / seconds).toFixed(1)} tok/s read and written]`);
}
