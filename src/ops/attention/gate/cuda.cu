// The gate over three branches, and the sums behind its statistics. Rows are (token, head), three values each; logits
// and their gradients are T, gates and their gradients f32.
#include "elements.cuh"

typedef DTYPE T;

constexpr int ROWS_PER_PARTIAL = 4096;  // rows summed into one partial result (op.ts has the same)
constexpr int SUMS = 9;
constexpr int TOKENS_PER_PARTIAL = 128;  // of a partial sum of the bias's gradient (cuda.ts has the same)

template <class Body> __device__ __forceinline__ void each_row(i64 rows, const Body& body) {
  const i64 threads = (i64)gridDim.x * blockDim.x;
  for (i64 r = (i64)blockIdx.x * blockDim.x + threadIdx.x; r < rows; r += threads) body(r);
}

// The gates of one row's logits.
__device__ __forceinline__ void gate_of(float (&x)[3], bool softmax, float inverse) {
#pragma unroll
  for (int b = 0; b < 3; b++) x[b] *= inverse;
  if (softmax) {
    // Taking the largest away: exp cannot overflow, and the sum is at least 1. A NaN reaches the sum and with it the
    // row.
    const float most = fmaxf(x[0], fmaxf(x[1], x[2]));
#pragma unroll
    for (int b = 0; b < 3; b++) x[b] = expf(x[b] - most);
    const float share = 1.0f / (x[0] + x[1] + x[2]);
#pragma unroll
    for (int b = 0; b < 3; b++) x[b] *= share;
  } else {
#pragma unroll
    for (int b = 0; b < 3; b++) x[b] = 1.0f / (1.0f + expf(-x[b]));
  }
}

// d = the gradient of the row's logits, given its gates and their gradient.
__device__ __forceinline__ void gradient_of(float (&d)[3], const float (&g)[3], bool softmax, float inverse) {
  const float mean = g[0] * d[0] + g[1] * d[1] + g[2] * d[2];
#pragma unroll
  for (int b = 0; b < 3; b++) d[b] = softmax ? g[b] * (d[b] - mean) * inverse : g[b] * (1.0f - g[b]) * d[b] * inverse;
}

extern "C" __global__ void __launch_bounds__(256) gate_forward(const T* logits, float* gates, i64 rows, int softmax,
                                                               float temperature) {
  const float inverse = 1.0f / temperature;
  each_row(rows, [=](i64 r) {
    float x[3];
#pragma unroll
    for (int b = 0; b < 3; b++) x[b] = read_one(logits + 3 * r + b);
    gate_of(x, softmax, inverse);
#pragma unroll
    for (int b = 0; b < 3; b++) gates[3 * r + b] = x[b];
  });
}

extern "C" __global__ void __launch_bounds__(256) gate_backward(const float* gates, const float* d_gates, T* d_logits,
                                                                i64 rows, int softmax, float temperature,
                                                                int accumulate) {
  const float inverse = 1.0f / temperature;
  each_row(rows, [=](i64 r) {
    float g[3], d[3];
#pragma unroll
    for (int b = 0; b < 3; b++) g[b] = gates[3 * r + b], d[b] = d_gates[3 * r + b];
    gradient_of(d, g, softmax, inverse);
#pragma unroll
    for (int b = 0; b < 3; b++) {
      T* to = d_logits + 3 * r + b;
      write_one(to, accumulate ? read_one(to) + d[b] : d[b]);
    }
  });
}

// Logits as columns of a wider matrix: those of token t begin at fused + t * width + column; the bias [3 * heads] is
// added.
extern "C" __global__ void __launch_bounds__(256) gate_columns_forward(const T* fused, const float* bias, float* gates,
                                                                       i64 tokens, int heads, i64 width, i64 column,
                                                                       int softmax, float temperature) {
  const float inverse = 1.0f / temperature;
  each_row(tokens * heads, [=](i64 r) {
    const i64 token = r / heads;
    const int head = (int)(r - token * heads);
    const T* from = fused + token * width + column + 3 * head;
    float x[3];
#pragma unroll
    for (int b = 0; b < 3; b++) x[b] = read_one(from + b) + bias[3 * head + b];
    gate_of(x, softmax, inverse);
#pragma unroll
    for (int b = 0; b < 3; b++) gates[3 * r + b] = x[b];
  });
}

