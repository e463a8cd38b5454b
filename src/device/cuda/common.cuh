// What every attention kernel shares: the shape macros, small types, bf16 conversion, asynchronous
// copies and the search for the sequence a tile belongs to. No host code, no standard headers: NVRTC
// compiles this with nothing installed but the driver.
#pragma once

// Shapes are macros (-DHEADS=12 ...), so that every loop over them unrolls.
#ifndef HEADS
#define HEADS 12
#endif
#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef DK
#define DK 64
#endif
#ifndef DV
#define DV 64
#endif
#ifndef CMP_L
#define CMP_L 32
#endif
#ifndef CMP_D
#define CMP_D 16
#endif
#ifndef SEL_L
#define SEL_L 64
#endif
#ifndef SEL_N
#define SEL_N 16
#endif
#ifndef WINDOW
#define WINDOW 512
#endif

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short bf16;

constexpr int HPG = HEADS / GROUPS;      // heads per group; they share keys, so they are packed as rows
constexpr int PK = (DK + 63) / 64;       // 64-column panels of a key row
constexpr int PV = (DV + 63) / 64;       // and of a value row
constexpr int PANEL = 64 * 128;          // bytes of a panel: 64 rows of 64 bf16
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr int NEVER = 0x7fffffff;

static_assert(HEADS % GROUPS == 0 && HPG >= 1 && HPG <= 16, "heads per group must be 1 to 16");
static_assert(DK % 16 == 0 && DV % 16 == 0, "head sizes must be multiples of 16");
static_assert(CMP_L % CMP_D == 0 && SEL_L % CMP_D == 0 && CMP_L <= SEL_L, "d divides l and l', l <= l'");
static_assert(SEL_N >= 3 && SEL_N <= 64, "n must be 3 to 64");

// A number the host reads from the module: bytes of shared memory, rows of a tile.
#define EXPORT(name, ...) extern "C" __device__ int name = (__VA_ARGS__);

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
// softmax scale with log2(e) folded in: every exponential is a bare ex2
__device__ __forceinline__ float scale_log2() { return LOG2E / sqrtf((float)DK); }
__device__ __forceinline__ float scale() { return 1.0f / sqrtf((float)DK); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float low_half(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_half(u32 x) { return __uint_as_float(x & 0xffff0000u); }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A panel row is 128 bytes, its eight 16-byte chunks permuted by the row: the 128-byte swizzle that
// the tensor cores read, and free of bank conflicts for everything else.
__device__ __forceinline__ u32 swizzle(int row, int chunk) {
  return (u32)(row * 128 + ((chunk ^ (row & 7)) << 4));
}

__device__ __forceinline__ void copy16(u32 to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(present ? 4 : 0) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Starts the copy of 64 rows of D columns into ceil(D/64) panels; row(r) is a pointer, or null for zeros.
template <int D, int THREADS, class Row>
__device__ __forceinline__ void load_panel(u32 to, int thread, const bf16* anywhere, Row row) {
  constexpr int CHUNKS = ((D + 63) / 64) * 8;
#pragma unroll
  for (int c = thread; c < 64 * CHUNKS; c += THREADS) {
    const int r = c / CHUNKS, chunk = c % CHUNKS;
    const bf16* from = row(r);
    const bool present = from != nullptr && chunk * 8 < D;
    copy16(to + (chunk / 8) * PANEL + swizzle(r, chunk & 7), present ? from + chunk * 8 : anywhere, present);
  }
}

__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Adds to fp32 in global memory without reading back.
__device__ __forceinline__ void reduce2(float* to, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
#else
  atomicAdd(to, a);
  atomicAdd(to + 1, b);
#endif
}
__device__ __forceinline__ void reduce4(float* to, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  atomicAdd(to, a);
  atomicAdd(to + 1, b);
  atomicAdd(to + 2, c);
  atomicAdd(to + 3, d);
#endif
}

// Where a tile lies: the sequence, its first token and length, and the tile's index inside it.
struct Place {
  int sequence, first, length, tile, base;  // base: tiles of all earlier sequences
};

// tiles(length) says how many tiles a sequence has; false when the index is past the last one.
template <class Tiles>
__device__ __forceinline__ bool find_place(const int* cu_seqlens, int sequences, int index, Tiles tiles, Place& place) {
  int base = 0, first = cu_seqlens[0];
  for (int s = 0; s < sequences; s++) {
    const int end = cu_seqlens[s + 1];
    const int count = tiles(end - first);
    if (index < base + count) {
      place.sequence = s;
      place.first = first;
      place.length = end - first;
      place.tile = index - base;
      place.base = base;
      return true;
    }
    base += count;
    first = end;
  }
  return false;
}

__device__ __forceinline__ int visible_cmp(int t) { return t + 1 < CMP_L ? 0 : (t + 1 - CMP_L) / CMP_D + 1; }
