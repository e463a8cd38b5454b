// dK, dV and dQ of the compressed branch in one walk over the queries: five products a pair of query and key, where
// compressed_backward and the pass for dQ together compute seven, scores and exponentials twice.
//
// A block holds JOINT tiles of 64 keys, one for each of its computing warpgroups, and walks the packed rows that see
// them, 64 at a time. A computing warpgroup does what `backward` does (see there) and leaves dS in shared memory. One
// more warpgroup loads the queries, computes dQ = dS * K over all tiles of the block and adds it to fp32 sums in global
// memory. Those are in the order of the accumulators (see joint_element), so that a warp adds 512 bytes at once; blocks
// that run together walk the same rows, whose sums stay in L2. The order of the additions varies from run to run.
#pragma once
#include "backward.cuh"

#define JOINT_SHAPE (DK == 64 && DV == 64 && SEL_L == 64)

#ifndef JOINT
#define JOINT 3  // computing warpgroups
#endif
#ifndef JOINT_CHUNK
#define JOINT_CHUNK 1024  // tokens one block walks
#endif
#ifndef JOINT_REGISTERS
#define JOINT_REGISTERS (JOINT == 3 ? 144 : 208)  // of a computing thread; the others have what is left
#endif
#ifndef JOINT_EARLY
#define JOINT_EARLY 6  // of the eight parts of the scores, those that are weighed before the product for dP begins
#endif

constexpr int JOINT_THREADS = (JOINT + 1) * 128;
constexpr int JOINT_LEFT = 65536 / JOINT_THREADS / 8 * 8 * (JOINT + 1) - JOINT * JOINT_REGISTERS;  // of the other threads
constexpr int JOINT_STAGES = 4, JOINT_SLOTS = 2;  // of queries and of dS
constexpr int JOINT_SHARED = (JOINT * 2 + JOINT_STAGES * 2 + JOINT_SLOTS * JOINT) * PANEL + JOINT_STAGES * 1024 + 128 + 1024;

// Sums of dQ: per block of 64 tokens HPG tiles of 64 packed rows, each for all groups. Where column `column` (even) of row `row` of a tile of sums lies, and the column after it.
__device__ __forceinline__ int joint_element(int row, int column) {
  const int half = (row / 8) & 1, thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  return ((column / 16 * 2 + half) * 128 + thread) * 4 + column / 8 % 2 * 2;
}
struct JointWalk {
  int row0, rows;    // packed rows row0 ... row0 + rows of the sequence; row0 is a multiple of 64
  int key0, active;  // the block's first key; warpgroups that have a key to see
  // Index of row r among the rows (token, head), from the sequence's first token and the group's first head on
  __device__ __forceinline__ u32 row(int r) const { return row0 + r + (u32)(row0 + r) / HPG * (HEADS - HPG); }
  __device__ __forceinline__ int seen(int r) const { return count_compressed((row0 + r) / HPG + 1) - key0; }
};

// Offsets from a multiple of 1,024 in shared memory, which is at `start` for loads and stores, at `base` for the rest.
struct JointMemory {
  unsigned char* start;
  u32 base;
  __device__ __forceinline__ u32 keys(int w) const { return base + w * PANEL; }
  __device__ __forceinline__ u32 values(int w) const { return base + (JOINT + w) * PANEL; }
  __device__ __forceinline__ u32 stage(int i) const { return base + (JOINT * 2 + i % JOINT_STAGES * 2) * PANEL; }
  __device__ __forceinline__ u32 ds(int i, int w) const {
    return base + (JOINT * 2 + JOINT_STAGES * 2 + i % JOINT_SLOTS * JOINT + w) * PANEL;
  }
  __device__ __forceinline__ unsigned char* store_ds(int i, int w) const { return start + (ds(i, w) - base); }
  // of a stage: shift[64], delta[64], seen[64]
  static constexpr int SIDE = (JOINT * 2 + JOINT_STAGES * 2 + JOINT_SLOTS * JOINT) * PANEL;
  __device__ __forceinline__ unsigned char* side(int i) const { return start + SIDE + i % JOINT_STAGES * 1024; }
  __device__ __forceinline__ u32 barriers() const { return base + SIDE + JOINT_STAGES * 1024; }
  __device__ __forceinline__ u32 full(int i) const { return barriers() + i % JOINT_STAGES * 16; }
  __device__ __forceinline__ u32 empty(int i) const { return full(i) + 8; }
  __device__ __forceinline__ u32 written(int i) const { return barriers() + (JOINT_STAGES + i % JOINT_SLOTS) * 16; }
  __device__ __forceinline__ u32 read(int i) const { return written(i) + 8; }
  __device__ __forceinline__ void init(int active) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < JOINT_STAGES; i++) {
        barrier_init(full(i), 4);
        barrier_init(empty(i), active * 4);
      }
      for (int i = 0; i < JOINT_SLOTS; i++) {
        barrier_init(written(i), active * 4);
        barrier_init(read(i), 4);
      }
      matrix_publish();
    }
    __syncthreads();
  }
};
// A warpgroup gives registers back or takes more; those of all threads of the block stay within 65,536.
template <int COUNT> __device__ __forceinline__ void registers_release() {
#if WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT> __device__ __forceinline__ void registers_claim() {
#if WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
// The A fragment of slice `step` of a warpgroup's [64, 64] operand into a panel.
__device__ __forceinline__ void store_fragment(unsigned char* panel, int step, const u32 (&a)[4]) {
  const int lane = threadIdx.x & 31, first = ((threadIdx.x & 127) / 32) * 16;
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(panel) + swizzle(first + (lane & 15), step * 2 + lane / 16)),
               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; e++)
    *(u32*)(panel + swizzle(first + lane / 4 + (e & 1) * 8, step * 2 + e / 2) + (lane & 3) * 4) = a[e];
