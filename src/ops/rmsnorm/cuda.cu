// RMSNorm, forward and backward. The forward keeps 1/rms of every row for the backward.
//
// A team of WARPS warps holds a row in registers, VECTORS 16-byte pieces in every thread, so each number is read once.
// VECTORS = 0: rows of any length and alignment, a block for each, read twice. RESIDENT blocks of the backward pass are to
// run on a multiprocessor at once.
#include "elements.cuh"

typedef DTYPE T;

#if VECTORS > 0

constexpr int N = WIDE<T>, TEAM = 32 * WARPS, BLOCK = TEAM < 256 ? 256 : TEAM, TEAMS = BLOCK / TEAM;

// The sum over the threads of a team, in every one of them. All threads of the block must call it.
__device__ __forceinline__ float team_sum(float x) {
  x = warp_sum(x);
  if constexpr (WARPS > 1) {
    __shared__ float sums[BLOCK / 32];
    const int warp = threadIdx.x / 32;
    __syncthreads();  // the sums of the last row have been read
    if (threadIdx.x % 32 == 0) sums[warp] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) x += sums[warp / WARPS * WARPS + i];
  }
  return x;
}

// The team's row as it lies in memory: 16 bytes at columns (v * TEAM + place) * N.
struct Row {
  uint4 raw[VECTORS];

  __device__ __forceinline__ void read(const T* from, int place, int dim) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int column = (v * TEAM + place) * N;
      raw[v] = column < dim ? *(const uint4*)(from + column) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void get(float (&to)[N], int v) const { load(to, (const T*)&raw[v]); }
};

extern "C" __global__ void __launch_bounds__(BLOCK)
rmsnorm_forward(const T* x, const float* weight, T* y, float* inverse_rms, i64 rows, int dim, float epsilon) {
  const int place = threadIdx.x % TEAM;
  const i64 teams = (i64)gridDim.x * TEAMS;
  for (i64 first = (i64)blockIdx.x * TEAMS; first < rows; first += teams) {
    const i64 r = first + threadIdx.x / TEAM;
    const bool present = r < rows;
    Row row;
    row.read(x + (present ? r : 0) * dim, place, dim);
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      float a[N];
      row.get(a, v);
#pragma unroll
      for (int k = 0; k < N; k++) squares += a[k] * a[k];
    }
    const float scale = 1.0f / sqrtf(team_sum(squares) / (float)dim + epsilon);
    if (!present) continue;
    if (place == 0) inverse_rms[r] = scale;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int column = (v * TEAM + place) * N;
      if (column >= dim) break;
      float a[N], w[N];
      row.get(a, v);
      load(w, weight + column);
#pragma unroll
      for (int k = 0; k < N; k++) a[k] *= scale * w[k];
      store(y + r * dim + column, a);
    }
  }
}

