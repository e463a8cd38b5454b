/** Draws the next token of every row of logits on a GPU, with the tokens that the host's sampler draws. */
import type { CudaRuntime } from '../../device/cuda/runtime.js';
import type { Tensor } from '../../tensor/tensor.js';

/** The token that `sampleRows` writes where rounding could decide the draw: the host's sampler must draw the token. */
export const UNCERTAIN = -2;

/** Numbers of a row of settings: temperature, top-k, top-p, min-p and the uniform number of the draw. */
export const SETTINGS = 5;

export interface SampledRows {
  /** f32 [rows, width], the first `vocabulary` of each row are candidates. */
  readonly logits: Tensor;
  readonly vocabulary: number;
  /** f64 [rows, SETTINGS]. A row of temperature 0 is left as it is. */
  readonly settings: Tensor;
  /** i32 [rows]: the argmax token of each row, -1 if all logits are NaN; overwritten with the drawn token or UNCERTAIN. */
  readonly next: Tensor;
  /** i32 [rows]: overwritten with the drawn token where there is one. */
  readonly ids: Tensor;
}

const THREADS = 1024;

export function sampleRows(cuda: CudaRuntime, { logits, vocabulary, settings, next, ids }: SampledRows): void {
  const [rows, width] = logits.shape;
  const code = cuda.compile(new URL('./cuda.cu', import.meta.url));
  code.launch('sample_rows', { grid: rows, block: THREADS }, logits, width, vocabulary, settings, ids, next);
}
