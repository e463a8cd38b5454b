/**
 * Decoding in float64, token after token, with selections that are given: what a device in bf16 should have computed from
 * the blocks it selected. Numbers are rounded where the device stores them. So an error of the device shows as such, and a
 * block that it preferred shows by how much it scored less than one that was left out: nothing, or the width of a near tie.
 */
import type { LanguageModel } from '../../model/language-model.js';
import { headShapeOf, hiddenSize, sparseShapeOf } from '../../model/shape.js';
import { siluForward, swigluForward } from '../../ops/activation/reference.js';
import { gateForward } from '../../ops/gate/reference.js';
import { linearForward } from '../../ops/linear/reference.js';
import { rmsnormForward } from '../../ops/rmsnorm/reference.js';
import { isSelection } from '../../ops/select/reference.js';
import { rotated, type StepHistory, type StepProblem, stepForward, stepImportance } from '../../ops/step/reference.js';
import { rounded } from '../../testing/devices.js';

/** Blocks that one token selected: [layer][group][slot], -1 behind the last. */
export type TokenSelection = readonly (readonly (readonly number[])[])[];

export interface Replayed {
  readonly logits: Float64Array;
  /** The largest part by which a block that was selected scored less than one that was not, over layers and groups. */
  readonly margin: number;
}

/** By what part the worst block that was taken scores less than the best that was left; 0 for a right selection. */
export function selectionMargin(score: ArrayLike<number>, selected: readonly number[]): number {
  if (!isSelection(score, selected, 1)) return Number.POSITIVE_INFINITY; // forced blocks, order or number are wrong
  const blocks = selected.filter((j) => j >= 0);
  const forced = [0, score.length - 2, score.length - 1];
  const taken = blocks.filter((j) => !forced.includes(j)).map((j) => score[j]);
  const left = Array.from(score).filter((_, j) => !blocks.includes(j));
  if (left.length === 0 || taken.length === 0) return 0;
  return Math.max(0, 1 - Math.min(...taken) / Math.max(...left));
}

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

const bf16 = (values: Float64Array) => rounded(values, 'bf16');
const NOTHING = new Float64Array(0);
const EMPTY: StepHistory = {
  ...{ kCmp: NOTHING, vCmp: NOTHING, kSel: NOTHING, vSel: NOTHING, kWin: NOTHING, vWin: NOTHING },
  ...{ rawKeys: NOTHING, rawValues: NOTHING },
};

export class StepReplay {
  readonly #model: LanguageModel;
  readonly #values = new Map<string, Float64Array>();
  readonly #problems: StepProblem[];
  #histories: StepHistory[];
  #position = 0;

