// Selected branch: softmax over the tokens of the selected blocks.
//   selected_union    tile-union: the tokens of a tile share one stream over the union of their blocks.
//                     With UNION_TOKENS=1 it is the query-major kernel (v1).
//   selected_dense, selected_outer
//                     KV-outer: blocks 0, cur-1, cur densely; then every chosen block over the list of tokens
//                     that chose it, as partial results, merged as they come. Cost does not depend on agreement.
//                     The first of the two does the window branch as well, for all tokens, with the same queries.
//   selected_backward KV-outer over forced and chosen tokens alike.
// Both forward paths are launched; the plan (plan.cuh) decides on the device which one works on which stretch of
// tokens. A tile that straddles two stretches writes only the tokens of its own path. Both end with the gated sum of
// the branches unless `combined` is null.
#include "forward.cuh"
#include "backward.cuh"
#include "plan.cuh"
#include "window.cuh"

static_assert(OUTER_CHUNK * HPG % 64 == 0, "a full item fills its steps");
static_assert(SEL_L <= 64, "selection blocks over 64 tokens are not supported");

#ifndef UNION_WIDE
#define UNION_WIDE 1
#endif
#ifndef DENSE_WARPGROUPS
#define DENSE_WARPGROUPS 2
#endif
constexpr int UNION_MAX = UNION_TOKENS * SEL_N;
constexpr int UNION_WORDS = (UNION_MAX + 31) / 32;

// Shared memory of the union: the stream's blocks and, per token, which of them it selected.
struct Union {
  int blocks[UNION_MAX];
  u32 member[UNION_TOKENS][UNION_WORDS];
  int count, before;  // blocks of the union, and how many of them lie before every token
};

// plus 4 bytes per word, words = (blocks of the longest sequence + 31) / 32
EXPORT(selected_union_shared, STREAM_SHARED<UNION_WARPGROUPS, UNION_WIDE, PK> + (int)sizeof(Union))
EXPORT(selected_union_tokens, UNION_TOKENS)
EXPORT(selected_union_threads, STREAM_THREADS<UNION_WARPGROUPS>)
EXPORT(selected_dense_threads, STREAM_THREADS<DENSE_WARPGROUPS>)
EXPORT(selected_dense_shared, ATTEND_BOTH_SHARED<DENSE_WARPGROUPS>)
EXPORT(selected_dense_rows, DENSE_WARPGROUPS * 64)
EXPORT(selected_backward_shared, BACKWARD_SHARED_DQ + SEL_CHUNK * 12)

// grid (blocks of all sequences, groups)
extern "C" __global__ void __launch_bounds__(256) selected_pack(const bf16* k, const bf16* v, unsigned char* packed,
                                                                const int* cu_seqlens, int sequences) {
  pack_tile<SEL_L>(k, v, packed, cu_seqlens, sequences);
}

// Eight columns of a row: sums of bf16 values times a weight.
struct Columns {
  float o[8];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; i++) o[i] = 0.0f;
  }
  __device__ __forceinline__ void add(uint4 y, float weight) {
    o[0] += low_bf16(y.x) * weight, o[1] += high_bf16(y.x) * weight, o[2] += low_bf16(y.y) * weight,
        o[3] += high_bf16(y.y) * weight;
    o[4] += low_bf16(y.z) * weight, o[5] += high_bf16(y.z) * weight, o[6] += low_bf16(y.w) * weight,
        o[7] += high_bf16(y.w) * weight;
  }
  __device__ __forceinline__ uint4 packed(float f) const {
    return make_uint4(pack_bf16(o[0] * f, o[1] * f), pack_bf16(o[2] * f, o[3] * f), pack_bf16(o[4] * f, o[5] * f),
                      pack_bf16(o[6] * f, o[7] * f));
  }
};

// The combination of the branches; out may be null: then it is left to combine_forward.
struct Combination {
  const bf16 *cmp, *win;
  const float* gates;
  bf16* out;
  struct Others {
    uint4 cmp, win;
    float gates[3];
  };
  __device__ __forceinline__ void load(Others& o, i64 at, int column) const {
    if (out == nullptr) return;
    o.cmp = *(const uint4*)(cmp + at * DV + column);
    o.win = *(const uint4*)(win + at * DV + column);
#pragma unroll
    for (int i = 0; i < 3; i++) o.gates[i] = gates[at * 3 + i];
  }
  __device__ __forceinline__ void store(const Others& o, i64 at, int column, uint4 selected) const {
    if (out == nullptr) return;
    Columns c;
    c.clear();
    c.add(o.cmp, o.gates[0]);
    c.add(selected, o.gates[1]);
    c.add(o.win, o.gates[2]);
    *(uint4*)(out + at * DV + column) = c.packed(1.0f);
  }
  __device__ __forceinline__ void operator()(i64 at, int column, uint4 selected) const {
    Others o;
    load(o, at, column);
    store(o, at, column, selected);
  }
};

