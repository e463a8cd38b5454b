// Shared by the kernels of a decode step: shapes as macros, the overlap of one kernel's start with the end of the one
// before, and attention of one token's heads over 32 keys of a page, by one warp.
//
// Pages: per group keys as rows [size][DK], then values as columns [DV][size] (decode/paged). Tensor cores multiply
// m16n8k16 with the heads of a group as rows; both operands come from memory straight into registers, 16 bytes a lane,
// because the order of terms in a sum is free: lane 4g + t takes eight neighbours for two products.
#pragma once
#include "elements.cuh"
#include "../../shape.cuh"

constexpr int PAGE = 64;                 // keys of a page of the window and the compressed branch (paged/cuda.ts)
constexpr int UNIT = 32;                 // keys that a warp sees at a time
constexpr int KP = DK / 32;              // 16-byte pieces a lane has of a key
constexpr int VT = DV / 8;               // tiles of eight value columns
constexpr int HALVES = HPG > 8 ? 2 : 1;  // rows g, and g + 8 for more than eight heads

static_assert(DK % 32 == 0 && DV % 8 == 0 && SEL_L % UNIT == 0, "what the pieces of 16 bytes need");

// Partial result of a block of dense attention: maxima [HPG], sums [HPG], results [HPG][DV], number of keys.
constexpr int RECORD = HPG * (2 + DV) + 1;

// Columns of the fused projection: queries, then keys and values of the compressed, the selected and the window branch.
constexpr int KEYS = GROUPS * DK, VALUES = GROUPS * DV;
constexpr int AT_CMP = HEADS * DK, AT_SEL = AT_CMP + KEYS + VALUES, AT_WIN = AT_SEL + KEYS + VALUES;
constexpr int WIDTH = AT_WIN + KEYS + VALUES;

// The next kernel may start now; what this one has to wait for (everything that earlier kernels wrote) comes at the
// latest possible place. Without the launch attribute both do nothing.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads of data that overlapping kernels do not write (weights, old keys): volatile, so that they stay before the wait.
// Four lanes read half of a line of 128 bytes, another warp the other half soon after: the whole line is requested at
// once.
#ifndef LOAD_HINT
#define LOAD_HINT 128
#endif
#if LOAD_HINT == 256
#define LOAD_EARLY "ld.global.L2::256B.v4.u32"
#elif LOAD_HINT == 128
#define LOAD_EARLY "ld.global.L2::128B.v4.u32"
#else
#define LOAD_EARLY "ld.global.v4.u32"
#endif
__device__ __forceinline__ uint4 load_early(const void* from) {
  uint4 x;
  asm volatile(LOAD_EARLY " {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}

// The same for keys and values, which are read once: they leave the L2 cache before anything else. Not where a single
// block reads all keys of a sequence: there it takes longer.
__device__ __forceinline__ uint4 load_once(const void* from) {
#if (READ_ONCE || CLUSTER > 1) && __CUDA_ARCH__ >= 800
  uint4 x;
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from), "l"(policy));
  return x;
#else
  return load_early(from);
#endif
}

struct Cached {
  const i64* tables;  // [batch] addresses of tables of pages
  i64 place;          // of the layer in a page, in numbers

  __device__ bf16* page(int b, int index) const { return ((bf16* const*)tables[b])[index] + place; }
};

// One sequence's pages of a kind.
struct Table {
  bf16* const* pages;
  i64 place;

  __device__ __forceinline__ Table(const Cached& cached, int b)
      : pages((bf16* const*)cached.tables[b]), place(cached.place) {}
  __device__ __forceinline__ bf16* page(int index) const { return pages[index] + place; }
};

template <int SIZE> __device__ __forceinline__ bf16* keys_of(bf16* page, int g) { return page + g * SIZE * DK; }
template <int SIZE> __device__ __forceinline__ bf16* values_of(bf16* page, int g) {
  return page + GROUPS * SIZE * DK + g * SIZE * DV;
}

// 32 keys and values in flight to a warp. Lane 4g + t has of tile i the key 8 (g / 2) + 2 i + g % 2, so that the
// scores it gets, of columns 2t and 2t + 1 of every tile, are those of the keys 8t ... 8t + 7: what it needs as operand
// of the second product, whose values it loads as those eight neighbours.
struct Unit {
  uint4 keys[4][KP], values[VT];

