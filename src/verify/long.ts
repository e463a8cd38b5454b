/**
 * Long sequences, checked at a sample of queries: outputs at those rows equal the float64 reference, and with a
 * gradient that is zero everywhere else, the gradients of all keys and values can be computed from those rows alone.
 */
import { freemem } from 'node:os';
import type { Device } from '../device/device.js';
import { attendBackward, attendForward, range, scores, softmax } from '../ops/attention/branch-reference.js';
import { combineBackward, combineForward } from '../ops/attention/combine/reference.js';
import { nativeSparseAttention, type SparseOptions } from '../ops/attention/nsa.js';
import { isSelection, overlap } from '../ops/attention/select/reference.js';
import type { HeadShape } from '../ops/attention/shape.js';
import { castInto } from '../ops/cast/op.js';
import { compressedCount } from '../ops/common/sequences.js';
import { fillNormal, fillUniform } from '../tensor/random/op.js';
import type { Tensor } from '../tensor/tensor.js';
import { type CaseShapes, gradientName, INPUT_NAMES, type InputName, inputShapes } from './cases.js';
import { check, type Finding, TOLERANCE, type VerifyCheck, Worst } from './check.js';
import { record, withSequences } from './core.js';
import { addTo, randomValues, relativeError } from './numbers.js';

export interface LongCase extends Omit<CaseShapes, 'lengths'> {
  readonly name: string;
  readonly length: number;
}

const CASES: readonly LongCase[] = [
  {
    name: 'S = 8192, the 125m shape, sampled rows',
    length: 8192,
    heads: { heads: 12, groups: 2, dk: 64, dv: 64 },
    sparse: { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 },
  },
  {
    name: 'S = 65,601, sampled rows',
    length: 65_601,
    heads: { heads: 4, groups: 2, dk: 32, dv: 32 },
    sparse: { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 },
  },
  {
    // 65,601 * 64 * 128 numbers of 4 bytes: offsets into q and dq do not fit 32 bits.
    name: 'S = 65,601, queries of more than 2^31 bytes, sampled rows',
    length: 65_601,
    heads: { heads: 64, groups: 4, dk: 128, dv: 8 },
    sparse: { l: 128, d: 128, lSel: 128, nSel: 3, w: 64 },
  },
];

export function longChecks(device: Device): VerifyCheck[] {
  return CASES.map((example) => check('9 shapes', example.name, TOLERANCE, () => sampled(device, example)));
}

