// KV-outer: every chosen block over the list of tokens that chose it, as partial results, which are merged with the
// output of the forced blocks while they are still in the L2 cache.
#pragma once
#include "combination.cuh"
#include "forward.cuh"
#include "plan.cuh"

static_assert(OUTER_CHUNK * HPG % 64 == 0, "a full item fills its steps");

// Row addresses are stored per row. With large heads or many heads per group they are stored per token, which leaves
// shared memory for one more thread block per multiprocessor.
constexpr int PER_ENTRY = PK + PV <= 2 && HPG <= 14 ? 1 : HPG;
constexpr int OUTER_ENTRIES = OUTER_CHUNK * HPG / PER_ENTRY;
constexpr int OUTER_SHARED = (PK + PV + 2 * PK + 1) * PANEL + OUTER_ENTRIES * 8 + 1024;
constexpr int OUTER_BLOCKS = PK + PV <= 2 ? 4 : PK + PV <= 4 ? 3 : 2;
constexpr int CHOSEN = SEL_N > 3 ? SEL_N - 3 : 1;  // slots 1 ... SEL_N - 3 have partials
EXPORT(selected_outer_shared, OUTER_SHARED)
EXPORT(selected_outer_blocks, OUTER_BLOCKS)  // on a multiprocessor: the grid is this times their number
EXPORT(selected_outer_ring, RING)            // partial [ring * stretch, G, chosen, h, Dv], lse without Dv
EXPORT(selected_outer_chosen, CHOSEN)

__device__ __forceinline__ void await(const int* counter, int target) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < target);
}
__device__ __forceinline__ uint4 load_l2(const void* from) {  // not through L1: others write this
  uint4 x;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ float load_l2(const float* from) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}

// One work item: a block's keys and values, up to OUTER_CHUNK of the tokens of one stretch that chose it. Every
// key lies before every such token: no mask. Each (token, slot, head) gets a normalised partial output in bf16 and
// its own log-sum-exp (base 2) in fp32. ring0: what to add to a flat token to get its place in the ring.
__device__ __forceinline__ void outer_item(unsigned char* shared, const bf16* q, const unsigned char* tile,
                                           const u32* entries, int tokens, int first, int group, int ring0,
                                           bf16* partial, float* partial_lse) {
  const int steps = (tokens * HPG + 63) / 64;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const u32 origin = shared_address(shared), base = (origin + 1023) & ~1023u;
  const u32 values = base + PK * PANEL, ring = values + PV * PANEL, staging = ring + 2 * PK * PANEL;
  unsigned char* const generic = shared - origin;
  u32* const rows_of = (u32*)(generic + staging + PANEL);  // of q, per packed row of the item or per token
  u32* const places_of = rows_of + OUTER_ENTRIES;          // of the partial results
  const auto row_of = [&](int r) { return rows_of[r / PER_ENTRY] + r % PER_ENTRY; };
  const auto place_of = [&](int r) { return places_of[r / PER_ENTRY] + r % PER_ENTRY; };
#pragma unroll
  for (int i = 0; i < PACKED / 2048; i++) copy16(base + (i * 128 + thread) * 16, tile + (i * 128 + thread) * 16, true);
  // The last step's absent rows repeat the last token's, and write the same results to the same place.
  for (int i = thread; i < min(OUTER_CHUNK, (steps * 64 + HPG - 1) / HPG); i += 128) {
    const u32 entry = entries[min(i, tokens - 1)], token = first + entry / 64;
    const u32 row = token * HEADS + group * HPG,
              place = (((token + ring0) * GROUPS + group) * CHOSEN + entry % 64 - 1) * HPG;
#pragma unroll
    for (int h = 0; h < HPG; h += PER_ENTRY) {
      rows_of[(i * HPG + h) / PER_ENTRY] = row + h;
      places_of[(i * HPG + h) / PER_ENTRY] = place + h;
    }
  }
  __syncthreads();
  const auto request = [&](int i) {
    if (i < steps) load_rows<DK>(ring + (i & 1) * PK * PANEL, q, [&](int r) { return row_of(i * 64 + r); });
    copies_commit();
  };
  // A step's results are written while the next one's scores are computed; p: the panel of columns.
  const auto emit = [&](int i, int p) {
    emit_rows(generic + staging, [&](int, int r, int chunk, uint4 x) {
      if (p * 64 + chunk * 8 < DV)
        store_streaming(partial + chunk * 8 + (i64)place_of(i * 64 + r) * DV + p * 64, x);
    });
  };
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
    if (i > 0) emit(i - 1, PV - 1);
    matrix_wait<0>();
    hold(score);
    if (SEL_L < 64) {
#pragma unroll
      for (int e = 0; e < 32; e++)
        if ((e / 4) * 8 + (lane & 3) * 2 + (e & 1) >= SEL_L) score[e] = -positive_infinity();
    }
    float top0 = -positive_infinity(), top1 = -positive_infinity();
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      top0 = fmaxf(top0, fmaxf(score[e], score[e + 1]));
      top1 = fmaxf(top1, fmaxf(score[e + 2], score[e + 3]));
    }
    top0 = quad_max(top0) * c;
    top1 = quad_max(top1) * c;
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      score[e] = exp2_approximate(fmaf(score[e], c, -top0));
      score[e + 1] = exp2_approximate(fmaf(score[e + 1], c, -top0));
      score[e + 2] = exp2_approximate(fmaf(score[e + 2], c, -top1));
      score[e + 3] = exp2_approximate(fmaf(score[e + 3], c, -top1));
      sum0 += score[e] + score[e + 1];
      sum1 += score[e + 2] + score[e + 3];
    }
    as_operand(weights, score);
    sum0 = quad_sum(sum0);
    sum1 = quad_sum(sum1);
    const int inner = warp * 16 + lane / 4, row = i * 64 + inner;
    if ((lane & 3) == 0) {
      partial_lse[place_of(row)] = top0 + log2_approximate(sum0);
      partial_lse[place_of(row + 8)] = top1 + log2_approximate(sum1);
    }
    const float scale0 = reciprocal_approximate(sum0), scale1 = reciprocal_approximate(sum1);
