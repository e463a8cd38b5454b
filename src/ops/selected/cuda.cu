// Selected branch: softmax over the tokens of the selected blocks.
//   selected_union    tile-union: the tokens of a tile share one stream over the union of their blocks.
//                     With UNION_TOKENS=1 it is the query-major kernel (v1).
//   selected_outer, selected_finish
//                     KV-outer: every chosen block over the list of tokens that chose it, as partial results;
//                     then blocks 0, cur-1, cur densely with the merge (and the combination of the branches)
//                     at the end. Cost does not depend on agreement.
//   selected_backward KV-outer over forced and chosen tokens alike.
#include "../../device/cuda/forward.cuh"
#include "../../device/cuda/backward.cuh"

static_assert(SEL_L <= 64, "selection blocks over 64 tokens are not supported");

#ifndef UNION_WARPGROUPS
#define UNION_WARPGROUPS 2
#endif
#ifndef UNION_TOKENS
#define UNION_TOKENS (UNION_WARPGROUPS * 64 / HPG)
#endif
#ifndef UNION_WIDE
#define UNION_WIDE 1
#endif
#ifndef FORCED_WARPGROUPS
#define FORCED_WARPGROUPS 2
#endif
#ifndef OUTER_CHUNK
#define OUTER_CHUNK 128
#endif
#ifndef SEL_CHUNK
#define SEL_CHUNK 256
#endif

constexpr int UNION_MAX = UNION_TOKENS * SEL_N;
constexpr int UNION_WORDS = (UNION_MAX + 31) / 32;

// Shared memory of the union: the stream's blocks and, per token, which of them it selected.
struct Union {
  int blocks[UNION_MAX];
  u32 member[UNION_TOKENS][UNION_WORDS];
  int count;
};

// plus 4 bytes per word, words = (blocks of the longest sequence + 31) / 32
EXPORT(selected_union_shared, STREAM_SHARED<UNION_WARPGROUPS, UNION_WIDE, PK> + (int)sizeof(Union))
EXPORT(selected_union_tokens, UNION_TOKENS)
EXPORT(selected_union_threads, STREAM_THREADS<UNION_WARPGROUPS>)
EXPORT(selected_finish_threads, STREAM_THREADS<FORCED_WARPGROUPS>)
EXPORT(selected_finish_shared, STREAM_SHARED<FORCED_WARPGROUPS, 1, PK>)
EXPORT(selected_finish_rows, FORCED_WARPGROUPS * 64)
EXPORT(selected_backward_shared, BACKWARD_SHARED_DQ + SEL_CHUNK * 4)

// grid (blocks of all sequences, groups)
extern "C" __global__ void __launch_bounds__(256) selected_pack(const bf16* k, const bf16* v, unsigned char* packed, const int* cu_seqlens, int sequences) {
  pack_tile<SEL_L>(k, v, packed, cu_seqlens, sequences);
}

struct SelectedUnion : PackedRows {
  const Union* u;
  int tiles, packed0, token_first;
  __device__ __forceinline__ int tile(int i) const { return packed0 + u->blocks[min(i, tiles - 1)]; }
  __device__ __forceinline__ bool whole(int) const { return false; }
  __device__ __forceinline__ void range(int tile, int t, int& low, int& high) const {
    low = 0;
    const bool in = t >= 0 && tile < tiles && (u->member[t - token_first][tile / 32] >> (tile & 31) & 1);
    high = in ? min(SEL_L, t + 1 - u->blocks[tile] * SEL_L) : 0;
  }
};

