/** Decoders: the text of a list of tokens. Each step changes the tokens; what is left is joined. */
import { decodeUtf8 } from '../bytes.js';
import { BYTE_CHARACTERS } from './pre-tokenizers.js';
import { patternOf, replaced, type Step, stepsOf, textOf } from './step.js';

export type Decoder = (tokens: readonly string[]) => readonly string[];

/** Without a decoder, tokens are joined with spaces. */
export function createDecoder(step: Step | null | undefined): Decoder {
  if (!step) return (tokens) => [tokens.join(' ')];
  switch (step.type) {
    case 'Sequence': {
      const steps = stepsOf(step, 'decoders').map(createDecoder);
      return (tokens) => steps.reduce((result, decode) => decode(result), tokens);
    }
    case 'ByteLevel':
      return (tokens) => [decodeUtf8(Buffer.concat(tokens.map(bytesOfToken)))];
    case 'ByteFallback':
      return decodeByteFallback;
    case 'Fuse':
      return (tokens) => [tokens.join('')];
    case 'Strip':
      return stripDecoder(step);
    case 'Replace': {
      const [pattern, content] = [patternOf(step), textOf(step, 'content')];
      return (tokens) => tokens.map((token) => replaced(token, pattern, content));
    }
    case 'Metaspace': {
      const replacement = textOf(step, 'replacement', '▁');
      const scheme = textOf(step, 'prepend_scheme', step['add_prefix_space'] === false ? 'never' : 'always');
      const first = scheme === 'never' ? ' ' : '';
      return (tokens) => tokens.map((token, i) => token.replaceAll(replacement, i === 0 ? first : ' '));
    }
    case 'WordPiece':
      return wordPieceDecoder(step);
    case 'BPEDecoder': {
      const suffix = textOf(step, 'suffix', '</w>');
      return (tokens) => tokens.map((token, i) => token.replaceAll(suffix, i === tokens.length - 1 ? '' : ' '));
    }
    default:
      throw new Error(`the decoder "${step.type}" is not supported`);
  }
}

/** Whether decoding is the plain concatenation of `bytesOfToken`. */
export function isByteLevelDecoder(step: Step | null | undefined): boolean {
  return step?.type === 'ByteLevel';
}

/** Whether a token after the first adds the same text whatever its neighbours are. */
export function isConcatenatingDecoder(step: Step | null | undefined): boolean {
  if (step?.type === 'Sequence') return stepsOf(step, 'decoders').every(isConcatenatingDecoder);
  return ['ByteLevel', 'ByteFallback', 'Fuse', 'Metaspace', 'Replace', 'Strip'].includes(step?.type ?? '');
}

const BYTE_OF = new Map(BYTE_CHARACTERS.map((character, byte) => [character, byte]));

/** A token of a byte-level vocabulary. One with other characters, such as an added token, is its own text. */
export function bytesOfToken(token: string): Uint8Array {
  const bytes = Array.from(token, (character) => BYTE_OF.get(character));
  return bytes.every((byte) => byte !== undefined) ? Uint8Array.from(bytes) : Buffer.from(token, 'utf8');
}

/** The byte of a token such as `<0x0A>`, or undefined. */
export function byteOfFallbackToken(token: string): number | undefined {
  const digits = /^<0x([0-9A-Fa-f]{2})>$/.exec(token)?.[1];
  return digits === undefined ? undefined : Number.parseInt(digits, 16);
}

/** Byte tokens in a row become their text; if they are not valid UTF-8, each becomes U+FFFD. */
function decodeByteFallback(tokens: readonly string[]): readonly string[] {
  const result: string[] = [];
  let bytes: number[] = [];
  const flush = () => {
    if (bytes.length === 0) return;
    const text = decodeUtf8(Uint8Array.from(bytes));
    const isValid = Buffer.from(text, 'utf8').equals(Uint8Array.from(bytes));
    if (isValid) result.push(text);
    else for (let i = 0; i < bytes.length; i++) result.push('\uFFFD');
    bytes = [];
  };
  for (const token of tokens) {
    const byte = byteOfFallbackToken(token);
    if (byte === undefined) {
      flush();
      result.push(token);
    } else bytes.push(byte);
  }
  flush();
  return result;
}

/** Removes up to `start` and `stop` times a character at the ends of each token. */
function stripDecoder(step: Step): Decoder {
  const content = textOf(step, 'content');
  const [start, stop] = [Number(step['start'] ?? 0), Number(step['stop'] ?? 0)];
  return (tokens) =>
    tokens.map((token) => {
      let result = token;
      for (let i = 0; i < start && result.startsWith(content); i++) result = result.slice(content.length);
      for (let i = 0; i < stop && result.endsWith(content); i++) result = result.slice(0, -content.length);
      return result;
    });
}

function wordPieceDecoder(step: Step): Decoder {
  const prefix = textOf(step, 'prefix', '##');
  const cleanUp = (text: string) =>
    text
      .replaceAll(/ ([.?!,])/g, '$1')
      .replaceAll(" ' ", "'")
      .replaceAll(/ (n't|'m|'s|'ve|'re)/g, '$1')
      .replaceAll(' do not', " don't");
  return (tokens) =>
    tokens.map((token, i) => {
      if (i > 0) token = token.startsWith(prefix) ? token.slice(prefix.length) : ` ${token}`;
      return step['cleanup'] === false ? token : cleanUp(token);
    });
}
