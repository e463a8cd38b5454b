// A byte-level BPE tokenizer whose tokens are the words of a few texts, as the tokenizer.json that many programs read.

const SPECIAL = ['<|im_start|>', '<|im_end|>'];
const MARKERS = ['<tool_call>', '</tool_call>'];
/**
 * Words with the space before them, numbers, and runs of everything else: half as many tokens as with a token for every
 * character between words, and a token says what comes next ("costs" and a space: a number), which makes results easy to copy.
 */
const PIECES = /(?: ?\p{L}+|\p{N}+|[^\p{L}\p{N}]+)/u;

/** Merges the most frequent pair of neighbours until every word is one token. */
export function makeTokenizer(texts) {
  const alphabet = printableBytes();
  const words = new Map();
  for (const text of texts)
    for (const [piece] of text.matchAll(new RegExp(PIECES, 'gu')))
      words.set(
        piece,
        [...Buffer.from(piece)].map((byte) => alphabet[byte]),
      );
  const merges = [];
  for (;;) {
    const counts = new Map();
    for (const parts of words.values())
      for (let i = 1; i < parts.length; i++) {
        const pair = `${parts[i - 1]} ${parts[i]}`;
        counts.set(pair, (counts.get(pair) ?? 0) + 1);
      }
    const [best] = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1))[0] ?? [];
    if (best === undefined) break;
    merges.push(best);
    const [first, second] = best.split(' ');
    for (const parts of words.values())
      for (let i = 1; i < parts.length; i++)
        if (parts[i - 1] === first && parts[i] === second) parts.splice(i - 1, 2, first + second);
  }
  const tokens = [...new Set([...alphabet, ...merges.map((pair) => pair.replace(' ', ''))])];
  const added = [...SPECIAL, ...MARKERS].map((content, i) => ({
    id: tokens.length + i,
    content,
    special: SPECIAL.includes(content),
    normalized: false,
  }));
  return {
    version: '1.0',
    added_tokens: added,
    normalizer: null,
    pre_tokenizer: {
      type: 'Sequence',
      pretokenizers: [
        { type: 'Split', pattern: { Regex: PIECES.source }, behavior: 'Isolated', invert: false },
        { type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: false },
      ],
    },
    post_processor: null,
    decoder: { type: 'ByteLevel', add_prefix_space: true, trim_offsets: true, use_regex: true },
    model: { type: 'BPE', vocab: Object.fromEntries(tokens.map((token, id) => [token, id])), merges },
  };
}

/** GPT-2's table from bytes to printable characters. */
function printableBytes() {
  const isPrintable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  let others = 0;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(isPrintable(byte) ? byte : 256 + others++));
}
