// The scorer loss on a GPU, for any shape: the share of each chosen block in a token's attention, the loss with the
// gradient of the importances, and the part of their gradient that only chosen blocks have. The part that all
// compressed blocks share is one pass of `compressed_backward` over inputs that `scorer_shared` writes (cuda.ts).
//
// One warp per (token, group), or per compressed block; nothing is added atomically, so results are the same bits in
// every run. Only what is proportional to the tokens is kept.
#include "../branch.cuh"

constexpr float LEAST = 1e-20f;    // less importance counts as this much, without a gradient
constexpr int CHANNELS = 2 * KC;   // of a lane

struct Scorer {
  i64 l, d, block;
  int count, init, local;

  __device__ bool chosen(int t, int index) const { return index >= init && index <= t / block - local; }
  __device__ int visible(int t) const { return t + 1 < l ? 0 : (int)((t + 1 - l) / d) + 1; }
  // Compressed blocks [first, first + width) overlap selection block `index`; tokens shared / d is their weight.
  __device__ int first(int index) const { return (int)(index * (block / d) - (l / d - 1)); }
  __device__ int width() const { return (int)(l / d - 1 + block / d); }
  __device__ float weight(int index, int key) const {
    const i64 begin = max((i64)key * d, (i64)index * block);
    const i64 end = min((i64)key * d + l, (i64)(index + 1) * block);
    return end > begin ? (float)(end - begin) / (float)d : 0.0f;
  }
};

// The sequence that holds a token or a key.
__device__ __forceinline__ int sequence_of(const int* offsets, i64 sequences, i64 at) {
  int low = 0, high = (int)sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= at) low = middle;
    else high = middle;
  }
  return low;
}

__device__ __forceinline__ void load_row(float (&x)[CHANNELS], const Element* row, int dk, int lane) {
#pragma unroll
  for (int j = 0; j < CHANNELS; j++) x[j] = j * 32 + lane < dk ? read_one(row + j * 32 + lane) : 0.0f;
}
// The dot product over the lanes of a warp; all lanes get it.
__device__ __forceinline__ float dot(const float (&a)[CHANNELS], const float (&b)[CHANNELS]) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < CHANNELS; j++) sum = fmaf(a[j], b[j], sum);
  return warp_sum(sum);
}

#define WARP_ITEMS(ITEMS)                                                                 \
  const int lane = threadIdx.x % 32;                                                      \
  const i64 items = (ITEMS), stride = (i64)gridDim.x * WARPS;                             \
  for (i64 item = (i64)blockIdx.x * WARPS + threadIdx.x / 32; item < items; item += stride)

