// Selected branch: softmax over the tokens of the selected blocks.
//   selected_union    tile-union: the tokens of a tile share one stream over the union of their blocks.
//                     With UNION_TOKENS=1 it is the query-major kernel (v1).
//   selected_dense, selected_outer (selected-outer.cuh)
//                     KV-outer: blocks 0, cur-1, cur densely; then every chosen block over the list of tokens
//                     that chose it, as partial results, merged as they come. Cost does not depend on agreement.
//   selected_dense, selected_gather (selected-gather.cuh)
//                     tile-gather: blocks 0, cur-1, cur densely; then the tokens of a block share a stream over the
//                     union of what they chose, and each step gathers the rows that chose its block.
// selected_union and selected_dense do the window branch of their tokens as well, with the same queries (WINDOW > 0).
//   selected_backward (selected-backward.cuh)
//                     KV-outer over forced and chosen tokens alike.
// All forward paths are launched; the plan (plan.cuh) decides on the device which one works on which stretch of
// tokens. A tile that straddles two stretches writes only the tokens of its own path. All end with the gated sum of
// the branches unless `combined` is null.
#include "combination.cuh"
#include "forward.cuh"
#include "plan.cuh"
#include "selected-backward.cuh"
#include "selected-gather.cuh"
#include "selected-outer.cuh"
#include "window.cuh"

static_assert(SEL_L <= 64, "selection blocks over 64 tokens are not supported");

#ifndef DENSE_WARPGROUPS
#define DENSE_WARPGROUPS 2
#endif
constexpr int UNION_MAX = UNION_TOKENS * SEL_N;
constexpr int UNION_WORDS = (UNION_MAX + 31) / 32;

// Shared memory of the union: the stream's blocks and, per token, which of them it selected.
struct Union {
  u32 member[UNION_TOKENS][UNION_WORDS];
  int count, before;  // blocks of the union, and how many of them lie before every token
  unsigned short blocks[(UNION_MAX + 1) / 2 * 2];
};
// The same where a tile sees at most 64 blocks; each warpgroup has its own.
struct ShortUnion {
  u32 member[UNION_TOKENS][2];
  int count, before;
  unsigned short blocks[64];
};
constexpr int UNION_BYTES =
    (int)(sizeof(Union) > UNION_WARPGROUPS * sizeof(ShortUnion) ? sizeof(Union)
                                                                : UNION_WARPGROUPS * sizeof(ShortUnion));

// plus 4 bytes per word, words = (blocks of the longest sequence + 31) / 32
EXPORT(selected_union_shared, STREAM_SHARED<UNION_WARPGROUPS, 1, PK> + UNION_BYTES)
EXPORT(selected_union_tokens, UNION_TOKENS)
EXPORT(selected_union_threads, STREAM_THREADS<UNION_WARPGROUPS>)
EXPORT(selected_dense_threads, STREAM_THREADS<DENSE_WARPGROUPS>)
EXPORT(selected_dense_shared, STREAM_SHARED<DENSE_WARPGROUPS, 1, PK>)
EXPORT(selected_dense_rows, DENSE_WARPGROUPS * 64)

// largest [blocks][GROUPS]: bits of the largest magnitude of a block's values, for tile-gather. grid (blocks of all
// sequences, groups)
extern "C" __global__ void __launch_bounds__(256) selected_pack(const bf16* k, const bf16* v, unsigned char* packed,
                                                                u32* largest, const int* cu_seqlens, int sequences) {
  __shared__ u32 of_block;
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();
  const u32 of_warp = __reduce_max_sync(~0u, pack_tile<SEL_L>(k, v, packed, cu_seqlens, sequences));
  if (threadIdx.x % 32 == 0) atomicMax(&of_block, of_warp);
  __syncthreads();
  if (threadIdx.x == 0) largest[blockIdx.x * GROUPS + blockIdx.y] = of_block;
}

// Blocks of a token, 64 bits: selected [SEL_N], -1 for none.
__device__ __forceinline__ u64 block_mask(const int* selected) {
  int block[SEL_N];
#pragma unroll
  for (int i = 0; i < SEL_N; i++) block[i] = selected[i];
  u64 mask = 0;
#pragma unroll
  for (int i = 0; i < SEL_N; i++)
    if (block[i] >= 0) mask |= 1ull << block[i];
  return mask;
}
__device__ __forceinline__ u64 below(int bit) { return bit < 64 ? (1ull << bit) - 1 : ~0ull; }
__device__ __forceinline__ int popcount(u64 x) { return __popc((u32)x) + __popc((u32)(x >> 32)); }
__device__ __forceinline__ u32 warp_or(u32 x) {
#pragma unroll
  for (int s = 16; s > 0; s /= 2) x |= __shfl_xor_sync(~0u, x, s);
  return x;
}

