/** Compression of blocks of tokens in float64. Block i of a sequence covers its positions [i*d, i*d+l). */
import { compressedCount } from '../../common/sequences.js';

export interface CompressShape {
  readonly groups: number;
  readonly size: number;
  readonly l: number;
  readonly d: number;
}

/** First token of every block of all sequences. */
export function blockStarts(starts: ArrayLike<number>, { l, d }: Pick<CompressShape, 'l' | 'd'>): number[] {
  const first: number[] = [];
  for (let s = 0; s + 1 < starts.length; s++) {
    const count = compressedCount(starts[s + 1] - starts[s], l, d);
    for (let i = 0; i < count; i++) first.push(starts[s] + i * d);
  }
  return first;
}

/** y[i] = sum over p of weight[p] * x[first(i) + p], channel by channel; `weight` [l,G,D], all 1/l for the average. */
export function convForward(
  x: Float64Array,
  weight: Float64Array,
  starts: ArrayLike<number>,
  shape: CompressShape,
): Float64Array {
  const width = shape.groups * shape.size;
  const blocks = blockStarts(starts, shape);
  const y = new Float64Array(blocks.length * width);
  blocks.forEach((first, i) => {
    for (let p = 0; p < shape.l; p++)
      for (let c = 0; c < width; c++) y[i * width + c] += weight[p * width + c] * x[(first + p) * width + c];
  });
  return y;
}

export function convBackward(
  x: Float64Array,
  weight: Float64Array,
  starts: ArrayLike<number>,
  shape: CompressShape,
  dy: Float64Array,
): { dx: Float64Array; dWeight: Float64Array } {
  const width = shape.groups * shape.size;
  const [dx, dWeight] = [new Float64Array(x.length), new Float64Array(weight.length)];
  blockStarts(starts, shape).forEach((first, i) => {
    for (let p = 0; p < shape.l; p++)
      for (let c = 0; c < width; c++) {
        dx[(first + p) * width + c] += weight[p * width + c] * dy[i * width + c];
        dWeight[p * width + c] += x[(first + p) * width + c] * dy[i * width + c];
      }
  });
  return { dx, dWeight };
}

export function averageWeight({ groups, size, l }: CompressShape): Float64Array {
  return new Float64Array(l * groups * size).fill(1 / l);
}

/** Blocks with the position embedding [l,G,D] added, one row of l*D numbers for each (block, group). */
export function unfoldForward(
  x: Float64Array,
  position: Float64Array,
  starts: ArrayLike<number>,
  shape: CompressShape,
): Float64Array {
  const out = new Float64Array(blockStarts(starts, shape).length * shape.groups * shape.l * shape.size);
  forEachUnfolded(starts, shape, (to, from, embedding) => {
    out[to] = x[from] + position[embedding];
  });
  return out;
}

export function unfoldBackward(
  dOut: Float64Array,
  starts: ArrayLike<number>,
  shape: CompressShape,
): { dx: Float64Array; dPosition: Float64Array } {
  const width = shape.groups * shape.size;
  const [dx, dPosition] = [new Float64Array(starts[starts.length - 1] * width), new Float64Array(shape.l * width)];
  forEachUnfolded(starts, shape, (to, from, embedding) => {
    dx[from] += dOut[to];
    dPosition[embedding] += dOut[to];
  });
  return { dx, dPosition };
}

export interface MlpWeights {
  readonly position: Float64Array;
  readonly w1: Float64Array;
  readonly w2: Float64Array;
}

/** `position` [l,G,D], `w1` [hidden, l*D], `w2` [D, hidden]: y = w2 silu(w1 (block + position)), group by group. */
export function mlpForward(
  x: Float64Array,
  { position, w1, w2 }: MlpWeights,
  starts: ArrayLike<number>,
  shape: CompressShape,
): Float64Array {
  const { l, size } = shape;
  const unfolded = unfoldForward(x, position, starts, shape);
  const hidden = w2.length / size;
  const y = new Float64Array(unfolded.length / l);
  for (let row = 0; row < unfolded.length / (l * size); row++)
    for (let h = 0; h < hidden; h++) {
      let total = 0;
      for (let i = 0; i < l * size; i++) total += w1[h * l * size + i] * unfolded[row * l * size + i];
      const active = total / (1 + Math.exp(-total));
      for (let c = 0; c < size; c++) y[row * size + c] += w2[c * hidden + h] * active;
    }
  return y;
}

function forEachUnfolded(
  starts: ArrayLike<number>,
  shape: CompressShape,
  body: (to: number, from: number, embedding: number) => void,
): void {
  const { groups, size, l } = shape;
  blockStarts(starts, shape).forEach((first, i) => {
    for (let g = 0; g < groups; g++)
      for (let p = 0; p < l; p++)
        for (let c = 0; c < size; c++)
          body(
            ((i * groups + g) * l + p) * size + c,
            ((first + p) * groups + g) * size + c,
            (p * groups + g) * size + c,
          );
  });
}