struct SelectedUnion : PackedRows {
  const Union* u;
  Combination combine;
  // blocks before every token come first: a token sees all of one or nothing
  __device__ __forceinline__ bool even(int i) const { return i < before; }
  __device__ __forceinline__ bool sees(int i, int t) const {
    return t >= 0 && (u->member[t - token_first][i / 32] >> (i & 31) & 1);
  }
  __device__ __forceinline__ bool whole(int) const { return false; }
  int border;  // of two stretches: tokens on the other kernel's side are not written
  bool earlier, later;
  __device__ __forceinline__ void finish(int r, int column, uint4 x, float lse) const {
    if (!(token(r) < border ? earlier : later)) return;
    PackedRows::finish(r, column, x, lse);
    combine(index(r), column, x);
  }
  int tiles, before, packed0, token_first;
  __device__ __forceinline__ int tile(int i) const { return packed0 + u->blocks[min(i, tiles - 1)]; }
  __device__ __forceinline__ void range(int tile, int t, int& low, int& high) const {
    low = 0;
    const bool in = t >= 0 && tile < tiles && (u->member[t - token_first][tile / 32] >> (tile & 31) & 1);
    high = in ? min(SEL_L, t + 1 - u->blocks[tile] * SEL_L) : 0;
  }
};

// grid (tiles of UNION_TOKENS tokens, groups); works where the plan is null or assigns the stretch to it; served[0]
// counts the times it did
extern "C" __global__ void
    __launch_bounds__(STREAM_THREADS<UNION_WARPGROUPS>, FORWARD_BLOCKS(UNION_WARPGROUPS, UNION_WIDE))
    selected_union(const bf16* q, const unsigned char* packed, const int* selected, const bf16* cmp, const bf16* win,
                   const float* gates, bf16* out, float* lse, bf16* combined, const Plan* plan, int* served,
                   const int* cu_seqlens, int sequences, int words, int stretch) {
  extern __shared__ unsigned char shared[];
  if (plan != nullptr && plan->union_stretches == 0) return;
  if (served != nullptr && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) served[0]++;
  Union* const u = (Union*)(shared + STREAM_SHARED<UNION_WARPGROUPS, UNION_WIDE, PK>);
  u32* const bits = (u32*)(u + 1);
  Place place;
  if (!find_place(
          cu_seqlens, sequences, gridDim.x - 1 - blockIdx.x,
          [](int length) { return (length + UNION_TOKENS - 1) / UNION_TOKENS; },
          [](int length) { return (length + SEL_L - 1) / SEL_L; }, place))
    return;
  const int thread = threadIdx.x, group = blockIdx.y, t0 = place.tile * UNION_TOKENS;
  const int tokens = min(UNION_TOKENS, place.length - t0);
  SelectedUnion branch;
  const int stretch0 = (place.first + t0) / stretch, stretch1 = (place.first + t0 + tokens - 1) / stretch;
  branch.earlier = plan == nullptr || plan->choice[stretch0] == TILE_UNION;
  branch.later = plan == nullptr || plan->choice[stretch1] == TILE_UNION;
  branch.border = stretch1 * stretch - place.first;
  if (!branch.earlier && !branch.later) return;
  const int* const rows = selected + ((i64)(place.first + t0) * GROUPS + group) * SEL_N;
  for (int w = thread; w < words; w += STREAM_THREADS<UNION_WARPGROUPS>) bits[w] = 0;
  for (int w = thread; w < UNION_TOKENS * UNION_WORDS; w += STREAM_THREADS<UNION_WARPGROUPS>)
    u->member[w / UNION_WORDS][w % UNION_WORDS] = 0;
  __syncthreads();
  for (int i = thread; i < tokens * SEL_N; i += STREAM_THREADS<UNION_WARPGROUPS>) {
    const int block = rows[(i64)(i / SEL_N) * GROUPS * SEL_N + i % SEL_N];
    if (block >= 0) atomicOr(bits + block / 32, 1u << (block & 31));
  }
  __syncthreads();
  // ascending list of the union, and each token's bits in it
  for (int w = thread; w < words; w += STREAM_THREADS<UNION_WARPGROUPS>) {
    int position = 0;
    for (int e = 0; e < w; e++) position += __popc(bits[e]);
    for (u32 word = bits[w]; word != 0; word &= word - 1) u->blocks[position++] = w * 32 + __ffs(word) - 1;
    if (w == words - 1) u->count = position;
    const int before = (t0 + 1) / SEL_L;  // blocks that end at or before the tile's first token
    if (w == min(before / 32, words - 1))
      u->before =
          position - __popc(bits[w]) + __popc(before / 32 > w ? bits[w] : bits[w] & ((1u << (before & 31)) - 1));
  }
  __syncthreads();
  for (int i = thread; i < tokens * SEL_N; i += STREAM_THREADS<UNION_WARPGROUPS>) {
    const int block = rows[(i64)(i / SEL_N) * GROUPS * SEL_N + i % SEL_N];
    if (block < 0) continue;
    int low = 0, high = u->count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (u->blocks[middle] <= block) low = middle;
      else high = middle;
    }
    atomicOr(&u->member[i / SEL_N][low / 32], 1u << (low & 31));
  }
  __syncthreads();
  branch.q = q;
  branch.o = out;
  branch.l = lse;
  branch.first = place.first;
  branch.packed0 = place.units;
  branch.group = group;
  branch.start = t0 * HPG;
  branch.rows = tokens * HPG;
  branch.packed = packed;
  branch.u = u;
  branch.combine = {cmp, win, gates, combined};
  branch.token_first = t0;
  branch.tiles = u->count;
  branch.before = SEL_L == 64 ? u->before : 0;
  attend<UNION_WARPGROUPS, UNION_WIDE>(branch, shared);
}

