// Gradients of the compressed and the window branch in one walk over the queries: five products a pair of query and
// key, where compressed_backward, window_backward and the pass for dQ compute seven, scores and exponentials twice.
//
// A block holds JOINT tiles of 64 keys, one for each of its computing warpgroups, and walks the packed rows that see
// them, 64 at a time. A computing warpgroup does what `backward` does (see there) and leaves dS in shared memory. One
// more warpgroup loads the queries, computes dQ = dS * K over all tiles of the block and adds it to fp32 sums in global
// memory (query-sums.cuh). Blocks that run together walk the same rows, whose sums stay in L2. The order of the
// additions varies from run to run.
#include "backward.cuh"
#include "query-sums.cuh"

#ifndef JOINT
#define JOINT 3  // computing warpgroups
#endif
#ifndef JOINT_CHUNK
#define JOINT_CHUNK 1024  // tokens one block of the compressed branch walks
#endif
#ifndef JOINT_REGISTERS
#define JOINT_REGISTERS (JOINT == 3 ? 144 : 208)  // of a computing thread; the others have what is left
#endif
#ifndef ARRIVALS
#define ARRIVALS 1  // of a warp; 32 for racecheck, which does not see that __syncwarp orders the other lanes' accesses
#endif

#if (WGMMA || defined(EMULATED)) && JOINT_SHAPE
constexpr int JOINT_KEYS = JOINT * 64, JOINT_THREADS = (JOINT + 1) * 128;
constexpr int JOINT_LEFT = 65536 / JOINT_THREADS / 8 * 8 * (JOINT + 1) - JOINT * JOINT_REGISTERS;
// No sequence is longer, and times HPG it fits 32 bits.
constexpr int LIMITED_WINDOW = WINDOW < (1 << 24) ? WINDOW : 1 << 24;
constexpr int JOINT_STAGES = 4, JOINT_SLOTS = 2;  // of queries and of dS
constexpr int JOINT_SIDE = 1024 + 64;           // bytes beside a stage of queries
constexpr int JOINT_SHARED =
    (JOINT * 2 + JOINT_STAGES * 2 + JOINT_SLOTS * JOINT) * PANEL + JOINT_STAGES * JOINT_SIDE + 128 + JOINT * 64 + 1024;

EXPORT(joint_gradients_shared, JOINT_SHARED)
EXPORT(joint_gradients_threads, JOINT_THREADS)
EXPORT(joint_gradients_chunk, JOINT_CHUNK)
EXPORT(joint_gradients_keys, JOINT_KEYS)

// The rows of a block: packed rows row0 ... row0 + rows of the sequence. Token t sees the keys from low to high(t), by
// number in the block.
struct JointWalk {
  bool window;
  int row0, rows, steps;  // row0 is a multiple of 64
  int key0, active;       // the block's first key; warpgroups that have keys to be seen
  // Index of row r among the rows (token, head), from the sequence's first token and the group's first head on
  __device__ __forceinline__ u32 row(int r) const { return row0 + r + (u32)(row0 + r) / HPG * (HEADS - HPG); }
  __device__ __forceinline__ void range(int r, int& low, int& high) const {
    const int t = (row0 + r) / HPG;
    high = (window ? t + 1 : count_compressed(t + 1)) - key0;
    low = window ? high - LIMITED_WINDOW : 0;
  }
  // The first token that sees key k of the block
  __device__ __forceinline__ int sees(int k) const { return window ? key0 + k : (key0 + k) * CMP_D + CMP_L - 1; }
  // The steps in which warpgroup w has something to see, and whether it sees all of its keys in one of them
  __device__ __forceinline__ int begin(int w) const { return max(0, sees(w * 64) * HPG - row0) / 64; }
  __device__ __forceinline__ int end(int w) const {
    return window ? min(steps, ((sees(w * 64 + 63) + LIMITED_WINDOW) * HPG - row0 + 63) / 64) : steps;
  }
  __device__ __forceinline__ bool whole(int w, int i) const {
    const int from = row0 + i * 64;
    return from >= sees(w * 64 + 63) * HPG && (!window || from + 64 <= (sees(w * 64) + LIMITED_WINDOW) * HPG);
  }
};

