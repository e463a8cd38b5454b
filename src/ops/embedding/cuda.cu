// Embedding: rows copied out of the table, and gradients of rows summed back into it in the order of the tokens.
//
// The order is the reason for sorting: tokens are put in the order of their ids by a stable radix sort, one block then
// adds all rows of an id, and no two blocks write the same number.
#include "elements.cuh"

typedef DTYPE T;

constexpr int CHUNK = 2048, DIGITS = 256, BLOCK = 256, WARPS = BLOCK / 32;  // of the sort: tokens of a block, and so on
constexpr int TEAMS = 4, TEAM = 128, AHEAD = 4;  // of the sum: teams of threads, and the rows each has under way

// y[t] = table[ids[t]]. An id outside the table gives NaN: the host does not check ids, and the loss shows it.
extern "C" __global__ void __launch_bounds__(256)
embedding_forward(const float* table, const i32* ids, T* y, i64 tokens, i64 vocab, i64 dim) {
  const bool wide = dim % WIDE<T> == 0 && aligned(table) && aligned(y);
  const auto copy = [=](auto n) {
    constexpr int N = decltype(n)::value;
    const i64 vectors = dim / N, count = tokens * vectors, threads = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
      const i64 t = count <= 0xffffffffll ? (i64)((u32)i / (u32)vectors) : i / vectors;
      const i64 column = (i - t * vectors) * N, id = ids[t];
      float x[N];
      if (id >= 0 && id < vocab) {
        load(x, table + id * dim + column);
      } else {
#pragma unroll
        for (int k = 0; k < N; k++) x[k] = not_a_number();
      }
      store(y + t * dim + column, x);
    }
  };
  if (wide) copy(Count<WIDE<T>>{});
  else copy(Count<1>{});
}

// Sort key of a token: its id, or `vocab` if that is outside the table.
__device__ __forceinline__ u32 key_of(i32 id, i64 vocab) { return id >= 0 && id < vocab ? (u32)id : (u32)vocab; }

// counts[digit][chunk]: how many keys of each chunk have each digit.
extern "C" __global__ void __launch_bounds__(BLOCK)
sort_count(const i32* keys, u32* counts, i64 tokens, i64 vocab, int shift) {
  __shared__ u32 own[DIGITS];
  own[threadIdx.x] = 0;
  __syncthreads();
  const i64 first = (i64)blockIdx.x * CHUNK, end = tokens - first < CHUNK ? tokens : first + CHUNK;
  for (i64 i = first + threadIdx.x; i < end; i += BLOCK) atomicAdd(&own[key_of(keys[i], vocab) >> shift & 255u], 1u);
  __syncthreads();
  counts[(i64)threadIdx.x * gridDim.x + blockIdx.x] = own[threadIdx.x];
}

// counts[i] = the sum of all counts before i: where the keys of that digit and chunk begin. One block of 1024.
extern "C" __global__ void __launch_bounds__(1024) sort_scan(u32* counts, i64 count) {
  __shared__ u32 sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 before = 0;
  for (i64 base = 0; base < count; base += 1024) {
    const i64 i = base + threadIdx.x;
    const u32 own = i < count ? counts[i] : 0;
    const u32 sum = warp_prefix_sum(own);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    const u32 total = warp_prefix_sum(sums[lane]);
    const u32 all = __shfl_sync(~0u, total, 31), earlier = __shfl_sync(~0u, total, warp == 0 ? 0 : warp - 1);
    if (i < count) counts[i] = before + (warp == 0 ? 0 : earlier) + sum - own;
    before += all;
    __syncthreads();
  }
}

