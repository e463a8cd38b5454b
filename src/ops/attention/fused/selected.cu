// Selected branch: softmax over the tokens of the selected blocks.
//   selected_union    tile-union: the tokens of a tile share one stream over the union of their blocks.
//                     With UNION_TOKENS=1 it is the query-major kernel (v1).
//   selected_dense, selected_outer (selected-outer.cuh)
//                     KV-outer: blocks 0, cur-1, cur densely; then every chosen block over the list of tokens
//                     that chose it, as partial results, merged as they come. Cost does not depend on agreement.
//                     The first of the two does the window branch as well, for all tokens, with the same queries.
//   selected_backward (selected-backward.cuh)
//                     KV-outer over forced and chosen tokens alike.
// Both forward paths are launched; the plan (plan.cuh) decides on the device which one works on which stretch of
// tokens. A tile that straddles two stretches writes only the tokens of its own path. Both end with the gated sum of
// the branches unless `combined` is null.
#include "combination.cuh"
#include "forward.cuh"
#include "plan.cuh"
#include "selected-backward.cuh"
#include "selected-outer.cuh"
#include "window.cuh"

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

// grid (blocks of all sequences, groups)
extern "C" __global__ void __launch_bounds__(256) selected_pack(const bf16* k, const bf16* v, unsigned char* packed,
                                                                const int* cu_seqlens, int sequences) {
  pack_tile<SEL_L>(k, v, packed, cu_seqlens, sequences);
}

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
