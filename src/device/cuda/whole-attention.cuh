// Attention of a decode step by blocks that stay (whole.cuh): items in order, for every (sequence, group) shares of its
// compressed keys and the token's entry into the cache, and some items later its selected blocks and its window.
#pragma once
#include "whole.cuh"
#include "append.cuh"

constexpr int STRIDE = SEL_L / CMP_D, LEAD = CMP_L / CMP_D - 1, WEIGHTS = LEAD + STRIDE;  // of the importance
constexpr int ROOM = SEL_N - 3;                                                           // blocks that are not forced
constexpr int STRETCH = STRIDE <= 4 ? 512 : STRIDE <= 32 ? 64 : 4;  // selection blocks whose importance is computed at a time
constexpr int STRETCH_UNITS = (STRETCH * STRIDE + LEAD) / UNIT + 2;
constexpr int SHARES_AT_MOST = 32, PARTS_AT_MOST = 4;
constexpr int BINS = 2048, BIN_SHIFT = 20, BINS_OF_THREAD = (BINS + THREADS - 1) / THREADS;
constexpr int SELECTION = 1, SELECTED = 2, WINDOWED = 4, COMPRESSED = 8;  // parts of the work, to be timed one by one

static_assert(STRIDE * CMP_D == SEL_L, "d divides l'");

// What one part of a (sequence, group) leaves: maxima, sums and results of the selected branch and the window, and the
// keys that each of them saw.
constexpr int PART = 2 * HPG * (2 + DV) + 2;

struct Workspace {
  float* partial;  // [pairs][splits + 1] records of the compressed branch
  float* weights;  // [pairs][HPG][capacity]: powers of two of the scores of compressed keys, relative to
  float* bases;    // [pairs][HPG][capacity / UNIT]
  float* merged;   // [pairs][HPG][DV]: the compressed branch
  float* parts;    // [pairs][parts] of PART numbers
};
// What one layer needs, as numbers of 64 bits: addresses, and its place in each kind of page.
struct Layer {
  const float* attention_norm;
  const bf16 *projection, *gate;
  const float* gate_bias;
  const bf16* out;
  const float* mlp_norm;
  const bf16 *up, *down;
  const float *phi_keys, *phi_values;
  i64 cmp_place, sel_place, win_place, tail_place;
  int *chosen, *reads;  // [batch][GROUPS][SEL_N] and [batch][GROUPS][3]
};

// The buffers of a step.
struct Step {
  const float *table, *frequencies, *norm;
  const bf16* head;
  int *ids, *positions, *next;
  float2* rotations;
  bf16 *x, *middle, *projection, *attended, *active;
  float *gates, *logits;
  const i64 *cmp_tables, *sel_tables, *win_tables, *tail_tables;
  Workspace work;
  float* best_values;
  int* best_indices;  // [blocks][batch]
};

// How the step was launched.
struct Call {
  Gate gate;
  float epsilon;
  int batch, splits, parts_of_pair, parts;
  int work;      // where in shared memory, in float4, what phases need begins
  i64 capacity;  // compressed keys that there is room for
};

// At the beginning of shared memory: addresses come from there whenever they are needed, registers are for weights and
// keys.
struct Fixed {
  Step step;
  Call call;
  GridBarrier barrier;
  Layer layers[1];  // as many as there are
};
__device__ __forceinline__ Fixed& fixed() { return *(Fixed*)shared_memory; }
__device__ __forceinline__ float4* work_memory() { return shared_memory + fixed().call.work; }

// One layer's attention.
struct Attention {
  const Step& step;
  const Layer& layer;
  const Call& call;

  __device__ __forceinline__ explicit Attention(int l) : step(fixed().step), layer(fixed().layers[l]), call(fixed().call) {}
  __device__ __forceinline__ const bf16* row(int b) const { return step.projection + (i64)b * WIDTH; }
  __device__ __forceinline__ const float2* rotation(int b) const { return step.rotations + b * DK; }
};

