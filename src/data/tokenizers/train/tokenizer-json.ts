/** The files of a trained tokenizer, in the format of Hugging Face. Ids: special tokens, bytes, merges in their order. */

import { UsageError } from '../../../errors.js';
import { BYTE_CHARACTERS } from '../huggingface/pre-tokenizers.js';
import { type Merges, SYMBOL_OF_BYTE } from './merges.js';

export function tokenizerJson({ left, right }: Merges, special: readonly string[]): string {
  const symbols: string[] = [];
  for (const [byte, symbol] of SYMBOL_OF_BYTE.entries()) symbols[symbol] = BYTE_CHARACTERS[byte];
  const merges = Array.from(left, (first, i) => {
    const pair = [symbols[first], symbols[right[i]]];
    symbols.push(pair.join(''));
    return pair;
  });
  const double = special.find((token) => symbols.includes(token));
  if (double !== undefined)
    throw new UsageError(
      `--special-token: ${double} is also an ordinary token of the text; choose another text for it`,
    );
  const byteLevel = { type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: true };
  const flags = { single_word: false, lstrip: false, rstrip: false, normalized: false, special: true };
  return json({
    version: '1.0',
    truncation: null,
    padding: null,
    added_tokens: special.map((content, id) => ({ id, content, ...flags })),
    normalizer: null,
    pre_tokenizer: byteLevel,
    post_processor: { ...byteLevel, trim_offsets: false },
    decoder: byteLevel,
    model: {
      type: 'BPE',
      dropout: null,
      unk_token: null,
      continuing_subword_prefix: null,
      end_of_word_suffix: null,
      fuse_unk: false,
      byte_fallback: false,
      ignore_merges: false,
      vocab: Object.fromEntries([...special, ...symbols].map((token, id) => [token, id])),
      // As texts: programs before 2024 read no lists. Symbols have no spaces.
      merges: merges.map((pair) => pair.join(' ')),
    },
  });
}

export function tokenizerConfigJson(special: readonly string[]): string {
  const [eos] = special;
  const flags = { lstrip: false, normalized: false, rstrip: false, single_word: false, special: true };
  return json({
    add_prefix_space: false,
    added_tokens_decoder: Object.fromEntries(special.map((content, id) => [id, { content, ...flags }])),
    clean_up_tokenization_spaces: false,
    eos_token: eos,
    bos_token: null,
    pad_token: null,
    unk_token: null,
    tokenizer_class: 'PreTrainedTokenizerFast',
  });
}

const json = (value: object) => `${JSON.stringify(value, null, 1)}\n`;
