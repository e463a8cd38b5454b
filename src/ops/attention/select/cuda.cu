// Branch kernel: which blocks each token attends to, importance of the selection blocks from the compressed attention's
// probabilities, and the top n with the forced blocks.
//
// Probabilities are recomputed from q, k_cmp and the LSE, 64 compressed blocks at a time, and summed over the heads of
// the group in the order of the heads. A selection block takes its sum in the order of its compressed blocks, as far as
// they have come; a compressed block is never longer than a selection block, so at most two sums of a token are
// unfinished. Finished ones are offered to the token's list of the best, which a warp keeps. With `chunked` there are
// two lists: half of the slots for the blocks before the token's chunk, the others, but for its own block, for the
// chunk.
#include "../branch.cuh"

// Sorts by score, then the lower index first; greater is better, and anything is better than the empty entry 0.
__device__ __forceinline__ u64 rank_of(float importance, int index) {
  const u32 bits = __float_as_uint(importance == importance ? importance : -1.0f);  // NaN comes last
  const u32 ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (u64)ordered << 32 | ~(u32)index;
}
__device__ __forceinline__ int index_of(u64 rank) { return (int)~(u32)rank; }

// The best `room` of what was offered, in no order. All lanes of a warp call together.
struct Best {
  u64* entries;
  int room;