// Blocks 0, cur - 1 and cur. A tile whose tokens lie in two blocks streams one more.
struct SelectedForced : PackedRows {
  int border;  // of two stretches: its tokens' side that is the other kernel's is not written
  bool before, after;
  __device__ __forceinline__ void finish(int r, int column, uint4 x, float lse) const {
    if (token(r) < border ? before : after) PackedRows::finish(r, column, x, lse);
  }
  int tiles, packed0, token_first, from;  // tile 0 is block 0, tile i >= 1 is block from + i - 1
  __device__ __forceinline__ int block(int tile) const { return tile == 0 ? 0 : from + tile - 1; }
  __device__ __forceinline__ int tile(int i) const { return packed0 + block(min(i, tiles - 1)); }
  __device__ __forceinline__ bool even(int tile) const {
    return SEL_L == 64 && tile < tiles && (block(tile) + 1) * SEL_L <= token_first + 1;
  }
  __device__ __forceinline__ bool sees(int tile, int t) const {
    return t >= 0 && (block(tile) == 0 || block(tile) >= t / SEL_L - 1);
  }
  __device__ __forceinline__ bool whole(int) const { return false; }
  __device__ __forceinline__ void range(int tile, int t, int& low, int& high) const {
    const int b = block(tile);
    low = 0;
    high = t >= 0 && (b == 0 || b >= t / SEL_L - 1) ? min(SEL_L, t + 1 - b * SEL_L) : 0;
  }
};