struct AttentionShared {
  alignas(16) bf16 q[16 * DK];
  alignas(16) float results[WARPS][HPG][DV];
  float tops[WARPS][HPG], sums[WARPS][HPG], warp_factor[WARPS][HPG];
  // The compressed branch: factor of every share, log-sum of every head.
  float factor[SHARES_AT_MOST + 1][HPG], lse[HPG], gates[HPG][3];
  // Selected branch and window, of the block.
  float branch_tops[2][HPG], branch_sums[2][HPG], branch_results[2][HPG][DV];
  float key[DK], block[DK + DV];
  float unit_factor[HPG][STRETCH_UNITS], probability[STRETCH * STRIDE + LEAD];
  int histogram[BINS], totals[WARPS], limit, above, held, tied;
  int best[ROOM + 1], selected[SEL_N], count, seen[3], item, is_last;
};

// Results of the warps, left by Running::finish, to those of the block.
template <class Store>
__device__ __forceinline__ void merge_warps(AttentionShared& s, float* tops, float* sums, const Store& store) {
  __syncthreads();
  for (int i = threadIdx.x; i < WARPS * HPG; i += THREADS) {
    const int w = i / HPG, r = i % HPG;
    float top = -positive_infinity(), sum = 0.0f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) top = fmaxf(top, s.tops[k][r]);
    const float base = top == -positive_infinity() ? 0.0f : top;
    s.warp_factor[w][r] = exp2_approximate(s.tops[w][r] - base);
    if (w != 0) continue;
#pragma unroll
    for (int k = 0; k < WARPS; k++) sum += exp2_approximate(s.tops[k][r] - base) * s.sums[k][r];
    tops[r] = top, sums[r] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < HPG * DV; i += THREADS) {
    const int r = i / DV, c = i % DV;
    float result = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) result += s.warp_factor[w][r] * s.results[w][r][c];
    store(i, result);
  }
}

// One share of the compressed keys of a pair: a maximum, a sum and a result for every head, and what the selection needs.
__device__ __forceinline__ void see_share(int l, i64 pair, int split) {
  const Attention a(l);
  AttentionShared& s = *(AttentionShared*)work_memory();
  const int b = (int)(pair / GROUPS), g = (int)(pair % GROUPS), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int known = count_compressed(a.step.positions[b]), units = (known + UNIT - 1) / UNIT;
  int share = (units + a.call.splits - 1) / a.call.splits;
  // Where there are more shares than blocks every warp has work: then some shares are empty.
  if (a.call.batch * GROUPS * a.call.splits > (int)gridDim.x) share = (share + WARPS - 1) / WARPS * WARPS;
  const int begin = split * share, end = begin + share < units ? begin + share : units;
  const Partial to(a.step.work.partial, a.call.splits, pair, split);
  if (begin >= end) {  // results of a share whose sum is zero are not read
    for (int r = threadIdx.x; r < HPG; r += THREADS) to.tops[r] = -positive_infinity(), to.sums[r] = 0.0f;
    if (threadIdx.x == 0) *to.seen = 0.0f;
    return;
  }
  const Cached cmp = {a.step.cmp_tables, a.layer.cmp_place};
  const int head_of_lane = lane / 4, t = lane % 4;
  Unit unit;
  int u = begin + warp;
  if (u < end) unit.load<PAGE>(cmp.page(b, u * UNIT / PAGE), g, u * UNIT % PAGE);
  else unit.clear();
  rotate_queries(s.q, a.row(b), a.rotation(b), g);
  if (threadIdx.x == 0) s.seen[2] = 0;
  __syncthreads();
  Queries queries;
  queries.load(s.q);
  Running running;
  running.reset();
  bool loaded = u < end;
  for (; u < end; u += WARPS) {
    // The other warps' keys are on the way while this one computes; a second unit would not fit into the registers.
    if (!loaded) unit.load<PAGE>(cmp.page(b, u * UNIT / PAGE), g, u * UNIT % PAGE);
    loaded = false;
    const int high = known - u * UNIT < UNIT ? known - u * UNIT : UNIT;
    float* const weights = a.step.work.weights + pair * HPG * a.call.capacity + u * UNIT + 8 * t;
    running.see(unit, queries, 0, high, [&](int half, int i, const float*, float first, float second, float base) {
      const int r = head_of_lane + 8 * half;
      if (r >= HPG) return;
      *(float2*)(weights + r * a.call.capacity + 2 * i) = make_float2(first, second);
      if (i == 0 && t == 0) a.step.work.bases[(pair * HPG + r) * (a.call.capacity / UNIT) + u] = base;
    });
    if (lane == 0) atomicAdd(&s.seen[2], high);
  }
  running.finish(s.tops[warp], s.sums[warp], &s.results[warp][0][0]);
  merge_warps(s, to.tops, to.sums, [&](int i, float result) { to.results[i] = result; });
  if (threadIdx.x == 0) *to.seen = (float)s.seen[2];
}

