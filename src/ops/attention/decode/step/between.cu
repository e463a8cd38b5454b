// The linear layers between two attentions of a decode step of few sequences, one launch: the output projection, the
// feed-forward layer and the projection of the next layer. A launch for each of them would wait for the end of the one
// before; here a block waits for numbers.
//
// All blocks run at the same time (StepBetween sees to it). Each has some tiles of eight rows of every weight, in
// registers before attention is over, so that only x travels between the layers. Numbers that other blocks wait for
// are words of two bf16 in `exchange`, which holds EMPTY before: a word is its own signal, and no barrier is needed.
// Each layer of the model has its own exchange; the launch of the next layer empties it again.
#include "linear.cuh"

#ifndef DIM
#define DIM 768
#define ATTENDED 768
#define HIDDEN 3072
#define GATED 0
#define OUT_TILES 1
#define UP_TILES 4
#define DOWN_TILES 1
#define NEXT_TILES 2
#define OCTETS 1
#endif

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int ROWS = 8 * OCTETS;                    // sequences at most
constexpr int BATCH_TILES = (OCTETS + 1) / 2;       // tiles of the tensor cores; one octet fills half of one
constexpr u32 EMPTY = 0xffffffff;     // a NaN that no rounding to bf16 gives
constexpr int MOST_POLLS = 1 << 26;   // half a minute; without this, a fault elsewhere would be a hang here

constexpr int MOST_TILES_OF(int a, int b) { return a > b ? a : b; }
constexpr int MOST_TILES = MOST_TILES_OF(MOST_TILES_OF(OUT_TILES, UP_TILES), MOST_TILES_OF(DOWN_TILES, NEXT_TILES));

static_assert(OCTETS == 1 || OCTETS % 2 == 0, "whole tiles");
static_assert(ROWS * 4 * OUT_TILES <= THREADS && ROWS * 4 * DOWN_TILES <= THREADS, "one residual for a thread");
static_assert(DIM % 32 == 0 && ATTENDED % 32 == 0 && HIDDEN % 32 == 0 && (!GATED || UP_TILES % 2 == 0), "pieces");

__device__ __forceinline__ uint4 load_relaxed(const bf16* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ u32 load_word(const bf16* from) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_word(bf16* to, u32 x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void poll_again(int& polls) {
  if (++polls > MOST_POLLS) __trap();
}
__device__ __forceinline__ bool has_empty(uint4 x) {
  return x.x == EMPTY || x.y == EMPTY || x.z == EMPTY || x.w == EMPTY;
}

// Sums of a layer's columns, of every warp.
struct Sums {
  float sums[WARPS][ROWS][8 * MOST_TILES + 1], squares[WARPS][ROWS];
};

// TILES tiles of eight rows of a weight [rows][INPUTS], whose columns the warps share out.
template <int INPUTS, int TILES> struct Layer {
  static constexpr int STEPS = INPUTS / 32;                // of 32 columns
  static constexpr int OWN = (STEPS + WARPS - 1) / WARPS;  // steps of a warp: every eighth
  uint4 weights[TILES][OWN];

  // row_of(n): the lane's row of tile n, null without one.
  template <class RowOf> __device__ __forceinline__ void load(const RowOf& row_of) {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const bf16* const row = row_of(n);
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int step = i * WARPS + warp;
        weights[n][i] =
            row != nullptr && step < STEPS ? load_early(row + step * 32 + 8 * t) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Multiplies rows of x [batch][INPUTS], normed if NORM; with POLL x is written by other blocks meanwhile.
  template <bool NORM, bool POLL> __device__ __forceinline__ void multiply(const bf16* x, int batch, const float* norm,
                                                                          Sums& to) const {
    constexpr int CHUNK = OCTETS * OWN <= 24 ? OWN : OCTETS > 2 ? 3 : 6;  // steps whose x is in registers
    constexpr int CHUNKS = (OWN + CHUNK - 1) / CHUNK, BUFFERS = CHUNKS > 1 ? 2 : 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float factors[NORM ? OWN : 1][8];
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (NORM && i * WARPS + warp < STEPS) ::load(factors[NORM ? i : 0], norm + (i * WARPS + warp) * 32 + 8 * t);
    uint4 a[BUFFERS][CHUNK][OCTETS];
    const auto load_chunk = [&](int chunk) {
#pragma unroll
      for (int i = 0; i < CHUNK; i++)
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
          const int step = (chunk * CHUNK + i) * WARPS + warp, row = 8 * o + g;
          const bf16* const from = x + row * INPUTS + step * 32 + 8 * t;
          const bool present = step < STEPS && row < batch;
          a[chunk % BUFFERS][i][o] =
              !present ? make_uint4(0, 0, 0, 0) : POLL ? load_relaxed(from) : *(const uint4*)from;
        }
    };
    load_chunk(0);
    float acc[BATCH_TILES][TILES][4] = {}, square[OCTETS] = {};
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      if (chunk + 1 < CHUNKS) load_chunk(chunk + 1);
      int polls = 0;
      while (POLL) {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
#pragma unroll
          for (int o = 0; o < OCTETS; o++) missing |= has_empty(a[chunk % BUFFERS][i][o]);
        if (!missing) break;
        poll_again(polls);
        load_chunk(chunk);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        const int at = chunk * CHUNK + i;
        if (at >= OWN || at * WARPS + warp >= STEPS) break;
        uint4(&own)[OCTETS] = a[chunk % BUFFERS][i];
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
          if (NORM) own[o] = weigh(own[o], factors[NORM ? at : 0], square[o]);
#pragma unroll
        for (int m = 0; m < BATCH_TILES; m++) {
          const uint4 first = own[2 * m], second = OCTETS > 1 ? own[OCTETS > 1 ? 2 * m + 1 : 0] : make_uint4(0, 0, 0, 0);
#pragma unroll
          for (int n = 0; n < TILES; n++) {
            const uint4 w = weights[n][at];
            mma_bf16(acc[m][n], first.x, second.x, first.y, second.y, w.x, w.y);
            mma_bf16(acc[m][n], first.z, second.z, first.w, second.w, w.z, w.w);
          }
        }
      }
    }
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) to.sums[warp][8 * o + g][8 * n + 2 * t + e] = acc[o / 2][n][o % 2 * 2 + e];
      if (NORM) {
        const float sum = quad_sum(square[o]);
        if (t == 0) to.squares[warp][8 * o + g] = sum;
      }
    }
    __syncthreads();
  }
};

