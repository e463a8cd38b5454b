/**
 * Logits of a saved model, recomputed in float64 by code that uses nothing of `src/`: only the recipe of
 * docs/reference/model.md and the definition of the branches in docs/explain/attention.md. It reads the tensors by the
 * documented names. If this test fails, the documents no longer describe the model.
 */
import { describe, expect, it } from 'vitest';
import { configSchema } from '../src/config/schema.js';
import { LanguageModel } from '../src/model/language-model.js';
import { modelShape } from '../src/model/shape.js';
import { Tape } from '../src/tensor/tape.js';
import { Tensor } from '../src/tensor/tensor.js';
import { cpu } from '../src/testing/devices.js';
import { relativeError } from '../src/testing/numbers.js';

type Row = number[];
type Matrix = Row[];

const MODEL = { dim: 16, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 6, mlp_ratio: 1.5 };
const NSA = { l: 4, d: 2, l_sel: 8, n_sel: 4, w: 5 };
const VOCABULARY = 24;
const TOKENS = 57;

const sum = (values: Row) => values.reduce((total, value) => total + value, 0);
const dot = (a: Row, b: Row) => sum(a.map((value, i) => value * b[i]));
const plus = (a: Row, b: Row) => a.map((value, i) => value + b[i]);
const silu = (x: number) => x / (1 + Math.exp(-x));
const times = (matrix: Matrix, x: Row) => matrix.map((row) => dot(row, x));
const chunks = (values: Row, size: number): Matrix =>
  Array.from({ length: values.length / size }, (_, i) => values.slice(i * size, (i + 1) * size));
const softmax = (values: Row): Row => {
  const most = Math.max(...values);
  const exponentials = values.map((value) => Math.exp(value - most));
  return exponentials.map((value) => value / sum(exponentials));
};
const rmsnorm = (x: Row, weight: Row, eps: number) => {
  const scale = 1 / Math.sqrt(dot(x, x) / x.length + eps);
  return x.map((value, i) => value * scale * weight[i]);
};

interface Settings {
  readonly phi: 'avg' | 'conv' | 'mlp';
  readonly gate: 'softmax' | 'sigmoid';
  readonly mlp: 'silu' | 'swiglu';
  readonly cmp_rope: 'after' | 'before' | 'none';
}

const THETA = 10_000;
const ROPE_SCALE = 3;
const GATE_TEMP = 0.7;
const EPS = 1e-6;

function rotate(x: Row, position: number): Row {
  const half = x.length / 2;
  const y = [...x];
  for (let j = 0; j < half; j++) {
    const frequency = Math.fround(THETA ** ((-2 * j) / x.length));
    const angle = Math.fround(Math.fround(Math.fround(position) / Math.fround(ROPE_SCALE)) * frequency);
    y[j] = x[j] * Math.cos(angle) - x[j + half] * Math.sin(angle);
    y[j + half] = x[j + half] * Math.cos(angle) + x[j] * Math.sin(angle);
  }
  return y;
}

/** Softmax attention of one query over the given keys; zeros if there are none. */
function attend(q: Row, keys: Matrix, values: Matrix, size: number): Row {
  if (keys.length === 0) return new Array<number>(size).fill(0);
  const p = softmax(keys.map((key) => dot(q, key) / Math.sqrt(q.length)));
  return Array.from({ length: size }, (_, c) => sum(p.map((share, i) => share * values[i][c])));
}