// dx (+)= ..., and d_weight's sum over the block's `span` rows into partial[blockIdx.x] unless that is null.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
rmsnorm_backward(const T* x, const float* weight, const float* inverse_rms, const T* dy, T* dx, float* partial,
                 i64 rows, int dim, int accumulate, int span) {
  const int place = threadIdx.x % TEAM, team = threadIdx.x / TEAM;
  const i64 first = (i64)blockIdx.x * span;
  const int count = (int)(rows - first < span ? rows - first : span);
  float sums[VECTORS][N] = {};
  for (int base = 0; base < count; base += TEAMS) {
    const bool present = base + team < count;
    const i64 r = first + (present ? base + team : 0);
    Row row, slope, before;
    row.read(x + r * dim, place, dim);
    slope.read(dy + r * dim, place, dim);
    if (accumulate) before.read(dx + r * dim, place, dim);  // with the others: waiting once is enough
    const float scale = inverse_rms[r];
    float inner = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int column = (v * TEAM + place) * N;
      if (column >= dim) break;
      float a[N], d[N], w[N];
      row.get(a, v);
      slope.get(d, v);
      load(w, weight + column);
#pragma unroll
      for (int k = 0; k < N; k++) {
        inner += d[k] * w[k] * a[k];
        if (present) sums[v][k] += d[k] * a[k] * scale;
      }
    }
    const float shrink = team_sum(inner) * scale * scale * scale / (float)dim;
    if (dx == nullptr || !present) continue;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int column = (v * TEAM + place) * N;
      if (column >= dim) break;
      float a[N], d[N], w[N];
      row.get(a, v);
      slope.get(d, v);
      load(w, weight + column);
#pragma unroll
      for (int k = 0; k < N; k++) d[k] = d[k] * w[k] * scale - a[k] * shrink;
      if (accumulate) {
        before.get(a, v);
#pragma unroll
        for (int k = 0; k < N; k++) d[k] += a[k];
      }
      store(dx + r * dim + column, d);
    }
  }
  if (partial == nullptr) return;
  float* const total = partial + (i64)blockIdx.x * dim;
  if constexpr (TEAMS == 1) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int column = (v * TEAM + place) * N;
      if (column < dim) store(total + column, sums[v]);
    }
  } else {
    __shared__ float4 room[TEAMS][VECTORS * TEAM * N / 4];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) store((float*)room[team] + (v * TEAM + place) * N, sums[v]);
    __syncthreads();
    for (int column = threadIdx.x; column < dim; column += BLOCK) {
      float sum = 0.0f;
#pragma unroll
      for (int t = 0; t < TEAMS; t++) sum += ((const float*)room[t])[column];
      total[column] = sum;
    }
  }
}

#else

constexpr int BLOCK = 256;

extern "C" __global__ void __launch_bounds__(BLOCK)
rmsnorm_forward(const T* x, const float* weight, T* y, float* inverse_rms, i64 rows, int dim, float epsilon) {
  __shared__ float room[BLOCK / 32];
  for (i64 r = blockIdx.x; r < rows; r += gridDim.x) {
    const T* row = x + r * dim;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < dim; i += BLOCK) squares += read_one(row + i) * read_one(row + i);
    const float scale = 1.0f / sqrtf(block_sum(squares, room) / (float)dim + epsilon);
    if (threadIdx.x == 0) inverse_rms[r] = scale;
    for (int i = threadIdx.x; i < dim; i += BLOCK) write_one(y + r * dim + i, read_one(row + i) * scale * weight[i]);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
rmsnorm_backward(const T* x, const float* weight, const float* inverse_rms, const T* dy, T* dx, float* partial,
                 i64 rows, int dim, int accumulate, int span) {
  __shared__ float room[BLOCK / 32];
  const i64 first = (i64)blockIdx.x * span;
  const i64 end = rows - first < span ? rows : first + span;
  if (dx != nullptr)
    for (i64 r = first; r < end; r++) {
      const T* row = x + r * dim;
      const T* slope = dy + r * dim;
      const float scale = inverse_rms[r];
      float inner = 0.0f;
      for (int i = threadIdx.x; i < dim; i += BLOCK) inner += read_one(slope + i) * weight[i] * read_one(row + i);
      const float shrink = block_sum(inner, room) * scale * scale * scale / (float)dim;
      for (int i = threadIdx.x; i < dim; i += BLOCK) {
        const float d = read_one(slope + i) * weight[i] * scale - read_one(row + i) * shrink;
        T* to = dx + r * dim + i;
        write_one(to, accumulate ? read_one(to) + d : d);
      }
    }
  if (partial == nullptr) return;
  for (int i = threadIdx.x; i < dim; i += BLOCK) {
    float sum = 0.0f;
    for (i64 r = first; r < end; r++) sum += read_one(dy + r * dim + i) * read_one(x + r * dim + i) * inverse_rms[r];
    partial[(i64)blockIdx.x * dim + i] = sum;
  }
}

#endif

extern "C" __global__ void __launch_bounds__(1024)
rmsnorm_weight(const float* partial, i64 partials, float* d_weight, i64 dim, int accumulate) {
  add_partial_sums(partial, partials, d_weight, dim, accumulate);
}
