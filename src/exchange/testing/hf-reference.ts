/**
 * Logits of a Hugging Face folder in float64, from config.json and the tensors by their own names. It uses nothing of the
 * importer and of the model: only what the documentation of the format says.
 */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';

type Row = number[];
type Matrix = Row[];
type Tensors = ReadonlyMap<string, { readonly shape: readonly number[]; readonly values: Float64Array }>;

interface Rope {
  readonly rope_type?: string;
  readonly type?: string;
  readonly rope_theta?: number;
  readonly factor?: number;
  readonly original_max_position_embeddings?: number;
  readonly low_freq_factor?: number;
  readonly high_freq_factor?: number;
}

const sum = (values: Row) => values.reduce((total, value) => total + value, 0);
const dot = (a: Row, b: Row) => sum(a.map((value, i) => value * b[i]));
const plus = (a: Row, b: Row) => a.map((value, i) => value + b[i]);
const rms = (x: Row, weight: Row, eps: number) => {
  const scale = 1 / Math.sqrt(dot(x, x) / x.length + eps);
  return x.map((value, i) => value * scale * weight[i]);
};
const softmax = (scores: Row) => {
  const most = Math.max(...scores);
  const powers = scores.map((score) => Math.exp(score - most));
  return powers.map((power) => power / sum(powers));
};

/** Inverse frequencies and the factor on cosine and sine. */
function ropeTable(config: Record<string, unknown>, size: number): { frequencies: Row; amplitude: number } {
  const rope = (config['rope_parameters'] ?? config['rope_scaling'] ?? {}) as Rope;
  const theta = rope.rope_theta ?? (config['rope_theta'] as number | undefined) ?? 10_000;
  const base = Array.from({ length: size / 2 }, (_, j) => 1 / theta ** ((2 * j) / size));
  const { factor = 1, original_max_position_embeddings: length = 0 } = rope;
  switch (rope.rope_type ?? rope.type ?? 'default') {
    case 'linear':
      return { frequencies: base.map((f) => f / factor), amplitude: 1 };
    case 'llama3': {
      const [low, high] = [rope.low_freq_factor!, rope.high_freq_factor!];
      const frequencies = base.map((f) => {
        const wave = (2 * Math.PI) / f;
        if (wave > length / low) return f / factor;
        if (wave < length / high) return f;
        const smooth = (length / wave - low) / (high - low);
        return ((1 - smooth) * f) / factor + smooth * f;
      });
      return { frequencies, amplitude: 1 };
    }
    case 'yarn': {
      const at = (turns: number) => (size * Math.log(length / (turns * 2 * Math.PI))) / (2 * Math.log(theta));
      const [first, last] = [Math.max(0, Math.floor(at(32))), Math.min(size - 1, Math.ceil(at(1)))];
      const ramp = (j: number) => Math.min(1, Math.max(0, (j - first) / (last - first)));
      const frequencies = base.map((f, j) => (1 - ramp(j)) * f + (ramp(j) * f) / factor);
      return { frequencies, amplitude: 0.1 * Math.log(factor) + 1 };
    }
    default:
      return { frequencies: base, amplitude: 1 };
  }
}

/** Logits [token][vocabulary]. */
export function hfReferenceLogits(folder: string, tensors: Tensors, ids: readonly number[]): Matrix {
  const config = JSON.parse(readFileSync(join(folder, 'config.json'), 'utf8')) as Record<string, unknown>;
  const [heads, groups] = [config['num_attention_heads'] as number, config['num_key_value_heads'] as number];
  const [hidden, eps] = [config['hidden_size'] as number, config['rms_norm_eps'] as number];
  const size = (config['head_dim'] as number | undefined) ?? hidden / heads;
  const { frequencies, amplitude } = ropeTable(config, size);
  const rowsOf = (name: string): Matrix => {
    const tensor = tensors.get(name);
    if (!tensor) throw new Error(`there is no ${name}`);
    const width = tensor.shape[tensor.shape.length - 1];
    return Array.from({ length: tensor.values.length / width }, (_, i) =>
      Array.from(tensor.values.subarray(i * width, (i + 1) * width)),
    );
  };
  const linear = (x: Matrix, name: string): Matrix => {
    const weight = rowsOf(`${name}.weight`);
    const bias = tensors.has(`${name}.bias`) ? rowsOf(`${name}.bias`)[0] : null;
    return x.map((row) => weight.map((outputs, i) => dot(outputs, row) + (bias?.[i] ?? 0)));
  };
  const norm = (x: Matrix, name: string) => x.map((row) => rms(row, rowsOf(name)[0], eps));
  const turn = (head: Row, position: number): Row => {
    const half = size / 2;
    return head.map((value, i) => {
      const angle = position * frequencies[i % half];
      const other = i < half ? -head[i + half] : head[i - half];
      return amplitude * (value * Math.cos(angle) + other * Math.sin(angle));
    });
  };
  const embedding = rowsOf('model.embed_tokens.weight');
  let x = ids.map((id) => embedding[id]);
  for (let layer = 0; layer < (config['num_hidden_layers'] as number); layer++) {
    const name = `model.layers.${layer}`;
    const input = norm(x, `${name}.input_layernorm.weight`);
    const split = (part: string) =>
      linear(input, `${name}.self_attn.${part}_proj`).map((row) =>
        Array.from({ length: row.length / size }, (_, head) => row.slice(head * size, (head + 1) * size)),
      );
    const prepared = (part: 'q' | 'k') =>
      split(part).map((token, t) =>
        token.map((head) => {
          const weight = `${name}.self_attn.${part}_norm.weight`;
          return turn(tensors.has(weight) ? rms(head, rowsOf(weight)[0], eps) : head, t);
        }),
      );
    const [q, k, v] = [prepared('q'), prepared('k'), split('v')];
    const attended = q.map((token, t) =>
      token.flatMap((query, head) => {
        const group = Math.floor(head / (heads / groups));
        const shares = softmax(k.slice(0, t + 1).map((keys) => dot(query, keys[group]) / Math.sqrt(size)));
        return query.map((_, c) => sum(shares.map((share, s) => share * v[s][group][c])));
      }),
    );
    const middle = linear(attended, `${name}.self_attn.o_proj`).map((row, t) => plus(x[t], row));
    const normed = norm(middle, `${name}.post_attention_layernorm.weight`);
    const [gate, up] = ['gate', 'up'].map((part) => linear(normed, `${name}.mlp.${part}_proj`));
    const active = gate.map((row, t) => row.map((a, i) => (a / (1 + Math.exp(-a))) * up[t][i]));
    x = linear(active, `${name}.mlp.down_proj`).map((row, t) => plus(middle[t], row));
  }
  const last = norm(x, 'model.norm.weight');
  const isTied = config['tie_word_embeddings'] === true;
  return linear(last, isTied ? 'model.embed_tokens' : 'lm_head');
}
