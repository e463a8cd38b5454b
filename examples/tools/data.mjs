// Writes what the training needs: chats.jsonl, and a folder with the tokenizer and the chat template.
//
//   node data.mjs [--out artifacts/tools] [--chats 12000] [--seed 1]
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { randomChat, randomNumbers } from './grammar.mjs';
import { makeTokenizer } from './tokenizer.mjs';

const { values } = parseArgs({
  options: {
    out: { type: 'string', default: 'artifacts/tools' },
    chats: { type: 'string', default: '12000' },
    seed: { type: 'string', default: '1' },
  },
});
const beside = (name) => join(import.meta.dirname, name);
const tools = JSON.parse(readFileSync(beside('tools.json'), 'utf8'));
const random = randomNumbers(Number(values.seed));
const chats = Array.from({ length: Number(values.chats) }, () => randomChat(random, tools).chat);
const tokenizer = join(values.out, 'tokenizer');
mkdirSync(tokenizer, { recursive: true });
writeFileSync(join(values.out, 'chats.jsonl'), chats.map((chat) => `${JSON.stringify(chat)}\n`).join(''));
writeFileSync(join(tokenizer, 'tokenizer.json'), JSON.stringify(makeTokenizer(textsOf(chats.slice(0, 2000)))));
writeFileSync(join(tokenizer, 'tokenizer_config.json'), JSON.stringify({ eos_token: '<|im_end|>', pad_token: null }));
copyFileSync(beside('chat_template.jinja'), join(tokenizer, 'chat_template.jinja'));
console.log(`${values.out}: ${chats.length} chats`);

/** Texts that the template makes of chats: the tokenizer should have their words as whole tokens. */
function textsOf(chats) {
  const described = tools.map(
    ({ function: { name, description, parameters } }) =>
      `${name}(${Object.keys(parameters.properties).join(', ')}): ${description}`,
  );
  // As the filter tojson writes it.
  const called = ({ function: call }) => `\n${JSON.stringify(call).replaceAll('":', '": ').replaceAll(',"', ', "')}\n`;
  const said = chats.flatMap(({ messages }) =>
    messages.flatMap(({ content, tool_calls: calls = [] }) => [content ?? '', ...calls.map(called)]),
  );
  return ['\nsystem\nYou can call these tools:\n\nuser\nassistant\ntool\n', ...described, ...said];
}
