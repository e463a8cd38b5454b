// The inverted index of a selection: for every block the list of tokens that selected it. Also the work items of the
// kernels that walk the lists, and the choice of the kernel of the selected branch for every stretch of tokens
// (plan.cuh).
#pragma once
#include "plan.cuh"

EXPORT(select_forward_chunk, OUTER_CHUNK)
EXPORT(select_plan_words, PLAN_WORDS<Plan>)
EXPORT(select_plan_unions, PLAN_WORDS<PlanItems>)
EXPORT(select_plan_done, PLAN_WORDS<PlanChoice>)
EXPORT(select_union_tokens, UNION_TOKENS)
EXPORT(select_max_stretches, MAX_STRETCHES)
EXPORT(select_backward_chunk, SEL_CHUNK)

// A warp per list: where each stretch begins inside the list (a list is ordered by stretch), its length, and
// each (list, stretch) gets a place among the stretch's work items. grid (lists / 8)
extern "C" __global__ void __launch_bounds__(256) select_totals(const int* counts, int* begins, int* totals,
                                                                int* places, Plan* plan, const int* cu_blocks,
                                                                int sequences, int stretches) {
  const int all = cu_blocks[sequences] * GROUPS, list = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (list >= all) return;
  int base = 0;
  for (int from = 0; from < stretches; from += 32) {
    const int s = from + lane, count = s < stretches ? counts[(i64)list * stretches + s] : 0;
    const int sum = warp_prefix_sum(count);
    if (s < stretches) begins[(i64)list * stretches + s] = base + sum - count;
    if (count > 0)
      places[(i64)list * stretches + s] = atomicAdd(plan->stretch_items + s, (count + OUTER_CHUNK - 1) / OUTER_CHUNK);
    base += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) totals[list] = base;
}

// One block of 1024 threads: offsets [2, G * blocks + 1] of every list and of its backward work items (forced
// tokens included), and where each stretch's forward work items start.
extern "C" __global__ void __launch_bounds__(1024) select_index(const int* totals, int* offsets, Plan* plan,
                                                                const int* cu_seqlens, const int* cu_blocks,
                                                                int sequences, int stretches) {
  __shared__ int sums[2][32];
  __shared__ int bases[2];
  __shared__ int items[MAX_STRETCHES];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const int blocks = cu_blocks[sequences], all = blocks * GROUPS;
  if (thread < 2) bases[thread] = 0;
  if (thread < stretches) items[thread] = plan->stretch_items[thread];
  __syncthreads();
  if (thread < stretches) {
    int base = 0;
    for (int e = 0; e < thread; e++) base += items[e];
    plan->stretch_base[thread] = base;
  }
  for (int from = 0; from < all; from += 1024) {
    const int i = from + thread;
    int value[2] = {0, 0};
    if (i < all) {
      const int at = i % blocks, s = sequence_of(cu_blocks, sequences, at);
      const int length = cu_seqlens[s + 1] - cu_seqlens[s], block = at - cu_blocks[s];
      const int forced = forced_tokens(block, length);
      value[0] = totals[i];
      value[1] = (value[0] + forced + SEL_CHUNK - 1) / SEL_CHUNK;
    }
    int before[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int sum = warp_prefix_sum(value[n]);
      before[n] = sum - value[n];
      if (lane == 31) sums[n][warp] = sum;
    }
    __syncthreads();
    if (warp < 2) {
      const int mine = sums[warp][lane];
      const int sum = warp_prefix_sum(mine);
      sums[warp][lane] = sum - mine + bases[warp];
      __syncwarp();
      if (lane == 31) bases[warp] += sum;
    }
    __syncthreads();
    if (i < all)
#pragma unroll
      for (int n = 0; n < 2; n++) offsets[n * (all + 1) + i] = before[n] + sums[n][warp];
    __syncthreads();
  }
  if (thread < 2) offsets[thread * (all + 1) + all] = bases[thread];
}

// Writes the work items, a warp per list: forward (list, place in it), backward (list, chunk). Blocks: lists / 8
__device__ __forceinline__ void write_items(int number, const int* offsets, const int* begins, const int* places,
                                            const Plan* plan, int* forward_items, int* backward_items,
                                            const int* cu_blocks, int sequences, int stretches) {
  const int all = cu_blocks[sequences] * GROUPS, list = number * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (list >= all) return;
  const int from = offsets[all + 1 + list], to = offsets[all + 2 + list], total = offsets[list + 1] - offsets[list];
  for (int i = from + lane; i < to; i += 32) ((int2*)backward_items)[i] = make_int2(list, i - from);
  for (int s = lane; s < stretches; s += 32) {
    const i64 at = (i64)list * stretches + s;
    const int begin = begins[at], end = s + 1 < stretches ? begins[at + 1] : total;
    if (begin == end) continue;
    int2* const items = (int2*)forward_items + plan->stretch_base[s] + places[at];
    for (int i = 0; begin + i * OUTER_CHUNK < end; i++) items[i] = make_int2(list, begin + i * OUTER_CHUNK);
  }
}