  constructor(model: LanguageModel) {
    const { shape } = model;
    for (const { name, value } of model.parameters) this.#values.set(name, Float64Array.from(value.read()));
    this.#model = model;
    this.#problems = Array.from({ length: shape.n_layers }, (_, layer) => ({
      ...{ heads: headShapeOf(shape), sparse: sparseShapeOf(shape), cmpRope: shape.nsa.cmp_rope, round: bf16 },
      rope: { theta: shape.rope_theta, scale: shape.rope_scale },
      phi:
        shape.nsa.phi === 'conv'
          ? { keys: this.#of(layer, 'attention.phi_k.weight'), values: this.#of(layer, 'attention.phi_v.weight') }
          : null,
    }));
    this.#histories = this.#problems.map(() => EMPTY);
  }

  /** A second replay that goes on from here. */
  fork(): StepReplay {
    const copy = new StepReplay(this.#model);
    copy.#histories = [...this.#histories];
    copy.#position = this.#position;
    return copy;
  }

  next(token: number, selection: TokenSelection): Replayed {
    const { shape } = this.#model;
    const [dim, hidden] = [shape.dim, hiddenSize(shape)];
    let x = bf16(this.#named('embedding').slice(token * dim, (token + 1) * dim));
    let margin = 0;
    for (let layer = 0; layer < shape.n_layers; layer++) {
      const normed = rmsnormForward(x, this.#of(layer, 'attention_norm'), shape.norm_eps);
      const attended = this.#attend(layer, normed, selection[layer]);
      margin = Math.max(margin, attended.margin);
      const out = multiply(bf16(attended.out), bf16(this.#of(layer, 'attention.out')));
      const middle = bf16(x.map((value, i) => value + out[i]));
      const up = multiply(
        rmsnormForward(middle, this.#of(layer, 'mlp_norm'), shape.norm_eps),
        bf16(this.#of(layer, 'mlp.up')),
      );
      const active = bf16(shape.mlp === 'swiglu' ? swigluForward(up, hidden) : siluForward(up));
      const down = multiply(active, bf16(this.#of(layer, 'mlp.down')));
      x = bf16(middle.map((value, i) => value + down[i]));
    }
    this.#position += 1;
    const head = bf16(this.#named(shape.tie_embeddings ? 'embedding' : 'head'));
    return { logits: multiply(rmsnormForward(x, this.#named('norm'), shape.norm_eps), head), margin };
  }

  #attend(layer: number, normed: Float64Array, selected: TokenSelection[number]) {
    const { heads, sparse, cmpRope, rope } = this.#problems[layer];
    const position = this.#position;
    const projection = bf16(multiply(normed, bf16(this.#of(layer, 'attention.qkv'))));
    const history = this.#histories[layer];
    const scores = stepImportance(this.#problems[layer], history, projection, position);
    const margin = Math.max(...selected.map((blocks, group) => selectionMargin(scores[group], blocks)));
    const chosen = selected.map((blocks) => blocks.filter((j) => j >= 0));
    const result = stepForward(this.#problems[layer], history, projection, position, chosen);
    const [keys, values] = [heads.groups * heads.dk, heads.groups * heads.dv];
    const part = (branch: number) => {
      const at = heads.heads * heads.dk + branch * (keys + values);
      const k = projection.slice(at, at + keys);
      return {
        k,
        turned: bf16(rotated(k, heads.dk, position, rope)),
        v: projection.slice(at + keys, at + keys + values),
      };
    };
    const [cmp, sel, win] = [part(0), part(1), part(2)];
    // Rows that no later block needs are dropped when one is complete.
    const rawKeys = joined(history.rawKeys, cmpRope === 'before' ? cmp.turned : cmp.k);
    const rawValues = joined(history.rawValues, cmp.v);
    const dropped = result.block ? sparse.d : 0;
    this.#histories[layer] = {
      ...{ kCmp: joined(history.kCmp, result.block?.key), vCmp: joined(history.vCmp, result.block?.value) },
      ...{ kSel: joined(history.kSel, sel.turned), vSel: joined(history.vSel, sel.v) },
      ...{ kWin: joined(history.kWin, win.turned), vWin: joined(history.vWin, win.v) },
      ...{ rawKeys: rawKeys.slice(dropped * keys), rawValues: rawValues.slice(dropped * values) },
    };
    const gates = this.#gates(layer, normed);
    const out = result.oCmp.map((value, i) => {
      const head = 3 * Math.floor(i / heads.dv);
      return gates[head] * value + gates[head + 1] * result.oSel[i] + gates[head + 2] * result.oWin[i];
    });
    return { out, margin };
  }

  #gates(layer: number, normed: Float64Array): Float64Array {
    const { nsa, n_heads } = this.#model.shape;
    const fixed = (weights: readonly number[]) => Float64Array.from({ length: 3 * n_heads }, (_, i) => weights[i % 3]);
    if (nsa.force_uniform_gate) return fixed([1 / 3, 1 / 3, 1 / 3]);
    const { force_branch } = nsa;
    if (force_branch !== 'none') return fixed(['cmp', 'sel', 'win'].map((name) => Number(name === force_branch)));
    const logits = multiply(normed, bf16(this.#of(layer, 'attention.gate.weight')));
    const bias = this.#of(layer, 'attention.gate.bias');
    return gateForward(
      logits.map((value, i) => value + bias[i]),
      { kind: nsa.gate, temperature: nsa.gate_temp },
    );
  }

  #of(layer: number, name: string): Float64Array {
    return this.#named(`blocks.${layer}.${name}`);
  }

  #named(name: string): Float64Array {
    const values = this.#values.get(name);
    if (!values) throw new Error(`this model has no parameter ${name}`);
    return values;
  }
}

/** One row by a weight [outputs, inputs]. */
function multiply(x: Float64Array, weight: Float64Array): Float64Array {
  return linearForward(x, weight, 1, weight.length / x.length, x.length);
}

function joined(a: Float64Array, b: Float64Array = NOTHING): Float64Array {
  const all = new Float64Array(a.length + b.length);
  all.set(a);
  all.set(b, a.length);
  return all;
}
