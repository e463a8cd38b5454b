/** Reads traces (`writeTrace`) piece by piece, for the reader view. */
import { UsageError } from '../errors.js';
import { openSafetensors, type SafetensorsFile } from '../run/safetensors.js';
import type { SafeDtype } from '../run/safetensors-format.js';
import { TRACE_FORMAT } from './trace.js';
import type { TraceReaders, TraceText, TraceToken } from './trace-view.js';

const MAX_TOKENS = 1 << 20;

export class TraceFile {
  readonly #file: SafetensorsFile;
  readonly #shape: {
    readonly layers: number;
    readonly tokens: number;
    readonly groups: number;
    readonly slots: number;
  };

  /** Refuses a file that is not a trace. */
  constructor(path: string) {
    this.#file = openSafetensors(path);
    try {
      if (this.#file.metadata['format'] !== TRACE_FORMAT) throw this.#refusal(`its format is not ${TRACE_FORMAT}`);
      const [layers, tokens, groups, slots] = this.#expect('selected', 'I16', 4);
      if (!(tokens > 0 && tokens <= MAX_TOKENS && layers > 0 && groups > 0))
        throw this.#refusal('its shapes are out of range');
      const gates = this.#expect('gates', 'U8', 4);
      const same = [layers, tokens, groups, 3].every((extent, i) => extent === gates[i]);
      const vectors = [this.#expect('logprobs', 'F32', 1), this.#expect('piece_ends', 'I32', 1)];
      if (!same || vectors.some(([extent]) => extent !== tokens))
        throw this.#refusal('its tensors do not fit together');
      this.#expect('pieces', 'U8', 1);
      if (!(this.#blockSize > 0)) throw this.#refusal('l_sel is missing');
      this.#shape = { layers, tokens, groups, slots };
    } catch (error) {
      this.#file.close();
      throw error;
    }
  }

  text(): TraceText {
    const { layers, tokens, groups, slots } = this.#shape;
    const logprobs = Array.from(new Float32Array(this.#read('logprobs')), (value) =>
      Number.isFinite(value) ? Number(value.toFixed(4)) : null,
    );
    return {
      model: this.#file.metadata['model'] ?? '',
      step: Number(this.#file.metadata['step']) || null,
      layers,
      groups,
      slots,
      blockSize: this.#blockSize,
      window: Number(this.#file.metadata['window']) || 0,
      pieces: this.#pieces(tokens),
      logprobs,
      counts: this.#counts(),
    };
  }

  token(index: number): TraceToken {
    const { layers, tokens, groups, slots } = this.#shape;
    if (!Number.isSafeInteger(index) || index < 0 || index >= tokens)
      throw new UsageError(`token ${index}: the trace has tokens 0 to ${tokens - 1}`);
    const part = <Value>(name: string, width: number, bytes: number, view: (buffer: ArrayBuffer) => Value[]) =>
      Array.from({ length: layers }, (_, layer) => {
        const target = new Uint8Array(groups * width * bytes);
        this.#file.readPart(name, (layer * tokens + index) * target.length, target);
        const values = view(target.buffer);
        return Array.from({ length: groups }, (_, group) => values.slice(group * width, (group + 1) * width));
      });
    return {
      selected: part('selected', slots, 2, (buffer) => [...new Int16Array(buffer)]).map((layer) =>
        layer.map((blocks) => blocks.filter((block) => block >= 0)),
      ),
      gates: part('gates', 3, 1, (buffer) => [...new Uint8Array(buffer)].map((value) => value / 255)),
    };
  }

  readers(block: number): TraceReaders {
    const { tokens, groups, slots } = this.#shape;
    const counts = new Uint16Array(tokens);
    this.#eachLayer((selected) => {
      for (let i = 0; i < selected.length; i++)
        if (selected[i] === block) counts[Math.floor(i / (groups * slots))] += 1;
    });
    const all = Array.from(counts, (count, token): [number, number] => [token, count]);
    return { readers: all.filter(([, count]) => count > 0) };
  }

  /** The JSON answer to a path below that of the trace: '', `token/I` or `block/B`; undefined for any other. */
  answer([what, index]: readonly string[]): TraceText | TraceToken | TraceReaders | undefined {
    if (what === undefined) return this.text();
    if (what === 'token') return this.token(Number(index));
    return what === 'block' ? this.readers(Number(index)) : undefined;
  }

  close(): void {
    this.#file.close();
  }

  get #blockSize(): number {
    return Number(this.#file.metadata['l_sel']);
  }

  #counts(): number[][] {
    const blocks = Math.ceil(this.#shape.tokens / this.#blockSize);
    const all: number[][] = [];
    this.#eachLayer((selected) => {
      const counts = new Array<number>(blocks).fill(0);
      for (const block of selected) if (block >= 0 && block < blocks) counts[block] += 1;
      all.push(counts);
    });
    return all;
  }

  #eachLayer(use: (selected: Int16Array) => void): void {
    const { layers, tokens, groups, slots } = this.#shape;
    const target = new Uint8Array(tokens * groups * slots * 2);
    for (let layer = 0; layer < layers; layer++) {
      this.#file.readPart('selected', layer * target.length, target);
      use(new Int16Array(target.buffer));
    }
  }

  #pieces(tokens: number): string[] {
    const bytes = Buffer.from(this.#read('pieces'));
    const ends = new Int32Array(this.#read('piece_ends'));
    return Array.from({ length: tokens }, (_, i) => bytes.toString('utf8', i === 0 ? 0 : ends[i - 1], ends[i]));
  }

  #read(name: string): ArrayBuffer {
    const { begin, end } = this.#file.entry(name);
    const target = new Uint8Array(end - begin);
    this.#file.readInto(name, target);
    return target.buffer;
  }

  #expect(name: string, dtype: SafeDtype, dimensions: number): number[] {
    const entry = this.#file.entry(name);
    if (entry.dtype !== dtype || entry.shape.length !== dimensions)
      throw this.#refusal(`${name} is not ${dtype} with ${dimensions} dimensions`);
    return entry.shape;
  }

  #refusal(reason: string): UsageError {
    return new UsageError(`${this.#file.path}: not a trace: ${reason}; write one with trefoil eval selection --trace`);
  }
}
