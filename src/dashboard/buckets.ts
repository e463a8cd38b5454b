/**
 * A summary of a log of any length in bounded memory. Rows are collected into buckets; when all buckets are in use,
 * neighbours are merged and every bucket covers twice as many rows. A bucket keeps minimum, maximum and last value of each
 * column, so a single spike in a million rows is never lost.
 */
import type { ChartData, ColumnBuckets } from './chart-data.js';

interface Column {
  readonly min: Float64Array;
  readonly max: Float64Array;
  readonly last: Float64Array;
  /** 1 where the minimum occurred before the maximum. */
  readonly minFirst: Uint8Array;
}

export class Buckets {
  readonly columns: readonly string[];
  readonly capacity: number;
  readonly #data: readonly Column[];
  readonly #steps: readonly [Float64Array, Float64Array];
  readonly #times: readonly [Float64Array, Float64Array];
  /** Byte offset of the first row. */
  readonly #offsets: Float64Array;
  readonly #rows: Uint32Array;
  #count = 0;
  /** Rows that fill a bucket. */
  #size = 1;

  constructor(columns: readonly string[], capacity: number) {
    this.columns = columns;
    this.capacity = capacity;
    const array = () => new Float64Array(capacity);
    this.#data = columns.map(() => ({
      min: array(),
      max: array(),
      last: array(),
      minFirst: new Uint8Array(capacity),
    }));
    this.#steps = [array(), array()];
    this.#times = [array(), array()];
    this.#offsets = array();
    this.#rows = new Uint32Array(capacity);
  }

  get count(): number {
    return this.#count;
  }

  /** The newest step; -Infinity without rows. */
  get lastStep(): number {
    return this.#count === 0 ? Number.NEGATIVE_INFINITY : this.#steps[1][this.#count - 1];
  }

  /** Adds a row. A step that is not above the last one replaces the rows from it on: a resumed run repeats steps. */
  add(step: number, time: number, values: ArrayLike<number>, offset = 0): void {
    if (step <= this.lastStep) this.#rewind(step);
    if (this.#isFull && this.#count === this.capacity) this.#merge();
    if (this.#isFull) this.#open(step, time, offset);
    const i = this.#count - 1;
    this.#steps[1][i] = step;
    this.#times[1][i] = time;
    this.#rows[i] += 1;
    this.#data.forEach((column, c) => {
      const value = values[c];
      if (!Number.isFinite(value)) return;
      column.last[i] = value;
      if (!(value >= column.min[i])) {
        column.min[i] = value;
        column.minFirst[i] = 0;
      }
      if (!(value <= column.max[i])) {
        column.max[i] = value;
        column.minFirst[i] = 1;
      }
    });
  }

  /** The buckets that overlap a range of steps. */
  chartData(from: number, to: number, offset: number, size: number): ChartData {
    const [begin, end] = this.range(from, to);
    const part = (array: Float64Array) => array.slice(begin, end);
    const values = new Map<string, ColumnBuckets>();
    this.columns.forEach((name, c) => {
      const { min, max, last, minFirst } = this.#data[c];
      const [first, second] = [part(min), part(max)];
      for (let i = begin; i < end; i++) if (minFirst[i] === 0) [first[i - begin], second[i - begin]] = [max[i], min[i]];
      values.set(name, { first, second, last: part(last) });
    });
    return {
      columns: this.columns,
      buckets: end - begin,
      offset,
      size,
      values,
      exact: this.#rows.subarray(begin, end).every((rows) => rows === 1),
      steps: [part(this.#steps[0]), part(this.#steps[1])],
      times: [part(this.#times[0]), part(this.#times[1])],
    };
  }

  /** Indices [begin, end) of the buckets that overlap a range of steps. */
  range(from: number, to: number): [begin: number, end: number] {
    let begin = 0;
    while (begin < this.#count && this.#steps[1][begin] < from) begin++;
    let end = begin;
    while (end < this.#count && this.#steps[0][end] <= to) end++;
    return [begin, end];
  }

  /** Bytes of the file behind buckets [begin, end); `fileEnd` ends the last bucket. */
  bytes([begin, end]: readonly [number, number], fileEnd: number): [from: number, to: number] {
    if (begin >= end) return [fileEnd, fileEnd];
    return [this.#offsets[begin], end < this.#count ? this.#offsets[end] : fileEnd];
  }

  /** Whether a row needs a new bucket. */
  get #isFull(): boolean {
    return this.#count === 0 || this.#rows[this.#count - 1] >= this.#size;
  }

  clear(): void {
    this.#count = 0;
    this.#size = 1;
  }

  #open(step: number, time: number, offset: number): void {
    const i = this.#count++;
    this.#steps[0][i] = step;
    this.#times[0][i] = time;
    this.#offsets[i] = offset;
    this.#rows[i] = 0;
    for (const { min, max, last, minFirst } of this.#data) {
      min[i] = max[i] = last[i] = Number.NaN;
      minFirst[i] = 1;
    }
  }

  /** Drops rows from `step` on. A bucket that straddles it keeps its extremes: those values did occur. */
  #rewind(step: number): void {
    while (this.#count > 0 && this.#steps[0][this.#count - 1] >= step) this.#count--;
    const last = this.#steps[1];
    if (this.#count > 0) last[this.#count - 1] = Math.min(last[this.#count - 1], step - 1);
  }

  #merge(): void {
    const half = Math.ceil(this.#count / 2);
    for (let i = 0; i < half; i++) {
      const [a, b] = [2 * i, Math.min(2 * i + 1, this.#count - 1)];
      this.#steps[0][i] = this.#steps[0][a];
      this.#steps[1][i] = this.#steps[1][b];
      this.#times[0][i] = this.#times[0][a];
      this.#times[1][i] = this.#times[1][b];
      this.#offsets[i] = this.#offsets[a];
      this.#rows[i] = a === b ? this.#rows[a] : this.#rows[a] + this.#rows[b];
      for (const column of this.#data) mergeColumn(column, a, b, i);
    }
    this.#count = half;
    this.#size *= 2;
  }
}

/** Bucket `into` becomes the union of neighbours `a` and `b`; NaN is an empty bucket. */
function mergeColumn({ min, max, last, minFirst }: Column, a: number, b: number, into: number): void {
  const [minA, minB, maxA, maxB] = [min[a], min[b], max[a], max[b]];
  const minIsLeft = Number.isNaN(minB) || minA <= minB;
  const maxIsLeft = Number.isNaN(maxB) || maxA >= maxB;
  const order = minIsLeft === maxIsLeft ? minFirst[minIsLeft ? a : b] : Number(minIsLeft);
  const value = Number.isNaN(last[b]) ? last[a] : last[b];
  min[into] = minIsLeft ? minA : minB;
  max[into] = maxIsLeft ? maxA : maxB;
  last[into] = value;
  minFirst[into] = order;
}