// The keys of a computing warpgroup: their offset in k and v, and their number. Kept in shared memory until its end.
struct JointKeys {
  i64 offset;
  int keys, window;
  int begin, end, steps;  // of the block's steps, those in which there is something to see
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
  // of a stage: shift[64], delta[64], low[64], high[64], and whether each warpgroup sees all
  static constexpr int SIDE = (JOINT * 2 + JOINT_STAGES * 2 + JOINT_SLOTS * JOINT) * PANEL;
  __device__ __forceinline__ unsigned char* side(int i) const { return start + SIDE + i % JOINT_STAGES * JOINT_SIDE; }
  __device__ __forceinline__ u32 barriers() const { return base + SIDE + JOINT_STAGES * JOINT_SIDE; }
  __device__ __forceinline__ JointKeys* kept_by(int w) const {
    return (JointKeys*)(start + SIDE + JOINT_STAGES * JOINT_SIDE + 128) + w;
  }
  __device__ __forceinline__ u32 full(int i) const { return barriers() + i % JOINT_STAGES * 16; }
  __device__ __forceinline__ u32 empty(int i) const { return full(i) + 8; }
  __device__ __forceinline__ u32 written(int i) const { return barriers() + (JOINT_STAGES + i % JOINT_SLOTS) * 16; }
  __device__ __forceinline__ u32 read(int i) const { return written(i) + 8; }
  __device__ __forceinline__ void init(int active) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < JOINT_STAGES; i++) {
        barrier_init(full(i), 4 * ARRIVALS);
        barrier_init(empty(i), active * 4 * ARRIVALS);
      }
      for (int i = 0; i < JOINT_SLOTS; i++) {
        barrier_init(written(i), active * 4 * ARRIVALS);
        barrier_init(read(i), 4 * ARRIVALS);
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
  int thread = threadIdx.x & 127;
  asm volatile("" : "+r"(thread));  // computed anew in every step: there are no registers to keep addresses in
  const int lane = thread & 31, first = thread / 32 * 16;
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
  if ((threadIdx.x & 31) < ARRIVALS) barrier_arrive(at);
}