  __device__ void clear(int lane) const {
    for (int i = lane; i < room; i += 32) entries[i] = 0;
  }
  // The least entry and where it is.
  __device__ u64 worst(int lane, int& at) const {
    u64 least = ~0ull;
    int place = 0;
    for (int i = lane; i < room; i += 32)
      if (entries[i] < least) least = entries[i], place = i;
    u64 all = least;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const u64 other = __shfl_xor_sync(~0u, all, step);
      all = other < all ? other : all;
    }
    const int lane_of_it = __ffs(__ballot_sync(~0u, least == all)) - 1;
    at = __shfl_sync(~0u, place, lane_of_it);
    return all;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) select_forward(
    const Element* q, const Element* k, const float* lse, const int* offsets, const int* key_offsets, int* selected,
    u64* lists, i64 sequences, int heads, int groups, int dk, i64 l, i64 d, i64 block, int count, int init, int local,
    int largest, int chunked) {
  __shared__ i64 place[TILE];
  __shared__ float open[2][TILE];  // unfinished sums, by the parity of the block
  __shared__ u64 worst[TILE];      // of the token's list
  __shared__ int worst_place[TILE];
  const Inputs in = {q, k, nullptr, offsets, key_offsets, sequences, heads, groups, dk, 1};
  float *const queries = tile_buffer(0), *const keys = tile_buffer(1), *const weights = tile_buffer(2);
  const int y = threadIdx.x / 16 * 4, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int h = in.per_group(), size = in.tile_tokens(), room = count - init - local;
  // Selection block j takes part of the compressed blocks [j * step - lead, (j + 1) * step).
  const int step = (int)(block / d), lead = (int)(l / d) - 1;
  const float scale = in.scale();
  const auto row = [&](int r) { return place[r]; };
  lists += (i64)blockIdx.x * size * room;
  Walk walk(offsets, sequences, size);
  for (i64 item = blockIdx.x; walk.seek(item / groups); item += gridDim.x) {
    Span span(in, walk.sequence, (int)(item % groups));
    set_tokens(span, walk);
    const i64 last = (span.t1 - 1) / block;
    // Tokens with no more blocks than slots take all of them and need no scores; those with more may have no slot to
    // give.
    if (room > 0 && last >= count) {
      __syncthreads();
      place_rows(place, in, span);
      for (int u = warp; u < size; u += WARPS) {
        Best{lists + (i64)u * room, room}.clear(lane);
        if (lane == 0) worst[u] = 0, worst_place[u] = 0;
      }
      __syncthreads();
      if (KC == 1) load_tile(queries, q, dk, 0, row);
      // Only blocks before the local ones can be chosen.
      const i64 end = (last - local + 1) * step;
      for (int k0 = 0; k0 < end; k0 += TILE) {
        // ---- Probabilities [64 rows, 64 compressed blocks]
        const auto key = [&](int r) { return span.key(in, k0 + r); };
        float score[4][4] = {};
#pragma unroll
        for (int c = 0; c < KC; c++) {
          __syncthreads();
          if (KC > 1) load_tile(queries, q, dk, c * TILE, row);
          load_tile(keys, k, dk, c * TILE, key);
          __syncthreads();
          multiply_rows(score, queries, keys, used_columns(dk, c));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const i64 at = place[y + i];
          const float row_lse = at < 0 ? 0.0f : lse[at];
#pragma unroll
          for (int j = 0; j < 4; j++) score[i][j] = expf(score[i][j] * scale - row_lse);
        }
        store_tile(weights, score);
        __syncthreads();
        // ---- Summed over the heads: [tokens, 64]
        float* const sums = keys;  // the keys are no longer needed: their buffer is free
        for (int i = threadIdx.x; i < size * TILE; i += THREADS) {
          const int u = i / TILE, column = i % TILE;
          float sum = 0;
          for (int r = u * h; r < (u + 1) * h; r++) sum += weights[r * STRIDE + column];
          sums[u * STRIDE + column] = sum;
        }
        __syncthreads();
        // ---- Pooled into selection blocks and offered to each token's list, one warp per token
        for (int u = warp; u < span.t1 - span.t0; u += WARPS) {
          const i64 t = span.t0 + u, current = t / block;
          if (current < count) continue;
          const int visible = (int)((t + 1 - l) / d) + 1;  // compressed blocks; t >= block >= l
          const i64 chunk = current / count * count;
          const int half = chunked ? count / 2 : room;
          u64* const list = lists + (i64)u * room;
          u64 least = worst[u];
          int least_at = worst_place[u];
          for (int j0 = k0 / step; j0 <= (k0 + TILE - 1 + lead) / step; j0 += 32) {
            const int j = j0 + lane, begin = j * step - lead, stop = (j + 1) * step;
            float sum = begin >= k0 || k0 == 0 ? 0.0f : open[j & 1][u];
            for (int i = max(max(begin, 0), k0); i < min(min(stop, k0 + TILE), visible); i++) {
              const int shared = min(i - begin + 1, step) - max(i - begin - lead, 0);  // strides
              const float p = sums[u * STRIDE + i - k0];
              if (!largest) sum = fmaf((float)shared, p, sum);
              else if (!(p <= sum)) sum = p;  // NaN wins, as in a sum
            }
            __syncwarp();
            if (begin < k0 + TILE && stop > k0 + TILE) open[j & 1][u] = sum;
            const bool candidate = stop <= k0 + TILE && j >= init && j <= current - local;
            for (int part = 0; part <= chunked; part++) {
              const Best best = part ? Best{list + half, room - half} : Best{list, half};
              if (best.room == 0) continue;
              if (chunked) least = best.worst(lane, least_at);
              const bool belongs = candidate && (!chunked || (j >= chunk) == (part == 1));
              const u64 rank = belongs ? rank_of(sum, j) : 0;
              for (u32 better = __ballot_sync(~0u, rank > least); better != 0; better &= better - 1) {
                const u64 offered = __shfl_sync(~0u, rank, __ffs(better) - 1);
                if (offered <= least) continue;
                if (lane == 0) best.entries[least_at] = offered;
                __syncwarp();
                least = best.worst(lane, least_at);
                __syncwarp();
              }
            }
          }
          if (lane == 0) worst[u] = least, worst_place[u] = least_at;
          __syncwarp();
        }
      }
    }
    // ---- The rows of `selected`: ascending, -1 where fewer blocks exist
    __syncthreads();
    for (int u = warp; u < span.t1 - span.t0; u += WARPS) {
      const int t = span.t0 + u;
      const i64 current = t / block;
      int* const out = selected + ((span.token0 + t) * groups + span.group) * count;
      if (current < count) {
        for (int i = lane; i < count; i += 32) out[i] = i <= current ? i : -1;
        continue;
      }
      // Here current >= count >= init + local, so no block is both initial and local. The list is full, unless the
      // token's chunk has fewer blocks than slots.
      const u64* const chosen = lists + (i64)u * room;
      int held = 0;
      for (int i = 0; i < room; i++) held += chosen[i] != 0;
      for (int i = lane; i < room; i += 32) {
        if (chosen[i] == 0) continue;
        const int index = index_of(chosen[i]);
        int before = 0;
        for (int other = 0; other < room; other++) before += chosen[other] != 0 && index_of(chosen[other]) < index;
        out[init + before] = index;
      }
      for (int i = lane; i < init; i += 32) out[i] = i;
      for (int i = lane; i < local; i += 32) out[init + held + local - 1 - i] = (int)current - i;
      for (int i = init + held + local + lane; i < count; i += 32) out[i] = -1;
    }
    __syncthreads();
  }
}
