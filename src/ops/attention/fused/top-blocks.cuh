// The best blocks of a token while it is scored: a sorted list in registers, and the row of `selected` that it becomes.
// Two threads share a token. Each has a list of what it was offered; both lists together hold the best.
#pragma once
#include "common.cuh"

constexpr int PER_BLOCK = SEL_L / CMP_D;            // compressed keys that start in a selection block
constexpr int CARRY = CMP_L / CMP_D - 1;            // earlier ones that reach into it
constexpr int TOP = SEL_N - 3;             // slots that are not forced
// The usual case, four compressed keys a block and one carried over, is pooled in registers.
constexpr bool POOL_IN_REGISTERS = PER_BLOCK == 4 && CARRY == 1;
constexpr int PARTNER = POOL_IN_REGISTERS ? 2 : 1;  // lanes of a token, apart

struct Top {
  float score[TOP > 0 ? TOP : 1];
  int block[TOP > 0 ? TOP : 1];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < TOP; i++) {
      score[i] = -1.0f;
      block[i] = NEVER;
    }
  }
  // Keeps the list sorted, score descending; among equal scores the one offered first stays above.
  __device__ __forceinline__ void insert(float s, int b) {
#pragma unroll
    for (int i = TOP - 1; i >= 0; i--) {
      const bool here = s > score[i], above = i > 0 && s > score[i > 0 ? i - 1 : 0];
      block[i] = above ? block[i > 0 ? i - 1 : 0] : here ? b : block[i];
      score[i] = i > 0 ? fmaxf(score[i], fminf(s, score[i - 1])) : fmaxf(score[i], s);
    }
  }
  // A score that an offer must exceed: the token's two lists together already hold TOP blocks, all lower, that score at
  // least this much.
  __device__ __forceinline__ float threshold() const {
    float least = score[TOP > 0 ? TOP - 1 : 0];
    if (TOP > 1) {
      constexpr int HALF = TOP / 2, REST = TOP - HALF;  // HALF of one list and REST of the other
      least = fmaxf(least, __shfl_xor_sync(~0u, least, PARTNER));
      const float theirs = __shfl_xor_sync(~0u, score[HALF - 1], PARTNER);
      const float rest = score[REST - 1];
      const float mixed = fminf(rest, theirs);
      least = fmaxf(least, fmaxf(mixed, __shfl_xor_sync(~0u, mixed, PARTNER)));
    }
    return least;
  }
  // The TOP best of both lists of the token. Both are sorted: the better of each entry and the other list's opposite
  // entry are the best of both.
  __device__ __forceinline__ void merge() {
    int best[TOP > 0 ? TOP : 1];
#pragma unroll
    for (int e = 0; e < TOP; e++) {
      const float s = __shfl_xor_sync(~0u, score[TOP - 1 - e], PARTNER);
      const int b = __shfl_xor_sync(~0u, block[TOP - 1 - e], PARTNER);
      best[e] = s > score[e] || (s == score[e] && b < block[e]) ? b : block[e];
    }
#pragma unroll
    for (int e = 0; e < TOP; e++) block[e] = best[e];
  }
  // Every candidate, where there are no more than slots.
  __device__ __forceinline__ void take_all(int current) {
#pragma unroll
    for (int e = 0; e < TOP; e++) block[e] = e + 1 < current - 1 ? e + 1 : NEVER;
  }
  // Block numbers in ascending order: odd-even transposition sort.
  __device__ __forceinline__ void sort_blocks() {
#pragma unroll
    for (int pass = 0; pass < TOP; pass++)
#pragma unroll
      for (int e = pass & 1; e + 1 < TOP; e += 2) {
        const int a = min(block[e], block[e + 1]), b = max(block[e], block[e + 1]);
        block[e] = a;
        block[e + 1] = b;
      }
  }
};

// Writes a token's row of `selected`: block 0, the chosen blocks, cur - 1, cur, then -1; and counts the chosen ones.
// selected, ranks: the row [SEL_N]; counts: the entry of block 0, `stretches` apart from block to block, or null. Both
// threads of a token have the same list: side 0 takes the even slots, side 1 the odd ones.
__device__ __forceinline__ void write_selection(const Top& top, int side, int current, int* selected, int* ranks,
                                                int* counts, int stretches) {
  int chosen = 0;  // fewer than there are candidates when scores are NaN
#pragma unroll
  for (int e = 0; e < TOP; e++) chosen += top.block[e] != NEVER;
  // All counts are asked for before the first answer is waited for.
  constexpr int SLOTS = (SEL_N + 1) / 2;
  int block[SLOTS], rank[SLOTS];
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    const int even = i > 0 && i * 2 - 1 < TOP ? top.block[i > 0 && i * 2 - 1 < TOP ? i * 2 - 1 : 0] : NEVER;
    const int odd = i * 2 < TOP ? top.block[i * 2 < TOP ? i * 2 : 0] : NEVER;
    block[i] = side ? odd : even;
    rank[i] = 0;
    if (counts != nullptr && block[i] != NEVER)
      rank[i] = atomicAdd(counts + (i64)block[i] * stretches, 1);  // place in the block's list
  }
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    const int slot = i * 2 + side;
    const int after = slot - 1 - chosen;  // after the chosen ones: cur - 1 if it is neither 0 nor cur, then cur
    if (slot >= SEL_N) break;
    const int last = after == 0 && current >= 2 ? current - 1 : after == (current >= 2) && current >= 1 ? current : -1;
    selected[slot] = slot == 0 ? 0 : block[i] != NEVER ? block[i] : last;
    if (counts != nullptr && block[i] != NEVER) ranks[slot] = rank[i];
  }
}
