// The text of the language runs of bench/context.mjs: code and documents of this repository and the declarations of its
// locked packages, as documents of at least 6,000 characters, and a byte-level BPE tokenizer of 1,024 tokens made from it.
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join, relative } from 'node:path';

const FOLDERS = ['src', 'docs', 'test', 'bench', 'examples', 'node_modules/typescript/lib', 'node_modules/@types/node'];
const LENGTHS = [6000, 40_000];
const VOCABULARY = 1024;
const END = '<|endoftext|>';
const WORDS = /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;

/** Writes train.jsonl, val.jsonl and tokenizer.json to `out`: every twentieth file is for validation. */
export function writeCorpus(root, out) {
  const files = FOLDERS.flatMap((folder) =>
    readdirSync(join(root, folder), { recursive: true })
      .filter((name) => /\.(md|cpp|h|cu|cuh|mjs|ts)$/.test(name))
      .map((name) => join(root, folder, name)),
  ).sort((a, b) => (relative(root, a) < relative(root, b) ? -1 : 1));
  const texts = files
    .map((file) => readFileSync(file, 'utf8'))
    .filter((text) => text.length >= LENGTHS[0])
    .map((text) => text.slice(0, LENGTHS[1]));
  const parts = { train: texts.filter((_, i) => i % 20 !== 19), val: texts.filter((_, i) => i % 20 === 19) };
  mkdirSync(out, { recursive: true });
  for (const [name, part] of Object.entries(parts))
    writeFileSync(join(out, `${name}.jsonl`), part.map((text) => `${JSON.stringify({ text })}\n`).join(''));
  writeFileSync(join(out, 'tokenizer.json'), JSON.stringify(byteLevelBpe(parts.train, VOCABULARY - 1)));
  writeFileSync(join(out, 'tokenizer_config.json'), JSON.stringify({ eos_token: END }));
}

/** A tokenizer in the format of Hugging Face, with the most frequent pairs of `texts` as merges. */
function byteLevelBpe(texts, size) {
  const letters = byteLetters();
  const vocab = [...letters];
  const words = countWords(texts, letters);
  const merges = [];
  while (vocab.length < size) {
    const pairs = new Map();
    for (const { parts, count } of words)
      for (let i = 1; i < parts.length; i++) {
        const pair = `${parts[i - 1]} ${parts[i]}`;
        pairs.set(pair, (pairs.get(pair) ?? 0) + count);
      }
    const [best] = [...pairs].reduce((a, b) => (b[1] > a[1] || (b[1] === a[1] && b[0] < a[0]) ? b : a));
    const [left, right] = best.split(' ');
    merges.push(best);
    vocab.push(left + right);
    for (const word of words) word.parts = merged(word.parts, left, right);
  }
  const byteLevel = { type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: true };
  const end = { id: size, content: END, special: true, normalized: false };
  return {
    ...{ version: '1.0', truncation: null, padding: null, added_tokens: [end], normalizer: null, post_processor: null },
    ...{ pre_tokenizer: byteLevel, decoder: byteLevel },
    model: { type: 'BPE', vocab: Object.fromEntries(vocab.map((token, id) => [token, id])), merges },
  };
}

/** Words that occur at least three times, as letters for their bytes. */
function countWords(texts, letters) {
  const counts = new Map();
  for (const text of texts) for (const [word] of text.matchAll(WORDS)) counts.set(word, (counts.get(word) ?? 0) + 1);
  return [...counts]
    .filter(([, count]) => count >= 3)
    .map(([word, count]) => ({ parts: [...Buffer.from(word)].map((byte) => letters[byte]), count }));
}

function merged(parts, left, right) {
  const out = [];
  for (let i = 0; i < parts.length; i++) {
    const isPair = parts[i] === left && parts[i + 1] === right;
    out.push(isPair ? left + right : parts[i]);
    if (isPair) i++;
  }
  return out;
}

/** GPT-2's letter for each byte: itself if it is printable, otherwise one from U+0100 on. */
function byteLetters() {
  const isPrintable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : next++));
}
