/** Texts that break tokenizers: shared by the tests of every kind. */

export const DIFFICULT_TEXTS: Record<string, string> = {
  empty: '',
  plain: "Hello, world! It's a test; we'll see what they've done.",
  whitespace: 'a  b   c\t\t\td\n\n\n  e \r\n\r\n f      ',
  onlySpaces: ' '.repeat(1000),
  emoji: 'family 👨‍👩‍👧‍👦, flag 🇩🇪, skin 👍🏽, heart ❤️',
  cjk: '天地玄黃，宇宙洪荒。日本語のテキスト 한국어 문장',
  mixed: 'naïve café — Ωmega ∑ ±½ Привет مرحبا नमस्ते',
  marks: '\uFEFFbyte order mark, NUL \0, DEL \x7f, line \u2028 separator, combining e\u0301',
  code: 'for (let i = 0; i < 10; i++) {\n\t\tconsole.log("$" + i);\n}\n// 0123456789012345',
  specials: 'a<|endoftext|>b</s><s>[SEP]<|im_start|><pad>',
};

/** Lone surrogates have no UTF-8: every encoder writes U+FFFD for them. */
export const LONE_SURROGATES = { text: 'a\uD83Db\uDE00c\uD83D', decoded: 'a\uFFFDb\uFFFDc\uFFFD' };

/** Feeds ids one at a time; the concatenation must be what decoding at once gives. */
export function streamed(
  decoder: { push(id: number): string; end(): string },
  ids: Iterable<number>,
): { text: string; parts: string[] } {
  const parts = [...Array.from(ids, (id) => decoder.push(id)), decoder.end()];
  return { text: parts.join(''), parts };
}