// Share of each selected block in the attention of the selected branch, summed over the heads of the group.
extern "C" __global__ void __launch_bounds__(THREADS)
    scorer_mass(const Element* q, const Element* k, const float* lse, const int* offsets, const int* selected,
                float* mass, i64 sequences, int heads, int groups, int dk, i64 block, int count) {
  const int h = heads / groups;
  const float scale = 1.0f / sqrtf((float)dk);
  WARP_ITEMS((i64)offsets[sequences] * groups) {
    const i64 token = item / groups;
    const int group = (int)(item % groups), start = offsets[sequence_of(offsets, sequences, token)];
    const int t = (int)(token - start);
    for (int n = 0; n < count; n++) {
      const int index = selected[item * count + n];
      float sum = 0;
      for (int r = 0; index >= 0 && r < h; r++) {
        const i64 row = token * heads + group * h + r;
        float query[CHANNELS];
        load_row(query, q + row * dk, dk, lane);
        for (i64 s = index * block; s < min((index + 1) * block, (i64)t + 1); s++) {
          float key[CHANNELS];
          load_row(key, k + ((start + s) * groups + group) * dk, dk, lane);
          sum += expf(dot(query, key) * scale - lse[row]);
        }
      }
      if (lane == 0) mass[item * count + n] = sum;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scorer_forward(const Element* q, const Element* k, const float* lse, const float* mass, const int* offsets,
                   const int* key_offsets, const int* selected, float* d_importance, float* mean, float* losses,
                   i64 sequences, int heads, int groups, int dk, i64 l, i64 d, i64 block, int count, int init,
                   int local) {
  const Scorer scorer = {l, d, block, count, init, local};
  const int h = heads / groups;
  const float scale = 1.0f / sqrtf((float)dk);
  WARP_ITEMS((i64)offsets[sequences] * groups) {
    const i64 token = item / groups, at = item * count;
    const int group = (int)(item % groups), sequence = sequence_of(offsets, sequences, token);
    const int t = (int)(token - offsets[sequence]);
    const i64 key0 = key_offsets[sequence];
    // The sum over visible compressed blocks of weight times probability of one head, for slot n.
    const auto pooled = [&](int n, int r) {
      const i64 row = token * heads + group * h + r;
      const int index = selected[at + n], first = scorer.first(index);
      float query[CHANNELS], sum = 0;
      load_row(query, q + row * dk, dk, lane);
      for (int i = max(first, 0); i < min(first + scorer.width(), scorer.visible(t)); i++) {
        float key[CHANNELS];
        load_row(key, k + ((key0 + i) * groups + group) * dk, dk, lane);
        sum = fmaf(scorer.weight(index, i), expf(dot(query, key) * scale - lse[row]), sum);
      }
      return sum;
    };
    int blocks = 0;
    float shares = 0, all = 0, loss = 0;
    for (int n = 0; n < count; n++)
      if (scorer.chosen(t, selected[at + n])) blocks++, shares += mass[at + n];
    const bool counts = blocks >= 2 && shares > 0;
    for (int n = 0; n < count; n++) {
      float importance = 0;
      if (counts && scorer.chosen(t, selected[at + n])) {
        for (int r = 0; r < h; r++) importance += pooled(n, r);
        all += fmaxf(importance, LEAST);
      }
      if (lane == 0) d_importance[at + n] = importance;
    }
    __syncwarp();
    for (int n = 0; n < count; n++) {
      const float importance = d_importance[at + n];
      float gradient = 0;
      if (counts && scorer.chosen(t, selected[at + n])) {
        const float target = mass[at + n] / shares;
        if (target > 0) loss += target * logf(target * all / fmaxf(importance, LEAST));
        if (importance > LEAST) gradient = 1.0f / all - target / importance;
      }
      __syncwarp();
      if (lane == 0) d_importance[at + n] = gradient;
    }
    __syncwarp();
    for (int r = 0; r < h; r++) {
      float sum = 0;
      for (int n = 0; n < count; n++) {
        const float gradient = d_importance[at + n];
        if (gradient != 0) sum = fmaf(gradient, pooled(n, r), sum);
      }
      if (lane == 0) mean[token * heads + group * h + r] = sum;
    }
    if (lane == 0) losses[item] = loss;
  }
}

// One block: the mean, in double and in an order of its own.
extern "C" __global__ void __launch_bounds__(THREADS) scorer_mean(const float* losses, const int* offsets, float* loss,
                                                                  i64 sequences, int groups, double pairs) {
  __shared__ double parts[THREADS];
  double sum = 0;
  for (i64 i = threadIdx.x; i < (i64)offsets[sequences] * groups; i += THREADS) sum += losses[i];
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int step = THREADS / 2; step > 0; step /= 2) {
    if ((int)threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) *loss = pairs > 0 ? (float)(parts[0] / pairs) : 0.0f;
}

// Inputs of a backward pass of four value columns whose gradient of every score is -p * mean * factor: values of 0, an
// output of 1 and its gradient `mean`, so that delta is the mean and dO . v is 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    scorer_shared(const float* mean, Element* values, Element* out, Element* d_out, i64 rows, i64 keys, double factor) {
  const i64 stride = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < 4 * max(rows, keys); i += stride) {
    if (i < 4 * keys) write_one(values + i, 0.0f);
    if (i < 4 * rows) write_one(out + i, 1.0f);
    if (i < 4 * rows) write_one(d_out + i, i % 4 == 0 ? (float)(mean[i / 4] * factor) : 0.0f);
  }
}

// Adds the part of chosen blocks to the gradient of queries.
extern "C" __global__ void __launch_bounds__(THREADS)
    scorer_queries(const Element* q, const Element* k, const float* lse, const int* offsets, const int* key_offsets,
                   const int* selected, const float* d_importance, Element* dq, i64 sequences, int heads, int groups,
                   int dk, double factor, i64 l, i64 d, i64 block, int count, int init, int local) {
  const Scorer scorer = {l, d, block, count, init, local};
  const int h = heads / groups;
  const float scale = 1.0f / sqrtf((float)dk), f = (float)factor * scale;
  WARP_ITEMS((i64)offsets[sequences] * groups) {
    const i64 token = item / groups, at = item * count;
    const int group = (int)(item % groups), sequence = sequence_of(offsets, sequences, token);
    const int t = (int)(token - offsets[sequence]);
    for (int r = 0; r < h; r++) {
      const i64 row = token * heads + group * h + r;
      float query[CHANNELS], sum[CHANNELS] = {};
      load_row(query, q + row * dk, dk, lane);
      bool any = false;
      for (int n = 0; n < count; n++) {
        const float gradient = d_importance[at + n];
        if (gradient == 0) continue;
        any = true;
        const int index = selected[at + n], first = scorer.first(index);
        for (int i = max(first, 0); i < min(first + scorer.width(), scorer.visible(t)); i++) {
          float key[CHANNELS];
          load_row(key, k + ((key_offsets[sequence] + i) * (i64)groups + group) * dk, dk, lane);
          const float p = expf(dot(query, key) * scale - lse[row]);
          const float ds = p * scorer.weight(index, i) * gradient * f;
#pragma unroll
          for (int j = 0; j < CHANNELS; j++) sum[j] = fmaf(ds, key[j], sum[j]);
        }
      }
      if (!any) continue;
#pragma unroll
      for (int j = 0; j < CHANNELS; j++) {
        Element* const to = dq + row * dk + j * 32 + lane;
        if (j * 32 + lane < dk) write_one(to, read_one(to) + sum[j]);
      }
    }
  }
}

// Adds the part of tokens that chose a block to the gradient of its compressed keys.
extern "C" __global__ void __launch_bounds__(THREADS)
    scorer_keys(const Element* q, const Element* k, const float* lse, const int* offsets, const int* key_offsets,
                const int* selected, const float* d_importance, Element* d_keys, i64 sequences, int heads, int groups,
                int dk, double factor, i64 l, i64 d, i64 block, int count, int init, int local) {
  const Scorer scorer = {l, d, block, count, init, local};
  const int h = heads / groups;
  const float scale = 1.0f / sqrtf((float)dk), f = (float)factor * scale;
  WARP_ITEMS((i64)key_offsets[sequences] * groups) {
    const int group = (int)(item % groups), sequence = sequence_of(key_offsets, sequences, item / groups);
    const int index = (int)(item / groups - key_offsets[sequence]), start = offsets[sequence];
    const int length = offsets[sequence + 1] - start;
    float key[CHANNELS], sum[CHANNELS] = {};
    load_row(key, k + item * dk, dk, lane);
    for (int t = (int)(index * d + l - 1); t < length; t++) {
      const i64 at = ((i64)(start + t) * groups + group) * count;
      float gradient = 0;
      for (int n = lane; n < count; n += 32)
        if (selected[at + n] >= 0)
          gradient = fmaf(scorer.weight(selected[at + n], index), d_importance[at + n], gradient);
      gradient = warp_sum(gradient);
      if (gradient == 0) continue;
      for (int r = 0; r < h; r++) {
        const i64 row = (i64)(start + t) * heads + group * h + r;
        float query[CHANNELS];
        load_row(query, q + row * dk, dk, lane);
        const float ds = expf(dot(query, key) * scale - lse[row]) * gradient * f;
#pragma unroll
        for (int j = 0; j < CHANNELS; j++) sum[j] = fmaf(ds, query[j], sum[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < CHANNELS; j++) {
      Element* const to = d_keys + item * dk + j * 32 + lane;
      if (j * 32 + lane < dk) write_one(to, read_one(to) + sum[j]);
    }
  }
}
