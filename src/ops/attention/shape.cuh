// The shape of sparse attention as macros (-DHEADS=12 ...), so that every loop over it unrolls: shared by the fused
// kernels and the decode step. Defaults: the 125m shape.
#pragma once

#ifndef HEADS
#define HEADS 12  // query heads
#endif
#ifndef GROUPS
#define GROUPS 2  // key/value heads
#endif
#ifndef DK
#define DK 64  // columns of a query or key
#endif
#ifndef DV
#define DV 64  // columns of a value
#endif
#ifndef CMP_L
#define CMP_L 32  // compression block
#endif
#ifndef CMP_D
#define CMP_D 16  // its stride
#endif
#ifndef SEL_L
#define SEL_L 64  // selection block
#endif
#ifndef SEL_N
#define SEL_N 16  // selected blocks
#endif
#ifndef WINDOW
#define WINDOW 512  // 0 in fused kernels that leave the window branch to others, because it has queries of its own
#endif

constexpr int HPG = HEADS / GROUPS;  // heads per group; they share keys, so they are packed as rows

static_assert(HEADS % GROUPS == 0 && HPG >= 1 && HPG <= 16, "heads per group must be 1 to 16");
static_assert(CMP_L % CMP_D == 0 && SEL_L % CMP_D == 0 && CMP_L <= SEL_L, "d divides l and l', l <= l'");

// Compressed blocks that the first `length` tokens fill. Token t sees count_compressed(t + 1) of them.
__device__ __forceinline__ int count_compressed(int length) {
  return length < CMP_L ? 0 : (length - CMP_L) / CMP_D + 1;
}
