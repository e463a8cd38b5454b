// @ts-check
// Native Sparse Attention as a library. Run it with `node examples/attention.mjs` after `npm run build`, or from any
// folder in which the package is installed.
import {
  CpuDevice,
  createAttention,
  fillNormal,
  modelShape,
  nativeSparseAttention,
  ParameterStore,
  parseConfig,
  Sequences,
  sparseLayout,
  Tape,
} from 'trefoil';

/** @param {ArrayLike<number>} values */
const norm = (values) => Math.sqrt(Array.from(values).reduce((sum, value) => sum + value * value, 0)).toFixed(4);

const device = new CpuDevice();
console.log(`device: ${device.kind}, ${device.threads} threads`);

// Two sequences of different lengths, packed one after the other: no padding anywhere.
const tokens = new Sequences(device, [700, 324]);
const [heads, groups, size] = [6, 2, 32];

// 1. The core: queries, keys and values of the three branches, and gates, all given.
const sparse = { l: 32, d: 16, lSel: 64, nSel: 4, w: 128 };
const layout = sparseLayout(tokens, sparse);
const tape = new Tape(device);
let stream = 0;
/** @param {number[]} shape */
const random = (...shape) => {
  const tensor = tape.watch(tape.empty(shape)); // watched: its gradient is there after `backward`
  fillNormal(tensor, { seed: 1, stream: stream++ });
  return tensor;
};
const inputs = {
  q: random(tokens.total, heads, size),
  kCmp: random(layout.blocks.total, groups, size),
  vCmp: random(layout.blocks.total, groups, size),
  kSel: random(tokens.total, groups, size),
  vSel: random(tokens.total, groups, size),
  kWin: random(tokens.total, groups, size),
  vWin: random(tokens.total, groups, size),
  gates: random(tokens.total, heads, 3),
};
const { out, selected } = nativeSparseAttention(tape, inputs, layout, sparse);
console.log(`out ${out.shape.join('x')}, norm ${norm(out.read())}`);
console.log(`blocks of the last token: ${selected.read().slice(-sparse.nSel).join(' ')}`);
tape.backward(out, new Float32Array(out.size).fill(1));
for (const [name, input] of Object.entries(inputs)) {
  const gradient = tape.gradient(input);
  if (gradient) console.log(`gradient of ${name} ${gradient.shape.join('x')}, norm ${norm(gradient.read())}`);
}
tape.end(); // all memory goes back to the device's pool

// 2. The attention module: projections, rotary positions, compression and gate around the core.
const config = parseConfig({
  model: { dim: 96, n_heads: heads, n_kv_groups: groups, d_k: size, d_v: size },
  nsa: { l: sparse.l, d: sparse.d, l_sel: sparse.lSel, n_sel: sparse.nSel, w: sparse.w },
});
const shape = modelShape(config, 256);
const store = new ParameterStore(device, 1, shape.n_layers);
const attention = createAttention(store, 'attention', 0, shape);
const step = new Tape(device);
const x = step.empty([tokens.total, shape.dim]);
fillNormal(x, { seed: 2, stream: 0 });
const y = attention.forward(step, x, { layout });
console.log(`module ${x.shape.join('x')} -> ${y.shape.join('x')}, norm ${norm(y.read())}`);
step.backward(y, new Float32Array(y.size).fill(1));
for (const { name, value, gradient } of store.parameters)
  console.log(`parameter ${name} ${value.shape.join('x')}, gradient norm ${gradient ? norm(gradient.read()) : 'none'}`);
step.end();