// grid (tiles of UNION_TOKENS tokens, groups); unions [tiles, G] gets the union sizes when not null
extern "C" __global__ void __launch_bounds__(STREAM_THREADS<UNION_WARPGROUPS>, FORWARD_BLOCKS(UNION_WARPGROUPS, UNION_WIDE))
selected_union(const bf16* q, const unsigned char* packed, const int* selected, bf16* out, float* lse, int* unions,
               const int* cu_seqlens, int sequences, int words) {
  extern __shared__ unsigned char shared[];
  Union* const u = (Union*)(shared + STREAM_SHARED<UNION_WARPGROUPS, UNION_WIDE, PK>);
  u32* const bits = (u32*)(u + 1);
  Place place;
  if (!find_place(cu_seqlens, sequences, gridDim.x - 1 - blockIdx.x,
                  [](int length) { return (length + UNION_TOKENS - 1) / UNION_TOKENS; },
                  [](int length) { return (length + SEL_L - 1) / SEL_L; }, place)) return;
  const int thread = threadIdx.x, group = blockIdx.y, t0 = place.tile * UNION_TOKENS;
  const int tokens = min(UNION_TOKENS, place.length - t0);
  const int* const rows = selected + ((i64)(place.first + t0) * GROUPS + group) * SEL_N;
  for (int w = thread; w < words; w += STREAM_THREADS<UNION_WARPGROUPS>) bits[w] = 0;
  for (int w = thread; w < UNION_TOKENS * UNION_WORDS; w += STREAM_THREADS<UNION_WARPGROUPS>) u->member[w / UNION_WORDS][w % UNION_WORDS] = 0;
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
  }
  __syncthreads();
  for (int i = thread; i < tokens * SEL_N; i += STREAM_THREADS<UNION_WARPGROUPS>) {
    const int block = rows[(i64)(i / SEL_N) * GROUPS * SEL_N + i % SEL_N];
    if (block < 0) continue;
    int low = 0, high = u->count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (u->blocks[middle] <= block) low = middle; else high = middle;
    }
    atomicOr(&u->member[i / SEL_N][low / 32], 1u << (low & 31));
  }
  __syncthreads();
  if (unions != nullptr && thread == 0) unions[(place.base + place.tile) * GROUPS + group] = u->count;
  SelectedUnion branch;
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
  branch.token_first = t0;
  branch.tiles = u->count;
  attend<UNION_WARPGROUPS, UNION_WIDE>(branch, shared);
}