  // For paths that load nothing: a register that is undefined on one path is kept live on all others.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < KP; j++) keys[i][j] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int n = 0; n < VT; n++) values[n] = make_uint4(0, 0, 0, 0);
  }
  template <int SIZE> __device__ __forceinline__ void load(bf16* page, int group, int first) {
    load_keys<SIZE>(page, group, first);
    load_values<SIZE>(page, group, first);
  }
  template <int SIZE> __device__ __forceinline__ void load_keys(bf16* page, int group, int first) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bf16* k = keys_of<SIZE>(page, group) + (first + 8 * (g / 2) + g % 2) * DK + 8 * t;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < KP; j++) keys[i][j] = load_once(k + 2 * i * DK + 32 * j);
  }
  template <int SIZE> __device__ __forceinline__ void load_values(bf16* page, int group, int first) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bf16* v = values_of<SIZE>(page, group) + g * SIZE + first + 8 * t;
#pragma unroll
    for (int n = 0; n < VT; n++) values[n] = load_once(v + n * 8 * SIZE);
  }
};

// The queries of a group's heads as the first operand: rows g and g + 8.
struct Queries {
  uint4 rows[HALVES][KP];

  // q: [8 * HALVES][DK] in shared memory, rows without a head zero.
  __device__ __forceinline__ void load(const bf16* q) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int j = 0; j < KP; j++) rows[half][j] = *(const uint4*)(q + (g + 8 * half) * DK + 32 * j + 8 * t);
  }
};

// Running softmax of a warp over units. Sums are those of the lane alone until `finish`.
struct Running {
  float most[HALVES], total[HALVES], out[VT][4];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int half = 0; half < HALVES; half++) most[half] = -positive_infinity(), total[half] = 0.0f;
#pragma unroll
    for (int n = 0; n < VT; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
  }

  // Products of the unit's keys with the queries.
  static __device__ __forceinline__ void multiply(float (&s)[4][4], const Unit& unit, const Queries& q) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
#pragma unroll
      for (int j = 0; j < KP; j++) {
        const uint4 a = q.rows[0][j], b = HALVES > 1 ? q.rows[HALVES - 1][j] : make_uint4(0, 0, 0, 0),
                    k = unit.keys[i][j];
        mma_bf16(s[i], a.x, b.x, a.y, b.y, k.x, k.y);
        mma_bf16(s[i], a.z, b.z, a.w, b.w, k.z, k.w);
      }
    }
  }

  // Keys [low, high) of the unit are seen, whose products are in s. score(half, i, x, a, b, base): scores x[0] and x[1]
  // of keys 8t + 2i and the next, in powers of two, which are a and b relative to the base.
  template <class Score>
  __device__ __forceinline__ void add(const Unit& unit, float (&s)[4][4], int low, int high, const Score& score) {
    const int t = threadIdx.x % 4;
    const float scale = LOG2_E / sqrtf((float)DK);
    u32 p[2][4];  // operands of the second product: [half][i]
    float shrink[2] = {1.0f, 1.0f};
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      float top = most[half];
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int key = 8 * t + 2 * i + e;
          float& x = s[i][2 * half + e];
          x = key >= low && key < high ? x * scale : -positive_infinity();
          top = fmaxf(top, x);
        }
      }
      top = quad_max(top);
      // Nothing seen so far: any finite number does in place of -inf, whose difference from itself is NaN.
      const float base = top == -positive_infinity() ? 0.0f : top;
      shrink[half] = exp2_approximate(most[half] - base);
      most[half] = top;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float a = exp2_approximate(s[i][2 * half] - base), b = exp2_approximate(s[i][2 * half + 1] - base);
        sum += a + b;
        p[half][i] = pack_bf16(a, b);
        score(half, i, s[i] + 2 * half, a, b, base);
      }
      total[half] = total[half] * shrink[half] + sum;
    }
    if (HALVES == 1) p[1][0] = p[1][1] = p[1][2] = p[1][3] = 0;
