/**
 * Reading and writing safetensors files, the only form in which weights are stored, and filling a model from them. No file is
 * ever held as one buffer.
 */
import { createHash } from 'node:crypto';
import { closeSync } from 'node:fs';
import { UsageError } from '../errors.js';
import { fileError, openRegularFile, readFully, replaceFile, writeFully } from '../files.js';
import type { RowsInFile } from '../ops/linear/packed.js';
import { HashThread } from './hash-thread.js';
import {
  checkHeaderLength,
  dtypeNames,
  encodeHeader,
  isSafeDtype,
  layOut,
  PREFIX_BYTES,
  parseHeader,
  quote,
  type SafeTensor,
  type TensorEntry,
} from './safetensors-format.js';
import { changed, type TensorToWrite } from './tensor-source.js';

/** Bytes of a piece of a tensor that is copied. */
const PIECE_BYTES = 8 * 1024 * 1024;
/** Files from this size on are hashed in a thread of their own, which takes some milliseconds to start. */
const THREAD_BYTES = 64 * 1024 * 1024;

/** How a safetensors file is opened. */
export interface SafetensorsOptions {
  /** Symbolic links, as `openRegularFile` takes them. Default: followed. */
  readonly links?: 'followed' | 'refused' | 'in model';
}

/** How a safetensors file is written. */
export interface WriteSafetensorsOptions {
  /** Wait until the content and the name are on the disk. */
  fsync?: boolean;
  /** Called after each piece written with the total so far: progress, and the place where tests inject faults. */
  onWrite?: (bytesWritten: number) => void;
}

/** An open file whose header was checked; tensors are read one at a time. */
export class SafetensorsFile {
  readonly path: string;
  readonly metadata: Record<string, string>;
  readonly entries: ReadonlyMap<string, Readonly<TensorEntry>>;
  readonly #dataStart: number;
  readonly #descriptor: number;
  /** Memory of pieces that were read, for the next tensor: what is left to the garbage collector would add up. */
  #spare: Uint8Array | null = null;