// Blocks 0, cur - 1 and cur. A tile whose tokens lie in two blocks streams one more.
struct SelectedForced : PackedRows {
  const bf16 *partial, *cmp, *win;
  const float *partial_lse, *gates;
  bf16* combined;
  int tiles, packed0, from;  // tile 0 is block 0, tile i >= 1 is block from + i - 1
  __device__ __forceinline__ int block(int tile) const { return tile == 0 ? 0 : from + tile - 1; }
  __device__ __forceinline__ int tile(int i) const { return packed0 + block(min(i, tiles - 1)); }
  __device__ __forceinline__ bool whole(int) const { return false; }
  __device__ __forceinline__ void range(int tile, int t, int& low, int& high) const {
    const int b = block(tile);
    low = 0;
    high = t >= 0 && (b == 0 || b >= t / SEL_L - 1) ? min(SEL_L, t + 1 - b * SEL_L) : 0;
  }
  // Folds in the partials of the chosen blocks (slots 1 ... count - 3), then the other branches by the gate.
  __device__ __forceinline__ void finish(int r, int column, uint4 x, float lse) const {
    const i64 at = index(r);
    const int token = (u32)at / HEADS, head = (u32)at % HEADS;
    const int count = min((token - first) / SEL_L + 1, SEL_N);
    const i64 place = ((i64)token * GROUPS + group) * SEL_N * HPG + head - group * HPG;
    float top = lse, logs[SEL_N];
#pragma unroll
    for (int s = 1; s < SEL_N - 2; s++) {
      logs[s] = s < count - 2 ? partial_lse[place + s * HPG] : -infinity();
      top = fmaxf(top, logs[s]);
    }
    float sum = 0.0f, o[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    const auto add = [&](uint4 y, float weight) {
      o[0] += low_half(y.x) * weight, o[1] += high_half(y.x) * weight, o[2] += low_half(y.y) * weight, o[3] += high_half(y.y) * weight;
      o[4] += low_half(y.z) * weight, o[5] += high_half(y.z) * weight, o[6] += low_half(y.w) * weight, o[7] += high_half(y.w) * weight;
    };
    add(x, sum = exp2_fast(lse - top));
#pragma unroll
    for (int s = 1; s < SEL_N - 2; s++)
      if (s < count - 2) {
        const float weight = exp2_fast(logs[s] - top);
        add(*(const uint4*)(partial + (place + s * HPG) * DV + column), weight);
        sum += weight;
      }
    const float f = 1.0f / sum;
#pragma unroll
    for (int i = 0; i < 8; i++) o[i] *= f;
    x = make_uint4(pack(o[0], o[1]), pack(o[2], o[3]), pack(o[4], o[5]), pack(o[6], o[7]));
    *(uint4*)(this->o + at * DV + column) = x;
    if (column == 0) l[at] = LN2 * (top + log2f(sum));
    if (combined != nullptr) {
      const float gate = gates[at * 3 + 1];
#pragma unroll
      for (int i = 0; i < 8; i++) o[i] = 0.0f;
      add(x, gate);
      add(*(const uint4*)(cmp + at * DV + column), gates[at * 3]);
      add(*(const uint4*)(win + at * DV + column), gates[at * 3 + 2]);
      *(uint4*)(combined + at * DV + column) = make_uint4(pack(o[0], o[1]), pack(o[2], o[3]), pack(o[4], o[5]), pack(o[6], o[7]));
    }
  }
};

// Blocks 0, cur-1, cur densely, then everything else there is to add. cmp, win, gates and combined may be null:
// then only the selected branch is finished. grid (tiles of all sequences, groups)
extern "C" __global__ void __launch_bounds__(STREAM_THREADS<FORCED_WARPGROUPS>, FORWARD_BLOCKS(FORCED_WARPGROUPS, 1))
selected_finish(const bf16* q, const unsigned char* packed, const bf16* partial, const float* partial_lse,
                const bf16* cmp, const bf16* win, const float* gates, bf16* out, float* lse, bf16* combined,
                const int* cu_seqlens, int sequences) {
  extern __shared__ unsigned char shared[];
  constexpr int ROWS = FORCED_WARPGROUPS * 64;
  Place place;
  if (!find_place(cu_seqlens, sequences, blockIdx.x, [](int length) { return (length * HPG + ROWS - 1) / ROWS; },
                  [](int length) { return (length + SEL_L - 1) / SEL_L; }, place)) return;
  SelectedForced branch;
  branch.partial = partial;
  branch.partial_lse = partial_lse;
  branch.cmp = cmp;
  branch.win = win;
  branch.gates = gates;
  branch.combined = combined;
  branch.q = q;
  branch.o = out;
  branch.l = lse;
  branch.first = place.first;
  branch.packed0 = place.units;
  branch.group = blockIdx.y;
  branch.start = place.tile * ROWS;
  branch.rows = min(ROWS, place.length * HPG - branch.start);
  branch.packed = packed;
  branch.from = max(1, branch.start / HPG / SEL_L - 1);
  branch.tiles = max(1, (branch.start + branch.rows - 1) / HPG / SEL_L - branch.from + 2);
  attend<FORCED_WARPGROUPS, 1>(branch, shared);
}

constexpr int OUTER_SHARED = (PK + PV + 2 * PK + 1) * PANEL + OUTER_CHUNK * 8 + 1024;
EXPORT(selected_outer_shared, OUTER_SHARED)

// One work item: a block's keys and values, up to OUTER_CHUNK of the tokens that chose it. Every key lies
// before every such token: no mask. Each (token, slot, head) gets a normalised partial output in bf16 and
// its own log-sum-exp (base 2) in fp32. grid (upper bound of items)
extern "C" __global__ void __launch_bounds__(128, PK + PV <= 2 ? 4 : 2)
selected_outer(const bf16* q, const unsigned char* packed, const int* items, const int* offsets,
               const u32* lists, bf16* partial, float* partial_lse, const int* cu_seqlens, const int* cu_blocks, int sequences) {
  extern __shared__ unsigned char shared[];
  const int blocks = cu_blocks[sequences];
  if (blockIdx.x >= offsets[2 * (blocks * GROUPS + 1) - 1]) return;
  const int item = items[blockIdx.x * 2], chunk = items[blockIdx.x * 2 + 1], at = item % blocks, group = item / blocks;
  int s = 0, upper = sequences;
  while (upper - s > 1) {
    const int middle = (s + upper) / 2;
    if (cu_blocks[middle] <= at) s = middle; else upper = middle;
  }
  const int first = cu_seqlens[s];
  const int from = offsets[item] + chunk * OUTER_CHUNK, tokens = min(OUTER_CHUNK, offsets[item + 1] - from);
  const int rows = tokens * HPG, steps = (rows + 63) / 64;

  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const u32 origin = shared_address(shared), base = (origin + 1023) & ~1023u;
  const u32 values = base + PK * PANEL, ring = values + PV * PANEL, staging = ring + 2 * PK * PANEL;
  unsigned char* const generic = shared - origin;
  u32* const list = (u32*)(generic + staging + PANEL);
  const unsigned char* const tile = packed + ((i64)at * GROUPS + group) * PACKED;
#pragma unroll
  for (int i = 0; i < PACKED / 2048; i++) copy16(base + (i * 128 + thread) * 16, tile + (i * 128 + thread) * 16, true);
  for (int i = thread; i < tokens; i += 128) {  // rows of q and of the partials where the token's heads start
    const u32 entry = lists[from + i], token = first + entry / 64;
    list[i] = token * HEADS + group * HPG;
    list[OUTER_CHUNK + i] = ((token * GROUPS + group) * SEL_N + entry % 64) * HPG;
  }
  __syncthreads();
  const auto request = [&](int i) {
    if (i < steps)
      load_panel<DK, 128>(ring + (i & 1) * PK * PANEL, thread, q, [&](int r) {
        const int row = i * 64 + r;
        return row < rows ? (i64)(list[(u32)row / HPG] + (u32)row % HPG) : -1;
      });
    copies_commit();
  };
  const auto place = [&](int row) { return (i64)(list[OUTER_CHUNK + (u32)row / HPG] + (u32)row % HPG); };  // of the partial
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
    matrix_wait<0>();
    hold(score);
    if (SEL_L < 64) {
#pragma unroll
      for (int e = 0; e < 32; e++)
        if ((e / 4) * 8 + (lane & 3) * 2 + (e & 1) >= SEL_L) score[e] = -infinity();
    }
    float top0 = -infinity(), top1 = -infinity();
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      top0 = fmaxf(top0, fmaxf(score[e], score[e + 1]));
      top1 = fmaxf(top1, fmaxf(score[e + 2], score[e + 3]));
    }
    top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 1));
    top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 1));
    top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 2)) * c;
    top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 2)) * c;
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      score[e] = exp2_fast(fmaf(score[e], c, -top0));
      score[e + 1] = exp2_fast(fmaf(score[e + 1], c, -top0));
      score[e + 2] = exp2_fast(fmaf(score[e + 2], c, -top1));
      score[e + 3] = exp2_fast(fmaf(score[e + 3], c, -top1));
      sum0 += score[e] + score[e + 1];
      sum1 += score[e + 2] + score[e + 3];
    }
    as_operand(weights, score);
    sum0 += __shfl_xor_sync(~0u, sum0, 1);
    sum1 += __shfl_xor_sync(~0u, sum1, 1);
    sum0 += __shfl_xor_sync(~0u, sum0, 2);
    sum1 += __shfl_xor_sync(~0u, sum1, 2);
    const int inner = warp * 16 + lane / 4, row = i * 64 + inner;
    if ((lane & 3) == 0) {
      if (row < rows) partial_lse[place(row)] = top0 + log2_fast(sum0);
      if (row + 8 < rows) partial_lse[place(row + 8)] = top1 + log2_fast(sum1);
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
      store_rows(out, generic + staging, scale0, scale1, [&](int, int r, int chunk16, uint4 x) {
        if (i * 64 + r < rows && p * 64 + chunk16 * 8 < DV)
          store_streaming(partial + place(i * 64 + r) * DV + p * 64 + chunk16 * 8, x);
      });
    }
  }
}