// Union of the blocks of every tile of UNION_TOKENS tokens, a warp each; the last block chooses, for every stretch, the
// kernel of the selected branch, and schedules the KV-outer one. choice: ADAPTIVE takes tile-union where the mean union
// is at most `limit` blocks, tile-gather where it is at most `gather_limit` (0: never), KV-outer otherwise; other
// choices are taken as they are. A tile that lies in two counts in both. Blocks: tiles of all groups / 8; shared: 8 *
// words * 4 bytes, words as in selected_union
__device__ __forceinline__ void choose_kernels(int number, int numbers, u32* bitmaps, const int* selected, Plan* plan,
                                               const int* cu_seqlens, int sequences, int words, int stretch,
                                               int stretches, int choice, float limit, float gather_limit) {
  __shared__ int choices[MAX_STRETCHES], pieces;
  __shared__ bool last;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, at = number * 8 + warp, group = at % GROUPS;
  u32* const bits = bitmaps + warp * words;
  Place place;
  if (find_place(
          cu_seqlens, sequences, at / GROUPS, [](int length) { return (length + UNION_TOKENS - 1) / UNION_TOKENS; },
          place)) {
    const int t0 = place.tile * UNION_TOKENS, tokens = min(UNION_TOKENS, place.length - t0);
    for (int w = lane; w < words; w += 32) bits[w] = 0;
    __syncwarp();
    for (int i = lane; i < tokens * SEL_N; i += 32) {
      const int block = selected[((i64)(place.first + t0 + i / SEL_N) * GROUPS + group) * SEL_N + i % SEL_N];
      if (block >= 0) atomicOr(bits + block / 32, 1u << (block & 31));
    }
    __syncwarp();
    int count = 0;
    for (int w = lane; w < words; w += 32) count += __popc(bits[w]);
    count = warp_sum(count);
    if (lane == 0) {
      const int from = (place.first + t0) / stretch, to = (place.first + t0 + tokens - 1) / stretch;
      for (int s = from; s <= to; s++) {
        atomicAdd(plan->union_sizes + s, count);
        atomicAdd(plan->union_tiles + s, 1);
      }
      __threadfence();
    }
  }
  __syncthreads();
  if (thread == 0) last = atomicAdd(&plan->choosers_done, 1) == numbers - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (thread < stretches) {
    const int s = thread, unions = atomicAdd(plan->union_sizes + s, 0), tiles = atomicAdd(plan->union_tiles + s, 0);
    const int mine = choice == ALTERNATE                            ? TILE_UNION + s % (gather_limit > 0.0f ? 3 : 2)
                     : choice != ADAPTIVE                           ? choice
                     : (float)unions <= limit * (float)tiles        ? TILE_UNION
                     : (float)unions <= gather_limit * (float)tiles ? TILE_GATHER
                                                                    : KV_OUTER;
    choices[s] = mine;
  }
  __syncthreads();
  // Few stretches for tile-union are not worth its launch beside tile-gather's.
  if (choice == ADAPTIVE && gather_limit > 0.0f) {
    const int unions = __syncthreads_count(thread < stretches && choices[thread] == TILE_UNION);
    if (thread < stretches && choices[thread] == TILE_UNION && unions * 4 <= stretches) choices[thread] = TILE_GATHER;
    __syncthreads();
  }
  if (thread < stretches) {
    int piece = 0, gathered = 0;
    for (int s = 0; s < thread; s++) {
      piece += choices[s] == KV_OUTER;
      gathered += choices[s] == TILE_GATHER;
    }
    plan->choice[thread] = choices[thread];
    if (choices[thread] == KV_OUTER) {
      plan->piece_stretch[piece] = thread;
      plan->piece_items[piece] = plan->stretch_items[thread];
      plan->piece_merges[piece] = merge_items(thread, stretch, cu_seqlens[sequences]);
      piece++;
    }
    if (thread == stretches - 1) {
      gathered += choices[thread] == TILE_GATHER;
      plan->pieces = pieces = piece;
      plan->gather_stretches = gathered;
      plan->union_stretches = stretches - piece - gathered;
    }
  }
  __syncthreads();
  if (thread < pieces + LAG + 1) {
    int ticket = 0;
    for (int e = 0; e < thread; e++)
      ticket += (e < pieces ? plan->piece_items[e] : 0) + (e >= LAG ? plan->piece_merges[e - LAG] : 0);
    plan->first_ticket[thread] = ticket;
  }
}