// Importance of the candidates 1 ... all; never negative, a number that is none ranks last.
__device__ __forceinline__ void compute_importance(const Attention& a, AttentionShared& s, float* importance, i64 pair, int all) {
  const float* const weights = a.step.work.weights + pair * HPG * a.call.capacity;
  const float* const bases = a.step.work.bases + pair * HPG * (a.call.capacity / UNIT);
  for (int begin = 1; begin <= all; begin += STRETCH) {
    const int blocks = all + 1 - begin < STRETCH ? all + 1 - begin : STRETCH;
    const int from = begin * STRIDE - LEAD, count = blocks * STRIDE + LEAD;
    const int first_unit = from / UNIT, units = (from + count - 1) / UNIT - first_unit + 1;
    for (int i = threadIdx.x; i < HPG * units; i += THREADS) {
      const int r = i / units, u = i % units;
      s.unit_factor[r][u] = exp2_approximate(bases[r * (a.call.capacity / UNIT) + first_unit + u] - s.lse[r]);
    }
    __syncthreads();
    constexpr int AHEAD = 4;  // keys of a thread whose weights are on the way at once
    for (int base = threadIdx.x; base < count; base += AHEAD * THREADS) {
      float weight[AHEAD][HPG];
#pragma unroll
      for (int n = 0; n < AHEAD; n++) {
        const int i = base + n * THREADS < count ? base + n * THREADS : count - 1;
#pragma unroll
        for (int r = 0; r < HPG; r++) weight[n][r] = weights[r * a.call.capacity + from + i];
      }
#pragma unroll
      for (int n = 0; n < AHEAD; n++) {
        const int i = base + n * THREADS;
        if (i >= count) break;
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < HPG; r++) sum += weight[n][r] * s.unit_factor[r][(from + i) / UNIT - first_unit];
        s.probability[i] = sum;
      }
    }
    __syncthreads();
    for (int j = threadIdx.x; j < blocks; j += THREADS) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < WEIGHTS; i++) {
        const int at = (i - LEAD) * CMP_D, stop = at + CMP_L;
        const int shared = (stop < SEL_L ? stop : SEL_L) - (at > 0 ? at : 0);
        sum += (float)shared / (float)CMP_D * s.probability[j * STRIDE + i];
      }
      importance[begin + j] = sum >= 0.0f ? sum : 0.0f;
    }
    __syncthreads();
  }
}