#endif
}
// One arrival for each warp, once all of its lanes have come here.
__device__ __forceinline__ void warp_arrive(u32 at) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(at);
}

// The warpgroup that loads queries and gradients and adds dQ up; sums: the tile of row0. q, d_out, shift and delta begin
// with the sequence's first token and the group's first head.
__device__ __forceinline__ void joint_queries(const JointWalk& walk, const JointMemory& memory, const bf16* q,
                                              const bf16* d_out, const float* shift, const float* delta, float* sums) {
  const int thread = threadIdx.x & 127, steps = (walk.rows + 63) / 64;
  q += thread % 8 * 8;
  d_out += thread % 8 * 8;
  const float* const weights = thread < 64 ? shift : delta;
  sums += thread * 4;
  const auto request = [&](int i) {
    if (i < steps) {
      const u32 to = memory.stage(i) + swizzle(thread / 8, thread % 8);
#pragma unroll
      for (int e = 0; e < 4; e++) {  // absent rows repeat the last one, see `backward`
        const i64 at = (i64)walk.row(min(i * 64 + thread / 8 + e * 16, walk.rows - 1)) * 64;
        copy16(to + e * 2048, q + at);
        copy16(to + PANEL + e * 2048, d_out + at);
      }
      const int r = i * 64 + (thread & 63);
      copy4(shared_address(memory.side(i)) + thread * 4, r < walk.rows ? weights + walk.row(r) : ABSENT + thread / 64,
            true);
    }
    copies_commit();
  };
  const auto announce = [&](int i) {
    if (i >= steps) return;
    if (thread < 64) *(int*)(memory.side(i) + 512 + thread * 4) = walk.seen(i * 64 + thread);
    matrix_publish();
    warp_arrive(memory.full(i));
  };
#pragma unroll 1
  for (int i = 0; i < JOINT_STAGES; i++) request(i);
  copies_wait<1>();
#pragma unroll 1
  for (int i = 0; i < JOINT_STAGES - 1; i++) announce(i);
#pragma unroll 1
  for (int i = 0; i < steps; i++) {
    float d_query[32];
    barrier_wait(memory.written(i), i / JOINT_SLOTS & 1);
    matrix_begin();
#pragma unroll
    for (int w = 0; w < JOINT; w++) {
      if (w >= walk.active) break;
#pragma unroll
      for (int s = 0; s < 4; s++)
        product<ACROSS, ACROSS>(d_query, handle(memory.ds(i, w)), handle(memory.keys(w)), s, w + s > 0);
    }
    matrix_commit();
    matrix_wait<0>();
    hold(d_query);
    warp_arrive(memory.read(i));
#pragma unroll
    for (int n = 0; n < 8; n += 2)
#pragma unroll
      for (int half = 0; half < 2; half++)
        reduce4(sums + (n + half) * 512, d_query[n * 4 + half * 2], d_query[n * 4 + half * 2 + 1],
                d_query[n * 4 + 4 + half * 2], d_query[n * 4 + 5 + half * 2]);
    sums += GROUPS * 4096;
    if (i + JOINT_STAGES < steps) barrier_wait(memory.empty(i), i / JOINT_STAGES & 1);
    request(i + JOINT_STAGES);
    copies_wait<1>();
    announce(i + JOINT_STAGES - 1);
  }
}

// Warpgroup w of the computing ones: dk and dv of its `keys` keys.
__device__ __forceinline__ void joint_keys(const JointWalk& walk, const JointMemory& memory, int w, const bf16* k,
                                           const bf16* v, int keys, float* dk, float* dv) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread / 32, steps = (walk.rows + 63) / 64;
  load_panel<DK, 128>(memory.keys(w), thread, k, [&](int r) { return r < keys ? r * GROUPS : -1; });
  load_panel<DV, 128>(memory.values(w), thread, v, [&](int r) { return r < keys ? r * GROUPS : -1; });
  copies_commit();
  const float c = scale_log2();
  const u32 keys_at = handle(memory.keys(w)), values_at = handle(memory.values(w));
  // The first step all of whose rows see all of these keys
  const int whole = (((walk.key0 + w * 64 + 63) * CMP_D + CMP_L - 1) * HPG - walk.row0 + 63) / 64;
  float d_key[32], d_value[32];
