// The gated sum of three branches, for any shape, in f32 or bf16. Rows are (token, head): three f32 gates and `size`
// numbers of each branch. The fused form is in fused/combine.cu.
#include "elements.cuh"

typedef DTYPE T;

// Calls body(row, index, Count<N>) for N numbers of every row, one thread each.
template <int N, class Body> __device__ __forceinline__ void each_in_rows(i64 rows, i64 size, const Body& body) {
  const i64 vectors = size / N, count = rows * vectors, threads = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
    const i64 row = count <= 0xffffffffll ? (i64)((u32)i / (u32)vectors) : i / vectors;
    body(row, i * N, Count<N>{});
  }
}

extern "C" __global__ void __launch_bounds__(256) combine_forward(const float* gates, const T* cmp, const T* sel,
                                                                  const T* win, T* out, i64 rows, i64 size) {
  const auto body = [=](i64 row, i64 i, auto n) {
    constexpr int N = decltype(n)::value;
    const float ga = gates[3 * row], gb = gates[3 * row + 1], gc = gates[3 * row + 2];
    float a[N], b[N], c[N];
    load(a, cmp + i);
    load(b, sel + i);
    load(c, win + i);
#pragma unroll
    for (int k = 0; k < N; k++) a[k] = ga * a[k] + gb * b[k] + gc * c[k];
    store(out + i, a);
  };
  if (size % WIDE<T> == 0 && aligned(cmp) && aligned(sel) && aligned(win) && aligned(out))
    each_in_rows<WIDE<T>>(rows, size, body);
  else each_in_rows<1>(rows, size, body);
}

// d_gates[row][b] (+)= d_out[row] . branch_b[row]; `team` lanes of a warp, a power of two, share a row.
template <int N> __device__ __forceinline__ void dot_rows(const T* d_out, const T* cmp, const T* sel, const T* win,
                                                          float* d_gates, i64 rows, i64 size, int team,
                                                          bool accumulate) {
  const int lane = threadIdx.x % team, teams = 256 / team;
  for (i64 first = (i64)blockIdx.x * teams; first < rows; first += (i64)gridDim.x * teams) {
    const i64 row = first + threadIdx.x / team;
    float sums[3] = {0.0f, 0.0f, 0.0f};
    if (row < rows)
      for (i64 i = row * size + lane * N; i < (row + 1) * size; i += team * N) {
        float d[N], x[N];
        load(d, d_out + i);
#pragma unroll
        for (int b = 0; b < 3; b++) {
          load(x, (b == 0 ? cmp : b == 1 ? sel : win) + i);
#pragma unroll
          for (int k = 0; k < N; k++) sums[b] += d[k] * x[k];
        }
      }
#pragma unroll
    for (int b = 0; b < 3; b++)
      for (int s = team / 2; s > 0; s >>= 1) sums[b] += __shfl_xor_sync(~0u, sums[b], s);
    if (row >= rows || lane != 0) continue;
#pragma unroll
    for (int b = 0; b < 3; b++) d_gates[3 * row + b] = accumulate ? d_gates[3 * row + b] + sums[b] : sums[b];
  }
}

extern "C" __global__ void __launch_bounds__(256) combine_backward_gates(const T* d_out, const T* cmp, const T* sel,
                                                                         const T* win, float* d_gates, i64 rows,
                                                                         i64 size, int team, int accumulate) {
  if (size % WIDE<T> == 0 && aligned(d_out) && aligned(cmp) && aligned(sel) && aligned(win))
    dot_rows<WIDE<T>>(d_out, cmp, sel, win, d_gates, rows, size, team, accumulate);
  else dot_rows<1>(d_out, cmp, sel, win, d_gates, rows, size, team, accumulate);
}

// d_branch[row] (+)= gates[row][b] * d_out[row]
extern "C" __global__ void __launch_bounds__(256) combine_backward_branch(const T* d_out, const float* gates,
                                                                          T* d_branch, int b, i64 rows, i64 size,
                                                                          int accumulate) {
  const auto body = [=](i64 row, i64 i, auto n) {
    constexpr int N = decltype(n)::value;
    const float gate = gates[3 * row + b];
    float d[N];
    load(d, d_out + i);
#pragma unroll
    for (int k = 0; k < N; k++) d[k] *= gate;
    store(d_branch + i, d, accumulate);
  };
  if (size % WIDE<T> == 0 && aligned(d_out) && aligned(d_branch)) each_in_rows<WIDE<T>>(rows, size, body);
  else each_in_rows<1>(rows, size, body);
}