// The union where no block number exceeds 63, by one warp. rows: the selections of the tokens, GROUPS * SEL_N apart.
__device__ __forceinline__ void short_union(ShortUnion* u, const int* rows, int tokens, int t0) {
  const int lane = threadIdx.x & 31;
  u32 low = 0, high = 0;
  for (int t = lane; t < tokens; t += 32) {
    const u64 mine = block_mask(rows + (i64)t * GROUPS * SEL_N);
    u->member[t][0] = (u32)mine;
    u->member[t][1] = (u32)(mine >> 32);
    low |= (u32)mine;
    high |= (u32)(mine >> 32);
  }
  low = warp_or(low);
  high = warp_or(high);
  const u64 all = (u64)high << 32 | low;
#pragma unroll
  for (int block = lane; block < 64; block += 32)
    if (all >> block & 1) u->blocks[popcount(all & below(block))] = (unsigned short)block;
  if (lane == 0) {
    u->count = popcount(all);
    u->before = popcount(all & below((t0 + 1) / SEL_L));
  }
  if ((all & (all + 1)) == 0) return;  // every block up to the last: its number is its place
  for (int t = lane; t < tokens; t += 32) {
    u64 places = 0;
    for (u64 mine = (u64)u->member[t][1] << 32 | u->member[t][0]; mine != 0; mine &= mine - 1)
      places |= 1ull << popcount(all & ((mine & (0 - mine)) - 1));
    u->member[t][0] = (u32)places;
    u->member[t][1] = (u32)(places >> 32);
  }
}

