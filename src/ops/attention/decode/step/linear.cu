// Linear layers of a decode step: few rows of x, so all the time goes into one pass over the weights.
//
// y = x wᵀ for up to 16 * BATCH_TILES rows of x, with what stands around it: x may be normed (NORM: RMSNorm), the
// result activated (ACTIVATION 1: SiLU, 2: SwiGLU over two halves of w) or added to a residual. A block has TILES tiles
// of eight rows of w, whose columns its warps share out; a warp has all its weights in flight before it waits for x.
// The tensor cores multiply x (rows of the batch) by w, both straight from memory, 16 bytes a lane.
//
// Every block reads all columns of x, so with many inputs and few tiles most of the traffic is x. With CLUSTER > 1 the
// blocks of a cluster share out the columns of x and of more tiles, and exchange their sums: plain layers only.
#ifndef CLUSTER
#define CLUSTER 1
#endif
#include "cluster.cuh"
#include "decode.cuh"

#ifndef INPUTS
#define INPUTS 768
#define BATCH_TILES 1
#define TILES 1
#define NORM 1
#define ACTIVATION 0
#define OUTPUT bf16
#endif

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int STEPS = INPUTS / (32 * CLUSTER);    // of 32 columns, of a block
constexpr int OWN = (STEPS + WARPS - 1) / WARPS;  // steps of a warp: every eighth
// Blocks on a multiprocessor: with few, a thread has registers for all of its loads at once.
constexpr int RESIDENT = BATCH_TILES > 1 || TILES > 2 || OWN * TILES > 6 ? 2 : 4;
constexpr int ROWS = 16 * BATCH_TILES, COLUMNS = 8 * TILES;

// Results that a block of a cluster adds up and writes.
constexpr int SHARE = (ROWS * COLUMNS + CLUSTER - 1) / CLUSTER;

static_assert(INPUTS % (32 * CLUSTER) == 0 && (ACTIVATION != 2 || TILES % 2 == 0), "what the pieces need");
static_assert(CLUSTER == 1 || (!NORM && ACTIVATION == 0), "a cluster exchanges plain sums");

struct Shared {
  float sums[WARPS][ROWS][COLUMNS + 1], squares[WARPS][ROWS];
  float parts[CLUSTER][CLUSTER > 1 ? SHARE : 1];  // sums of the blocks of a cluster
};

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// Eight numbers times the norm's weights, rounded; their squares are added up.
__device__ __forceinline__ uint4 weigh(uint4 x, const float (&weight)[8], float& squares) {
  const u32 in[4] = {x.x, x.y, x.z, x.w};
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float a = low_bf16(in[i]), b = high_bf16(in[i]);
    squares += a * a + b * b;
    out[i] = pack_bf16(a * weight[2 * i], b * weight[2 * i + 1]);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// w [rows][INPUTS] gives y [batch][rows]; then also [also_rows][INPUTS] gives also_y, f32 (the gate's logits). With
// ACTIVATION 2 `rows` counts the results, and w has twice as many rows. norm: f32 [INPUTS].
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
step_linear(const bf16* x, const float* norm, float epsilon, const bf16* w, int rows, OUTPUT* y, const bf16* also,
            int also_rows, float* also_y, const bf16* residual, int batch) {
  extern __shared__ float4 shared_memory[];
  Shared& s = *(Shared*)shared_memory;
  auto& sums = s.sums;
  auto& squares = s.squares;
  let_next_start();
  if (CLUSTER > 1) cluster_arrive();
  const int rank = cluster_rank();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int own_tiles = ((rows + 7) / 8) * (ACTIVATION == 2 ? 2 : 1);  // the others belong to `also`
  const int first_tile = (int)blockIdx.x / CLUSTER * TILES, first_row = blockIdx.y * ROWS;
  uint4 weights[TILES][OWN];
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const int tile = first_tile + n;
    const bool is_own = tile < own_tiles;
    // SwiGLU: tiles 2i and 2i + 1 are the same eight results, of the first and of the second half
    int r = is_own ? (ACTIVATION == 2 ? tile / 2 : tile) * 8 + g : (tile - own_tiles) * 8 + g;
    const int last = (is_own ? rows : also_rows) - 1;
    if (r > last) r = last;  // its result is not written
    if (ACTIVATION == 2 && tile % 2 == 1) r += rows;
    const bf16* from = (is_own ? w : also) + (i64)r * INPUTS + rank * STEPS * 32 + 8 * t;
    const bool present = is_own || also_rows > 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int step = i * WARPS + warp;
      weights[n][i] =
          present && (STEPS % WARPS == 0 || step < STEPS) ? load_early(from + step * 32) : make_uint4(0, 0, 0, 0);
    }
  }
  wait_for_previous();
  // The residual of a thread's first result, which is its only one in small batches, comes with x.
  float added = 0.0f;
  if (residual != nullptr) {
    const int first = CLUSTER > 1 ? rank * SHARE + (int)threadIdx.x : (int)threadIdx.x;
    const int row = first_row + first / COLUMNS, r = first_tile * 8 + first % COLUMNS;
    if (first < ROWS * COLUMNS && row < batch && r < rows) added = read_one(residual + (i64)row * rows + r);
  }
  float acc[BATCH_TILES][TILES][4] = {}, square[BATCH_TILES][2] = {};
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int step = i * WARPS + warp;
    if (STEPS % WARPS != 0 && step >= STEPS) break;
    float factor[8];
    if (NORM) load(factor, norm + step * 32 + 8 * t);