// What every token sees: the window branch; then, where KV-outer works, blocks 0, cur-1, cur, output and lse as if
// nothing else were selected. grid (tiles of all sequences, groups)
extern "C" __global__ void __launch_bounds__(STREAM_THREADS<DENSE_WARPGROUPS>, FORWARD_BLOCKS(DENSE_WARPGROUPS, 1))
selected_dense(const bf16* q, const unsigned char* packed, const unsigned char* packed_window, bf16* out, float* lse,
               bf16* win, float* lse_win, const Plan* plan, const int* cu_seqlens, int sequences, int stretch) {
  extern __shared__ unsigned char shared[];
  constexpr int ROWS = DENSE_WARPGROUPS * 64;
  Window window;
  if (!window_tile<ROWS>(window, q, packed_window, cu_seqlens, sequences)) return;
  window.o = win;
  window.l = lse_win;
  SelectedForced forced;
  (PackedRows&)forced = window;
  forced.o = out;
  forced.l = lse;
  forced.packed = packed;
  forced.packed0 = window.packed0;
  if (SEL_L != 64) {  // packed blocks are not the window's tiles
    Place place;
    find_place(
        cu_seqlens, sequences, LONGEST_FIRST ? gridDim.x - 1 - blockIdx.x : blockIdx.x,
        [](int length) { return (length * HPG + ROWS - 1) / ROWS; },
        [](int length) { return (length + SEL_L - 1) / SEL_L; }, place);
    forced.packed0 = place.units;
  }
  forced.token_first = window.start / HPG;
  const int stretch0 = (window.first + forced.token_first) / stretch,
            stretch1 = (window.first + window.token_last) / stretch;
  forced.before = plan->choice[stretch0] == KV_OUTER;
  forced.after = plan->choice[stretch1] == KV_OUTER;
  forced.border = stretch1 * stretch - window.first;
  forced.from = max(1, forced.token_first / SEL_L - 1);
  forced.tiles = forced.before || forced.after ? max(1, window.token_last / SEL_L - forced.from + 2) : 0;
  attend_both<DENSE_WARPGROUPS>(window, forced, shared);
}

// Row addresses are stored per row. With large heads or many heads per group they are stored per token, which leaves
// shared memory for one more thread block per multiprocessor.
constexpr int PER_ENTRY = PK + PV <= 2 && HPG <= 14 ? 1 : HPG;
constexpr int OUTER_ENTRIES = OUTER_CHUNK * HPG / PER_ENTRY;
constexpr int OUTER_SHARED = (PK + PV + 2 * PK + 1) * PANEL + OUTER_ENTRIES * 8 + 1024;
constexpr int OUTER_BLOCKS = PK + PV <= 2 ? 4 : PK + PV <= 4 ? 3 : 2;
constexpr int CHOSEN = SEL_N > 3 ? SEL_N - 3 : 1;  // slots 1 ... SEL_N - 3 have partials
EXPORT(selected_outer_shared, OUTER_SHARED)
EXPORT(selected_outer_blocks, OUTER_BLOCKS)  // on a multiprocessor: the grid is this times their number
EXPORT(selected_outer_ring, RING)            // partial [ring * stretch, G, chosen, h, Dv], lse without Dv
EXPORT(selected_outer_chosen, CHOSEN)

__device__ __forceinline__ void await(const int* counter, int target) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < target);
}
__device__ __forceinline__ uint4 load_l2(const void* from) {  // not through L1: others write this
  uint4 x;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ float load_l2(const float* from) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}

