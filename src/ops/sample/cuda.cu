// Draws the next token of every row of logits by temperature, top-k, top-p and min-p, one thread block for each row.
//
// The tokens are those of the host's sampler (infer/engine/sampler.ts), which adds float64 weights one after the other. Here sums
// have another order, so a decision is taken only if it is further from its limit than any order of additions can reach;
// otherwise the token is UNCERTAIN, about once in 10^7 draws, and the host draws it. Ties are decided by the index.
//
// Top-k and top-p need the most probable tokens in order. No row is sorted: a histogram over the logits finds the bin in
// which a limit lies, and only the tokens of that bin are sorted.
#include "elements.cuh"

constexpr int THREADS = 1024, BINS = THREADS, LIST = THREADS;
constexpr float BINS_PER_NAT = 32.0f;
constexpr double FIXED_ONE = 1099511627776.0;  // weights of bins are integers, so that their sums are exact
// Parts of a sum that do not decide. Adding 2^19 numbers in float64 errs by less than 2^-33 of their sum, and as many tokens
// of the last bin weigh less than 2^19 exp(-31.9) = 7.3e-9 of the most probable one.
constexpr double MARGIN = 1e-8;
constexpr int UNCERTAIN = -2;

struct Settings {
  double temperature, top_k, top_p, min_p, uniform;
};

struct Token {
  float logit;
  int index;
};
// True if a is more probable; of equals, the lower index comes first.
__device__ __forceinline__ bool before(Token a, Token b) {
  return a.logit > b.logit || (a.logit == b.logit && a.index < b.index);
}

struct Row {
  const float* logits;
  int vocabulary;
  float best;
  double temperature;

  // Relative to the most probable token.
  __device__ __forceinline__ double weight(float logit) const {
    return exp(((double)logit - (double)best) / temperature);
  }
  // Falls with the logit. The last bin has all that is too improbable.
  __device__ __forceinline__ int bin(float logit) const {
    return (int)fminf((best - logit) * (BINS_PER_NAT / (float)temperature), BINS - 1);
  }
};

struct Room {
  int counts[BINS];   // tokens of a bin and of all before it
  u64 masses[BINS];   // their weights, in units of 1 / FIXED_ONE
  Token list[LIST];   // tokens of one bin
  Token sorted[LIST]; // the same, most probable first
  double weights[LIST];
  double sums[32];
  u64 masses_of_warps[32];
  int counts_of_warps[32];
  int listed, found, unsure;
  Token last;
  double kept;
};

// Sums of x over the threads up to this one.
template <class T> __device__ __forceinline__ T block_scan(T x, T* room) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += other;
  }
  if (lane == 31) room[warp] = x;
  __syncthreads();
  T earlier = T(0);
  for (int w = 0; w < warp; w++) earlier += room[w];
  __syncthreads();
  return earlier + x;
}

__device__ void fill_bins(const Row& row, Room& room) {
  const int thread = threadIdx.x;
  room.counts[thread] = 0;
  room.masses[thread] = 0;
  __syncthreads();
  for (int i = thread; i < row.vocabulary; i += THREADS) {
    const float logit = row.logits[i];
    const int bin = row.bin(logit);
    atomicAdd(&room.counts[bin], 1);
    atomicAdd(&room.masses[bin], (u64)(expf((logit - row.best) / (float)row.temperature) * (float)FIXED_ONE));
  }
  __syncthreads();
  const int count = block_scan(room.counts[thread], room.counts_of_warps);
  const u64 mass = block_scan(room.masses[thread], room.masses_of_warps);
  room.counts[thread] = count;
  room.masses[thread] = mass;
  __syncthreads();
}

// The first bin at which the cumulative sum exceeds `limit`; the last one if none does.
template <class T> __device__ __forceinline__ int find_bin(const T* sums, T limit, Room& room) {
  const int thread = threadIdx.x;
  if (thread == 0) room.found = BINS - 1;
  __syncthreads();
  if (sums[thread] > limit && (thread == 0 || !(sums[thread - 1] > limit))) room.found = thread;
  __syncthreads();
  const int found = room.found;
  __syncthreads();
  return found;
}

// Sorts the tokens of a bin, with their weights; returns the sum of the weights of all bins before it, -1 if the bin has
// too many tokens.
__device__ double sort_bin(const Row& row, int wanted, Room& room) {
  const int thread = threadIdx.x;
  if (thread == 0) room.listed = 0;
  __syncthreads();
  double own = 0;
  for (int i = thread; i < row.vocabulary; i += THREADS) {
    const float logit = row.logits[i];
    const int bin = row.bin(logit);
    if (bin < wanted) own += row.weight(logit);
    if (bin != wanted) continue;
    const int place = atomicAdd(&room.listed, 1);
    if (place < LIST) room.list[place] = {logit, i};
  }
  const double sum = block_sum(own, room.sums);
  const int listed = room.listed;
  if (listed > LIST) return -1;
  if (thread < listed) {
    const Token token = room.list[thread];
    int rank = 0;
    for (int i = 0; i < listed; i++) rank += before(room.list[i], token);
    room.sorted[rank] = token;
    room.weights[rank] = row.weight(token.logit);
  }
  __syncthreads();
  return sum;
}

// Sets room.last to the k-th most probable token; false if it is not known. In the last bin it does not matter.
__device__ bool keep_largest(const Row& row, int k, Room& room) {
  const int bin = find_bin(room.counts, k - 1, room);
  if (bin == BINS - 1) return true;
  if (sort_bin(row, bin, room) < 0) return false;
  if (threadIdx.x == 0) room.last = room.sorted[k - 1 - (bin > 0 ? room.counts[bin - 1] : 0)];
  __syncthreads();
  return true;
}