// Puts every token of a chunk at the position given by its digit and its rank among equal digits. A null `tokens_in` means
// 0, 1, 2, ...; the keys of the first pass are the ids themselves.
extern "C" __global__ void __launch_bounds__(BLOCK)
sort_scatter(const i32* keys_in, const i32* tokens_in, i32* keys_out, i32* tokens_out, const u32* starts, i64 tokens,
             i64 vocab, int shift) {
  __shared__ u32 place[WARPS][DIGITS];  // counts of a warp's digits, then where its next one goes
  constexpr int SHARE = CHUNK / WARPS;  // consecutive tokens of a warp, so that their order stays
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 first = (i64)blockIdx.x * CHUNK + warp * SHARE;
  for (int digit = lane; digit < DIGITS; digit += 32) place[warp][digit] = 0;
  __syncwarp();
  for (int round = 0; round < SHARE; round += 32) {
    const i64 i = first + round + lane;
    if (i < tokens) atomicAdd(&place[warp][key_of(keys_in[i], vocab) >> shift & 255u], 1u);
  }
  __syncthreads();
  u32 next = starts[(i64)threadIdx.x * gridDim.x + blockIdx.x];
  for (int w = 0; w < WARPS; w++) {
    const u32 count = place[w][threadIdx.x];
    place[w][threadIdx.x] = next;
    next += count;
  }
  __syncthreads();
  for (int round = 0; round < SHARE; round += 32) {
    const i64 i = first + round + lane;
    const u32 key = i < tokens ? key_of(keys_in[i], vocab) : 0;
    const u32 digit = i < tokens ? key >> shift & 255u : DIGITS;
    const u32 equal = __match_any_sync(~0u, digit), earlier = equal & ((1u << lane) - 1);
    u32 to = 0;
    if (digit < DIGITS) to = place[warp][digit] + __popc(earlier);
    __syncwarp();
    if (digit < DIGITS) {
      if (earlier == 0) place[warp][digit] += __popc(equal);
      keys_out[to] = (i32)key;
      tokens_out[to] = tokens_in != nullptr ? tokens_in[i] : (i32)i;
    }
    __syncwarp();
  }
}

// d_table[id] += the rows of dy whose tokens have that id. The block that stands at the first of them does it all:
// TEAMS teams take turns of AHEAD rows, each keeping them in order, and are then added in order.
template <int N>
__device__ __forceinline__ void add_rows(const i32* keys, const i32* order, const T* dy, float* to, i64 first,
                                         i64 tokens, i64 dim) {
  __shared__ float room[TEAMS][TEAM * N];
  const int place = threadIdx.x % TEAM, team = threadIdx.x / TEAM;
  const i32 id = keys[first];
  for (i64 base = 0; base < dim; base += TEAM * N) {
    const i64 column = base + place * N;
    float sum[N] = {};
    bool more = true;
    for (i64 i = first + team * AHEAD; more; i += TEAMS * AHEAD) {
      float rows[AHEAD][N] = {};
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        more = i + k < tokens && keys[i + k] == id;
        if (more && column < dim) load(rows[k], dy + order[i + k] * dim + column);
      }
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
#pragma unroll
        for (int c = 0; c < N; c++) sum[c] += rows[k][c];
    }
#pragma unroll
    for (int c = 0; c < N; c++) room[team][c * TEAM + place] = sum[c];
    __syncthreads();
    if (team == 0 && column < dim) {
#pragma unroll
      for (int t = 1; t < TEAMS; t++)
#pragma unroll
        for (int c = 0; c < N; c++) sum[c] += room[t][c * TEAM + place];
      store(to + column, sum, true);
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(TEAMS* TEAM)
embedding_backward(const i32* keys, const i32* order, const T* dy, float* d_table, i64 tokens, i64 vocab, i64 dim) {
  const i64 first = blockIdx.x;
  const i32 id = keys[first];
  if (id >= vocab || (first > 0 && keys[first - 1] == id)) return;
  float* const to = d_table + id * dim;
  if (dim % WIDE<T> == 0 && aligned(dy) && aligned(d_table))
    add_rows<WIDE<T>>(keys, order, dy, to, first, tokens, dim);
  else
    add_rows<1>(keys, order, dy, to, first, tokens, dim);
}
