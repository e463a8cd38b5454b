// Top-k selection: the ROOM candidates of highest importance. Few candidates are compared each with each
// (`count_ahead`), a warp ranks more of them (`take_best`), and `keep_most_important` by a block of threads takes time
// linear in their number, whatever their values.
#pragma once
#include "elements.cuh"

// The number of candidates ahead of candidate j: those that are more important, and the earlier ones among equals.
// order: the bits of the importances, which are not negative; -1 for places without a candidate. Aligned to 16 bytes,
// `fours` times four of them. The thread counts among the fours part, part + PARTS, ...
template <int PARTS> __device__ __forceinline__ int count_ahead(const int* order, int fours, int j, int part) {
  const int own = order[j];
  int ahead[4] = {};  // apart, so that additions do not wait for each other
#pragma unroll 8
  for (int i = part; i < fours; i += PARTS) {
    const int4 x = ((const int4*)order)[i];
    const int less = i < j / 4 ? own - 1 : own;
    ahead[0] += x.x > less, ahead[1] += x.y > less, ahead[2] += x.z > less, ahead[3] += x.w > less;
  }
  if (part == 0) {
    const int4 x = ((const int4*)order)[j / 4];  // of its own four the equal ones before j are left
    ahead[0] += j % 4 > 0 && x.x == own, ahead[1] += j % 4 > 1 && x.y == own, ahead[2] += j % 4 > 2 && x.z == own;
  }
  return ahead[0] + ahead[1] + (ahead[2] + ahead[3]);
}

constexpr int KEPT = 64;  // candidates of a warp at most that `take_best` compares with each other

// The ROOM best of a warp's candidates, order[0 ... count), at most OWN for each lane: take(place, number in order,
// bits) for every place, bits -1 where there is no candidate. order[count ... whole fours) are -1. kept: shared memory
// of the warp, 2 KEPT numbers aligned to 16 bytes. All lanes call.
//
// Every lane has up to OWN candidates. ROOM lanes have one that is at least as good as the best of the lane number
// ROOM, so that whatever is less cannot be among the best: few are left to be compared each with each.
template <int ROOM, int OWN, class Take>
__device__ __forceinline__ void take_best(const int* order, int count, int* kept, const Take& take) {
  const int lane = threadIdx.x % 32;
  int own[OWN], most = 0, left = 0;
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    own[n] = lane + 32 * n < count ? order[lane + 32 * n] : -1;
    most = max(most, own[n]);
  }
  int limit = 0;
  __syncwarp();  // another lane may still read `kept` in a call before
  if (ROOM < 32) {
    kept[lane] = most;
    __syncwarp();
    int ahead[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int4 x = ((const int4*)kept)[i];
      ahead[0] += x.x > most, ahead[1] += x.y > most, ahead[2] += x.z > most, ahead[3] += x.w > most;
    }
    const bool is_best = ahead[0] + ahead[1] + (ahead[2] + ahead[3]) < ROOM;
    limit = (int)~__reduce_max_sync(~0u, is_best ? ~(u32)most : 0u);
    __syncwarp();
  }
  int* const kept_index = kept + KEPT;
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const u32 passed = __ballot_sync(~0u, own[n] >= limit);
    const int to = left + __popc(passed & ((1u << lane) - 1));
    if (own[n] >= limit && to < KEPT) kept[to] = own[n], kept_index[to] = lane + 32 * n;
    left += __popc(passed);
  }
  const bool fits = left <= KEPT;
  if (fits && lane < 3 && left + lane < KEPT) kept[left + lane] = -1;
  __syncwarp();
  const int all = fits ? left : count;
  const int* const compared = fits ? kept : order;
  for (int i = lane; i < max(all, ROOM); i += 32) {
    if (i >= all) {
      take(i, 0, -1);
      continue;
    }
    const int place = count_ahead<1>(compared, (all + 3) / 4, i, 0);
    if (place < ROOM) take(place, fits ? kept_index[i] : i, compared[i]);
  }
}

