/**
 * Brings prefixes from files to the device: pieces are read by the threads of the runtime, and copied to the device while the
 * next ones are read. The device verifies a file before a sequence is continued with it.
 */
import type { Device, HostMemory } from '../../../device/device.js';
import { hostMemory } from '../../../device/host-memory.js';
import type { CachedSequence, DecodeCache } from '../../../model/cache.js';
import { checksums } from '../../../ops/checksum/op.js';
import { Tensor } from '../../../tensor/tensor.js';
import type { OpenPrefixFile, PrefixFiles } from './files.js';
import type { PrefixKeys } from './keys.js';

/** Pieces of files that are read at the same time, by as many threads as the runtime has (UV_THREADPOOL_SIZE). */
const READ_AHEAD = 24;
/** Bytes of a piece. */
const PIECE = 4 * 2 ** 20;
/** Copies to the device that are not waited for. */
const IN_FLIGHT = 8;

/** A load that is continued between steps. */
export interface PrefixLoad {
  readonly keys: PrefixKeys;
  /** Fewer tokens than this are loaded. */
  readonly length: number;
  /** Holds whole blocks. */
  readonly sequence: CachedSequence;
  isWanted(): boolean;
  /** Called when the sequence holds `count` more tokens. */
  onFile(count: number): void;
}

export class PrefixReader {
  readonly #cache: DecodeCache;
  readonly #files: PrefixFiles;
  readonly #block: number;
  readonly #buffers: ReadBuffers;

  constructor(cache: DecodeCache, files: PrefixFiles, block: number) {
    this.#cache = cache;
    this.#files = files;
    this.#block = block;
    this.#buffers = new ReadBuffers(cache.device, READ_AHEAD, PIECE);
  }

