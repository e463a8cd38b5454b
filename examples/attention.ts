// Native Sparse Attention alone, forward and backward: first the core on given tensors, then the layer around it.
import { openDevice, parseConfig } from 'trefoil';
import { Attention, fillNormal, modelShape, nativeSparseAttention, ParameterStore, Sequences, Tape } from 'trefoil/nn';

const norm = (values: Float32Array) => Math.sqrt(values.reduce((sum, value) => sum + value * value, 0)).toFixed(4);

const device = openDevice('cpu');
// Two sequences of different lengths, packed one after the other without padding.
using tokens = new Sequences(device, [700, 324]);
const [heads, groups, size] = [6, 2, 32];

const shape = modelShape(
  parseConfig({
    model: { dim: 96, n_heads: heads, n_kv_groups: groups, d_k: size, d_v: size },
    nsa: { l: 32, d: 16, l_sel: 64, n_sel: 4, w: 128 },
  }),
  256,
);
const sparse = shape.nsa;

// 1. The core: queries, keys and values of the three branches, and the gates.
{
  using tape = new Tape(device); // owns what operations create on it; `using` ends it
  let stream = 0;
  const random = (...shape: number[]) => {
    const tensor = tape.watch(tape.empty(shape)); // watched: its gradient is available after `backward`
    fillNormal(tensor, { seed: 1, stream: stream++ });
    return tensor;
  };
  const keys = () => random(tokens.total, groups, size);
  const inputs = {
    q: random(tokens.total, heads, size),
    kCmp: random(tokens.compressed(sparse).total, groups, size),
    vCmp: random(tokens.compressed(sparse).total, groups, size),
    kSel: keys(),
    vSel: keys(),
    kWin: keys(),
    vWin: keys(),
    gates: random(tokens.total, heads, 3),
  };
  const { out, selected } = nativeSparseAttention(tape, inputs, tokens, sparse);
  console.log(`out ${out.shape.join('x')}, norm ${norm(Float32Array.from(out.read()))}`);
  console.log(`blocks of the last token: ${selected.read().slice(-sparse.nSel).join(' ')}`);
  tape.backward(out, 1); // as if the loss were the sum of all outputs
  for (const [name, input] of Object.entries(inputs)) {
    const gradient = tape.gradient(input);
    if (gradient) console.log(`gradient of ${name} ${gradient.shape.join('x')}, norm ${norm(gradient.read())}`);
  }
}

// 2. The layer: projections, rotary positions, compression and gate around the core.
using store = new ParameterStore(device, 1, 1);
const attention = new Attention(store, 'attention', shape);
{
  using tape = new Tape(device);
  const x = tape.empty([tokens.total, shape.dim]);
  fillNormal(x, { seed: 2, stream: 0 });
  const y = attention.forward(tape, x, { lengths: tokens });
  console.log(`layer ${x.shape.join('x')} -> ${y.shape.join('x')}, norm ${norm(Float32Array.from(y.read()))}`);
  tape.backward(y, 1);
}
const { gradient } = attention.projection;
console.log(
  `gradient of ${attention.projection.name}: norm ${gradient ? norm(Float32Array.from(gradient.read())) : 'none'}`,
);
