/** Safetensors in a page: read from a Blob or from an address, a range at a time, and written as a Blob. */
import { TrefoilError, UsageError } from '../errors.js';
import {
  checkHeaderLength,
  encodeHeader,
  layOut,
  PREFIX_BYTES,
  parseHeader,
  quote,
  type SafeTensor,
  type TensorEntry,
  toFloat32,
} from '../run/safetensors-format.js';
import { expectFloatEntry, expectNoOthers, modelTensors, type TensorNames } from '../run/tensor-source.js';
import type { Parameter } from '../tensor/parameter.js';

/** A file that the user gave the page, or its address. Files are never read whole where the server knows ranges. */
export type TensorContent = Blob | URL | string;

/**
 * Reads bytes `from` to `to`.
 *
 * @opaque
 */
interface Ranges {
  readonly size: number;
  read(from: number, to: number): Promise<Uint8Array>;
}

/** Tensors by name in a safetensors file of a page, read one at a time. */
export class BrowserTensors implements TensorNames {
  readonly path: string;
  readonly metadata: Readonly<Record<string, string>>;
  readonly entries: TensorNames['entries'];
  readonly #places: ReadonlyMap<string, Readonly<TensorEntry>>;
  /** Size of the whole file. */
  readonly bytes: number;
  readonly #ranges: Ranges;
  readonly #dataStart: number;

  private constructor(path: string, ranges: Ranges, header: Uint8Array) {
    this.path = path;
    this.bytes = ranges.size;
    this.#ranges = ranges;
    this.#dataStart = PREFIX_BYTES + header.length;
    ({ metadata: this.metadata, entries: this.#places } = parseHeader(path, header, ranges.size - this.#dataStart));
    this.entries = this.#places;
  }

  /** Reads and checks the header. */
  static async open(content: TensorContent): Promise<BrowserTensors> {
    const isBlob = content instanceof Blob;
    const path = isBlob ? nameOf(content) : String(content);
    const ranges = isBlob ? rangesOfBlob(content) : await rangesOfAddress(content);
    const prefix = await ranges.read(0, Math.min(PREFIX_BYTES, ranges.size));
    const length = checkHeaderLength(path, prefix, ranges.size);
    return new BrowserTensors(path, ranges, await ranges.read(PREFIX_BYTES, PREFIX_BYTES + length));
  }

  /** Reads one tensor. */
  async read(name: string): Promise<SafeTensor> {
    const entry = this.#places.get(name);
    if (!entry) throw new UsageError(`${this.path}: there is no tensor ${quote(name)}`);
    const { dtype, shape, begin, end } = entry;
    const data = await this.#ranges.read(this.#dataStart + begin, this.#dataStart + end);
    return { dtype, shape: [...shape], data };
  }
}

function nameOf(content: Blob): string {
  return (content as { readonly name?: string }).name ?? 'model.safetensors';
}

function rangesOfBlob(blob: Blob): Ranges {
  return {
    size: blob.size,
    read: async (from, to) => new Uint8Array(await blob.slice(from, to).arrayBuffer()),
  };
}

/** Ranges of a file on a server. One that does not know ranges sends it whole, once. */
async function rangesOfAddress(address: URL | string): Promise<Ranges> {
  const ask = async (from: number, to: number) => {
    const response = await fetch(address, { headers: { Range: `bytes=${from}-${to - 1}` } });
    if (!response.ok) throw new TrefoilError(`${address}: the server answers ${response.status}; check the address`);
    return response;
  };
  const first = await ask(0, PREFIX_BYTES);
  const size = Number(/\/(\d+)$/.exec(first.headers.get('content-range') ?? '')?.[1]);
  if (first.status !== 206 || !Number.isSafeInteger(size)) return rangesOfBlob(await first.blob());
  await first.arrayBuffer();
  return {
    size,
    read: async (from, to) => {
      if (from === to) return new Uint8Array();
      const bytes = new Uint8Array(await (await ask(from, to)).arrayBuffer());
      if (bytes.length !== to - from) throw new TrefoilError(`${address}: changed while it was read; load it again`);
      return bytes;
    },
  };
}

/** Fills the weights of a model from a file that must hold exactly these, one tensor in memory at a time. */
export async function loadTensors(
  source: BrowserTensors,
  model: { readonly parameters: readonly Parameter[] },
): Promise<void> {
  expectNoOthers(source, model);
  for (const { name, value } of model.parameters) expectFloatEntry(source, name, value.shape);
  for (const parameter of model.parameters) {
    const values = toFloat32(await source.read(parameter.name))!;
    parameter.value.writeBytes(new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
    parameter.changed();
  }
}

/** The weights of a model as the content of model.safetensors. */
export function safetensorsBlob(model: { readonly parameters: readonly Parameter[] }): Blob {
  const tensors = [...modelTensors(model)];
  const entries = layOut('model.safetensors', tensors);
  const byName = new Map(tensors.map((tensor) => [tensor.name, tensor]));
  const parts = [encodeHeader(entries, { format: 'trefoil' })];
  for (const name of entries.keys()) {
    const { data } = byName.get(name)!;
    const bytes = typeof data === 'function' ? data() : data;
    parts.push(...(bytes instanceof Uint8Array ? [bytes] : bytes));
  }
  return new Blob(parts as Uint8Array<ArrayBuffer>[], { type: 'application/octet-stream' });
}
