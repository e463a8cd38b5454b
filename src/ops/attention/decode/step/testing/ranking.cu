// `keep_most_important` and `count_ahead` alone, for their tests. One block ranks the candidates 1 ... all; importance:
// [all + 1].
#include "../ranking.cuh"

constexpr int THREADS = 256, ROOM = TAKEN;  // TAKEN: a macro

extern "C" __global__ void __launch_bounds__(THREADS) rank_candidates(const float* importance, int* ties, int* best,
                                                                      int all) {
  __shared__ Ranking<THREADS, ROOM> ranking;
  __shared__ u32 most;
  for (int i = threadIdx.x; i < ranking.BINS; i += THREADS) ranking.histogram[i] = 0;
  if (threadIdx.x == 0) {
    ranking.held = ranking.tied = 0;
    most = 0;
    for (int j = 1; j <= all; j++) most = max(most, __float_as_uint(importance[j]));
  }
  __syncthreads();
  keep_most_important(ranking, importance, most, ties, all);
  for (int i = threadIdx.x; i < ROOM; i += THREADS) best[i] = ranking.best[i];
}

// order: [4 * fours]; places: the number of candidates ahead of each of them.
extern "C" __global__ void __launch_bounds__(THREADS) count_candidates(const int* order, int fours, int* places) {
  const int part = threadIdx.x % 2;
  for (int begin = 0; begin < 4 * fours; begin += THREADS / 2) {
    const int i = begin + (int)threadIdx.x / 2;
    int place = i < 4 * fours ? count_ahead<2>(order, fours, i, part) : 0;
    place += __shfl_xor_sync(~0u, place, 1);
    if (i < 4 * fours) places[i] = place;
  }
}

// One warp ranks order[0 ... count), at most 32 * OWN candidates. taken [TAKEN]: their indices, best first, then -1.
constexpr int OWN = 7;
extern "C" __global__ void __launch_bounds__(32) take_candidates(const int* order, int count, int* taken) {
  extern __shared__ float4 shared_memory[];
  take_best<TAKEN, OWN>(order, count, (int*)shared_memory,
                        [&](int place, int i, int bits) { taken[place] = bits < 0 ? -1 : i; });
}
