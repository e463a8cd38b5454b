// What selection leaves for the selected branch: the choice of kernel and the schedule of the KV-outer one.
// Tokens (flat, all sequences) are cut into stretches, and each is given to one of the two kernels. The KV-outer kernel works through them in order: the
// partial results of a stretch, then, LAG stretches later, their merge. Partials live in a ring of RING stretches.
#pragma once
#include "common.cuh"

#ifndef OUTER_CHUNK
#define OUTER_CHUNK 128  // tokens one work item of the KV-outer forward takes from a list
#endif
#ifndef SEL_CHUNK
#define SEL_CHUNK 512    // and of the backward, forced tokens included
#endif
#ifndef UNION_WARPGROUPS
#define UNION_WARPGROUPS 2
#endif
#ifndef UNION_TOKENS
#define UNION_TOKENS (UNION_WARPGROUPS * 64 / HPG)
#endif
#ifndef LAG
#define LAG 2
#endif

#ifndef SLACK
#define SLACK 2   // stretches that may be begun before a merged one's place is free again
#endif
#ifndef MERGE_TOKENS
#define MERGE_TOKENS 8   // tokens of a merge item; a stretch is a multiple of it
#endif

constexpr int RING = LAG + SLACK;
constexpr int MAX_STRETCHES = 128;
constexpr int ADAPTIVE = 0, TILE_UNION = 1, KV_OUTER = 2, ALTERNATE = 3;  // the last for tests: stretches in turn

// Words of the plan. Items and everything from UNIONS on start at zero; select_index and select_finish write the rest.
enum Plan {
  PLAN_ITEMS = 0,                            // KV-outer items of each stretch
  PLAN_BASE = PLAN_ITEMS + MAX_STRETCHES,    // where they start in the array of items
  PLAN_UNIONS = PLAN_BASE + MAX_STRETCHES,   // sum of the union sizes of each stretch's tiles, and how many those are
  PLAN_TILES = PLAN_UNIONS + MAX_STRETCHES,
  PLAN_COUNTED = PLAN_TILES + MAX_STRETCHES, // blocks of select_finish that are done
  PLAN_SHARED,                               // stretches that tile-union serves, and that KV-outer does
  PLAN_PIECES,
  PLAN_CHOICE,                               // TILE_UNION or KV_OUTER of each stretch
  PLAN_ORDER = PLAN_CHOICE + MAX_STRETCHES,  // the stretches of KV-outer, its pieces; items and merge items of each piece
  PLAN_OUTERS = PLAN_ORDER + MAX_STRETCHES,
  PLAN_MERGES = PLAN_OUTERS + MAX_STRETCHES,
  PLAN_TICKET = PLAN_MERGES + MAX_STRETCHES, // first ticket of each segment (items of a piece, merge of the LAG-th before), and the end
  PLAN_DONE = PLAN_TICKET + MAX_STRETCHES + LAG + 1,  // of each piece: items done, merge items done; tickets given out
  PLAN_MERGED = PLAN_DONE + MAX_STRETCHES,
  PLAN_NEXT = PLAN_MERGED + MAX_STRETCHES,
  PLAN_WORDS
};

// the sequence with cu[s] <= at < cu[s + 1]
__device__ __forceinline__ int find_sequence(const int* cu, int sequences, int at) {
  int s = 0, upper = sequences;
  while (upper - s > 1) {
    const int middle = (s + upper) / 2;
    if (cu[middle] <= at) s = middle; else upper = middle;
  }
  return s;
}

__device__ __forceinline__ int merge_items(int stretch_index, int stretch, int tokens) {
  return (min(stretch, tokens - stretch_index * stretch) + MERGE_TOKENS - 1) / MERGE_TOKENS;
}