// Writes each chosen (token, slot) into its block's list: entry = position in the sequence * 64 + slot.
// One thread per (token, group, slot)
__device__ __forceinline__ void write_lists(int number, const int* selected, const int* ranks, const int* offsets,
                                            const int* begins, u32* lists, const int* cu_seqlens, const int* cu_blocks,
                                            int sequences, int stretch, int stretches) {
  const int tokens = cu_seqlens[sequences];
  const i64 i = (i64)number * 256 + threadIdx.x;
  if (i >= (i64)tokens * GROUPS * SEL_N) return;
  const int block = selected[i], slot = (int)(i % SEL_N), group = (int)(i / SEL_N % GROUPS),
            token = (int)(i / SEL_N / GROUPS);
  if (block <= 0) return;
  const int s = sequence_of(cu_seqlens, sequences, token), t = token - cu_seqlens[s];
  if (block >= t / SEL_L - 1) return;
  const i64 list = (i64)group * cu_blocks[sequences] + cu_blocks[s] + block;
  lists[offsets[list] + begins[list * stretches + token / stretch] + ranks[i]] = (u32)t * 64 + slot;
}

// Three steps that read the index, in one launch: the first `choosers` blocks choose, the next `itemizers`
// write the work items, the rest the lists. Each part can be left out. choice and limits: see above.
extern "C" __global__ void __launch_bounds__(256) select_finish(
    const int* selected, const int* ranks, const int* offsets, const int* begins, const int* places, Plan* plan,
    int* forward_items, int* backward_items, u32* lists, const int* cu_seqlens, const int* cu_blocks, int sequences,
    int words, int stretch, int stretches, int choice, float limit, float gather_limit, int choosers, int itemizers) {
  extern __shared__ u32 bitmaps[];
  const int number = blockIdx.x;
  if (number < choosers)
    choose_kernels(number, choosers, bitmaps, selected, plan, cu_seqlens, sequences, words, stretch, stretches, choice,
                   limit, gather_limit);
  else if (number < choosers + itemizers)
    write_items(number - choosers, offsets, begins, places, plan, forward_items, backward_items, cu_blocks, sequences,
                stretches);
  else
    write_lists(number - choosers - itemizers, selected, ranks, offsets, begins, lists, cu_seqlens, cu_blocks,
                sequences, stretch, stretches);
}

// Puts every list in ascending order through a bitmap of the sequence: the same selection then always
// gives the same sums. grid (blocks, groups); shared: bitmap of the longest sequence, (max_length + 31) / 32 words.
extern "C" __global__ void __launch_bounds__(256) select_sort(const int* selected, const int* offsets, u32* lists,
                                                              const int* cu_seqlens, const int* cu_blocks,
                                                              int sequences) {
  extern __shared__ u32 bits[];
  __shared__ int sums[8];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const int blocks = cu_blocks[sequences], at = blockIdx.x, group = blockIdx.y;
  const int from = offsets[group * blocks + at], to = offsets[group * blocks + at + 1];
  if (to - from < 2) return;
  const int s = sequence_of(cu_blocks, sequences, at);
  const int first = cu_seqlens[s], words = (cu_seqlens[s + 1] - first + 31) / 32, block = at - cu_blocks[s];
  for (int w = thread; w < words; w += 256) bits[w] = 0;
  __syncthreads();
  for (int i = from + thread; i < to; i += 256) atomicOr(bits + lists[i] / 64 / 32, 1u << (lists[i] / 64 % 32));
  __syncthreads();
  int base = from;
  for (int w0 = 0; w0 < words; w0 += 256) {
    u32 word = w0 + thread < words ? bits[w0 + thread] : 0;
    const int own = __popc(word), sum = warp_prefix_sum(own);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int position = base + sum - own;
    for (int w = 0; w < 8; w++) {
      if (w < warp) position += sums[w];
      base += sums[w];
    }
    while (word != 0) {
      const int t = (w0 + thread) * 32 + __ffs(word) - 1;
      word &= word - 1;
      const int* const row = selected + ((i64)(first + t) * GROUPS + group) * SEL_N;
      int slot = 0;
      while (row[slot] != block) slot++;
      lists[position++] = (u32)t * 64 + slot;
    }
    __syncthreads();
  }
}