// The ROOM most important of the candidates 1 ... all, the lower index among equals, in any order. Numbers that are not
// negative compare as their bits do: a histogram of the upper bits finds the bin of the last one that is taken, and only
// the candidates of that bin are compared with each other. ties: room for `all` numbers.
__device__ __forceinline__ void keep_most_important(AttentionShared& s, const float* importance, int* ties, int all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto bin_of = [](float x) { return (int)(__float_as_uint(x) >> BIN_SHIFT); };
  for (int i = threadIdx.x; i < BINS; i += THREADS) s.histogram[i] = 0;
  if (threadIdx.x == 0) s.held = 0, s.tied = 0;
  __syncthreads();
  for (int j = 1 + threadIdx.x; j <= all; j += THREADS) atomicAdd(&s.histogram[bin_of(importance[j])], 1);
  __syncthreads();
  // Threads count from the highest bins down.
  const int highest = BINS - 1 - (int)threadIdx.x * BINS_OF_THREAD;
  int own = 0;
#pragma unroll
  for (int i = 0; i < BINS_OF_THREAD; i++) own += highest - i >= 0 ? s.histogram[highest - i] : 0;
  int before = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) s.totals[warp] = before;
  __syncthreads();
  before -= own;
  for (int w = 0; w < warp; w++) before += s.totals[w];
  if (before < ROOM && before + own >= ROOM) {
    int bin = highest;
    while (before + s.histogram[bin] < ROOM) before += s.histogram[bin--];
    s.limit = bin, s.above = before;
  }
  __syncthreads();
  for (int j = 1 + threadIdx.x; j <= all; j += THREADS) {
    const int bin = bin_of(importance[j]);
    if (bin > s.limit) s.best[atomicAdd(&s.held, 1)] = j;
    else if (bin == s.limit) ties[atomicAdd(&s.tied, 1)] = j;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < s.tied; i += THREADS) {
    const int j = ties[i];
    const float value = importance[j];
    int place = s.above;
    for (int k = 0; k < s.tied; k++) {
      const float other = importance[ties[k]];
      place += other > value || (other == value && ties[k] < j);
    }
    if (place < ROOM) s.best[place] = j;
  }
  __syncthreads();
}

// selected[0 ... count): block 0, the chosen ones ascending, current - 1, current.
__device__ __forceinline__ void select_blocks(const Attention& a, AttentionShared& s, float* importance, i64 pair, int position) {
  const int current = position / SEL_L;
  if (current + 1 <= SEL_N) {
    for (int i = threadIdx.x; i <= current; i += THREADS) s.selected[i] = i;
    if (threadIdx.x == 0) s.count = current + 1;
    __syncthreads();
    return;
  }
  const int all = current - 2;
  if (ROOM > 0) {
    compute_importance(a, s, importance, pair, all);
    keep_most_important(s, importance, (int*)(importance + all + 1), all);
  }
  for (int i = threadIdx.x; i < ROOM; i += THREADS) {
    int place = 1;
#pragma unroll
    for (int k = 0; k < ROOM; k++) place += s.best[k] < s.best[i];
    s.selected[place] = s.best[i];
  }
  if (threadIdx.x == 0) s.selected[0] = 0, s.selected[SEL_N - 2] = current - 1, s.selected[SEL_N - 1] = current, s.count = SEL_N;
  __syncthreads();
}

// Maximum and sum of the compressed branch, a warp for each head; factors of the shares.
__device__ __forceinline__ void weigh_shares(const Attention& a, AttentionShared& s, i64 pair) {
  const float* const from = a.step.work.partial + pair * (a.call.splits + 1) * RECORD;
  constexpr int OF_LANE = (SHARES_AT_MOST + 1 + 31) / 32;
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < HPG; r += WARPS) {
    float tops[OF_LANE], sums[OF_LANE], top = -positive_infinity(), sum = 0.0f;
#pragma unroll
    for (int n = 0; n < OF_LANE; n++) {
      const int i = lane + 32 * n;
      tops[n] = i <= a.call.splits ? from[i * RECORD + r] : -positive_infinity();
      sums[n] = i <= a.call.splits ? from[i * RECORD + HPG + r] : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < OF_LANE; n++) top = fmaxf(top, tops[n]);
    top = warp_max(top);
    const float base = top == -positive_infinity() ? 0.0f : top;
#pragma unroll
    for (int n = 0; n < OF_LANE; n++) tops[n] = exp2_approximate(tops[n] - base), sum += tops[n] * sums[n];
    sum = warp_sum(sum);
#pragma unroll
    for (int n = 0; n < OF_LANE; n++)
      if (lane + 32 * n <= a.call.splits) s.factor[lane + 32 * n][r] = sum > 0.0f ? tops[n] / sum : 0.0f;
    if (lane == 0) s.lse[r] = base + log2f(sum);
  }
}