// One work item: a block's keys and values, up to OUTER_CHUNK of the tokens of one stretch that chose it. Every
// key lies before every such token: no mask. Each (token, slot, head) gets a normalised partial output in bf16 and
// its own log-sum-exp (base 2) in fp32. ring0: what to add to a flat token to get its place in the ring.
__device__ __forceinline__ void outer_item(unsigned char* shared, const bf16* q, const unsigned char* tile,
                                           const u32* entries, int tokens, int first, int group, int ring0,
                                           bf16* partial, float* partial_lse) {
  const int rows = tokens * HPG, steps = (rows + 63) / 64;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const u32 origin = shared_address(shared), base = (origin + 1023) & ~1023u;
  const u32 values = base + PK * PANEL, ring = values + PV * PANEL, staging = ring + 2 * PK * PANEL;
  unsigned char* const generic = shared - origin;
  u32* const rows_of = (u32*)(generic + staging + PANEL);  // of q, per packed row of the item or per token
  u32* const places_of = rows_of + OUTER_ENTRIES;          // of the partial results
  const auto row_of = [&](int r) { return rows_of[r / PER_ENTRY] + r % PER_ENTRY; };
  const auto place_of = [&](int r) { return places_of[r / PER_ENTRY] + r % PER_ENTRY; };
#pragma unroll
  for (int i = 0; i < PACKED / 2048; i++) copy16(base + (i * 128 + thread) * 16, tile + (i * 128 + thread) * 16, true);
  // the last step's absent rows repeat the last token's
  for (int i = thread; i < min(OUTER_CHUNK, (steps * 64 + HPG - 1) / HPG); i += 128) {
    const u32 entry = entries[min(i, tokens - 1)], token = first + entry / 64;
    const u32 row = token * HEADS + group * HPG,
              place = (((token + ring0) * GROUPS + group) * CHOSEN + entry % 64 - 1) * HPG;
#pragma unroll
    for (int h = 0; h < HPG; h += PER_ENTRY) {
      rows_of[(i * HPG + h) / PER_ENTRY] = row + h;
      places_of[(i * HPG + h) / PER_ENTRY] = place + h;
    }
  }
  __syncthreads();
  const auto request = [&](int i) {
    if (i < steps) load_rows<DK>(ring + (i & 1) * PK * PANEL, q, [&](int r) { return row_of(i * 64 + r); });
    copies_commit();
  };
  // A step's results are written while the next one's scores are computed; p: the panel of columns.
  const auto emit = [&](int i, int p) {
    emit_rows(generic + staging, [&](int, int r, int chunk, uint4 x) {
      if (i * 64 + r < rows && p * 64 + chunk * 8 < DV)
        *(uint4*)(partial + chunk * 8 + (i64)place_of(i * 64 + r) * DV + p * 64) = x;
    });
  };
  request(0);
  const float c = scale_log2();
  for (int i = 0; i < steps; i++) {
    copies_wait<0>();
    matrix_publish();
    __syncthreads();
    request(i + 1);
    float score[32];
    u32 weights[4][4];
    matrix_begin();
    product_rows<DK>(score, handle(ring + (i & 1) * PK * PANEL), handle(base));
    matrix_commit();
    if (i > 0) emit(i - 1, PV - 1);
    matrix_wait<0>();
    hold(score);
    if (SEL_L < 64) {
#pragma unroll
      for (int e = 0; e < 32; e++)
        if ((e / 4) * 8 + (lane & 3) * 2 + (e & 1) >= SEL_L) score[e] = -positive_infinity();
    }
    float top0 = -positive_infinity(), top1 = -positive_infinity();
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      top0 = fmaxf(top0, fmaxf(score[e], score[e + 1]));
      top1 = fmaxf(top1, fmaxf(score[e + 2], score[e + 3]));
    }
    top0 = quad_max(top0) * c;
    top1 = quad_max(top1) * c;
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      score[e] = exp2_approximate(fmaf(score[e], c, -top0));
      score[e + 1] = exp2_approximate(fmaf(score[e + 1], c, -top0));
      score[e + 2] = exp2_approximate(fmaf(score[e + 2], c, -top1));
      score[e + 3] = exp2_approximate(fmaf(score[e + 3], c, -top1));
      sum0 += score[e] + score[e + 1];
      sum1 += score[e + 2] + score[e + 3];
    }
    as_operand(weights, score);
    sum0 = quad_sum(sum0);
    sum1 = quad_sum(sum1);
    const int inner = warp * 16 + lane / 4, row = i * 64 + inner;
    if ((lane & 3) == 0) {
      if (row < rows) partial_lse[place_of(row)] = top0 + log2_approximate(sum0);
      if (row + 8 < rows) partial_lse[place_of(row + 8)] = top1 + log2_approximate(sum1);
    }
    const float scale0 = 1.0f / sum0, scale1 = 1.0f / sum1;
#pragma unroll
    for (int p = 0; p < PV; p++) {
      float out[32];
      matrix_begin();
#pragma unroll
      for (int e = 0; e < 4; e++) product<ACROSS>(out, weights[e], advance(handle(values), p * PANEL), e, e > 0);
      matrix_commit();
      matrix_wait<0>();
      hold(out);
      stage_rows(out, generic + staging, scale0, scale1);
      if (p + 1 < PV) emit(i, p);
    }
  }
  emit(steps - 1, PV - 1);
}

constexpr int MERGE_LANES = DV <= 32 ? 4 : DV <= 64 ? 8 : DV <= 128 ? 16 : 32;

