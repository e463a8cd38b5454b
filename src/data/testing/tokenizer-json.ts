/** Small tokenizer.json files for tests: one byte-level BPE like GPT-2's, one unigram like SentencePiece's. */

/** GPT-2's table from bytes to printable characters, in the order of the bytes. */
function printableBytes(): string[] {
  const printable = (byte: number): boolean =>
    (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || (byte >= 174 && byte <= 255);
  let extra = 0;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(printable(byte) ? byte : 256 + extra++));
}

export function byteLevelTokenizerJson(endOfText = '<|endoftext|>'): object {
  const merges = ['t h', 'th e', 'Ġ the', 'e r', 'Ġ Ġ', 'Ã ©'];
  const tokens = [...printableBytes(), ...merges.map((pair) => pair.replace(' ', ''))];
  return {
    version: '1.0',
    added_tokens: [{ id: tokens.length, content: endOfText, special: true, normalized: false }],
    normalizer: null,
    pre_tokenizer: { type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: true },
    post_processor: null,
    decoder: { type: 'ByteLevel', add_prefix_space: true, trim_offsets: true, use_regex: true },
    model: { type: 'BPE', vocab: Object.fromEntries(tokens.map((token, id) => [token, id])), merges },
  };
}

export function unigramTokenizerJson(): object {
  const bytes = Array.from({ length: 256 }, (_, byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`);
  const letters = [...'abcdefghijklmnopqrstuvwxyz<>/.▁'];
  const vocab = [
    ['<unk>', 0],
    ['</s>', 0],
    ...bytes.map((byte) => [byte, -20]),
    ...letters.map((letter) => [letter, -5]),
    ['▁the', -2],
  ];
  return {
    version: '1.0',
    added_tokens: [
      { id: 0, content: '<unk>', special: true, normalized: false },
      { id: 1, content: '</s>', special: true, normalized: false },
    ],
    normalizer: null,
    pre_tokenizer: { type: 'Metaspace', replacement: '▁', prepend_scheme: 'always', split: false },
    post_processor: null,
    decoder: { type: 'Metaspace', replacement: '▁', prepend_scheme: 'always', split: false },
    model: { type: 'Unigram', unk_id: 0, vocab, byte_fallback: false },
  };
}