/** The check itself, for any length. In bf16 gates are non-negative, as the fused kernels require. */
export function sampled(
  device: Device,
  { length, heads, sparse }: LongCase,
  dtype: 'f32' | 'bf16' = 'f32',
  options: SparseOptions = {},
): Finding {
  const shapes: CaseShapes = { lengths: [length], heads, sparse };
  const sizes = inputShapes(shapes);
  const bytes = INPUT_NAMES.reduce((total, name) => total + 4 * sizes[name].reduce((a, b) => a * b), 0);
  const needed = bytes * 4; // inputs, their gradients, outputs, and packed copies inside the kernels
  if (device.kind === 'cpu' && freemem() < needed)
    return { skipped: `needs ${(needed / 2 ** 30).toFixed(1)} GiB of free memory` };
  const rows = sampleRows(length, sparse.w);
  try {
    return withSequences(device, [length], (tokens, tape) => {
      const inputs = record(INPUT_NAMES, (name) => {
        const numbers = tape.empty(sizes[name]);
        const source = { seed: 51, stream: INPUT_NAMES.indexOf(name) };
        if (name === 'gates' && dtype === 'bf16') fillUniform(numbers, source);
        else fillNormal(numbers, source);
        if (name === 'gates' || dtype === 'f32') return tape.watch(numbers);
        const tensor = tape.watch(tape.empty(sizes[name], dtype));
        castInto(device, numbers, tensor);
        tape.drop(numbers);
        return tensor;
      });
      const results = nativeSparseAttention(tape, inputs, tokens, sparse, options);
      const selected = results.selected.read() as Int32Array;
      const out = rows.map((row) => readRow(results.out, row));
      const dOut = tape.zeros(results.out.shape, dtype);
      const dRows = rows.map((row, i) => {
        dOut.rows(row, row + 1).write(randomValues(heads.heads * heads.dv, 60 + i));
        return readRow(dOut, row); // as rounded
      });
      tape.backward(results.out, dOut);
      const reference = new SampledReference(shapes, inputs);
      const worst = new Worst();
      const rowsTogether = new Map<string, [actual: number[], expected: number[]]>();
      // In bf16 a row whose gradient nearly cancels keeps few digits: limits hold for all rows together.
      const compare = (name: string, actual: Float64Array, expected: Float64Array, at: string) => {
        if (dtype === 'f32') {
          worst.add(relativeError(actual, expected), `${name} is off at ${at}`);
          return;
        }
        const [a, b] = rowsTogether.get(name) ?? [[], []];
        rowsTogether.set(name, [
          [...a, ...actual],
          [...b, ...expected],
        ]);
      };
      for (const [i, row] of rows.entries()) {
        const at = `token ${row}`;
        const expected = reference.row(row, selected, dRows[i]);
        if (expected.wrong) {
          worst.add(1, expected.wrong);
          continue;
        }
        const dq = readRow(tape.gradient(inputs.q)!, row);
        const dGates = readRow(tape.gradient(inputs.gates)!, row);
        compare('out', out[i], expected.out, at);
        compare('dq', dq, expected.dq, at);
        compare('d_gates', dGates, expected.dGates, at);
        if (rows.includes(row + 1) || row + 1 === length) continue;
        const beside = readRow(tape.gradient(inputs.q)!, row + 1).some((value) => value !== 0);
        worst.add(beside ? 1 : 0, `dq is not zero at token ${row + 1}, whose output got no gradient`);
      }
      for (const [name, [actual, expected]] of rowsTogether)
        worst.add(relativeError(actual, expected), `${name} is off`);
      for (const name of KEY_NAMES)
        worst.add(
          relativeError(tape.gradient(inputs[name])!.read(), reference.gradients[name]),
          `${gradientName(name)} is off`,
        );
      return worst.finding;
    });
  } finally {
    device.pool.trim(); // gigabytes that nothing after this needs
  }
}

/** The ends, both sides of every kind of edge, and rows in between. */
function sampleRows(length: number, w: number): number[] {
  const edges = [0, 1, 63, 64, w - 1, w, w + 1, 1023, 1024, length - 65, length - 2, length - 1];
  const spread = range(1, 20).map((i) => Math.floor((length * i) / 20) + ((i * 37) % 64));
  return [...new Set([...edges, ...spread])].filter((row) => row < length).sort((a, b) => a - b);
}

/** One row of a tensor that may exceed the size limit of typed arrays. */
function readRow(tensor: Tensor, row: number): Float64Array {
  return Float64Array.from(tensor.rows(row, row + 1).read());
}

const KEY_NAMES = ['kCmp', 'vCmp', 'kSel', 'vSel', 'kWin', 'vWin'] as const;
type KeyName = (typeof KEY_NAMES)[number];
const BRANCHES = [
  ['kCmp', 'vCmp'],
  ['kSel', 'vSel'],
  ['kWin', 'vWin'],
] as const;

/** The reference for one query at a time, over gathered keys; gradients of keys and values add up from row to row. */
class SampledReference {
  readonly gradients: Record<KeyName, Float64Array>;
  readonly #shapes: CaseShapes;
  readonly #inputs: Record<InputName, Tensor>;
  readonly #values: Record<KeyName, ArrayLike<number>>;
  /** The heads of one group. */
  readonly #group: HeadShape;

  constructor(shapes: CaseShapes, inputs: Record<InputName, Tensor>) {
    const { heads, groups, dk, dv } = shapes.heads;
    this.#shapes = shapes;
    this.#inputs = inputs;
    this.#group = { heads: heads / groups, groups: 1, dk, dv };
    this.#values = record(KEY_NAMES, (name) => inputs[name].read());
    this.gradients = record(KEY_NAMES, (name) => new Float64Array(inputs[name].size));
  }