// The weight of a token that may be drawn, 0 of others.
__device__ __forceinline__ double kept_weight(const Row& row, int i, Token last, double min_p, Room& room) {
  const Token token = {row.logits[i], i};
  if (before(last, token)) return 0;
  const double weight = row.weight(token.logit);
  if (min_p > 0 && fabs(weight - min_p) <= MARGIN * min_p) room.unsure = 1;
  return weight < min_p ? 0 : weight;
}

__device__ double kept_mass(const Row& row, double min_p, Room& room) {
  const Token last = room.last;
  double own = 0;
  for (int i = threadIdx.x; i < row.vocabulary; i += THREADS) own += kept_weight(row, i, last, min_p, room);
  return block_sum(own, room.sums);
}

// The draw among all tokens up to room.last in the order of their indices.
__device__ void draw_by_index(const Row& row, const Settings& settings, Room& room) {
  const int thread = threadIdx.x, share = (row.vocabulary + THREADS - 1) / THREADS;
  const int begin = min(row.vocabulary, thread * share), end = min(row.vocabulary, begin + share);
  const Token last = room.last;
  double own = 0;
  for (int i = begin; i < end; i++) own += kept_weight(row, i, last, settings.min_p, room);
  const double upto = block_scan(own, room.sums);
  if (thread == THREADS - 1) room.kept = upto;
  __syncthreads();
  const double target = settings.uniform * room.kept, margin = MARGIN * room.kept;
  double sum = upto - own;
  if (target < sum || target >= upto) return;
  for (int i = begin; i < end; i++) {
    const double weight = kept_weight(row, i, last, settings.min_p, room);
    if (weight == 0 || target >= sum + weight) {
      sum += weight;
      continue;
    }
    // If rounding could decide, two threads may come here, and neither is certain.
    if ((sum == 0 || target - sum > margin) && sum + weight - target > margin) room.found = i;
    break;
  }
}

// Sets room.last and room.kept to the fewest of the most probable tokens that reach `target`, and to their weight.
__device__ bool keep_nucleus(const Row& row, double target, double mass, Room& room) {
  const int bin = find_bin(room.masses, (u64)(target * FIXED_ONE), room);
  const double above = bin == BINS - 1 ? -1 : sort_bin(row, bin, room);
  if (above < 0 || above > target - MARGIN * mass) return false;
  if (threadIdx.x == 0) {
    room.found = -1;
    double sum = above;
    for (int i = 0; i < room.listed && !before(room.last, room.sorted[i]); i++) {
      const double earlier = sum;
      sum += room.weights[i];
      if (sum < target) continue;
      if (sum - target > MARGIN * mass && target - earlier > MARGIN * mass) room.found = i;
      break;
    }
    if (room.found >= 0) room.last = room.sorted[room.found], room.kept = sum;
  }
  __syncthreads();
  return room.found >= 0;
}

// The draw among the most probable tokens that reach top_p, in the order of their probabilities.
__device__ void draw_by_rank(const Row& row, const Settings& settings, Room& room) {
  const double mass = kept_mass(row, 0, room);
  const bool is_certain = keep_nucleus(row, settings.top_p * mass, mass, room);
  __syncthreads();
  if (threadIdx.x == 0) room.found = UNCERTAIN;
  __syncthreads();
  if (!is_certain) return;
  if (settings.min_p > 0) {
    const double kept = kept_mass(row, settings.min_p, room);
    if (threadIdx.x == 0) room.kept = kept;
    __syncthreads();
  }
  const double kept = room.kept, target = settings.uniform * kept;
  const int bin = find_bin(room.masses, (u64)(target * FIXED_ONE), room);
  const double above = bin == BINS - 1 ? -1 : sort_bin(row, bin, room);
  if (threadIdx.x == 0) {
    room.found = UNCERTAIN;
    double sum = above;
    for (int i = 0; i < room.listed && above >= 0 && target >= above; i++) {
      const double earlier = sum;
      sum += room.weights[i];
      if (target >= sum) continue;
      if ((earlier == 0 || target - earlier > MARGIN * kept) && sum - target > MARGIN * kept)
        room.found = room.sorted[i].index;
      break;
    }
  }
}

// logits [rows][width], of which the first `vocabulary` are candidates. next and ids [rows] hold the most probable token, or
// -1, and get the drawn one, or UNCERTAIN in `next`. A row of temperature 0 keeps what it has.
extern "C" __global__ void __launch_bounds__(THREADS) sample_rows(const float* logits, int width, int vocabulary,
                                                                  const Settings* settings, int* ids, int* next) {
  __shared__ Room room;
  const int b = blockIdx.x, best = next[b];
  const Settings own = settings[b];
  if (own.temperature == 0 || best < 0) return;
  const float* const from = logits + (i64)b * width;
  const Row row = {from, vocabulary, from[best], own.temperature};
  const bool has_top_k = own.top_k > 0 && own.top_k < vocabulary, has_top_p = own.top_p < 1;
  if (threadIdx.x == 0) {
    room.last = {-positive_infinity(), 0x7fffffff};
    room.unsure = 0;
  }
  if (has_top_k || has_top_p) fill_bins(row, room);
  const bool is_certain = !has_top_k || keep_largest(row, (int)own.top_k, room);
  __syncthreads();
  if (threadIdx.x == 0) room.found = UNCERTAIN;
  __syncthreads();
  if (is_certain && has_top_p) draw_by_rank(row, own, room);
  if (is_certain && !has_top_p) draw_by_index(row, own, room);
  __syncthreads();
  if (threadIdx.x != 0) return;
  next[b] = room.unsure ? UNCERTAIN : room.found;
  if (next[b] >= 0) ids[b] = next[b];
}