  /** Extends the sequence by the longest chain of files that are there and sound, while it is wanted. */
  async load(load: PrefixLoad): Promise<void> {
    const chain = await this.#chain(load);
    const buffers = this.#buffers;
    const pieces = chain.flatMap((file) =>
      Array.from({ length: Math.ceil(file.size / PIECE) }, (_, i) => ({ file, offset: i * PIECE })),
    );
    const reads: Promise<HostMemory | null>[] = [];
    let isOver = false;
    let taken = 0;
    let packed: Tensor | null = null;
    try {
      while (taken < pieces.length) {
        while (reads.length < Math.min(pieces.length, taken + READ_AHEAD))
          reads.push(readPiece(buffers, pieces[reads.length], () => isOver));
        const { file, offset } = pieces[taken];
        const memory = await reads[taken];
        if (!memory) break;
        taken += 1;
        if (!load.isWanted()) {
          buffers.give(memory);
          break;
        }
        packed ??= Tensor.empty(this.#cache.device, [file.size / 2], 'bf16');
        const bytes = Math.min(PIECE, file.size - offset);
        buffers.upload(memory, packed.pointer + BigInt(offset), bytes);
        if (offset + bytes < file.size) continue;
        const isSound = this.#append(load, file, packed);
        packed.free();
        packed = null;
        if (isSound) continue;
        await this.#files.discard(file.key);
        break;
      }
    } finally {
      isOver = true;
      buffers.settle();
      packed?.free();
      for (const read of reads.slice(taken)) {
        const memory = await read;
        if (memory) buffers.give(memory);
      }
      for (const file of chain) await file.close();
    }
  }

  /** To be called when no load is under way. */
  free(): void {
    this.#buffers.free();
  }

  /** Files that continue the sequence as far as possible, each the one before it. */
  async #chain({ keys, length, sequence }: PrefixLoad): Promise<OpenPrefixFile[]> {
    const start = sequence.length;
    const ends: number[] = [];
    for (let end = start + this.#block; end < length; end += this.#block) ends.push(end);
    const sizeFrom = (end: number) => (from: number) =>
      from < end && from % this.#block === 0 ? this.#cache.blockPageBytes(from, end) : Number.NaN;
    const found = await Promise.all(ends.map((end) => this.#files.open(keys.at(end), sizeFrom(end))));
    const chains = new Map<number, readonly OpenPrefixFile[]>([[start, []]]);
    let longest: readonly OpenPrefixFile[] = [];
    for (const [i, file] of found.entries()) {
      const before = file ? chains.get(file.from) : undefined;
      if (!file || !before) continue;
      longest = [...before, file];
      chains.set(ends[i], longest);
    }
    for (const file of found) if (file && !longest.includes(file)) await file.close();
    return [...longest];
  }

  /** Adds the content of a file to the sequence; false if the content is not what was written. */
  #append({ sequence, keys, onFile }: PrefixLoad, { key, from, sum }: OpenPrefixFile, packed: Tensor): boolean {
    const { device } = this.#cache;
    if (checksums(device, [packed])[0] !== sum) return false;
    const count = keys.lengthOf(key) - from;
    this.#cache.append(sequence, count);
    let offset = 0n;
    for (const { pointer, bytes } of joined(this.#cache.blockPages(sequence, from))) {
      device.copy(pointer, packed.pointer + offset, bytes);
      offset += BigInt(bytes);
    }
    onFile(count);
    return true;
  }
}

/** Memory of the pages, those that follow each other as one. */
export function joined(pages: readonly Tensor[]): { pointer: bigint; bytes: number }[] {
  const all: { pointer: bigint; bytes: number }[] = [];
  for (const { pointer, bytes } of pages) {
    const last = all.at(-1);
    if (last && last.pointer + BigInt(last.bytes) === pointer) last.bytes += bytes;
    else all.push({ pointer, bytes });
  }
  return all;
}

/** Reads a piece of a file into a buffer, unless `isOver` by the time there is one. */
async function readPiece(
  buffers: ReadBuffers,
  { file, offset }: { readonly file: OpenPrefixFile; readonly offset: number },
  isOver: () => boolean,
): Promise<HostMemory | null> {
  const memory = await buffers.take();
  if (!isOver() && (await file.read(memory.bytes.subarray(0, Math.min(PIECE, file.size - offset)), offset)))
    return memory;
  buffers.give(memory);
  return null;
}

/** A fixed number of buffers for pieces of files, on their way to the device. */
class ReadBuffers {
  readonly #all: readonly HostMemory[];
  readonly #free: HostMemory[];
  readonly #waiting: ((memory: HostMemory) => void)[] = [];
  /** Buffers that the device copies from, the oldest first. */
  readonly #copied: { readonly memory: HostMemory; readonly wait: () => void }[] = [];

  constructor(device: Device, count: number, bytes: number) {
    this.#all = Array.from({ length: count }, () => hostMemory(device, bytes));
    this.#free = [...this.#all];
  }

  /** A buffer; waits until one is given back if all are taken, in the order of the calls. */
  async take(): Promise<HostMemory> {
    return this.#free.pop() ?? new Promise((resolve) => this.#waiting.push(resolve));
  }

  give(memory: HostMemory): void {
    const next = this.#waiting.shift();
    if (next) next(memory);
    else this.#free.push(memory);
  }

  /** Starts to copy the first bytes of a buffer to the device, and gives it back when that is done. */
  upload(memory: HostMemory, address: bigint, bytes: number): void {
    this.#copied.push({ memory, wait: memory.upload(address, bytes) });
    if (this.#copied.length > IN_FLIGHT) this.#settleOldest();
  }

  /** Waits for all copies. */
  settle(): void {
    while (this.#copied.length > 0) this.#settleOldest();
  }

  #settleOldest(): void {
    const oldest = this.#copied.shift();
    if (!oldest) return;
    oldest.wait();
    this.give(oldest.memory);
  }

  /** To be called when all buffers were given back. */
  free(): void {
    for (const memory of this.#all) memory.free();
  }
}
