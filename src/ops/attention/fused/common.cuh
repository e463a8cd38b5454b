// Common code of the fused kernels: the shape macros, small types, bf16 conversion, asynchronous
// copies and the search for the sequence a tile belongs to. No host code, no standard headers: NVRTC
// compiles this with nothing installed but the driver.
#pragma once

#include "elements.cuh"
#include "../shape.cuh"

constexpr int PK = (DK + 63) / 64;  // 64-column panels of a key row
constexpr int PV = (DV + 63) / 64;  // and of a value row
constexpr int PANEL = 64 * 128;     // bytes of a panel: 64 rows of 64 bf16
constexpr float LN2 = 0.6931471805599453f;
constexpr int NEVER = 0x7fffffff;

static_assert(DK % 16 == 0 && DV % 16 == 0, "head sizes must be multiples of 16");
static_assert(SEL_N >= 3 && SEL_N <= 64, "n must be 3 to 64");

// A number the host reads from the module: bytes of shared memory, rows of a tile.
#define EXPORT(name, ...) extern "C" __device__ int name = (__VA_ARGS__);

// softmax scale with log2(e) folded in: every exponential is a bare ex2
__device__ __forceinline__ float scale_log2() { return LOG2_E / sqrtf((float)DK); }
__device__ __forceinline__ float scale() { return 1.0f / sqrtf((float)DK); }

// A store with evict-first priority, for data that is read much later: it should not displace other cache lines.
__device__ __forceinline__ void store_streaming(void* to, uint4 x) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// One store of 16 bytes. The compiler splits an assignment into four stores if another one stands beside it.
__device__ __forceinline__ void store16(void* to, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A panel row is 128 bytes, its eight 16-byte chunks permuted by the row: the 128-byte swizzle that
// the tensor cores read, and free of bank conflicts for everything else.
__device__ __forceinline__ u32 swizzle(int row, int chunk) { return (u32)(row * 128 + ((chunk ^ (row & 7)) << 4)); }

__device__ __forceinline__ void copy16(u32 to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(present ? 4 : 0) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Starts the copy of 64 rows of D columns into ceil(D/64) panels; row(r) is the row's index in `from`, or
// negative for zeros. The loop has a fixed length: addresses cost more than anything else in these kernels.
template <int D, int THREADS, class Row>
__device__ __forceinline__ void load_panel(u32 to, int thread, const bf16* from, Row row) {
  constexpr int CHUNKS = ((D + 63) / 64) * 8, ALL = 64 * CHUNKS;
#pragma unroll
  for (int i = 0; i < (ALL + THREADS - 1) / THREADS; i++) {
    const int c = i * THREADS + thread;
    if (ALL % THREADS != 0 && c >= ALL) break;
    const int r = c / CHUNKS, chunk = c % CHUNKS;
    const i64 index = row(r);
    const bool present = index >= 0 && (D % 64 == 0 || chunk * 8 < D);
    copy16(to + (chunk / 8) * PANEL + swizzle(r, chunk & 7), from + (present ? index * D + chunk * 8 : 0), present);
  }
}

// The same for the 128 threads of a warpgroup when every row exists, row(r) without a sign.
template <int D, class Row> __device__ __forceinline__ void load_rows(u32 to, const bf16* from, Row row) {
  constexpr int CHUNKS = ((D + 63) / 64) * 8;
  if constexpr (D % 64 != 0 || 128 % CHUNKS != 0) {
    load_panel<D, 128>(to, threadIdx.x & 127, from, [&](int r) { return (i64)row(r); });
  } else {
    const int first = (threadIdx.x & 127) / CHUNKS,
              chunk = threadIdx.x % CHUNKS;  // 128 / CHUNKS rows apart: the same permutation
    static_assert(128 / CHUNKS % 8 == 0, "rows of a thread must lie alike");
#pragma unroll
    for (int e = 0; e < CHUNKS / 2; e++)
      copy16(to + (chunk / 8) * PANEL + swizzle(first, chunk & 7) + e * (128 / CHUNKS) * 128,
             from + chunk * 8 + (i64)row(first + e * (128 / CHUNKS)) * D);
  }
}

// mbarriers: `full` completes when a stage's bytes have arrived, `empty` when all its readers have left.
__device__ __forceinline__ void barrier_init(u32 at, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) {
  asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0], %1;\n}" ::"r"(at), "r"(count) : "memory");
#else
  for (int i = 0; i < count; i++) barrier_arrive(at);
#endif
}
__device__ __forceinline__ void barrier_wait(u32 at, int parity) {
  u32 done = 0;
  while (!done) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
#else
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
#endif
  }
}