// Columns `column` and the next of row `row` of a product of INPUTS terms, of all warps.
template <int INPUTS, bool NORM> __device__ __forceinline__ float2 total(const Sums& of, int row, int column,
                                                                        float epsilon) {
  float x = 0.0f, y = 0.0f, square = 0.0f;
#pragma unroll
  for (int k = 0; k < WARPS; k++) x += of.sums[k][row][column], y += of.sums[k][row][column + 1];
  if (!NORM) return make_float2(x, y);
#pragma unroll
  for (int k = 0; k < WARPS; k++) square += of.squares[k][row];
  const float scale = 1.0f / sqrtf(square / INPUTS + epsilon);
  return make_float2(x * scale, y * scale);
}

// attended [batch][ATTENDED]; x [batch][DIM]: the residual, replaced by the layer's result. out [DIM][ATTENDED],
// up [HIDDEN][DIM] (with GATED twice as many rows), down [DIM][HIDDEN]. next [next_rows][DIM] gives projection
// [batch][next_rows], and also [also_rows][DIM] gives also_y, f32; next_rows 0: there is no next layer.
// exchange, before: [batch][DIM], [batch][HIDDEN], [batch][DIM], of this and of the previous layer.
extern "C" __global__ void __launch_bounds__(THREADS, 1) step_between(
    const bf16* attended, bf16* x, const bf16* out, const float* norm, float epsilon, const bf16* up, const bf16* down,
    const float* next_norm, const bf16* next, int next_rows, bf16* projection, const bf16* also, int also_rows,
    float* also_y, bf16* exchange, bf16* before, int batch) {
  extern __shared__ float4 shared_memory[];
  Sums* const sums = (Sums*)shared_memory;  // two, in turns: a warp may be one layer ahead of another
  let_next_start();
  const int g = threadIdx.x % 32 / 4, block = blockIdx.x, blocks = gridDim.x;
  bf16 *const middle = exchange, *const active = middle + batch * DIM, *const after = active + batch * HIDDEN;
  const auto row_of = [&](const bf16* w, int inputs, int tile, int rows) {
    return tile * 8 < rows ? w + (i64)min(tile * 8 + g, rows - 1) * inputs : nullptr;
  };
  Layer<ATTENDED, OUT_TILES> out_layer;
  Layer<DIM, UP_TILES> up_layer;
  Layer<HIDDEN, DOWN_TILES> down_layer;
  Layer<DIM, NEXT_TILES> next_layer;
  const int next_tiles = (next_rows + 7) / 8;
  out_layer.load([&](int n) { return row_of(out, ATTENDED, block + n * blocks, DIM); });
  up_layer.load([&](int n) {  // with GATED tiles 2i and 2i + 1 are the same eight results of both halves
    if (!GATED) return row_of(up, DIM, block + n * blocks, HIDDEN);
    return row_of(up + (n % 2 ? (i64)HIDDEN * DIM : 0), DIM, block + n / 2 * blocks, HIDDEN);
  });
  down_layer.load([&](int n) { return row_of(down, HIDDEN, block + n * blocks, DIM); });
  next_layer.load([&](int n) {
    const int tile = block + n * blocks;
    return tile < next_tiles ? row_of(next, DIM, tile, next_rows) : row_of(also, DIM, tile - next_tiles, also_rows);
  });
  wait_for_previous();
  // Results are written in pairs, a word each: visit(row, n, column) has the pair at `column` of the block's tile n.
  const auto each_pair = [&](auto tiles, const auto& visit) {
    for (int i = threadIdx.x; i < batch * 4 * tiles.value; i += THREADS)
      visit(i / (4 * tiles.value), i / 4 % tiles.value, i % 4 * 2);
  };
  // The output projection and the second feed-forward layer add a residual, which comes with x.
  {  // ---- output projection
    u32 added = 0;
    each_pair(Count<OUT_TILES>{}, [&](int row, int n, int column) {
      const int r = (block + n * blocks) * 8 + column;
      if (r < DIM) added = *(const u32*)(x + row * DIM + r);
    });
    out_layer.template multiply<false, false>(attended, batch, nullptr, sums[0]);
    each_pair(Count<OUT_TILES>{}, [&](int row, int n, int column) {
      const int r = (block + n * blocks) * 8 + column;
      const float2 y = total<ATTENDED, false>(sums[0], row, 8 * n + column, 0.0f);
      if (r < DIM) store_word(middle + row * DIM + r, pack_bf16(y.x + low_bf16(added), y.y + high_bf16(added)));
    });
  }
  // The exchange of the previous layer, which nobody reads any more.
  for (int i = block * THREADS + threadIdx.x; i < batch * (2 * DIM + HIDDEN) / 8; i += blocks * THREADS)
    ((uint4*)before)[i] = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  // ---- first feed-forward layer
  up_layer.template multiply<true, true>(middle, batch, norm, sums[1]);
  each_pair(Count<GATED ? UP_TILES / 2 : UP_TILES>{}, [&](int row, int n, int column) {
    const int r = (block + n * blocks) * 8 + column, at = 8 * (GATED ? 2 * n : n) + column;
    float2 y = total<DIM, true>(sums[1], row, at, epsilon);
    y.x = silu(y.x), y.y = silu(y.y);
    if (GATED) {
      const float2 factor = total<DIM, true>(sums[1], row, at + 8, epsilon);
      y.x *= factor.x, y.y *= factor.y;
    }
    if (r < HIDDEN) store_word(active + row * HIDDEN + r, pack_bf16(y.x, y.y));
  });
  {  // ---- second feed-forward layer
    u32 added = 0;
    each_pair(Count<DOWN_TILES>{}, [&](int row, int n, int column) {
      const int r = (block + n * blocks) * 8 + column;
      if (r < DIM) added = load_word(middle + row * DIM + r);  // is there: this block has multiplied all of it
    });
    down_layer.template multiply<false, true>(active, batch, nullptr, sums[0]);
    each_pair(Count<DOWN_TILES>{}, [&](int row, int n, int column) {
      const int r = (block + n * blocks) * 8 + column;
      const float2 y = total<HIDDEN, false>(sums[0], row, 8 * n + column, 0.0f);
      const u32 word = pack_bf16(y.x + low_bf16(added), y.y + high_bf16(added));
      if (r >= DIM) return;
      store_word(after + row * DIM + r, word);
      *(u32*)(x + row * DIM + r) = word;
    });
  }
  if (next_rows == 0) return;
  // ---- projection of the next layer
  next_layer.template multiply<true, true>(after, batch, next_norm, sums[1]);
  each_pair(Count<NEXT_TILES>{}, [&](int row, int n, int column) {
    const int tile = block + n * blocks;
    const float2 y = total<DIM, true>(sums[1], row, 8 * n + column, epsilon);
    if (tile < next_tiles) {
      *(u32*)(projection + (i64)row * next_rows + tile * 8 + column) = pack_bf16(y.x, y.y);
      return;
    }
    const int r = (tile - next_tiles) * 8 + column;
    if (r < also_rows) also_y[row * also_rows + r] = y.x;
    if (r + 1 < also_rows) also_y[row * also_rows + r + 1] = y.y;
  });
}

extern "C" __device__ int step_between_shared = 2 * sizeof(Sums);