#pragma unroll
  for (int i = 0; i < 32; i++) d_key[i] = d_value[i] = 0.0f;
  copies_wait<0>();
  matrix_publish();
  barrier(1 + w, 128);
#pragma unroll 1
  for (int i = 0; i < steps; i++) {
    const u32 queries = handle(memory.stage(i)), gradients = advance(queries, PANEL);
    const unsigned char* side = memory.side(i);
    barrier_wait(memory.full(i), i / JOINT_STAGES & 1);

    // ---- Scores, transposed: S [64 keys, 64 rows] = K * Q^T and dP = V * dO^T; P = exp2(S - shift)
    float score[32], d_score[32];
    u32 operand[4][4];
    matrix_begin();
    product_rows<DK>(score, keys_at, queries);
    matrix_commit();
    matrix_wait<0>();
    hold(score);
    const auto weigh = [&](int from, int to) {
#pragma unroll
      for (int n = from; n < to; n++) {
        const float2 shift = *(const float2*)(side + (n * 8 + (lane & 3) * 2) * 4);
        score[n * 4] = exp2_approximate(fmaf(score[n * 4], c, -shift.x));
        score[n * 4 + 1] = exp2_approximate(fmaf(score[n * 4 + 1], c, -shift.y));
        score[n * 4 + 2] = exp2_approximate(fmaf(score[n * 4 + 2], c, -shift.x));
        score[n * 4 + 3] = exp2_approximate(fmaf(score[n * 4 + 3], c, -shift.y));
      }
      if (i < whole) {
        const int key = w * 64 + warp * 16 + lane / 4;
#pragma unroll
        for (int n = from; n < to; n++) {
          const int2 seen = *(const int2*)(side + 512 + (n * 8 + (lane & 3) * 2) * 4);
          if (key >= seen.x) score[n * 4] = 0.0f;
          if (key >= seen.y) score[n * 4 + 1] = 0.0f;
          if (key + 8 >= seen.x) score[n * 4 + 2] = 0.0f;
          if (key + 8 >= seen.y) score[n * 4 + 3] = 0.0f;
        }
      }
#pragma unroll
      for (int n = from; n < to; n++) {
        operand[n / 2][n % 2 * 2] = pack_bf16(score[n * 4], score[n * 4 + 1]);
        operand[n / 2][n % 2 * 2 + 1] = pack_bf16(score[n * 4 + 2], score[n * 4 + 3]);
      }
    };
    // With all scores in registers beside it the second product would need more of them than there are.
    weigh(0, JOINT_EARLY);
    matrix_begin();
    product_rows<DV>(d_score, values_at, gradients);
    matrix_commit();
    weigh(JOINT_EARLY, 8);
    // ---- dV [64, DV] += P * dO; dS = P * (dP - delta), also for the warpgroup that computes dQ
    matrix_begin();
#pragma unroll
    for (int s = 0; s < 4; s++) product<ACROSS>(d_value, operand[s], gradients, s, true);
    matrix_commit();
    matrix_wait<1>();
    hold(d_score);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float2 d = *(const float2*)(side + 256 + (n * 8 + (lane & 3) * 2) * 4);
      const u32 upper = operand[n / 2][(n % 2) * 2], lower = operand[n / 2][(n % 2) * 2 + 1];
      d_score[n * 4] = low_bf16(upper) * (d_score[n * 4] - d.x);
      d_score[n * 4 + 1] = high_bf16(upper) * (d_score[n * 4 + 1] - d.y);
      d_score[n * 4 + 2] = low_bf16(lower) * (d_score[n * 4 + 2] - d.x);
      d_score[n * 4 + 3] = high_bf16(lower) * (d_score[n * 4 + 3] - d.y);
    }
    u32 d_operand[4][4];
    as_operand(d_operand, d_score);
    if (i >= JOINT_SLOTS) barrier_wait(memory.read(i), (i / JOINT_SLOTS - 1) & 1);
#pragma unroll
    for (int s = 0; s < 4; s++) store_fragment(memory.store_ds(i, w), s, d_operand[s]);
    matrix_publish();
    warp_arrive(memory.written(i));
    // ---- dK [64, DK] += dS * Q
    matrix_begin();
#pragma unroll
    for (int s = 0; s < 4; s++) product<ACROSS>(d_key, d_operand[s], queries, s, true);
    matrix_commit();
    matrix_wait<0>();
    hold(d_key);
    hold(d_value);
    warp_arrive(memory.empty(i));
  }
  // ---- The sums leave: dK [keys, DK] and dV [keys, DV]
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = warp * 16 + lane / 4 + half * 8, at = r * GROUPS * 64 + n * 8 + (lane & 3) * 2;
      if (r >= keys) continue;
      reduce2(dk + at, d_key[n * 4 + half * 2] * scale(), d_key[n * 4 + half * 2 + 1] * scale());
      reduce2(dv + at, d_value[n * 4 + half * 2], d_value[n * 4 + half * 2 + 1]);
    }
}