function attention(x: Matrix, tensor: (name: string) => Row, settings: Settings): Matrix {
  const { dim, n_heads: H, n_kv_groups: G, d_k: Dk, d_v: Dv } = MODEL;
  const { l, d, l_sel, n_sel, w } = NSA;
  const qkv = chunks(tensor('qkv'), dim);
  const rows = x.map((token) => times(qkv, token));
  let column = 0;
  /** [token][head] of the next part of the fused projection. */
  const part = (heads: number, size: number) => {
    const first = column;
    column += heads * size;
    return rows.map((row) => chunks(row.slice(first, column), size));
  };
  const rotated = (heads: Matrix[]) => heads.map((token, t) => token.map((head) => rotate(head, t)));
  const q = rotated(part(H, Dk));
  let rawKeys = part(G, Dk);
  const rawValues = part(G, Dv);
  const kSel = rotated(part(G, Dk));
  const vSel = part(G, Dv);
  const kWin = rotated(part(G, Dk));
  const vWin = part(G, Dv);
  if (settings.cmp_rope === 'before') rawKeys = rotated(rawKeys);

  const blocks = x.length < l ? 0 : Math.floor((x.length - l) / d) + 1;
  const compress = (values: Matrix[], name: string, size: number) =>
    Array.from({ length: blocks }, (_, i) =>
      Array.from({ length: G }, (_, g) => {
        const raw = Array.from({ length: l }, (_, p) => values[i * d + p][g]);
        if (settings.phi === 'avg') return Array.from({ length: size }, (_, c) => sum(raw.map((row) => row[c])) / l);
        const learned = (which: string) => tensor(`${name}.${which}`);
        const at = (all: Row, p: number) => all.slice((p * G + g) * size, (p * G + g + 1) * size);
        if (settings.phi === 'conv') {
          const weight = learned('weight');
          return Array.from({ length: size }, (_, c) => sum(raw.map((row, p) => row[c] * at(weight, p)[c])));
        }
        const u = raw.flatMap((row, p) => plus(row, at(learned('position'), p)));
        const hidden = times(chunks(learned('w1'), l * size), u).map(silu);
        return times(chunks(learned('w2'), hidden.length), hidden);
      }),
    );
  let kCmp = compress(rawKeys, 'phi_k', Dk);
  const vCmp = compress(rawValues, 'phi_v', Dv);
  if (settings.cmp_rope === 'after') kCmp = kCmp.map((groups, i) => groups.map((key) => rotate(key, i * d)));

  const gateWeight = chunks(tensor('gate.weight'), dim);
  const out = chunks(tensor('out'), H * Dv);
  const perGroup = H / G;
  return x.map((token, t) => {
    const visible = t + 1 < l ? 0 : Math.floor((t + 1 - l) / d) + 1;
    const gateLogits = plus(times(gateWeight, token), tensor('gate.bias')).map((value) => value / GATE_TEMP);
    const heads: Row = [];
    for (let g = 0; g < G; g++) {
      const keys = kCmp.slice(0, visible).map((groups) => groups[g]);
      const selected = selectBlocks(q[t].slice(g * perGroup, (g + 1) * perGroup), keys, t);
      const chosen = selected
        .flatMap((j) => Array.from({ length: l_sel }, (_, p) => j * l_sel + p))
        .filter((s) => s <= t);
      const near = Array.from({ length: Math.min(w, t + 1) }, (_, i) => t - i);
      const of = (tokens: number[], heads: Matrix[]) => tokens.map((s) => heads[s][g]);
      for (let i = 0; i < perGroup; i++) {
        const head = g * perGroup + i;
        const branches = [
          attend(
            q[t][head],
            keys,
            vCmp.slice(0, visible).map((groups) => groups[g]),
            Dv,
          ),
          attend(q[t][head], of(chosen, kSel), of(chosen, vSel), Dv),
          attend(q[t][head], of(near, kWin), of(near, vWin), Dv),
        ];
        const logits = gateLogits.slice(3 * head, 3 * head + 3);
        const gates = settings.gate === 'softmax' ? softmax(logits) : logits.map((value) => 1 / (1 + Math.exp(-value)));
        for (let c = 0; c < Dv; c++) heads.push(sum(branches.map((branch, b) => gates[b] * branch[c])));
      }
    }
    return times(out, heads);
  });

  /** The blocks that the heads `queries` of one group read at token `t`, ascending. */
  function selectBlocks(queries: Matrix, keys: Matrix, t: number): number[] {
    const cur = Math.floor(t / l_sel);
    const forced = [...new Set([0, cur - 1, cur].filter((j) => j >= 0))];
    const p = queries.map((query) => (keys.length ? softmax(keys.map((key) => dot(query, key) / Math.sqrt(Dk))) : []));
    const importance = (j: number) =>
      sum(
        keys.map((_, i) => {
          const shared = Math.max(0, Math.min(i * d + l, (j + 1) * l_sel) - Math.max(i * d, j * l_sel));
          return (shared / d) * sum(p.map((head) => head[i]));
        }),
      );
    const others = Array.from({ length: Math.max(0, cur - 1) }, (_, j) => j)
      .filter((j) => j !== 0)
      .sort((a, b) => importance(b) - importance(a) || a - b)
      .slice(0, n_sel - forced.length);
    return [...forced, ...others].sort((a, b) => a - b);
  }
}