#pragma unroll
    for (int p = 0; p < PV; p++) {
      float out[32];
      matrix_begin();
#pragma unroll
      for (int e = 0; e < 4; e++) product<ACROSS>(out, weights[e], advance(handle(values), p * PANEL), e, e > 0);
      matrix_commit();
      matrix_wait<0>();
      hold(out);
      stage_rows(out, generic + staging, scale0, scale1);
      if (p + 1 < PV) emit(i, p);
    }
  }
  emit(steps - 1, PV - 1);
}

constexpr int MERGE_LANES = DV <= 32 ? 4 : DV <= 64 ? 8 : DV <= 128 ? 16 : 32;

// MERGE_TOKENS tokens from `token0` on: the forced blocks' output and the partials become the branch's output.
__device__ __forceinline__ void merge_item(int token0, int tokens, int ring0, const bf16* partial,
                                           const float* partial_lse, bf16* out, float* lse, const Combination& combine,
                                           const int* chosen) {
  for (int i = threadIdx.x; i < tokens * HEADS * MERGE_LANES; i += 128) {
    const int column = i % MERGE_LANES * 8, row = i / MERGE_LANES, token = token0 + row / HEADS, head = row % HEADS,
              group = head / HPG;
    if (column >= DV) continue;
    const int count = chosen[row / HEADS];
    const i64 at = (i64)token0 * HEADS + row,
              place = ((i64)(token + ring0) * GROUPS + group) * CHOSEN * HPG + head % HPG;
    const float own = lse[at] * LOG2_E;
    uint4 x[CHOSEN];
    float logs[CHOSEN], top = own;
#pragma unroll
    for (int s = 0; s < CHOSEN; s++) {
      logs[s] = s < count ? load_l2(partial_lse + place + s * HPG) : -positive_infinity();
      x[s] = s < count ? load_l2(partial + (place + s * HPG) * DV + column) : make_uint4(0, 0, 0, 0);
    }
    const uint4 forced = *(const uint4*)(out + at * DV + column);
    Combination::Others others;
    combine.load(others, at, column);
#pragma unroll
    for (int s = 0; s < CHOSEN; s++) top = fmaxf(top, logs[s]);
    Columns c;
    c.clear();
    float sum = exp2_approximate(own - top);
    c.add(forced, sum);
#pragma unroll
    for (int s = 0; s < CHOSEN; s++) {
      const float weight = exp2_approximate(logs[s] - top);
      c.add(x[s], weight);
      sum += weight;
    }
    const uint4 y = c.packed(1.0f / sum);
    *(uint4*)(out + at * DV + column) = y;
    __syncwarp(__activemask());  // every lane of the row has read its lse
    if (column == 0) lse[at] = LN2 * (top + log2f(sum));
    combine.store(others, at, column, y);
  }
}