// This part's numbers of the compressed branch.
__device__ __forceinline__ void merge_shares(const Attention& a, AttentionShared& s, i64 pair, int part) {
  const float* const from = a.step.work.partial + pair * (a.call.splits + 1) * RECORD + 2 * HPG;
  const int share = (HPG * DV + a.call.parts_of_pair - 1) / a.call.parts_of_pair, begin = part * share;
  const int end = begin + share < HPG * DV ? begin + share : HPG * DV;
  for (int i = begin + threadIdx.x; i < end; i += THREADS) {
    float sum = 0.0f;
#pragma unroll 8
    for (int n = 0; n <= a.call.splits; n++) {
      const float factor = s.factor[n][i / DV];
      sum += factor != 0.0f ? factor * from[n * RECORD + i] : 0.0f;
    }
    a.step.work.merged[pair * HPG * DV + i] = sum;
  }
}

// Sum of the branches, from what all parts of the pair left.
__device__ __forceinline__ void sum_branches(const Attention& a, AttentionShared& s, i64 pair, int b, int g) {
  const float* const parts = a.step.work.parts + pair * a.call.parts_of_pair * PART;
  for (int i = threadIdx.x; i < HPG * DV; i += THREADS) {
    const int r = i / DV;
    float sum = s.gates[r][0] * a.step.work.merged[pair * HPG * DV + i];
#pragma unroll
    for (int branch = 0; branch < 2; branch++) {
      const float* const from = parts + branch * HPG * (2 + DV);
      float tops[PARTS_AT_MOST], sums[PARTS_AT_MOST], results[PARTS_AT_MOST], top = -positive_infinity();
#pragma unroll
      for (int p = 0; p < PARTS_AT_MOST; p++) {
        const bool present = p < a.call.parts_of_pair;
        tops[p] = present ? from[p * PART + r] : -positive_infinity();
        sums[p] = present ? from[p * PART + HPG + r] : 0.0f;
        results[p] = present ? from[p * PART + 2 * HPG + i] : 0.0f;
        top = fmaxf(top, tops[p]);
      }
      const float base = top == -positive_infinity() ? 0.0f : top;
      float result = 0.0f, total = 0.0f;
#pragma unroll
      for (int p = 0; p < PARTS_AT_MOST; p++) {
        const float factor = exp2_approximate(tops[p] - base);
        result += factor * results[p], total += factor * sums[p];
      }
      sum += total > 0.0f ? s.gates[r][1 + branch] * result / total : 0.0f;
    }
    write_one(a.step.attended + ((i64)b * HEADS + g * HPG) * DV + i, sum);
  }
  if (a.layer.reads == nullptr || threadIdx.x >= 3) return;
  float all = 0.0f;
  const float* const seen = threadIdx.x == 0 ? a.step.work.partial + pair * (a.call.splits + 1) * RECORD + RECORD - 1
                                             : parts + 2 * HPG * (2 + DV) + threadIdx.x - 1;
  const int count = threadIdx.x == 0 ? a.call.splits + 1 : a.call.parts_of_pair, apart = threadIdx.x == 0 ? RECORD : PART;
#pragma unroll 8
  for (int i = 0; i < count; i++) all += seen[i * apart];
  a.layer.reads[pair * 3 + threadIdx.x] = (int)all;
}