#pragma unroll
    for (int n = 0; n < VT; n++) {
      out[n][0] *= shrink[0], out[n][1] *= shrink[0], out[n][2] *= shrink[1], out[n][3] *= shrink[1];
      const uint4 v = unit.values[n];
      mma_bf16(out[n], p[0][0], p[1][0], p[0][1], p[1][1], v.x, v.y);
      mma_bf16(out[n], p[0][2], p[1][2], p[0][3], p[1][3], v.z, v.w);
    }
  }

  template <class Score>
  __device__ __forceinline__ void see(const Unit& unit, const Queries& q, int low, int high, const Score& score) {
    float s[4][4];
    multiply(s, unit, q);
    add(unit, s, low, high, score);
  }

  // Into memory of the warp: maxima [HPG], sums [HPG], results [HPG][ROW], not divided by the sums.
  template <int ROW = DV> __device__ __forceinline__ void finish(float* tops, float* sums, float* results) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const float sum = quad_sum(total[half]);
      const int row = g + 8 * half;
      if (row >= HPG) continue;
      if (t == 0) tops[row] = most[half], sums[row] = sum;
#pragma unroll
      for (int n = 0; n < VT; n++)
        *(float2*)(results + row * ROW + 8 * n + 2 * t) = make_float2(out[n][2 * half], out[n][2 * half + 1]);
    }
  }
};

// q[r][c] of group g of a row of the projection, rotated, in shared memory [8 * HALVES][DK]; rows without a head are
// zero. rotation: cosine and sine of every pair. AT_ONCE: all loads of a thread are in flight, if it has the registers.
template <int THREADS, bool AT_ONCE = true>
__device__ __forceinline__ void rotate_queries(bf16* q, const bf16* projection, const float2* rotation, int g) {
  const auto rotate = [&](int i) {
    const int r = i / (DK / 2), j = i % (DK / 2);
    float x = 0.0f, y = 0.0f;
    if (r < HPG) {
      const bf16* from = projection + (g * HPG + r) * DK + j;
      const float a = read_one(from), b = read_one(from + DK / 2);
      const float2 turn = rotation[j];
      x = a * turn.x - b * turn.y, y = b * turn.x + a * turn.y;
    }
    write_one(q + r * DK + j, x);
    write_one(q + r * DK + j + DK / 2, y);
  };
  if (AT_ONCE) {
#pragma unroll
    for (int i = threadIdx.x; i < 8 * HALVES * DK / 2; i += THREADS) rotate(i);
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < 8 * HALVES * DK / 2; i += THREADS) rotate(i);
  }
}

// The same without a rotation.
template <int THREADS> __device__ __forceinline__ void copy_queries(bf16* q, const bf16* projection, int g) {
  for (int i = threadIdx.x; i < HALVES * DK; i += THREADS) {  // pieces of 16 bytes
    const int r = i / (DK / 8);
    const uint4 piece = *(const uint4*)(projection + (r < HPG ? g * HPG * DK + i * 8 : 0));
    ((uint4*)q)[i] = r < HPG ? piece : make_uint4(0, 0, 0, 0);
  }
}

// Weights of the branches. kind: 0 = sigmoid, 1 = softmax, 2 = the constants given (compressed, selected, window).
struct Gate {
  int kind;
  float temperature, constants[3];
};

// Logit of branch i of head r of group g: gates[r][i], n = 3 r + i. Not read where the gate is constant.
__device__ __forceinline__ void load_gate(float (*gates)[3], int n, const float* logits, const float* bias, int g,
                                          const Gate& gate) {
  if (gate.kind != 2) gates[n / 3][n % 3] = (logits[3 * g * HPG + n] + bias[3 * g * HPG + n]) / gate.temperature;
}

// The gates of head r from its logits.
__device__ __forceinline__ void compute_gates(float (*gates)[3], int r, const Gate& gate) {
  float x[3];
#pragma unroll
  for (int i = 0; i < 3; i++) x[i] = gate.kind == 2 ? gate.constants[i] : gates[r][i];
  if (gate.kind == 1) {
    const float most = fmaxf(x[0], fmaxf(x[1], x[2]));
#pragma unroll
    for (int i = 0; i < 3; i++) x[i] = expf(x[i] - most);
    const float share = 1.0f / (x[0] + x[1] + x[2]);
#pragma unroll
    for (int i = 0; i < 3; i++) x[i] *= share;
  } else if (gate.kind == 0) {
#pragma unroll
    for (int i = 0; i < 3; i++) x[i] = 1.0f / (1.0f + expf(-x[i]));
  }
#pragma unroll
  for (int i = 0; i < 3; i++) gates[r][i] = x[i];
}