// The tokens that see a block: first the forced ones (every token for block 0, two blocks of tokens for the
// others), then the list. A work item is a stretch of that sequence.
struct SelectedBackward {
  const u32* list;  // in shared memory: this item's tokens, position * 64 + slot
  bf16* shares;
  int first, group, tokens, key0;
  __device__ __forceinline__ int token(int i) const { return (int)(list[i] / 64); }
  __device__ __forceinline__ int last(int i) const { return (int)(list[i] / 64); }
  __device__ __forceinline__ bf16* share(int r) const {
    const u32 entry = list[(u32)r / HPG];
    return shares + ((((i64)(first + (int)(entry / 64)) * GROUPS + group) * SEL_N + entry % 64) * HPG + (u32)r % HPG) * DK;
  }
  // only tokens inside the block are masked, and they come first, in order
  __device__ __forceinline__ bool whole(int from, int) const { return SEL_L == 64 && from >= key0 + SEL_L - 1; }
  __device__ __forceinline__ void range(int t, int& low, int& high) const {
    low = 0;
    high = min(SEL_L, t + 1 - key0);
  }
};

// grid (upper bound of items); adds to dk and dv in fp32, writes dq shares [T, G, n, h, Dk]
extern "C" __global__ void __launch_bounds__(128, BACKWARD_BLOCKS)
selected_backward(const bf16* q, const bf16* k, const bf16* v, const bf16* d_out, const float* lse, const float* delta,
                  bf16* shares, float* dk, float* dv, const int* items, const int* offsets,
                  const u32* lists, const int* cu_seqlens, const int* cu_blocks, int sequences) {
  extern __shared__ unsigned char shared[];
  const int blocks = cu_blocks[sequences];
  if (blockIdx.x >= offsets[3 * (blocks * GROUPS + 1) - 1]) return;
  const int item = items[blockIdx.x * 2], chunk = items[blockIdx.x * 2 + 1], at = item % blocks;
  int s = 0, upper = sequences;
  while (upper - s > 1) {
    const int middle = (s + upper) / 2;
    if (cu_blocks[middle] <= at) s = middle; else upper = middle;
  }
  const int length = cu_seqlens[s + 1] - cu_seqlens[s], block = at - cu_blocks[s];
  const int forced = block == 0 ? length : min(length, (block + 2) * SEL_L) - block * SEL_L;
  const int chosen = offsets[item + 1] - offsets[item], from = chunk * SEL_CHUNK;
  u32* const list = (u32*)(shared + BACKWARD_SHARED_DQ);
  SelectedBackward branch;
  branch.list = list;
  branch.shares = shares;
  branch.first = cu_seqlens[s];
  branch.group = item / blocks;
  branch.key0 = block * SEL_L;
  branch.tokens = min(SEL_CHUNK, forced + chosen - from);
  for (int i = threadIdx.x; i < branch.tokens; i += 128) {
    if (from + i < forced) {  // slots of forced blocks: 0, or the last two
      const int t = branch.key0 + from + i, current = t / SEL_L;
      list[i] = (u32)t * 64 + (block == 0 ? 0 : min(current, SEL_N - 1) - (current - block));
    } else {
      list[i] = lists[offsets[item] + from + i - forced];
    }
  }
  __syncthreads();
  const i64 key = (i64)(branch.first + branch.key0) * GROUPS + branch.group;
  backward<false, true>(branch, shared, q, d_out, lse, delta, k + key * DK, v + key * DV, min(SEL_L, length - branch.key0),
                  dk + key * DK, dv + key * DV);
}