// The warpgroup that loads queries and gradients and adds dQ up; sums: the tile of row0. q, d_out, shift and delta
// begin with the sequence's first token and the group's first head.
__device__ __forceinline__ void joint_queries(const JointWalk& walk, const JointMemory& memory, const bf16* q,
                                              const bf16* d_out, const float* shift, const float* delta, float* sums) {
  const int thread = threadIdx.x & 127;
  q += thread % 8 * 8;
  d_out += thread % 8 * 8;
  const float* const weights = thread < 64 ? shift : delta;
  sums += thread * 4;
  const auto request = [&](int i) {
    if (i < walk.steps) {
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
    if (i >= walk.steps) return;
    if (thread < 64) {
      int* const ranges = (int*)(memory.side(i) + 512) + thread;
      walk.range(i * 64 + thread, ranges[0], ranges[64]);
    } else if (thread < 64 + JOINT) {
      *((int*)(memory.side(i) + 1024) + thread - 64) = walk.whole(thread - 64, i);
    }
    matrix_publish();
    warp_arrive(memory.full(i));
  };
#pragma unroll 1
  for (int i = 0; i < JOINT_STAGES; i++) request(i);
  copies_wait<1>();
#pragma unroll 1
  for (int i = 0; i < JOINT_STAGES - 1; i++) announce(i);
#pragma unroll 1
  for (int i = 0; i < walk.steps; i++) {
    float d_query[32];
    barrier_wait(memory.written(i), i / JOINT_SLOTS & 1);
    matrix_begin();
    bool add = false;
#pragma unroll
    for (int w = 0; w < JOINT; w++)
      if (w < walk.active && i >= walk.begin(w) && i < walk.end(w)) {
#pragma unroll
        for (int s = 0; s < 4; s++)
          product<ACROSS, ACROSS>(d_query, handle(memory.ds(i, w)), handle(memory.keys(w)), s, s > 0 || add);
        add = true;
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
    if (i + JOINT_STAGES < walk.steps) barrier_wait(memory.empty(i), i / JOINT_STAGES & 1);
    request(i + JOINT_STAGES);
    copies_wait<1>();
    announce(i + JOINT_STAGES - 1);
  }
}

// Warpgroup w of the computing ones. store(place, r, column, dk, dv) takes two columns of dK and dV.
template <class Store>
__device__ __forceinline__ void joint_keys(const JointMemory& memory, int w, const bf16* k, const bf16* v,
                                           const JointKeys& given, Store store) {
  const int keys = given.keys;
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread / 32;
  load_panel<DK, 128>(memory.keys(w), thread, k, [&](int r) { return r < keys ? r * GROUPS : -1; });
  load_panel<DV, 128>(memory.values(w), thread, v, [&](int r) { return r < keys ? r * GROUPS : -1; });
  copies_commit();
  // Steps in which there is nothing to see: the others' barriers count on this warpgroup
  const auto idle = [&](int i) {
    barrier_wait(memory.full(i), i / JOINT_STAGES & 1);
    if (i >= JOINT_SLOTS) barrier_wait(memory.read(i), (i / JOINT_SLOTS - 1) & 1);
    warp_arrive(memory.written(i));
    warp_arrive(memory.empty(i));
  };
  const float c = scale_log2();
  const u32 keys_at = handle(memory.keys(w)), values_at = handle(memory.values(w));
  if (thread == 0) *memory.kept_by(w) = given;
  copies_wait<0>();
  matrix_publish();
  barrier(1 + w, 128);
#pragma unroll 1
  for (int i = 0; i < given.begin; i++) idle(i);
  float d_key[32], d_value[32];
#pragma unroll
  for (int i = 0; i < 32; i++) d_key[i] = d_value[i] = 0.0f;
  const int end = given.end;
#pragma unroll 1
  for (int i = given.begin; i < end; i++) {
    const u32 queries = handle(memory.stage(i)), gradients = advance(queries, PANEL);
    const unsigned char* side = memory.side(i);
    barrier_wait(memory.full(i), i / JOINT_STAGES & 1);
    // ---- Scores, transposed: S [64 keys, 64 rows] = K * Q^T; P = exp2(S - shift). There are not enough registers to
    // begin with dP meanwhile, nor for the next step's scores.
    float score[32];
    matrix_begin();
    product_rows<DK>(score, keys_at, queries);
    matrix_commit();
    matrix_wait<0>();
    hold(score);
    u32 operand[4][4];
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float2 shift = *(const float2*)(side + (n * 8 + (lane & 3) * 2) * 4);
      score[n * 4] = exp2_approximate(fmaf(score[n * 4], c, -shift.x));
      score[n * 4 + 1] = exp2_approximate(fmaf(score[n * 4 + 1], c, -shift.y));
      score[n * 4 + 2] = exp2_approximate(fmaf(score[n * 4 + 2], c, -shift.x));
      score[n * 4 + 3] = exp2_approximate(fmaf(score[n * 4 + 3], c, -shift.y));
    }
    if (!*((const int*)(side + 1024) + w)) {  // not all rows see all keys
      const int key = w * 64 + warp * 16 + lane / 4;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const int2 low = *(const int2*)(side + 512 + (n * 8 + (lane & 3) * 2) * 4);
        const int2 high = *(const int2*)(side + 768 + (n * 8 + (lane & 3) * 2) * 4);
        if (key < low.x || key >= high.x) score[n * 4] = 0.0f;
        if (key < low.y || key >= high.y) score[n * 4 + 1] = 0.0f;
        if (key + 8 < low.x || key + 8 >= high.x) score[n * 4 + 2] = 0.0f;
        if (key + 8 < low.y || key + 8 >= high.y) score[n * 4 + 3] = 0.0f;
      }
    }
    as_operand(operand, score);
    // ---- dP = V * dO^T; dV [64, DV] += P * dO; dS = P * (dP - delta), also for the warpgroup that computes dQ
    float d_score[32];
    matrix_begin();
    product_rows<DV>(d_score, values_at, gradients);
    matrix_commit();
#pragma unroll
    for (int s = 0; s < 4; s++) product<ACROSS>(d_value, operand[s], gradients, s, true);
    matrix_commit();
    matrix_wait<1>();
    hold(d_score);
    score_gradients(d_score, operand, side + 256, lane);
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
  const JointKeys place = *memory.kept_by(w);
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = warp * 16 + lane / 4 + half * 8, i = n * 4 + half * 2;
      if (r < place.keys)
        store(place, r, n * 8 + (lane & 3) * 2, make_float2(d_key[i] * scale(), d_key[i + 1] * scale()),
              make_float2(d_value[i], d_value[i + 1]));
    }
#pragma unroll 1
  for (int i = place.end; i < place.steps; i++) idle(i);
}