  constructor(path: string, options: SafetensorsOptions = {}) {
    const { descriptor, size } = openRegularFile(path, options);
    try {
      const prefix = new Uint8Array(PREFIX_BYTES);
      const length = checkHeaderLength(path, prefix.subarray(0, readFully(descriptor, prefix, 0)), size);
      const text = new Uint8Array(length);
      if (readFully(descriptor, text, PREFIX_BYTES) < length) throw changed(path);
      this.path = path;
      this.#descriptor = descriptor;
      this.#dataStart = PREFIX_BYTES + length;
      ({ metadata: this.metadata, entries: this.entries } = parseHeader(path, text, size - this.#dataStart));
    } catch (error) {
      closeSync(descriptor);
      throw fileError('read', path, error);
    }
  }

  /** The entry of a tensor; a missing one is refused by name. */
  entry(name: string): Readonly<TensorEntry> {
    const entry = this.entries.get(name);
    if (entry === undefined) throw new UsageError(`${this.path}: there is no tensor ${quote(name)}`);
    return entry;
  }

  /** Reads the bytes of a tensor into `target`, which must have exactly their size. */
  readInto(name: string, target: Uint8Array): void {
    const { begin, end } = this.entry(name);
    if (target.length !== end - begin)
      throw new UsageError(`${this.path}: tensor ${quote(name)} has ${end - begin} bytes, expected ${target.length}`);
    this.readPart(name, 0, target);
  }

  /** Reads bytes `from` to `to` of a tensor piece by piece, always into the same memory. */
  *pieces(name: string, from: number, to: number): Generator<Uint8Array> {
    const size = Math.min(PIECE_BYTES, to - from);
    const memory = this.#spare !== null && this.#spare.length >= size ? this.#spare : new Uint8Array(size);
    this.#spare = null; // another caller's pieces have other memory
    try {
      for (let at = from; at < to; at += size) {
        const piece = memory.subarray(0, Math.min(size, to - at));
        this.readPart(name, at, piece);
        yield piece;
      }
    } finally {
      this.#spare = memory;
    }
  }

  /** Fills `target` with the bytes of a tensor from `offset` on. */
  readPart(name: string, offset: number, target: Uint8Array): void {
    const { begin, end } = this.entry(name);
    if (offset < 0 || begin + offset + target.length > end)
      throw new UsageError(`${this.path}: tensor ${quote(name)} has no bytes ${offset} to ${offset + target.length}`);
    try {
      if (readFully(this.#descriptor, target, this.#dataStart + begin + offset) < target.length)
        throw changed(this.path);
    } catch (error) {
      throw fileError('read', this.path, error);
    }
  }

  /** Where the rows of a tensor lie; valid while the file is open. */
  parts(name: string): readonly RowsInFile[] {
    const { begin, shape } = this.entry(name);
    return [{ descriptor: this.#descriptor, offset: this.#dataStart + begin, rows: shape[0] }];
  }

  /** Reads one tensor into memory of its own. */
  read(name: string): SafeTensor {
    const { dtype, shape, begin, end } = this.entry(name);
    const data = new Uint8Array(end - begin);
    this.readInto(name, data);
    return { dtype, shape: [...shape], data };
  }

  close(): void {
    closeSync(this.#descriptor);
  }
}

/** Opens a file and checks its header; the caller closes it. */
export function openSafetensors(path: string, options: SafetensorsOptions = {}): SafetensorsFile {
  return new SafetensorsFile(path, options);
}

/** Reads a whole file into memory. */
export function readSafetensors(path: string): { metadata: Record<string, string>; tensors: Map<string, SafeTensor> } {
  const file = openSafetensors(path);
  try {
    const tensors = new Map<string, SafeTensor>();
    for (const name of file.entries.keys()) tensors.set(name, file.read(name));
    return { metadata: file.metadata, tensors };
  } finally {
    file.close();
  }
}

/** Writes a file aside and renames it: a reader never sees a partial file under that name. */
export function writeSafetensors(
  path: string,
  tensors: Iterable<TensorToWrite>,
  metadata: Record<string, string> = {},
  options: WriteSafetensorsOptions = {},
): { bytes: number; sha256: string } {
  const byName = new Map<string, TensorToWrite>();
  const list = [...tensors];
  for (const tensor of list) {
    if (!isSafeDtype(tensor.dtype)) {
      throw new UsageError(`${path}: tensor ${quote(tensor.name)} has no dtype among ${dtypeNames().join(' ')}`);
    }
    byName.set(tensor.name, tensor);
  }
  const entries = layOut(path, list);
  const size = Math.max(0, ...[...entries.values()].map(({ end }) => end));
  const hash = size >= THREAD_BYTES ? new HashThread() : createHash('sha256');
  let bytes = 0;
  const count = (piece: Uint8Array): void => {
    hash.update(piece);
    bytes += piece.length;
    options.onWrite?.(bytes);
  };
  const write = (descriptor: number): void => {
    writeFully(descriptor, encodeHeader(entries, metadata), count);
    for (const [name, entry] of entries) {
      const source = byName.get(name)!.data;
      const data = typeof source === 'function' ? source() : source;
      const [needed, before] = [entry.end - entry.begin, bytes];
      const wrong = (given: number) =>
        new UsageError(`${path}: tensor ${quote(name)} has ${given} bytes, its shape needs ${needed}`);
      if (data instanceof Uint8Array && data.length !== needed) throw wrong(data.length);
      for (const piece of data instanceof Uint8Array ? [data] : data) writeFully(descriptor, piece, count);
      if (bytes - before !== needed) throw wrong(bytes - before);
    }
  };
  try {
    replaceFile(path, write, options.fsync ?? false);
    return { bytes, sha256: hash instanceof HashThread ? hash.digest() : hash.digest('hex') };
  } finally {
    if (hash instanceof HashThread) hash.free();
  }
}
