// Writes what the training needs: chats.jsonl, and a folder with the tokenizer and the chat template.
//
//   node data.mjs [--out artifacts/tools] [--chats 12000] [--seed 1]
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { randomChat, randomNumbers, WORDS } from './grammar.mjs';
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
const chats = Array.from({ length: Number(values.chats) }, () => JSON.stringify(randomChat(random, tools).chat));
const tokenizer = join(values.out, 'tokenizer');
mkdirSync(tokenizer, { recursive: true });
writeFileSync(join(values.out, 'chats.jsonl'), `${chats.join('\n')}\n`);
const descriptions = tools.map((tool) => tool.function.description);
writeFileSync(join(tokenizer, 'tokenizer.json'), JSON.stringify(makeTokenizer([...WORDS, ...descriptions])));
writeFileSync(join(tokenizer, 'tokenizer_config.json'), JSON.stringify({ eos_token: '<|im_end|>', pad_token: null }));
copyFileSync(beside('chat_template.jinja'), join(tokenizer, 'chat_template.jinja'));
console.log(`${values.out}: ${chats.length} chats`);