// Shared memory of `keep_most_important`. The caller zeroes histogram, held and tied.
template <int THREADS, int ROOM> struct Ranking {
  static constexpr int BIN_BITS = 11, BINS = 1 << BIN_BITS, BINS_OF_THREAD = (BINS + THREADS - 1) / THREADS;
  int histogram[BINS], totals[THREADS / 32];
  int limit, above;  // the bin that holds the last candidate taken, and how many candidates lie in better bins
  int held, tied;    // entries of `best`, and candidates of the bin `limit`
  int best[ROOM + 1];

  // Sets limit and above: the bin in which the candidate number `room` lies, counted from bin 0. All threads call.
  __device__ __forceinline__ void find_limit(int room) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = (int)threadIdx.x * BINS_OF_THREAD;
    int own = 0;
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; i++) own += first + i < BINS ? histogram[first + i] : 0;
    int before = warp_prefix_sum(own);
    if (lane == 31) totals[warp] = before;
    __syncthreads();
    before -= own;
    for (int w = 0; w < warp; w++) before += totals[w];
    if (before < room && before + own >= room) {
      int bin = first;
      while (before + histogram[bin] < room) before += histogram[bin++];
      limit = bin, above = before;
    }
    __syncthreads();
  }
};

// The rare end of `keep_most_important`: many candidates in the bin of the last one that is taken. A function of its
// own: inside the kernel its code cost 1 % of a step.
template <int THREADS, int ROOM> __device__ __noinline__ void rank_ties(Ranking<THREADS, ROOM>& s,
                                                                        const float* importance, u32 most,
                                                                        const int* ties) {
  constexpr int BINS = Ranking<THREADS, ROOM>::BINS, BIN_BITS = Ranking<THREADS, ROOM>::BIN_BITS;
  const int tied = s.tied, above = s.above;
  const auto key_of = [&](int j) { return (u64)(most - __float_as_uint(importance[j])) << 32 | (u32)j; };
  constexpr int FIRST_SHIFT = 63 / BIN_BITS * BIN_BITS;  // digits of BIN_BITS bits, the first one shorter
  u64 prefix = 0;                                        // the digits found so far of the last key that is taken
  int shift = FIRST_SHIFT, room = ROOM - above;
#pragma unroll 1
  for (;; shift -= BIN_BITS) {
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.histogram[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < tied; i += THREADS) {
      const u64 key = key_of(ties[i]);
      if (shift == FIRST_SHIFT || key >> (shift + BIN_BITS) == prefix)
        atomicAdd(&s.histogram[(int)(key >> shift) & (BINS - 1)], 1);
    }
    __syncthreads();
    s.find_limit(room);
    room -= s.above;
    prefix = prefix << BIN_BITS | (u32)s.limit;
    const bool complete =
        s.histogram[s.limit] == room;  // the rest of the bin is taken; so at shift 0, where keys differ
    __syncthreads();
    if (complete) break;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < tied; i += THREADS)
    if (key_of(ties[i]) >> shift <= prefix) s.best[atomicAdd(&s.held, 1)] = ties[i];
  __syncthreads();
}

// Places ranking.best: the ROOM most important of the candidates 1 ... all, the lower index among equals, in any order.
// importance [all + 1] is not negative, and `most` holds the bits of the largest one: such numbers compare as their
// bits do. ties: room for `all` numbers. At least ROOM candidates must exist.
//
// A histogram of the upper bits of `most - importance` finds the bin of the last candidate that is taken; only the
// candidates of that bin need a closer look. Few are compared each with each. Many, as when almost all importances are
// equal, are ranked by a radix selection over the 64-bit key (most - importance, index), which no two share.
template <int THREADS, int ROOM> __device__ __forceinline__ void keep_most_important(Ranking<THREADS, ROOM>& s,
                                                                                     const float* importance, u32 most,
                                                                                     int* ties, int all) {
  constexpr int BINS = Ranking<THREADS, ROOM>::BINS, BIN_SHIFT = 16;
  const auto bin_of = [&](float x) { return min((int)((most - __float_as_uint(x)) >> BIN_SHIFT), BINS - 1); };
  for (int j = 1 + threadIdx.x; j <= all; j += THREADS) atomicAdd(&s.histogram[bin_of(importance[j])], 1);
  __syncthreads();
  s.find_limit(ROOM);
  for (int j = 1 + threadIdx.x; j <= all; j += THREADS) {
    const int bin = bin_of(importance[j]);
    if (bin < s.limit) s.best[atomicAdd(&s.held, 1)] = j;
    else if (bin == s.limit) ties[atomicAdd(&s.tied, 1)] = j;
  }
  __syncthreads();
  const int tied = s.tied, above = s.above;
  if (tied <= THREADS) {
    for (int i = threadIdx.x; i < tied; i += THREADS) {
      const int j = ties[i];
      const float value = importance[j];
      int place = above;
      for (int k = 0; k < tied; k++) {
        const float other = importance[ties[k]];
        place += other > value || (other == value && ties[k] < j);
      }
      if (place < ROOM) s.best[place] = j;
    }
    __syncthreads();
    return;
  }
  rank_ties(s, importance, most, ties);
}
