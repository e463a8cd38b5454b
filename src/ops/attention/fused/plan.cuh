// Plan of the selected branch: the choice of kernel and the schedule of the KV-outer one.
// Tokens (flat, all sequences) are cut into stretches, and each is given to one of three kernels. The KV-outer kernel
// works through them in order: the partial results of a stretch, then, LAG stretches later, their merge. Partials live
// in a ring of RING stretches.
#pragma once
#include "common.cuh"

#ifndef OUTER_CHUNK
#define OUTER_CHUNK 128  // tokens one work item of the KV-outer forward takes from a list
#endif
#ifndef SEL_CHUNK
#define SEL_CHUNK 512  // and of the backward, forced tokens included
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
#define SLACK 2  // stretches that may be begun before a merged one's place is free again
#endif
#ifndef MERGE_TOKENS
#define MERGE_TOKENS 8  // tokens of a merge item; a stretch is a multiple of it
#endif

// Tokens that see a block without choosing it: all for block 0, those of two blocks for the others. selected_backward
// and write_lists have these two rules in their own words, whose machine code was measured.
__device__ __forceinline__ int forced_tokens(int block, int length) {
  return block == 0 ? length : min(length, (block + 2) * SEL_L) - block * SEL_L;
}
// Whether the token at position t, which selected the block, chose it by score.
__device__ __forceinline__ bool is_chosen(int block, int t) { return block > 0 && block < t / SEL_L - 1; }

constexpr int RING = LAG + SLACK;
constexpr int MAX_STRETCHES = 128;
constexpr int ADAPTIVE = 0, TILE_UNION = 1, KV_OUTER = 2, TILE_GATHER = 3,
              ALTERNATE = 4;  // for tests: stretches in turn

// Written by select_totals, select_index and select_finish, read by selected_union, selected_dense, selected_outer
// and selected_gather.
// A piece is a stretch that the KV-outer kernel works on. The host zeroes the plan first.
// In three parts, each written after the ones before it: the host can zero the later parts alone to run them again.
struct PlanItems {
  // For each stretch:
  int stretch_items[MAX_STRETCHES];  // KV-outer work items
  int stretch_base[MAX_STRETCHES];   // index of the first one in the array of work items
};
struct PlanChoice : PlanItems {
  // For each stretch:
  int union_sizes[MAX_STRETCHES];  // sum of the union sizes of its tiles
  int union_tiles[MAX_STRETCHES];  // number of those tiles
  int choosers_done;               // blocks of select_finish that have added to the two sums
  int union_stretches;             // stretches that tile-union works on
  int gather_stretches;            // stretches that tile-gather works on
  int pieces;                      // stretches that KV-outer works on
  int choice[MAX_STRETCHES];       // TILE_UNION, KV_OUTER or TILE_GATHER
  // For each piece:
  int piece_stretch[MAX_STRETCHES];
  int piece_items[MAX_STRETCHES];
  int piece_merges[MAX_STRETCHES];  // merge items
  // Segment p of the tickets: the items of piece p and the merge items of piece p - LAG. The last entry is the end.
  int first_ticket[MAX_STRETCHES + LAG + 1];
};
struct Plan : PlanChoice {
  // Progress of the KV-outer kernel, of each piece:
  int items_done[MAX_STRETCHES];
  int merges_done[MAX_STRETCHES];
  int next_ticket;
};
template <class Part> constexpr int PLAN_WORDS = (int)(sizeof(Part) / sizeof(int));

__device__ __forceinline__ int merge_items(int stretch_index, int stretch, int tokens) {
  return (min(stretch, tokens - stretch_index * stretch) + MERGE_TOKENS - 1) / MERGE_TOKENS;
}