#pragma unroll
    for (int m = 0; m < BATCH_TILES; m++) {
      uint4 a[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first_row + 16 * m + 8 * half + g;
        const int column = (rank * STEPS + step) * 32 + 8 * t;
        a[half] = row < batch ? *(const uint4*)(x + (i64)row * INPUTS + column) : make_uint4(0, 0, 0, 0);
        if (NORM) a[half] = weigh(a[half], factor, square[m][half]);
      }
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        mma_bf16(acc[m][n], a[0].x, a[1].x, a[0].y, a[1].y, weights[n][i].x, weights[n][i].y);
        mma_bf16(acc[m][n], a[0].z, a[1].z, a[0].w, a[1].w, weights[n][i].z, weights[n][i].w);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < BATCH_TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = 16 * m + 8 * half + g;
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) sums[warp][row][8 * n + 2 * t + e] = acc[m][n][2 * half + e];
      if (NORM) {
        float own = square[m][half];
        own += __shfl_xor_sync(~0u, own, 1);
        own += __shfl_xor_sync(~0u, own, 2);
        if (t == 0) squares[warp][row] = own;
      }
    }
  __syncthreads();
  const auto total = [&](int row, int column) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) sum += sums[k][row][column];
    if (!NORM) return sum;
    float square = 0.0f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) square += squares[k][row];
    return sum * (1.0f / sqrtf(square / INPUTS + epsilon));
  };
  if (CLUSTER > 1) {
    cluster_wait();  // all have started
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS)
      write_to(i / SHARE, &s.parts[rank][i % SHARE], total(i / COLUMNS, i % COLUMNS));
    cluster_arrive();
    cluster_wait();
    for (int i = rank * SHARE + (int)threadIdx.x; i < ROWS * COLUMNS && i < (rank + 1) * SHARE; i += THREADS) {
      const int to = first_row + i / COLUMNS, r = first_tile * 8 + i % COLUMNS, own = i - rank * SHARE;
      if (to >= batch || r >= rows) continue;
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) sum += s.parts[c][own];
      if (residual != nullptr) sum += own == (int)threadIdx.x ? added : read_one(residual + (i64)to * rows + r);
      write_one(y + (i64)to * rows + r, sum);
    }
    return;
  }
  // SwiGLU has half as many results as columns.
  constexpr int RESULTS = ACTIVATION == 2 ? COLUMNS / 2 : COLUMNS;
  for (int i = threadIdx.x; i < ROWS * RESULTS; i += THREADS) {
    const int row = i / RESULTS, column = i % RESULTS, to = first_row + row;
    if (to >= batch) continue;
    if (ACTIVATION == 2) {
      const int pair = column / 8, r = (first_tile / 2 + pair) * 8 + column % 8;
      if (r < rows)
        write_one(y + (i64)to * rows + r,
                  silu(total(row, pair * 16 + column % 8)) * total(row, pair * 16 + 8 + column % 8));
      continue;
    }
    const int tile = first_tile + column / 8;
    if (tile >= own_tiles) {
      const int r = (tile - own_tiles) * 8 + column % 8;
      if (r < also_rows) also_y[(i64)to * also_rows + r] = total(row, column);
      continue;
    }
    const int r = tile * 8 + column % 8;
    if (r >= rows) continue;
    float value = total(row, column);
    if (ACTIVATION == 1) value = silu(value);
    if (residual != nullptr) value += i == threadIdx.x ? added : read_one(residual + (i64)to * rows + r);
    write_one(y + (i64)to * rows + r, value);
  }
}

extern "C" __device__ int step_linear_shared = sizeof(Shared);