constexpr int DQ_LANES = DK <= 32 ? 4 : DK <= 64 ? 8 : DK <= 128 ? 16 : 32;

// dq = the compressed and window branches' dq + the shares of the selected blocks. One row per DQ_LANES threads.
extern "C" __global__ void __launch_bounds__(256)
selected_query_gradient(const bf16* dq_cmp, const bf16* dq_win, const bf16* shares, const int* selected, bf16* dq, int tokens) {
  const i64 row = ((i64)blockIdx.x * 256 + threadIdx.x) / DQ_LANES;
  const int chunk = threadIdx.x % DQ_LANES;
  if (row >= (i64)tokens * HEADS || chunk * 8 >= DK) return;
  const int token = (int)(row / HEADS), head = (int)(row % HEADS), group = head / HPG;
  const int* const blocks = selected + ((i64)token * GROUPS + group) * SEL_N;
  const i64 at = ((i64)token * GROUPS + group) * SEL_N * HPG + head % HPG;
  float o[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  const auto add = [&](const uint4 x) {
    o[0] += low_half(x.x), o[1] += high_half(x.x), o[2] += low_half(x.y), o[3] += high_half(x.y);
    o[4] += low_half(x.z), o[5] += high_half(x.z), o[6] += low_half(x.w), o[7] += high_half(x.w);
  };
  add(*(const uint4*)(dq_cmp + row * DK + chunk * 8));
  add(*(const uint4*)(dq_win + row * DK + chunk * 8));
#pragma unroll
  for (int s = 0; s < SEL_N; s++)
    if (blocks[s] >= 0) add(*(const uint4*)(shares + (at + s * HPG) * DK + chunk * 8));
  *(uint4*)(dq + row * DK + chunk * 8) = make_uint4(pack(o[0], o[1]), pack(o[2], o[3]), pack(o[4], o[5]), pack(o[6], o[7]));
}