// The union in general, by all threads. bits: a bitmap of `words` words.
__device__ __forceinline__ void general_union(Union* u, u32* bits, const int* rows, int tokens, int words, int t0) {
  constexpr int THREADS = STREAM_THREADS<UNION_WARPGROUPS>;
  const int thread = threadIdx.x;
  for (int w = thread; w < words; w += THREADS) bits[w] = 0;
  for (int w = thread; w < UNION_TOKENS * UNION_WORDS; w += THREADS) u->member[w / UNION_WORDS][w % UNION_WORDS] = 0;
  __syncthreads();
  for (int i = thread; i < tokens * SEL_N; i += THREADS) {
    const int block = rows[(i64)(i / SEL_N) * GROUPS * SEL_N + i % SEL_N];
    if (block >= 0) atomicOr(bits + block / 32, 1u << (block & 31));
  }
  __syncthreads();
  // ascending list of the union, and each token's bits in it
  for (int w = thread; w < words; w += THREADS) {
    int position = 0;
    for (int e = 0; e < w; e++) position += __popc(bits[e]);
    for (u32 word = bits[w]; word != 0; word &= word - 1)
      u->blocks[position++] = (unsigned short)(w * 32 + __ffs(word) - 1);
    if (w == words - 1) u->count = position;
    const int before = (t0 + 1) / SEL_L;  // blocks that end at or before the tile's first token
    if (w == min(before / 32, words - 1))
      u->before =
          position - __popc(bits[w]) + __popc(before / 32 > w ? bits[w] : bits[w] & ((1u << (before & 31)) - 1));
  }
  __syncthreads();
  for (int i = thread; i < tokens * SEL_N; i += THREADS) {
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
}

struct SelectedUnion : PackedRows {
  Combination combine;
  unsigned char* room;    // UNION_BYTES of shared memory, then a bitmap
  const int* selections;  // of the tile's first token
  int tokens, words;
  bool is_short;
  const u32* member;             // [tokens][stride] words of bits, one for each block of the union
  const unsigned short* blocks;  // of the union, ascending
  int stride;
  // Builds the union. Only the first warp may use it before the next barrier.
  __device__ __forceinline__ void prepare() {
    if (is_short) {
      if (threadIdx.x % 128 < 32) short_union((ShortUnion*)room + warpgroup(), selections, tokens, token_first);
      __syncwarp();
    } else {
      general_union((Union*)room, (u32*)(room + UNION_BYTES), selections, tokens, words, token_first);
    }
    if (threadIdx.x < 32) complete();
  }
  __device__ __forceinline__ void complete() {
    if (is_short) use(*((const ShortUnion*)room + warpgroup()), 2);
    else use(*(const Union*)room, UNION_WORDS);
  }
  template <class Found> __device__ __forceinline__ void use(const Found& u, int words_of_token) {
    member = &u.member[0][0];
    blocks = u.blocks;
    stride = words_of_token;
    tiles = u.count;
    before = SEL_L == 64 ? u.before : 0;
  }
  // One bit per block: this thread's two tokens selected it. A word serves 32 steps. Absent rows are not used.
  struct Rows {
    const u32 *from0, *from1;
    u32 word0, word1;
    __device__ __forceinline__ Rows(const SelectedUnion& branch, int token0, int token1)
        : from0(branch.member + max(0, token0 - branch.token_first) * branch.stride),
          from1(branch.member + max(0, token1 - branch.token_first) * branch.stride) {}
    __device__ __forceinline__ void sees(int i, bool& in0, bool& in1) {
      if ((i & 31) == 0) {
        word0 = from0[i / 32];
        word1 = from1[i / 32];
      }
      in0 = word0 & 1;
      in1 = word1 & 1;
      word0 >>= 1;
      word1 >>= 1;
    }
  };
  // blocks before every token come first: a token sees all of one or nothing
  __device__ __forceinline__ bool even(int i) const { return i < before; }
  __device__ __forceinline__ bool whole(int) const { return false; }
  int border;  // of two stretches: tokens on the other kernel's side are not written
  bool earlier, later;
  using Ahead = Combination::Others;
  __device__ __forceinline__ void load(Ahead& ahead, int r, int column) const { combine.load(ahead, index(r), column); }
  __device__ __forceinline__ void finish(int r, int column, uint4 x, float lse, const Ahead& ahead) const {
    if (!(token(r) < border ? earlier : later)) return;
    PackedRows::finish(r, column, x, lse);
    combine.store(ahead, index(r), column, x);
  }
  int tiles, before, packed0, token_first;
  __device__ __forceinline__ int tile(int i) const { return packed0 + blocks[min(i, tiles - 1)]; }
  __device__ __forceinline__ void range(int tile, int t, int& low, int& high) const {
    low = 0;
    high = tile < tiles ? min(SEL_L, t + 1 - blocks[tile] * SEL_L) : 0;
  }
};

// The window branch, then the selected one, with the same queries. The union of the blocks is built while keys and
// queries are on their way. grid (tiles of UNION_TOKENS tokens but the first `skipped`, groups); works where the plan
// is null or assigns the stretch to it; served[0] counts the times it did
extern "C" __global__ void __launch_bounds__(STREAM_THREADS<UNION_WARPGROUPS>, FORWARD_BLOCKS(UNION_WARPGROUPS, 1))
selected_union(const bf16* q, const unsigned char* packed, const unsigned char* packed_window, const int* selected,
               const bf16* cmp, const float* gates, bf16* out, float* lse, bf16* win, float* lse_win, bf16* combined,
               const Plan* plan, int* served, const int* cu_seqlens, int sequences, int words, int stretch,
               int skipped) {
  extern __shared__ unsigned char shared[];
  if (plan != nullptr && plan->union_stretches == 0) return;
  if (served != nullptr && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) served[0]++;
  const int tile = skipped + gridDim.x - 1 - blockIdx.x;
  Place place;
  if (!find_place(
          cu_seqlens, sequences, tile, [](int length) { return (length + UNION_TOKENS - 1) / UNION_TOKENS; },
          [](int length) { return (length + 63) / 64; }, place))
    return;
  const int group = blockIdx.y, t0 = place.tile * UNION_TOKENS;
  const int tokens = min(UNION_TOKENS, place.length - t0);
  SelectedUnion branch;
  const int stretch0 = (place.first + t0) / stretch, stretch1 = (place.first + t0 + tokens - 1) / stretch;
  branch.earlier = plan == nullptr || plan->choice[stretch0] == TILE_UNION;
  branch.later = plan == nullptr || plan->choice[stretch1] == TILE_UNION;
  branch.border = stretch1 * stretch - place.first;
  if (!branch.earlier && !branch.later) return;
  Window window;
  window.q = q;
  window.packed = packed_window;
  window.o = win;
  window.l = lse_win;
  window.first = place.first;
  window.group = group;
  window.start = t0 * HPG;
  window.rows = tokens * HPG;
  window.packed0 = place.units;
  window_tokens(window);
  (PackedRows&)branch = window;
  branch.packed = packed;
  branch.o = out;
  branch.l = lse;
  branch.packed0 = place.units;
  if (SEL_L != 64) {  // packed blocks are not the window's tiles
    find_place(
        cu_seqlens, sequences, tile, [](int length) { return (length + UNION_TOKENS - 1) / UNION_TOKENS; },
        [](int length) { return (length + SEL_L - 1) / SEL_L; }, place);
    branch.packed0 = place.units;
  }
  branch.combine = {cmp, win, gates, combined};
  branch.token_first = t0;
  branch.room = shared + STREAM_SHARED<UNION_WARPGROUPS, 1, PK>;
  branch.selections = selected + ((i64)(place.first + t0) * GROUPS + group) * SEL_N;
  branch.tokens = tokens;
  branch.words = words;
  branch.is_short = UNION_WORDS >= 2 && (t0 + tokens - 1) / SEL_L < 64;
  attend_both<UNION_WARPGROUPS>(window, branch, shared);
}

// Blocks 0, cur - 1 and cur. A tile whose tokens lie in two blocks streams one more.
struct SelectedForced : PackedRows {
  int border;  // of two stretches: its tokens' side that is the other kernel's is not written
  bool before, after;
  __device__ __forceinline__ void finish(int r, int column, uint4 x, float lse, const Ahead&) const {
    if (token(r) < border ? before : after) PackedRows::finish(r, column, x, lse);
  }
  int tiles, packed0, token_first, from;  // tile 0 is block 0, tile i >= 1 is block from + i - 1
  __device__ __forceinline__ int block(int tile) const { return tile == 0 ? 0 : from + tile - 1; }
  __device__ __forceinline__ int tile(int i) const { return packed0 + block(min(i, tiles - 1)); }
  __device__ __forceinline__ void prepare() {}
  __device__ __forceinline__ void complete() {}
  __device__ __forceinline__ bool even(int tile) const {
    return SEL_L == 64 && tile < tiles && (block(tile) + 1) * SEL_L <= token_first + 1;
  }
  struct Rows {
    u32 word0, word1;  // a bit for each tile from the present one on
    __device__ __forceinline__ Rows(const SelectedForced& branch, int token0, int token1)
        : word0(branch.seen_by(token0)), word1(branch.seen_by(token1)) {}
    __device__ __forceinline__ void sees(int, bool& in0, bool& in1) {
      in0 = word0 & 1;
      in1 = word1 & 1;
      word0 >>= 1;
      word1 >>= 1;
    }
  };
  // Block 0, and blocks from t / SEL_L - 1 on.
  __device__ __forceinline__ u32 seen_by(int t) const { return 1u | ~0u << max(1, t / SEL_L - from); }
  __device__ __forceinline__ bool whole(int) const { return false; }
  __device__ __forceinline__ void range(int tile, int t, int& low, int& high) const {
    low = 0;
    high = min(SEL_L, t + 1 - block(tile) * SEL_L);
  }
};

// For stretches of KV-outer or tile-gather, the keys that every token sees: the window branch; then blocks 0, cur-1 and
// cur, with output and lse as if nothing else were selected. grid (tiles of all sequences, groups)
extern "C" __global__ void __launch_bounds__(STREAM_THREADS<DENSE_WARPGROUPS>, FORWARD_BLOCKS(DENSE_WARPGROUPS, 1))
selected_dense(const bf16* q, const unsigned char* packed, const unsigned char* packed_window, bf16* out, float* lse,
               bf16* win, float* lse_win, const Plan* plan, const int* cu_seqlens, int sequences, int stretch) {
  extern __shared__ unsigned char shared[];
  constexpr int ROWS = DENSE_WARPGROUPS * 64;
  if (plan->pieces + plan->gather_stretches == 0) return;
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
  forced.before = plan->choice[stretch0] != TILE_UNION;
  forced.after = plan->choice[stretch1] != TILE_UNION;
  forced.border = stretch1 * stretch - window.first;
  if (!forced.before && !forced.after) return;
  forced.from = max(1, forced.token_first / SEL_L - 1);
  forced.tiles = max(1, window.token_last / SEL_L - forced.from + 2);
  attend_both<DENSE_WARPGROUPS>(window, forced, shared);
}