// Compressed branch: block (chunk of tokens, tile of keys, group), adds to dk and dv in fp32. Window branch: block
// (tile of keys, group), after those of the compressed branch, writes dk and dv. Adds to the sums of dQ (without its
// scale). shift and delta are [3, T, H]. grid: G * (cmp_tiles * chunks + win_tiles), tiles of JOINT * 64 keys of all
// sequences
extern "C" __global__ void __launch_bounds__(JOINT_THREADS, 1) joint_gradients(
    const bf16* q, const bf16* d_out, const float* shift, const float* delta, const bf16* k_cmp, const bf16* v_cmp,
    float* dk_cmp, float* dv_cmp, const bf16* k_win, const bf16* v_win, bf16* dk_win, bf16* dv_win, float* dq,
    const int* cu_seqlens, const int* cu_cmp, const int* cu_blocks, int sequences, int cmp_tiles, int chunks) {
  extern __shared__ unsigned char shared[];
  const int compressed = cmp_tiles * chunks * GROUPS;
  JointWalk walk;
  walk.window = blockIdx.x >= compressed;
  const int index = blockIdx.x - (walk.window ? compressed : 0), group = index % GROUPS;
  const int tile = walk.window ? index / GROUPS : index / GROUPS % cmp_tiles;
  Place place;  // place.first and place.length count keys
  if (!find_place(walk.window ? cu_seqlens : cu_cmp, sequences, tile,
                  [](int count) { return (count + JOINT_KEYS - 1) / JOINT_KEYS; }, place))
    return;
  walk.key0 = place.tile * JOINT_KEYS;
  const int first = cu_seqlens[place.sequence], length = cu_seqlens[place.sequence + 1] - first;
  const int chunk = walk.window ? 0 : (chunks - 1 - index / GROUPS / cmp_tiles) * JOINT_CHUNK;
  const int start = max(walk.sees(0), chunk),
            end = min(length, walk.window ? walk.key0 + JOINT_KEYS - 1 + LIMITED_WINDOW : chunk + JOINT_CHUNK);
  if (start >= end) return;
  walk.row0 = start * HPG / 64 * 64;
  walk.rows = end * HPG - walk.row0;
  walk.steps = (walk.rows + 63) / 64;
  walk.active = min(JOINT, ((walk.window ? length : count_compressed(end)) - walk.key0 + 63) / 64);
  const u32 base = (shared_address(shared) + 1023) & ~1023u;
  const JointMemory memory = {shared + (base - shared_address(shared)), base};
  memory.init(walk.active);
  const int w = warpgroup();
  if (w == JOINT) {
    registers_release<JOINT_LEFT>();
    const i64 row = (i64)first * HEADS + group * HPG,
              weights = row + (walk.window ? 2 * (i64)cu_seqlens[sequences] * HEADS : 0);
    joint_queries(walk, memory, q + row * DK, d_out + row * DV, shift + weights, delta + weights,
                  dq + (((i64)cu_blocks[place.sequence] * HPG + walk.row0 / 64) * GROUPS + group) * 4096);
  } else if (w < walk.active) {
    registers_claim<JOINT_REGISTERS>();
    const JointKeys keys = {((i64)(place.first + walk.key0 + w * 64) * GROUPS + group) * 64,
                            min(64, place.length - walk.key0 - w * 64), walk.window, walk.begin(w), walk.end(w),
                            walk.steps};
    joint_keys(memory, w, (walk.window ? k_win : k_cmp) + keys.offset, (walk.window ? v_win : v_cmp) + keys.offset,
               keys, [&](const JointKeys& place, int r, int column, float2 dk, float2 dv) {
                 const i64 at = place.offset + r * GROUPS * 64 + column;
                 if (place.window) {
                   *(u32*)(dk_win + at) = pack_bf16(dk.x, dk.y);
                   *(u32*)(dv_win + at) = pack_bf16(dv.x, dv.y);
                 } else {
                   reduce2(dk_cmp + at, dk.x, dk.y);
                   reduce2(dv_cmp + at, dv.x, dv.y);
                 }
               });
  }
}
#endif
