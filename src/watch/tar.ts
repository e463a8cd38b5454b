/**
 * Writes tar archives (POSIX ustar, with GNU's binary sizes from 8 GiB on). Own code, because the log of an active run must
 * be stored with the size it had, complete lines only, which tar programs do not support.
 */
const BLOCK = 512;
const NAME_BYTES = 100;
const PREFIX_BYTES = 155;
const LARGEST_OCTAL = 8 ** 11;

export interface TarEntry {
  /** With forward slashes. */
  readonly name: string;
  readonly size: number;
  /** Seconds since 1970. */
  readonly mtime: number;
}

export function tarHeader({ name, size, mtime }: TarEntry): Uint8Array {
  const header = Buffer.alloc(BLOCK);
  const [prefix, rest] = splitName(name);
  header.write(rest, 0, NAME_BYTES, 'utf8');
  header.write(octal(0o644, 8), 100, 'latin1');
  header.write(octal(0, 8), 108, 'latin1');
  header.write(octal(0, 8), 116, 'latin1');
  if (size < LARGEST_OCTAL) header.write(octal(size, 12), 124, 'latin1');
  else {
    header[124] = 0x80;
    header.writeBigUInt64BE(BigInt(size), 128);
  }
  header.write(octal(Math.max(0, Math.floor(mtime)), 12), 136, 'latin1');
  header.write(' '.repeat(8), 148, 'latin1'); // the checksum counts as spaces
  header.write('0', 156, 'latin1');
  header.write('ustar\u000000', 257, 'latin1');
  header.write(prefix, 345, PREFIX_BYTES, 'utf8');
  const sum = header.reduce((total, byte) => total + byte, 0);
  header.write(`${sum.toString(8).padStart(6, '0')}\0 `, 148, 'latin1');
  return header;
}

/** Padding after a file, up to the next block. */
export function tarPadding(size: number): Uint8Array {
  return new Uint8Array((BLOCK - (size % BLOCK)) % BLOCK);
}

export function tarEnd(): Uint8Array {
  return new Uint8Array(2 * BLOCK);
}

function octal(value: number, width: number): string {
  return `${value.toString(8).padStart(width - 1, '0')}\0`;
}

function splitName(name: string): [prefix: string, rest: string] {
  if (Buffer.byteLength(name) <= NAME_BYTES) return ['', name];
  for (let at = name.indexOf('/'); at > 0; at = name.indexOf('/', at + 1)) {
    const [prefix, rest] = [name.slice(0, at), name.slice(at + 1)];
    if (Buffer.byteLength(prefix) <= PREFIX_BYTES && Buffer.byteLength(rest) <= NAME_BYTES) return [prefix, rest];
  }
  throw new RangeError(`${name}: too long for a tar archive`);
}