// MERGE_TOKENS tokens from `token0` on: the forced blocks' output and the partials become the branch's output.
__device__ __forceinline__ void merge_item(int token0, int tokens, int ring0, const bf16* partial,
                                           const float* partial_lse, bf16* out, float* lse, const Combination& combine,
                                           const int* chosen) {
  for (int i = threadIdx.x; i < tokens * HEADS * MERGE_LANES; i += 128) {
    const int column = i % MERGE_LANES * 8, row = i / MERGE_LANES, token = token0 + row / HEADS, head = row % HEADS,
              group = head / HPG;
    if (column >= DV) continue;
    const int count = chosen[row / HEADS];
    const i64 at = (i64)token0 * HEADS + row,
              place = ((i64)(token + ring0) * GROUPS + group) * CHOSEN * HPG + head % HPG;
    const float own = lse[at] * LOG2_E;
    uint4 x[CHOSEN];
    float logs[CHOSEN], top = own;
#pragma unroll
    for (int s = 0; s < CHOSEN; s++) {
      logs[s] = s < count ? load_l2(partial_lse + place + s * HPG) : -positive_infinity();
      x[s] = s < count ? load_l2(partial + (place + s * HPG) * DV + column) : make_uint4(0, 0, 0, 0);
    }
    const uint4 forced = *(const uint4*)(out + at * DV + column);
    Combination::Others others;
    combine.load(others, at, column);
#pragma unroll
    for (int s = 0; s < CHOSEN; s++) top = fmaxf(top, logs[s]);
    Columns c;
    c.clear();
    float sum = exp2_approximate(own - top);
    c.add(forced, sum);
#pragma unroll
    for (int s = 0; s < CHOSEN; s++) {
      const float weight = exp2_approximate(logs[s] - top);
      c.add(x[s], weight);
      sum += weight;
    }
    const uint4 y = c.packed(1.0f / sum);
    *(uint4*)(out + at * DV + column) = y;
    __syncwarp(__activemask());  // every lane of the row has read its lse
    if (column == 0) lse[at] = LN2 * (top + log2f(sum));
    combine.store(others, at, column, y);
  }
}

// Works through the plan: blocks draw tickets, in the order of the stretches, so whatever a ticket waits for was
// drawn before it. A stretch's partials are merged while they are still in the L2 cache, and their place in the ring
// is used again. items [.., 2]: list and place in it. served[1] counts the times this kernel worked.
// grid (multiprocessors * selected_outer_blocks)
extern "C" __global__ void __launch_bounds__(128, OUTER_BLOCKS) selected_outer(
    const bf16* q, const unsigned char* packed, const int* items, const int* offsets, const int* begins,
    const u32* lists, bf16* partial, float* partial_lse, const bf16* cmp, const bf16* win, const float* gates,
    bf16* out, float* lse, bf16* combined, Plan* plan, int* served, const int* cu_seqlens, const int* cu_blocks,
    int sequences, int stretch, int stretches) {
  extern __shared__ unsigned char shared[];
  __shared__ int drawn, chosen[MERGE_TOKENS];
  const int thread = threadIdx.x, blocks = cu_blocks[sequences], tokens = cu_seqlens[sequences], pieces = plan->pieces;
  if (pieces == 0) return;
  const int end = plan->first_ticket[pieces + LAG];
  if (thread == 0) {
    if (blockIdx.x == 0 && served != nullptr) served[1]++;
    drawn = atomicAdd(&plan->next_ticket, 1);
  }
  while (true) {
    __syncthreads();
    const int ticket = drawn;
    if (ticket >= end) return;
    int next = 0;
    if (thread == 0) next = atomicAdd(&plan->next_ticket, 1);  // arrives while this item is worked on
    int piece = 0, upper = pieces + LAG;
    while (upper - piece > 1) {
      const int middle = (piece + upper) / 2;
      if (plan->first_ticket[middle] <= ticket) piece = middle;
      else upper = middle;
    }
    // Items and merge items take turns, so that products and memory are both busy all the time.
    const int within = ticket - plan->first_ticket[piece], merges = piece >= LAG ? plan->piece_merges[piece - LAG] : 0;
    const u32 all = merges + (piece < pieces ? plan->piece_items[piece] : 0);
    const int merged = (int)((u64)within * merges / all);
    const bool merging = (int)((u64)(within + 1) * merges / all) > merged;
    if (!merging) {
      if (piece >= RING && thread == 0) await(plan->merges_done + piece - RING, plan->piece_merges[piece - RING]);
      const int s = plan->piece_stretch[piece];
      const int2 item = ((const int2*)items)[plan->stretch_base[s] + within - merged];
      const int list = item.x, at = list % blocks, group = list / blocks, from = offsets[list];
      const int upto = s + 1 < stretches ? begins[(i64)list * stretches + s + 1] : offsets[list + 1] - from;
      const int first = cu_seqlens[sequence_of(cu_blocks, sequences, at)];
      outer_item(shared, q, packed + ((i64)at * GROUPS + group) * PACKED, lists + from + item.y,
                 min(OUTER_CHUNK, upto - item.y), first, group, (piece % RING - s) * stretch, partial, partial_lse);
    } else {
      const int s = plan->piece_stretch[piece - LAG], token0 = s * stretch + merged * MERGE_TOKENS;
      const int count = min(MERGE_TOKENS, min((s + 1) * stretch, tokens) - token0);
      if (thread < count) {
        const int t = token0 + thread - cu_seqlens[sequence_of(cu_seqlens, sequences, token0 + thread)];
        chosen[thread] = max(0, min(t / SEL_L + 1, SEL_N) - 3);
      }
      if (thread == 0) await(plan->items_done + piece - LAG, plan->piece_items[piece - LAG]);
      __syncthreads();
      merge_item(token0, count, ((piece - LAG) % RING - s) * stretch, partial, partial_lse, out, lse,
                 {cmp, win, gates, combined}, chosen);
    }
    __syncthreads();
    if (thread == 0) {
      __threadfence();
      atomicAdd(merging ? plan->merges_done + piece - LAG : plan->items_done + piece, 1);
      drawn = next;
    }
  }
}