// One warp copies `bytes` contiguous bytes into shared memory; the barrier completes when they have arrived.
// sm_90 has an engine for this; before it every lane copies its share. FULL_ARRIVALS: what `full` counts.
#if __CUDA_ARCH__ >= 900
constexpr int FULL_ARRIVALS = 1;
__device__ __forceinline__ void bulk_expect(u32 full, int bytes, int lane) {
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, int bytes, u32 full, int lane) {
  if (lane == 0)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(full)
                 : "memory");
}
__device__ __forceinline__ void bulk_end(u32, int) {}
#else
constexpr int FULL_ARRIVALS = 32;
__device__ __forceinline__ void bulk_expect(u32, int, int) {}
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, int bytes, u32, int lane) {
  for (int at = lane * 16; at < bytes; at += 512) copy16(to + at, (const char*)from + at, true);
}
__device__ __forceinline__ void bulk_end(u32 full, int) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
}
#endif

__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives at such a barrier without waiting.
__device__ __forceinline__ void barrier_pass(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
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

constexpr int FIND_SERIAL = 2;  // sequences that are looked at one after the other

// Position of a tile: the sequence, its first token and length, and the tile's index inside it.
struct Place {
  int sequence, first, length, tile, base, units;  // base, units: tiles and units of all earlier sequences
};

// tiles(length): tiles of a sequence; units(length): its units of another kind (packed key
// tiles); false when the index is past the last tile. Called by whole warps: of more than FIND_SERIAL sequences
// each lane looks at one.
template <class Tiles, class Units> __device__ __forceinline__ bool find_place(const int* cu_seqlens, int sequences,
                                                                               int index, Tiles tiles, Units units,
                                                                               Place& place) {
  if (sequences > FIND_SERIAL) {
    const int lane = threadIdx.x & 31;
    int base = 0, unit = 0;
#pragma unroll 1
    for (int from = 0; from < sequences; from += 32) {
      const bool present = from + lane < sequences;
      const int first = cu_seqlens[present ? from + lane : 0];
      const int length = cu_seqlens[present ? from + lane + 1 : 0] - first;
      const int count = present ? tiles(length) : 0, own = present ? units(length) : 0;
      const u32 beyond = __ballot_sync(~0u, index < base + warp_prefix_sum(count));
      const int at = beyond != 0 ? __ffs(beyond) - 1 : 32;
      base += __reduce_add_sync(~0u, lane < at ? count : 0);
      unit += __reduce_add_sync(~0u, lane < at ? own : 0);
      if (beyond != 0) {
        place.sequence = from + at;
        place.first = cu_seqlens[from + at];
        place.length = cu_seqlens[from + at + 1] - place.first;
        place.tile = index - base;
        place.base = base;
        place.units = unit;
        return true;
      }
    }
    return false;
  }
  int base = 0, unit = 0, first = cu_seqlens[0];
#pragma unroll 1
  for (int s = 0; s < sequences; s++) {
    const int end = cu_seqlens[s + 1];
    const int count = tiles(end - first);
    if (index < base + count) {
      place.sequence = s;
      place.first = first;
      place.length = end - first;
      place.tile = index - base;
      place.base = base;
      place.units = unit;
      return true;
    }
    base += count;
    unit += units(end - first);
    first = end;
  }
  return false;
}

template <class Tiles>
__device__ __forceinline__ bool find_place(const int* cu_seqlens, int sequences, int index, Tiles tiles, Place& place) {
  return find_place(cu_seqlens, sequences, index, tiles, tiles, place);
}

// Keys and values are packed once per pass into what the tensor cores read: per (tile, group) PK panels of
// keys, then PV of values, so that a tile is one contiguous copy. `unit` rows a tile, zeros after them. Returns the
// largest magnitude of the values that the thread packed, as bits of a bf16.
constexpr int PACKED = (PK + PV) * PANEL;  // bytes of a packed tile
template <int UNIT> __device__ __forceinline__ u32 pack_tile(const bf16* k, const bf16* v, unsigned char* packed,
                                                             const int* cu, int sequences) {
  Place place;
  if (!find_place(cu, sequences, blockIdx.x, [](int length) { return (length + UNIT - 1) / UNIT; }, place)) return 0;
  u32 largest = 0;
  unsigned char* const to = packed + ((i64)blockIdx.x * GROUPS + blockIdx.y) * PACKED;
  for (int c = threadIdx.x; c < 64 * (PK + PV) * 8; c += blockDim.x) {
    const int panel = c / 512, r = c / 8 % 64, chunk = c % 8, token = place.tile * UNIT + r;
    const int column = (panel < PK ? panel : panel - PK) * 64 + chunk * 8, size = panel < PK ? DK : DV;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (r < UNIT && token < place.length && column < size)
      x = *(const uint4*)((panel < PK ? k : v) + ((i64)(place.first + token) * GROUPS + blockIdx.y) * size + column);
    *(uint4*)(to + panel * PANEL + swizzle(r, chunk)) = x;
    if (panel >= PK) {
      const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; i++) largest = max(largest, max(words[i] & 0x7fff, words[i] >> 16 & 0x7fff));
    }
  }
  return largest;
}
