/**
 * Decoding in float64, token after token, with selections that are given: what a device should have computed from the blocks
 * it selected. Either nothing is rounded but the weights, or numbers are where the device stores them, which shows what
 * bf16 does to a token.
 */
import { headsForward } from '../../model/heads-reference.js';
import type { LanguageModel } from '../../model/language-model.js';
import { headShapeOf, hiddenSize, rotaryShapeOf, sparseShapeOf } from '../../model/shape.js';
import { siluForward, swigluForward } from '../../ops/activation/reference.js';
import {
  type StepHistory,
  type StepProblem,
  stepForward,
  stepImportance,
} from '../../ops/attention/decode/step/reference.js';
import { gateForward } from '../../ops/attention/gate/reference.js';
import { linearForward } from '../../ops/linear/reference.js';
import { rmsnormForward } from '../../ops/rmsnorm/reference.js';
import { rotaryAngles } from '../../ops/rope/frequencies.js';
import { rounded } from '../../testing/devices.js';

/** Blocks that one token selected: [layer][group][slot], -1 behind the last. */
export type TokenSelection = readonly (readonly (readonly number[])[])[];

export interface Replayed {
  readonly logits: Float64Array;
  /** Importance of every block: [layer][group][block]. */
  readonly scores: readonly (readonly Float64Array[])[];
}

/** Rounds numbers as storing them does. */
export type Rounding = (values: Float64Array) => Float64Array;
export const toBf16: Rounding = (values) => rounded(values, 'bf16');
export const unrounded: Rounding = (values) => values;

/** `selected` i32 [layers, rows, groups, n] of one row. */
export function selectionOf(
  selected: ArrayLike<number>,
  [layers, rows, groups, n]: readonly number[],
  row: number,
): TokenSelection {
  return Array.from({ length: layers }, (_, layer) =>
    Array.from({ length: groups }, (_, group) => {
      const at = ((layer * rows + row) * groups + group) * n;
      return Array.from({ length: n }, (_, slot) => selected[at + slot]);
    }),
  );
}

const NOTHING = new Float64Array(0);
const EMPTY: StepHistory = {
  kCmp: NOTHING,
  vCmp: NOTHING,
  kSel: NOTHING,
  vSel: NOTHING,
  kWin: NOTHING,
  vWin: NOTHING,
  rawKeys: NOTHING,
  rawValues: NOTHING,
};

/** Parameters as they are, and rounded as the matrix products of a device take them, read once for all replays. */
export class ReplayWeights {
  readonly model: LanguageModel;
  readonly #values: ReadonlyMap<string, Float64Array>;
  readonly #rounded = new Map<string, Float64Array>();

  constructor(model: LanguageModel) {
    this.model = model;
    this.#values = new Map(model.parameters.map(({ name, value }) => [name, Float64Array.from(value.read())]));
  }

  value(name: string): Float64Array {
    const values = this.#values.get(name);
    if (!values) throw new Error(`this model has no parameter ${name}`);
    return values;
  }

  /** One row by a weight [outputs, inputs]. */
  multiply(x: Float64Array, name: string): Float64Array {
    const weight = this.#rounded.get(name) ?? toBf16(this.value(name));
    this.#rounded.set(name, weight);
    return linearForward(x, weight, 1, weight.length / x.length, x.length);
  }
}

export class StepReplay {
  readonly #weights: ReplayWeights;
  readonly #round: Rounding;
  readonly #problems: readonly StepProblem[];
  #histories: StepHistory[];
  #position = 0;