// The tokens that see a block: first the forced ones (every token for block 0, two blocks of tokens for the
// others), then the list. A work item is one chunk (SEL_CHUNK tokens) of this sequence.
struct SelectedBackward {
  // in shared memory, per token of the item: its position, and where its heads start in q and in the shares
  const u32 *positions, *starts, *places;
  bf16* shares;
  int tokens, key0;
  __device__ __forceinline__ int token(int i) const { return (int)positions[i]; }
  __device__ __forceinline__ u32 row(int r) const { return starts[(u32)r / HPG] + (u32)r % HPG; }
  __device__ __forceinline__ bf16* share(int r) const {
    return shares + (i64)(places[(u32)r / HPG] + (u32)r % HPG) * DK;
  }
  // only tokens inside the block are masked, and they come first, in order
  __device__ __forceinline__ bool whole(int from, int) const { return SEL_L == 64 && from >= key0 + SEL_L - 1; }
  __device__ __forceinline__ void range(int t, int& low, int& high) const {
    low = 0;
    high = min(SEL_L, t + 1 - key0);
  }
};

// grid (upper bound of items); adds to dk and dv in fp32, writes dq shares [T, G, n, h, Dk]. With parts = 1
// (deterministic) dk and dv are [items, l', D] and selected_sum adds them in order; the lists must be sorted.
extern "C" __global__ void __launch_bounds__(128, BACKWARD_BLOCKS) selected_backward(
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, const float* lse, const float* delta, bf16* shares,
    float* dk, float* dv, const int* items, const int* offsets, const u32* lists, const int* cu_seqlens,
    const int* cu_blocks, int sequences, int parts) {
  extern __shared__ unsigned char shared[];
  const int blocks = cu_blocks[sequences];
  if (blockIdx.x >= offsets[2 * (blocks * GROUPS + 1) - 1]) return;
  const int item = items[blockIdx.x * 2], chunk = items[blockIdx.x * 2 + 1], at = item % blocks;
  const int s = sequence_of(cu_blocks, sequences, at);
  const int length = cu_seqlens[s + 1] - cu_seqlens[s], block = at - cu_blocks[s];
  const int forced = block == 0 ? length : min(length, (block + 2) * SEL_L) - block * SEL_L;
  const int chosen = offsets[item + 1] - offsets[item], from = chunk * SEL_CHUNK;
  u32* const list = (u32*)(shared + BACKWARD_SHARED_DQ);
  const int first = cu_seqlens[s], group = item / blocks;
  SelectedBackward branch;
  branch.positions = list;
  branch.starts = list + SEL_CHUNK;
  branch.places = list + 2 * SEL_CHUNK;
  branch.shares = shares;
  branch.key0 = block * SEL_L;
  branch.tokens = min(SEL_CHUNK, forced + chosen - from);
  for (int i = threadIdx.x; i < branch.tokens; i += 128) {
    u32 t, slot;
    if (from + i < forced) {  // slots of forced blocks: 0, or the last two
      t = branch.key0 + from + i;
      const int current = t / SEL_L;
      slot = block == 0 ? 0 : min(current, SEL_N - 1) - (current - block);
    } else {
      const u32 entry = lists[offsets[item] + from + i - forced];
      t = entry / 64;
      slot = entry % 64;
    }
    list[i] = t;
    list[SEL_CHUNK + i] = (first + t) * HEADS + group * HPG;
    list[2 * SEL_CHUNK + i] = (((first + t) * GROUPS + group) * SEL_N + slot) * HPG;
  }
  __syncthreads();
  const i64 key = (i64)(first + branch.key0) * GROUPS + group;
  const i64 to = parts ? (i64)blockIdx.x * SEL_L : key;
  backward<false, true>(branch, shared, q, d_out, lse, delta, k + key * DK, v + key * DV,
                        min(SEL_L, length - branch.key0), dk + to * DK, dv + to * DV, parts ? 1 : GROUPS, parts != 0);
}