  row(token: number, selected: Int32Array, dOut: Float64Array) {
    const { groups, dk, dv } = this.#shapes.heads;
    const { nSel } = this.#shapes.sparse;
    const { heads: h } = this.#group;
    const q = readRow(this.#inputs.q, token);
    const gates = readRow(this.#inputs.gates, token);
    const outputs = BRANCHES.map(() => new Float64Array(groups * h * dv)) as [Float64Array, Float64Array, Float64Array];
    const dq = new Float64Array(q.length);
    let wrong: string | null = null;
    const problems = range(0, groups).flatMap((group) => {
      const query = q.slice(group * h * dk, (group + 1) * h * dk);
      const at = (token * groups + group) * nSel;
      const blocks = selected.subarray(at, at + nSel);
      if (!isSelection(this.#importance(token, group, query), blocks))
        wrong = `token ${token}, group ${group} selects [${blocks.join(', ')}], which are not its best blocks`;
      return BRANCHES.map(([keyName, valueName], branch) => {
        const keys = this.#visible(token, branch, blocks);
        const k = this.#gather(keyName, keys, group, dk);
        const v = this.#gather(valueName, keys, group, dv);
        const all = range(0, keys.length);
        outputs[branch].set(attendForward(query, k, v, this.#group, () => all).out, group * h * dv);
        return { group, branch, query, keys, k, v, all };
      });
    });
    const { dGates, dBranches } = combineBackward(gates, outputs, dOut);
    for (const { group, branch, query, keys, k, v, all } of problems) {
      const d = dBranches[branch].slice(group * h * dv, (group + 1) * h * dv);
      const gradient = attendBackward(query, k, v, this.#group, () => all, d);
      addTo(dq.subarray(group * h * dk), gradient.dq);
      const [keyName, valueName] = BRANCHES[branch];
      this.#scatter(keyName, keys, group, dk, gradient.dk);
      this.#scatter(valueName, keys, group, dv, gradient.dv);
    }
    return { out: combineForward(gates, outputs), dq, dGates, wrong: wrong as string | null };
  }

  #visible(token: number, branch: number, blocks: Int32Array): number[] {
    const { l, d, lSel, w } = this.#shapes.sparse;
    if (branch === 0) return range(0, compressedCount(token + 1, l, d));
    if (branch === 2) return range(Math.max(0, token - w + 1), token + 1);
    const chosen = [...blocks].filter((block) => block >= 0);
    return chosen.flatMap((block) => range(block * lSel, Math.min((block + 1) * lSel, token + 1)));
  }

  #importance(token: number, group: number, query: Float64Array): Float64Array {
    const { sparse } = this.#shapes;
    const { l, d, lSel } = sparse;
    const total = new Float64Array(Math.floor(token / lSel) + 1);
    const keys = range(0, compressedCount(token + 1, l, d));
    const k = this.#gather('kCmp', keys, group, this.#group.dk);
    for (let head = 0; head < this.#group.heads; head++) {
      const { probabilities } = softmax(scores(query, k, this.#group, head, 0, keys));
      for (const i of keys)
        for (let j = Math.floor((i * d) / lSel); j * lSel < i * d + l && j < total.length; j++)
          total[j] += overlap(i, j, sparse) * probabilities[i];
    }
    return total;
  }

  #gather(name: KeyName, rows: readonly number[], group: number, size: number): Float64Array {
    const { groups } = this.#shapes.heads;
    const values = this.#values[name];
    const gathered = new Float64Array(rows.length * size);
    rows.forEach((row, i) => {
      for (let c = 0; c < size; c++) gathered[i * size + c] = values[(row * groups + group) * size + c];
    });
    return gathered;
  }

  #scatter(name: KeyName, rows: readonly number[], group: number, size: number, values: Float64Array): void {
    const { groups } = this.#shapes.heads;
    const into = this.gradients[name];
    rows.forEach((row, i) => {
      for (let c = 0; c < size; c++) into[(row * groups + group) * size + c] += values[i * size + c];
    });
  }
}
