/** The rows [G * n] of every sampled pair of tokens, one after the other. */
export function referenceSample(selected: ArrayLike<number>, tokens: number, width: number, most: number): number[] {
  const pairs = Math.max(0, Math.min(most, tokens - 1));
  const sample: number[] = [];
  for (let pair = 0; pair < pairs; pair++) {
    const token = 1 + Math.floor((pair * (tokens - 1)) / pairs);
    for (let i = (token - 1) * width; i < (token + 1) * width; i++) sample.push(selected[i]);
  }
  return sample;
}
