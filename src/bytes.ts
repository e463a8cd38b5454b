/** Bytes and text, without Node's Buffer: these modules also run in a browser. */

const encoder = new TextEncoder();
const CHUNK = 8192;

/** The UTF-8 of a text. */
export function utf8(text: string): Uint8Array {
  return encoder.encode(text);
}

/** Bytes as a string with a character for each. */
export function byteString(bytes: Uint8Array): string {
  let text = '';
  for (let at = 0; at < bytes.length; at += CHUNK) text += String.fromCharCode(...bytes.subarray(at, at + CHUNK));
  return text;
}

/** The bytes of such a string. */
export function bytesOfString(text: string): Uint8Array {
  return Uint8Array.from(text, (character) => character.charCodeAt(0));
}

/** Arrays of bytes one after another. */
export function joinBytes(pieces: readonly Uint8Array[]): Uint8Array {
  const joined = new Uint8Array(pieces.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const piece of pieces) {
    joined.set(piece, at);
    at += piece.length;
  }
  return joined;
}

export function areSameBytes(a: Uint8Array, b: Uint8Array): boolean {
  return a.length === b.length && a.every((byte, i) => byte === b[i]);
}
