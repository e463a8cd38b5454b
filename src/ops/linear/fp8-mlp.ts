/**
 * A feed-forward layer down(silu(up x)) in FP8. Its inner result and the gradient of that go to FP8 as the activation is
 * computed, and are never written in bf16: separate conversions would cost what the products save.
 */
import type { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { addInto } from '../add/op.js';
import { Fp8Layer, Fp8Matrix, type Fp8Tensor, isDivisible, savesTime } from './fp8.js';

/** Products of fewer terms take as long as writing their results, in FP8 as in bf16. */
const FEWEST_TERMS = 512;

/** Whether the six products of `rows` rows save more time than the conversions around them take. */
export function feedForwardPays(rows: number, hidden: number, dim: number): boolean {
  if (!isDivisible(rows, hidden, dim) || dim < FEWEST_TERMS) return false;
  // x as in `normedLayerPays`, dy as in `layerPays`; `up` is read once more for its rows' norms.
  const bytes = 6 * rows * dim + 18 * hidden * dim;
  return savesTime(12 * rows * hidden * dim, bytes);
}

/**
 * `x` [rows, dim], weights `up` [hidden, dim] and `down` [dim, hidden] → [rows, dim], added to `residual` if given.
 * Without `computesResult` the result is not computed: only gradients pass through it.
 */
export function fp8FeedForward(
  tape: Tape,
  x: Fp8Tensor,
  { up, down }: { readonly up: Tensor; readonly down: Tensor },
  residual: Tensor | null = null,
  computesResult = true,
): Tensor {
  const { device } = tape;
  const [hidden, dim] = up.shape;
  const [rows] = x.shape;
  const inner = tape.empty([rows, hidden], 'bf16');
  const first = new Fp8Layer(tape, x.codes, up, inner, null);
  const layouts = { straight: computesResult, transposed: tape.recording };
  const active = new Fp8Matrix(device, { kind: 'Silu', x: inner }, 'e4m3', layouts, first.activationScale());
  const y = tape.empty([rows, dim], 'bf16');
  const second = new Fp8Layer(tape, active, down, computesResult ? y : null, residual);
  tape.record([x, up, down, residual], [y], [...first.saved, ...second.saved, inner], () => {
    const dy = tape.gradient(y);
    if (!dy) return;
    if (residual) tape.passGradient(y, residual, (into, value) => addInto(device, into, value));
    const dActive = Tensor.empty(device, [rows, hidden], 'bf16');
    const both = { straight: true, transposed: true };
    const dy8 = new Fp8Matrix(device, dy, 'e5m2', both);
    const scale = second.slopeScale(dy8);
    second.backward(dy8, { gradient: dActive, accumulate: false }, tape.gradientTarget(down));
    const source = { kind: 'SiluGradient', x: inner, dy: dActive } as const;
    const dInner = new Fp8Matrix(device, source, 'e5m2', both, scale);
    dActive.free();
    first.backward(dInner, tape.gradientTarget(x), tape.gradientTarget(up));
  });
  first.drop(tape);
  second.drop(tape);
  tape.drop(inner);
  return y;
}
