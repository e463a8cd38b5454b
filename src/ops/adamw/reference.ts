/** One step of AdamW in float64, as the paper writes it (Loshchilov & Hutter, algorithm 2). Changes value, m and v. */

export interface AdamWReferenceSettings {
  readonly learningRate: number;
  readonly betas: readonly [number, number];
  readonly epsilon: number;
  readonly weightDecay: number;
  readonly gradientScale: number;
}

export function adamwStep(
  value: Float64Array,
  gradient: Float64Array,
  m: Float64Array,
  v: Float64Array,
  step: number,
  settings: AdamWReferenceSettings,
): void {
  const { learningRate, epsilon, weightDecay, gradientScale } = settings;
  const [beta1, beta2] = settings.betas;
  for (let i = 0; i < value.length; i++) {
    const g = gradient[i] * gradientScale;
    m[i] = beta1 * m[i] + (1 - beta1) * g;
    v[i] = beta2 * v[i] + (1 - beta2) * g * g;
    const mean = m[i] / (1 - beta1 ** step);
    const variance = v[i] / (1 - beta2 ** step);
    value[i] -= learningRate * (mean / (Math.sqrt(variance) + epsilon) + weightDecay * value[i]);
  }
}