// The same columns of d_fused, zeros in the columns behind them, and partial[blockIdx.x] [3 * heads] = the sums over
// the block's tokens for the bias, unless that is null. A thread keeps to one head, so that its sums stay in registers.
// `largest`, unless null: the largest magnitude written, if nothing is accumulated.
constexpr int COLUMNS_BLOCK = 256;
extern "C" __global__ void __launch_bounds__(COLUMNS_BLOCK) gate_columns_backward(const float* gates,
                                                                                  const float* d_gates, T* d_fused,
                                                                                  float* partial, i64 tokens, int heads,
                                                                                  i64 width, i64 column, int softmax,
                                                                                  float temperature, int accumulate,
                                                                                  float* largest) {
  __shared__ float sums[COLUMNS_BLOCK][3];
  u32 top = 0;
  const float inverse = 1.0f / temperature;
  const i64 first = (i64)blockIdx.x * TOKENS_PER_PARTIAL;
  const int count = (int)(tokens - first < TOKENS_PER_PARTIAL ? tokens - first : TOKENS_PER_PARTIAL);
  for (int begin = 0; begin < heads; begin += COLUMNS_BLOCK) {
    const int lanes = heads - begin < COLUMNS_BLOCK ? heads - begin : COLUMNS_BLOCK, teams = COLUMNS_BLOCK / lanes;
    const int team = (int)threadIdx.x / lanes, head = begin + (int)threadIdx.x - team * lanes;
    float sum[3] = {};
    if (team < teams)
      for (int t = team; t < count; t += teams) {
        const i64 r = (first + t) * heads + head;
        float g[3], d[3] = {};
        if (d_gates != nullptr) {
#pragma unroll
          for (int b = 0; b < 3; b++) g[b] = gates[3 * r + b], d[b] = d_gates[3 * r + b];
          gradient_of(d, g, softmax, inverse);
        }
        T* to = d_fused + (first + t) * width + column + 3 * head;
        top = magnitude(d, top);
#pragma unroll
        for (int b = 0; b < 3; b++) {
          sum[b] += d[b];
          write_one(to + b, accumulate ? read_one(to + b) + d[b] : d[b]);
        }
      }
    if (partial == nullptr) continue;
    __syncthreads();  // the sums of the last heads have been read
#pragma unroll
    for (int b = 0; b < 3; b++) sums[threadIdx.x][b] = sum[b];
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * lanes; i += COLUMNS_BLOCK) {
      float total = 0.0f;
      for (int t = 0; t < teams; t++) total += sums[t * lanes + i / 3][i % 3];
      partial[(i64)blockIdx.x * 3 * heads + 3 * begin + i] = total;
    }
  }
  if (largest != nullptr) add_largest(largest, top);
  const i64 behind = width - column - 3 * heads;
  if (accumulate) return;
  for (i64 i = threadIdx.x; i < count * behind; i += COLUMNS_BLOCK) {
    const i64 t = i / behind;
    write_one(d_fused + (first + t) * width + column + 3 * heads + (i - t * behind), 0.0f);
  }
}

extern "C" __global__ void __launch_bounds__(1024) gate_bias(const float* partial, i64 partials, float* d_bias,
                                                             i64 count, int accumulate) {
  add_partial_sums(partial, partials, d_bias, count, accumulate);
}

extern "C" __global__ void __launch_bounds__(256) gate_constant(float* gates, i64 rows, float cmp, float sel,
                                                                float win) {
  each_row(rows, [=](i64 r) { gates[3 * r] = cmp, gates[3 * r + 1] = sel, gates[3 * r + 2] = win; });
}

// rows, sum and least of the entropy, sum and greatest of the largest share, collapsed rows, sums of the shares.
struct Sums {
  double value[SUMS];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < SUMS; i++) value[i] = 0;
    value[2] = positive_infinity(), value[4] = -positive_infinity();
  }
  __device__ __forceinline__ void least(double x) {
    if (x < value[2] || x != x) value[2] = x;  // once NaN, always NaN
  }
  __device__ __forceinline__ void greatest(double x) {
    if (x > value[4] || x != x) value[4] = x;
  }
  __device__ __forceinline__ void add(const double (&other)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; i++)
      if (i != 2 && i != 4) value[i] += other[i];
    least(other[2]);
    greatest(other[4]);
  }
};

__device__ __forceinline__ void add_row(Sums& sums, const float* gates) {
  const double total = (double)gates[0] + gates[1] + gates[2];
  double share[3], entropy = 0;
#pragma unroll
  for (int b = 0; b < 3; b++) {
    share[b] = total == 0 ? 1.0 / 3 : gates[b] / total;
    if (share[b] != 0) entropy -= share[b] * (double)logf((float)share[b]);
  }
  double most = share[0];
#pragma unroll
  for (int b = 1; b < 3; b++)
    if (share[b] > most) most = share[b];  // one NaN makes all three NaN
  sums.value[0] += 1;
  sums.value[1] += entropy;
  sums.least(entropy);
  sums.value[3] += most;
  sums.greatest(most);
  sums.value[5] += entropy < 0.1 && most > 0.95;
#pragma unroll
  for (int b = 0; b < 3; b++) sums.value[6 + b] += share[b];
}

// partial[blockIdx.x] = the sums of ROWS_PER_PARTIAL rows.
extern "C" __global__ void __launch_bounds__(256) gate_partial(const float* gates, double* partial, i64 rows) {
  __shared__ double room[8][SUMS];
  const i64 first = (i64)blockIdx.x * ROWS_PER_PARTIAL;
  const i64 end = rows - first < ROWS_PER_PARTIAL ? rows : first + ROWS_PER_PARTIAL;
  Sums own;
  own.clear();
  for (i64 r = first + threadIdx.x; r < end; r += 256) add_row(own, gates + 3 * r);
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) {
    double other[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) other[i] = __shfl_down_sync(~0u, own.value[i], s);
    own.add(other);
  }
  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (int i = 0; i < SUMS; i++) room[threadIdx.x / 32][i] = own.value[i];
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < 8; w++) own.add(room[w]);
#pragma unroll
  for (int i = 0; i < SUMS; i++) partial[(i64)blockIdx.x * SUMS + i] = own.value[i];
}

// All partial results in order; one warp, of which each lane takes a stretch of them.
extern "C" __global__ void __launch_bounds__(32) gate_sums(const double* partial, i64 partials, double* sums) {
  const i64 share = (partials + 31) / 32, first = threadIdx.x * share;
  Sums all;
  all.clear();
  for (i64 p = first; p < first + share && p < partials; p++) {
    double other[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) other[i] = partial[p * SUMS + i];
    all.add(other);
  }
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) {
    double other[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) other[i] = __shfl_down_sync(~0u, all.value[i], s);
    all.add(other);
  }
  if (threadIdx.x == 0)
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = all.value[i];
}
