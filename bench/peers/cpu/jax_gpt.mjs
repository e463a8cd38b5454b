// Training steps of the dense GPT of compare.mjs with jax-js (WebAssembly); prints one JSON object.
//
// Needs: a Node with global WebAssembly SIMD and using-declarations (24 or newer), and @jax-js/jax in the folder given by
// --modules. The whole step is one jit. Node has no global Worker, so jax-js runs on one thread here.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';

const names = ['dim', 'layers', 'heads', 'groups', 'vocabulary', 'length', 'batch', 'steps', 'threads', 'modules'];
const { values } = parseArgs({ options: Object.fromEntries(names.map((name) => [name, { type: 'string' }])) });
const [dim, layers, heads, groups, vocabulary, length, batch, steps] = names.slice(0, 8).map((name) => +values[name]);
const size = 64;
if (heads !== groups) throw new Error('grouped heads are not written down here');

const require = createRequire(join(resolve(values.modules), 'package.json'));
const entry = require.resolve('@jax-js/jax').replace(/index\.cjs$/, 'index.js');
const { init, defaultDevice, jit, nn, numpy: np, random, tree, valueAndGrad } = await import(pathToFileURL(entry));
await init('wasm');
defaultDevice('wasm');

let seed = 0;
const normal = (shape) => random.normal(random.key(++seed), shape).mul(0.02);
const parameters = {
  embedding: normal([vocabulary, dim]),
  blocks: Array.from({ length: layers }, () => ({
    attentionNorm: np.ones([dim]),
    qkv: normal([dim, 3 * heads * size]),
    out: normal([heads * size, dim]),
    mlpNorm: np.ones([dim]),
    up: normal([dim, 4 * dim]),
    down: normal([4 * dim, dim]),
  })),
  norm: np.ones([dim]),
  head: normal([dim, vocabulary]),
};
const count = tree.leaves(parameters).reduce((sum, { shape }) => sum + shape.reduce((a, b) => a * b, 1), 0);

const table = (of) =>
  np
    .array(
      Float32Array.from({ length: (length * size) / 2 }, (_, i) => {
        const [position, pair] = [Math.floor(i / (size / 2)), i % (size / 2)];
        return of(position * 10000 ** ((-2 * pair) / size));
      }),
    )
    .reshape([length, 1, size / 2]);
const [cosines, sines] = [table(Math.cos), table(Math.sin)];

function rmsnorm(x, weight) {
  const mean = np.mean(np.square(x.ref), -1, { keepdims: true });
  return x.div(np.sqrt(mean.add(1e-6))).mul(weight);
}

function rotate(x) {
  const [a, b] = np.split(x, 2, -1);
  const left = a.ref.mul(cosines.ref).sub(b.ref.mul(sines.ref));
  return np.concatenate([left, b.mul(cosines.ref).add(a.mul(sines.ref))], -1);
}

function block(x, { attentionNorm, qkv, out, mlpNorm, up, down }) {
  const projected = np.matmul(rmsnorm(x.ref, attentionNorm), qkv);
  const [q, k, v] = np.split(projected, 3, -1).map((part) => part.reshape([batch, length, heads, size]));
  const attended = nn.dotProductAttention(rotate(q), rotate(k), v, { isCausal: true });
  const middle = x.add(np.matmul(attended.reshape([batch, length, heads * size]), out));
  const active = nn.silu(np.matmul(rmsnorm(middle.ref, mlpNorm), up));
  return middle.add(np.matmul(active, down));
}

function lossOf(p, ids, targets) {
  let x = np.take(p.embedding, ids, 0);
  for (const weights of p.blocks) x = block(x, weights);
  const logits = np.matmul(rmsnorm(x, p.norm), p.head);
  const chosen = nn.oneHot(targets, vocabulary).mul(nn.logSoftmax(logits));
  return chosen.sum().mul(-1 / (batch * length));
}

const [rate, beta1, beta2, decay, limit] = [2e-4, 0.9, 0.95, 0.01, 1];
const step = jit((p, m, v, ids, targets, bias1, bias2) => {
  const [loss, gradients] = valueAndGrad(lossOf)(tree.ref(p), ids, targets);
  const squares = tree.leaves(tree.ref(gradients)).map((g) => np.square(g).sum());
  const norm = np.sqrt(squares.reduce((a, b) => a.add(b)));
  const scale = np.minimum(np.array(limit).div(norm), 1);
  const scaled = tree.map((g) => g.mul(scale.ref), gradients);
  scale.dispose();
  const newM = tree.map((old, g) => old.mul(beta1).add(g.mul(1 - beta1)), m, tree.ref(scaled));
  const newV = tree.map((old, g) => old.mul(beta2).add(np.square(g).mul(1 - beta2)), v, scaled);
  const update = (old, a, b) => {
    const direction = a.div(bias1.ref).div(np.sqrt(b.div(bias2.ref)).add(1e-8));
    return old.mul(1 - rate * decay).sub(direction.mul(rate));
  };
  const newP = tree.map(update, p, tree.ref(newM), tree.ref(newV));
  bias1.dispose();
  bias2.dispose();
  return [newP, newM, newV, loss];
});

const random32 = Int32Array.from(
  { length: batch * (length + 1) },
  (_, i) => (Math.imul(i + 1, 2654435761) >>> 8) % vocabulary,
);
const part = (from) =>
  np
    .array(
      Int32Array.from(
        { length: batch * length },
        (_, i) => random32[Math.floor(i / length) * (length + 1) + (i % length) + from],
      ),
      { dtype: np.int32 },
    )
    .reshape([batch, length]);
const [ids, targets] = [part(0), part(1)];

let [p, m, v] = [parameters, ...[0, 1].map(() => tree.map((x) => np.zeros(x.shape), parameters))];
const times = [];
let last = 0;
for (let i = 1; i <= 2 + steps; i++) {
  const start = performance.now();
  let loss;
  [p, m, v, loss] = step(p, m, v, ids.ref, targets.ref, np.array(1 - beta1 ** i), np.array(1 - beta2 ** i));
  last = (await loss.data())[0];
  for (const leaf of tree.leaves(p)) await leaf.blockUntilReady();
  times.push(performance.now() - start);
}
const sorted = times.slice(2).sort((a, b) => a - b);
const { version } = JSON.parse(readFileSync(join(entry, '../../package.json'), 'utf8'));
console.log(JSON.stringify({ version, ms_step: sorted[sorted.length >> 1], params: count, loss: last }));
process.exit(0);