  constructor(weights: ReplayWeights, round: Rounding) {
    const { shape } = weights.model;
    this.#weights = weights;
    this.#round = round;
    this.#problems = Array.from({ length: shape.nLayers }, (_, layer) => {
      const phi = (part: string) => weights.value(`blocks.${layer}.attention.phi_${part}.weight`);
      return {
        heads: headShapeOf(shape),
        sparse: sparseShapeOf(shape),
        cmpRope: shape.nsa.cmpRope,
        windowRope: shape.nsa.rope === 'window',
        round,
        rope: rotaryAngles(rotaryShapeOf(shape)),
        phi: shape.nsa.phi === 'conv' ? { keys: phi('k'), values: phi('v') } : null,
      };
    });
    this.#histories = this.#problems.map(() => EMPTY);
  }

  /** A second replay that goes on from here. */
  fork(): StepReplay {
    const copy = new StepReplay(this.#weights, this.#round);
    copy.#histories = [...this.#histories];
    copy.#position = this.#position;
    return copy;
  }

  next(token: number, selection: TokenSelection): Replayed {
    const weights = this.#weights;
    const { shape } = weights.model;
    const [dim, hidden] = [shape.dim, hiddenSize(shape)];
    const normed = (x: Float64Array, name: string) => rmsnormForward(x, weights.value(name), shape.normEps);
    let x = toBf16(weights.value('embedding').slice(token * dim, (token + 1) * dim));
    const scores: Float64Array[][] = [];
    for (let layer = 0; layer < shape.nLayers; layer++) {
      const name = `blocks.${layer}`;
      const input = normed(x, `${name}.attention_norm`);
      const projection = this.#heads(`${name}.attention`, weights.multiply(input, `${name}.attention.qkv`));
      scores.push(stepImportance(this.#problems[layer], this.#histories[layer], projection, this.#position));
      const attended = this.#round(this.#attend(layer, projection, this.#gates(layer, input), selection[layer]));
      const middle = this.#added(x, weights.multiply(attended, `${name}.attention.out`));
      const up = weights.multiply(normed(middle, `${name}.mlp_norm`), `${name}.mlp.up`);
      const active = this.#round(shape.mlp === 'swiglu' ? swigluForward(up, hidden) : siluForward(up));
      x = this.#added(middle, weights.multiply(active, `${name}.mlp.down`));
    }
    this.#position += 1;
    return { logits: weights.multiply(normed(x, 'norm'), shape.tieEmbeddings ? 'embedding' : 'head'), scores };
  }

  /** The token goes into the history; the gated sum of its branches. */
  #attend(
    layer: number,
    projection: Float64Array,
    gates: Float64Array,
    selected: TokenSelection[number],
  ): Float64Array {
    const problem = this.#problems[layer];
    const blocks = selected.map((row) => row.filter((j) => j >= 0));
    const result = stepForward(problem, this.#histories[layer], projection, this.#position, blocks);
    this.#histories[layer] = result.history;
    return result.oCmp.map((value, i) => {
      const head = 3 * Math.floor(i / problem.heads.dv);
      return gates[head] * value + gates[head + 1] * result.oSel[i] + gates[head + 2] * result.oWin[i];
    });
  }

  /** Bias and norms of the projection, stored before and after. */
  #heads(name: string, projected: Float64Array): Float64Array {
    const { shape } = this.#weights.model;
    const stored = this.#round(projected);
    if (!shape.qkvBias && !shape.qkNorm) return stored;
    // At position 0 a rotation changes nothing but by the amplitude: here the heads are not rotated yet.
    const still = { ...rotaryAngles(rotaryShapeOf(shape)), amplitude: 1 };
    const parts = headsForward(shape, stored, (part) => this.#weights.value(`${name}.${part}`), [0], still);
    return this.#round(Float64Array.from(parts.flatMap((part) => Array.from(part))));
  }

  #gates(layer: number, input: Float64Array): Float64Array {
    const { nsa, nHeads } = this.#weights.model.shape;
    const fixed = (weights: readonly number[]) => Float64Array.from({ length: 3 * nHeads }, (_, i) => weights[i % 3]);
    if (nsa.forceUniformGate) return fixed([1 / 3, 1 / 3, 1 / 3]);
    const { forceBranch } = nsa;
    if (forceBranch !== 'none') return fixed(['cmp', 'sel', 'win'].map((name) => Number(name === forceBranch)));
    const name = `blocks.${layer}.attention.gate`;
    const bias = this.#weights.value(`${name}.bias`);
    const logits = this.#weights.multiply(input, `${name}.weight`).map((value, i) => value + bias[i]);
    return gateForward(logits, { kind: nsa.gate, temperature: nsa.gateTemp });
  }

  #added(a: Float64Array, b: Float64Array): Float64Array {
    return this.#round(a.map((value, i) => value + b[i]));
  }
}