// One part of a pair's selected blocks and window; the last part to be done sums the branches.
__device__ __forceinline__ void see_part(int l, i64 pair, int part, u32* shares_done, int* parts_done) {
  const Attention a(l);
  AttentionShared& s = *(AttentionShared*)work_memory();
  float* const importance = (float*)(&s + 1);
  const int b = (int)(pair / GROUPS), g = (int)(pair % GROUPS), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int position = a.step.positions[b], all_warps = a.call.parts_of_pair * WARPS, own_warp = part * WARPS + warp;
  const Cached sel = {a.step.sel_tables, a.layer.sel_place}, win = {a.step.win_tables, a.layer.win_place};
  // The window first: all of it but the newest token was there before this step, so it is on its way before the wait.
  // Warps take its units from the other end than those of the selected blocks: who has none of the one has of the other.
  const int low = position + 1 > WINDOW ? position + 1 - WINDOW : 0;
  int u = low / UNIT + all_warps - 1 - own_warp;
  Unit unit;
  const bool loaded = (a.call.parts & WINDOWED) && (u + 1) * UNIT <= position;
  if (loaded) unit.load<PAGE>(win.page(b, u * UNIT / PAGE), g, u * UNIT % PAGE);
  else unit.clear();
  rotate_queries(s.q, a.row(b), a.rotation(b), g);
  compute_gates(s.gates, a.step.gates + (i64)b * 3 * HEADS, a.layer.gate_bias, g, a.call.gate);
  if (threadIdx.x < 2) s.seen[threadIdx.x] = 0;
  __syncthreads();
  Queries queries;
  queries.load(s.q);
  Running running;
  const auto ignore = [](int, int, const float*, float, float, float) {};
  running.reset();
  int seen = 0;
  const auto see_window = [&] {
    const int from_key = low - u * UNIT > 0 ? low - u * UNIT : 0;
    const int to_key = position + 1 - u * UNIT < UNIT ? position + 1 - u * UNIT : UNIT;
    running.see(unit, queries, from_key, to_key, ignore);
    seen += to_key - from_key;
    u += all_warps;
  };
  if (loaded) see_window();
  if (threadIdx.x == 0)
    while ((int)read_acquired(shares_done) <= a.call.splits) pause_thread();
  __syncthreads();
  weigh_shares(a, s, pair);
  while ((a.call.parts & WINDOWED) && u * UNIT <= position) {
    unit.load<PAGE>(win.page(b, u * UNIT / PAGE), g, u * UNIT % PAGE);
    see_window();
  }
  running.finish(s.tops[warp], s.sums[warp], &s.results[warp][0][0]);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen[1], seen);
  merge_warps(s, s.branch_tops[1], s.branch_sums[1], [&](int i, float x) { s.branch_results[1][i / DV][i % DV] = x; });
  int* const list = a.layer.chosen + pair * SEL_N;
  if (a.call.parts & SELECTION) {
    select_blocks(a, s, importance, pair, position);
    if (part == 0)
      for (int i = threadIdx.x; i < SEL_N; i += THREADS) list[i] = i < s.count ? s.selected[i] : -1;
  } else {
    if (threadIdx.x == 0) s.count = position / SEL_L + 1 < SEL_N ? position / SEL_L + 1 : SEL_N;
    for (int i = threadIdx.x; i < SEL_N; i += THREADS) s.selected[i] = list[i];
    __syncthreads();
  }
  constexpr int PER_BLOCK = SEL_L / UNIT;
  running.reset();
  seen = 0;
  const int units = a.call.parts & SELECTED ? s.count * PER_BLOCK : 0;
  const auto fetch = [&](int at) { unit.load<SEL_L>(sel.page(b, s.selected[at / PER_BLOCK]), g, at % PER_BLOCK * UNIT); };
  u = own_warp;
  if (u < units) fetch(u);
  else unit.clear();
  merge_shares(a, s, pair, part);  // while keys are on their way
  for (; u < units; u += all_warps) {
    const int left = position + 1 - s.selected[u / PER_BLOCK] * SEL_L - u % PER_BLOCK * UNIT;
    if (left > 0) {
      running.see(unit, queries, 0, left < UNIT ? left : UNIT, ignore);
      seen += left < UNIT ? left : UNIT;
    }
    if (u + all_warps < units) fetch(u + all_warps);
  }
  running.finish(s.tops[warp], s.sums[warp], &s.results[warp][0][0]);
  if (lane == 0 && seen > 0) atomicAdd(&s.seen[0], seen);
  float* const own = a.step.work.parts + (pair * a.call.parts_of_pair + part) * PART;
  merge_warps(s, own, own + HPG, [&](int i, float x) { own[2 * HPG + i] = x; });
  float* const window = own + HPG * (2 + DV);
  for (int i = threadIdx.x; i < HPG * DV; i += THREADS) window[2 * HPG + i] = s.branch_results[1][i / DV][i % DV];
  for (int r = threadIdx.x; r < HPG; r += THREADS) window[r] = s.branch_tops[1][r], window[HPG + r] = s.branch_sums[1][r];
  if (threadIdx.x < 2) own[PART - 2 + threadIdx.x] = (float)s.seen[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) s.is_last = add_ordered(parts_done) == a.call.parts_of_pair - 1;
  __syncthreads();
  if (s.is_last) sum_branches(a, s, pair, b, g);
}