// Adds the parts of every list in order. Four columns a thread. grid (lists, l' * max(Dk, Dv) / 1024, 2: dk and dv)
extern "C" __global__ void __launch_bounds__(256) selected_sum(const float* dk_parts, const float* dv_parts, bf16* dk,
                                                               bf16* dv, const int* offsets, const int* cu_seqlens,
                                                               const int* cu_blocks, int sequences) {
  const int size = blockIdx.z == 0 ? DK : DV, i = (blockIdx.y * 256 + threadIdx.x) * 4, row = i / size;
  const int blocks = cu_blocks[sequences], list = blockIdx.x, at = list % blocks,
            s = sequence_of(cu_blocks, sequences, at);
  const int token = (at - cu_blocks[s]) * SEL_L + row;
  if (row >= SEL_L || token >= cu_seqlens[s + 1] - cu_seqlens[s]) return;
  const int from = offsets[blocks * GROUPS + 1 + list], to = offsets[blocks * GROUPS + 2 + list];
  const float* const parts = (blockIdx.z == 0 ? dk_parts : dv_parts) + i;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int part = from; part < to; part++) {
    const float4 x = *(const float4*)(parts + (i64)part * SEL_L * size);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  bf16* const cell =
      (blockIdx.z == 0 ? dk : dv) + ((i64)(cu_seqlens[s] + token) * GROUPS + list / blocks) * size + i % size;
  *(uint2*)cell = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
}

constexpr int DQ_LANES = DK <= 32 ? 4 : DK <= 64 ? 8 : DK <= 128 ? 16 : 32;

// dq = the compressed and window branches' dq + the shares of the selected blocks. One row per DQ_LANES threads.
extern "C" __global__ void __launch_bounds__(256) selected_query_gradient(const bf16* dq_cmp, const bf16* dq_win,
                                                                          const bf16* shares, const int* selected,
                                                                          bf16* dq, int tokens) {
  const i64 row = ((i64)blockIdx.x * 256 + threadIdx.x) / DQ_LANES;
  const int chunk = threadIdx.x % DQ_LANES;
  if (row >= (i64)tokens * HEADS || chunk * 8 >= DK) return;
  const int token = (int)(row / HEADS), head = (int)(row % HEADS), group = head / HPG;
  const int* const blocks = selected + ((i64)token * GROUPS + group) * SEL_N;
  const i64 at = ((i64)token * GROUPS + group) * SEL_N * HPG + head % HPG;
  float o[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  const auto add = [&](const uint4 x) {
    o[0] += low_bf16(x.x), o[1] += high_bf16(x.x), o[2] += low_bf16(x.y), o[3] += high_bf16(x.y);
    o[4] += low_bf16(x.z), o[5] += high_bf16(x.z), o[6] += low_bf16(x.w), o[7] += high_bf16(x.w);
  };
#pragma unroll
  for (int s = 0; s < SEL_N; s++)
    if (blocks[s] >= 0) add(*(const uint4*)(shares + (at + s * HPG) * DK + chunk * 8));
#pragma unroll
  for (int i = 0; i < 8; i++) o[i] *= scale();
  add(*(const uint4*)(dq_cmp + row * DK + chunk * 8));
  add(*(const uint4*)(dq_win + row * DK + chunk * 8));
  *(uint4*)(dq + row * DK + chunk * 8) =
      make_uint4(pack_bf16(o[0], o[1]), pack_bf16(o[2], o[3]), pack_bf16(o[4], o[5]), pack_bf16(o[6], o[7]));
}
