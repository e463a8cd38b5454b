// sample[p] = the rows of tokens t - 1 and t of `selected` [tokens, width], t = 1 + p * (tokens - 1) / pairs.
extern "C" __global__ void selection_sample(const int* selected, int* sample, long long tokens, int width, int pairs) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= 2 * pairs * width) return;
  const int pair = i / (2 * width);
  const long long token = 1 + pair * (tokens - 1) / pairs;
  sample[i] = selected[(token - 1) * width + i % (2 * width)];
}