// The token of a pair goes into the cache.
__device__ __forceinline__ void append_pair(int l, i64 pair) {
  const Attention a(l);
  AttentionShared& s = *(AttentionShared*)work_memory();
  const int b = (int)(pair / GROUPS), g = (int)(pair % GROUPS);
  const Caches caches = {{a.step.cmp_tables, a.layer.cmp_place},
                         {a.step.sel_tables, a.layer.sel_place},
                         {a.step.win_tables, a.layer.win_place},
                         {a.step.tail_tables, a.layer.tail_place}};
  append_token(caches, b, g, a.step.positions[b], a.row(b), a.rotation(b), a.layer.phi_keys, a.layer.phi_values,
               Partial(a.step.work.partial, a.call.splits, pair, a.call.splits), s.q, s.key, s.block);
}

// All items of layer l. taken: of the items beyond the first of every block; shares_done and parts_done: for every pair.
__device__ __forceinline__ void attend(int l, int* taken, int* shares_done, int* parts_done) {
  const Call& call = fixed().call;
  AttentionShared& s = *(AttentionShared*)work_memory();
  const int pairs = call.batch * GROUPS, shares = call.splits + 1, both = shares + call.parts_of_pair;
  // A pair's parts come as many pairs later as keep all blocks busy with shares until then.
  const int wanted = ((int)gridDim.x + shares - 1) / shares, lag = wanted < pairs ? wanted : pairs;
  const int first = lag * shares, middle = (pairs - lag) * both, items = pairs * both;
  int item = blockIdx.x;
  while (item < items) {
    int next = items;
    if (threadIdx.x == 0 && items > (int)gridDim.x) next = gridDim.x + atomicAdd(taken, 1);  // known when this item is done
    int pair, at;  // at < shares: a share, then the parts
    if (item < first) pair = item / shares, at = item % shares;
    else if (item < first + middle) {
      pair = lag + (item - first) / both, at = (item - first) % both;
      if (at >= shares) pair -= lag;
    } else {
      const int left = item - first - middle;
      pair = pairs - lag + left / call.parts_of_pair, at = shares + left % call.parts_of_pair;
    }
    if (at >= shares) {
      see_part(l, pair, at - shares, (u32*)shares_done + pair, parts_done + pair);
    } else {
      if (call.parts & COMPRESSED) {
        if (at < call.splits) see_share(l, pair, at);
        else append_pair(l, pair);
      }
      __syncthreads();
      if (threadIdx.x == 0) add_released(shares_done + pair);
    }
    if (threadIdx.x == 0) s.item = next;
    __syncthreads();
    item = s.item;
    __syncthreads();
  }
}