// Works through the plan: blocks draw tickets, in the order of the stretches, so whatever a ticket waits for was
// drawn before it. A stretch's partials are merged while they are still in the L2 cache, and their place in the ring
// is used again. items [.., 2]: list and place in it. served[1] counts the times this kernel worked.
// grid (multiprocessors * selected_outer_blocks)
extern "C" __global__ void __launch_bounds__(128, OUTER_BLOCKS) selected_outer(
    const bf16* q, const unsigned char* packed, const int* items, const int* offsets, const int* begins,
    const u32* lists, bf16* partial, float* partial_lse, const bf16* cmp, const bf16* win, const float* gates,
    bf16* out, float* lse, bf16* combined, Plan* plan, int* served, const int* cu_seqlens, const int* cu_blocks,
    int sequences, int stretch, int stretches) {
  extern __shared__ unsigned char shared[];
  __shared__ int drawn, chosen[MERGE_TOKENS];
  const int thread = threadIdx.x, blocks = cu_blocks[sequences], tokens = cu_seqlens[sequences], pieces = plan->pieces;
  if (pieces == 0) return;
  const int end = plan->first_ticket[pieces + LAG];
  if (thread == 0) {
    if (blockIdx.x == 0 && served != nullptr) served[1]++;
    drawn = atomicAdd(&plan->next_ticket, 1);
  }
  while (true) {
    __syncthreads();
    const int ticket = drawn;
    if (ticket >= end) return;
    int next = 0;
    if (thread == 0) next = atomicAdd(&plan->next_ticket, 1);  // arrives while this item is worked on
    int piece = 0, upper = pieces + LAG;
    while (upper - piece > 1) {
      const int middle = (piece + upper) / 2;
      if (plan->first_ticket[middle] <= ticket) piece = middle;
      else upper = middle;
    }
    // Items and merge items take turns, so that products and memory are both busy all the time.
    const int within = ticket - plan->first_ticket[piece], merges = piece >= LAG ? plan->piece_merges[piece - LAG] : 0;
    const u32 all = merges + (piece < pieces ? plan->piece_items[piece] : 0);
    const int merged = (int)((u64)within * merges / all);
    const bool merging = (int)((u64)(within + 1) * merges / all) > merged;
    if (!merging) {
      if (piece >= RING && thread == 0) await(plan->merges_done + piece - RING, plan->piece_merges[piece - RING]);
      const int s = plan->piece_stretch[piece];
      const int2 item = ((const int2*)items)[plan->stretch_base[s] + within - merged];
      const int list = item.x, at = list % blocks, group = list / blocks, from = offsets[list];
      const int upto = s + 1 < stretches ? begins[(i64)list * stretches + s + 1] : offsets[list + 1] - from;
      const int first = cu_seqlens[sequence_of(cu_blocks, sequences, at)];
      outer_item(shared, q, packed + ((i64)at * GROUPS + group) * PACKED, lists + from + item.y,
                 min(OUTER_CHUNK, upto - item.y), first, group, (piece % RING - s) * stretch, partial, partial_lse);
    } else {
      const int s = plan->piece_stretch[piece - LAG], token0 = s * stretch + merged * MERGE_TOKENS;
      const int count = min(MERGE_TOKENS, min((s + 1) * stretch, tokens) - token0);
      if (thread < count) {
        const int t = token0 + thread - cu_seqlens[sequence_of(cu_seqlens, sequences, token0 + thread)];
        chosen[thread] = max(0, min(t / SEL_L + 1, SEL_N) - 3);
      }
      if (thread == 0) await(plan->items_done + piece - LAG, plan->piece_items[piece - LAG]);
      __syncthreads();
      merge_item(token0, count, ((piece - LAG) % RING - s) * stretch, partial, partial_lse, out, lse,
                 {cmp, win, gates, combined}, chosen);
    }
    __syncthreads();
    if (thread == 0) {
      __threadfence();
      atomicAdd(merging ? plan->merges_done + piece - LAG : plan->items_done + piece, 1);
      drawn = next;
    }
  }
}