function logits(ids: number[], tensors: ReadonlyMap<string, Row>, settings: Settings): Matrix {
  const { dim } = MODEL;
  const read = (name: string) => tensors.get(name) ?? expect.fail(`there is no tensor ${name}`);
  const embedding = chunks(read('embedding'), dim);
  let x = ids.map((id) => embedding[id]);
  for (let layer = 0; layer < MODEL.n_layers; layer++) {
    const block = (name: string) => read(`blocks.${layer}.${name}`);
    const normed = x.map((token) => rmsnorm(token, block('attention_norm'), EPS));
    x = attention(normed, (name) => block(`attention.${name}`), settings).map((row, t) => plus(x[t], row));
    const F = Math.round(dim * MODEL.mlp_ratio);
    const [up, down] = [chunks(block('mlp.up'), dim), chunks(block('mlp.down'), F)];
    x = x.map((token) => {
      const h = times(up, rmsnorm(token, block('mlp_norm'), EPS));
      const active = settings.mlp === 'silu' ? h.map(silu) : h.slice(0, F).map((a, i) => silu(a) * h[F + i]);
      return plus(token, times(down, active));
    });
  }
  const head = chunks(read('head'), dim);
  return x.map((token) => times(head, rmsnorm(token, read('norm'), EPS)));
}

const CASES: Settings[] = [
  { phi: 'avg', gate: 'softmax', mlp: 'silu', cmp_rope: 'after' },
  { phi: 'conv', gate: 'sigmoid', mlp: 'swiglu', cmp_rope: 'before' },
  { phi: 'mlp', gate: 'softmax', mlp: 'swiglu', cmp_rope: 'none' },
  { phi: 'mlp', gate: 'sigmoid', mlp: 'silu', cmp_rope: 'after' },
];

describe('the recipe of docs/reference/model.md', () => {
  it.each(CASES)('gives the logits of a model with phi $phi, gate $gate, mlp $mlp, cmp_rope $cmp_rope', (settings) => {
    const { mlp, ...nsa } = settings;
    const config = configSchema.parse({
      model: { ...MODEL, mlp, rope_theta: THETA, rope_scale: ROPE_SCALE },
      nsa: { ...NSA, ...nsa, gate_temp: GATE_TEMP },
    });
    const model = new LanguageModel(cpu(), modelShape(config, VOCABULARY), 1);
    // Every parameter away from its start (norms of 1 and gates of 0 would hide mistakes), and logits far from uniform.
    const tensors = new Map<string, Row>();
    for (const [k, parameter] of model.parameters.entries()) {
      const isNorm = parameter.name.endsWith('norm');
      const values = Float32Array.from({ length: parameter.value.size }, (_, i) =>
        isNorm ? 1 + 0.3 * Math.sin(7 * i + k) : 0.35 * Math.sin(12.9898 * i + 78.233 * k + Math.sin(i * 0.37)),
      );
      parameter.value.write(values);
      tensors.set(parameter.name, Array.from(values));
    }
    const ids = Array.from({ length: TOKENS }, (_, t) => (t * 7 + (t % 5) * 3) % VOCABULARY);
    const expected = logits(ids, tensors, settings).flat();

    const tape = new Tape(cpu(), { record: false });
    const input = Tensor.from(cpu(), Int32Array.from(ids), [TOKENS], 'i32');
    const rows = Array.from({ length: TOKENS }, (_, t) => t);
    const found = model.logits(tape, input, rows, { lengths: [TOKENS] }).read();
    const error = relativeError(Float64Array.from(found), Float64Array.from(expected));
    tape.end();
    for (const object of [input, model]) object.free();
    expect(error).toBeLessThan(2e-5);
  });
});
