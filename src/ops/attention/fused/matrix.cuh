// Matrix products of one warpgroup (128 threads): D[64, 64] += A[64, 16] * B[16, 64], bf16 in, fp32 out.
// Two implementations with the same fragments: wgmma on sm_90a and mma.sync + ldmatrix elsewhere
// (or with -DMMA_SYNC). Operands in shared memory are panels (see swizzle): a panel whose rows run
// along the product's inner dimension is "across", one whose columns do is "along".
//   accumulator d[4*n + e]: row 16*warp + lane/4 + 8*(e/2), column 8*n + 2*(lane%4) + e%2.
// On sm_90a a product is asynchronous: matrix_begin, products, matrix_commit, ..., matrix_wait<pending>,
// then hold() on every accumulator before it is read.
#pragma once
#include "common.cuh"

#if __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(MMA_SYNC)
#define WGMMA 1
#else
#define WGMMA 0
#endif

constexpr bool ALONG = false, ACROSS = true;

// A value that is the same in all lanes. The shuffle lets the assembler know it: handles derived from it are computed
// once, in uniform registers, where a product reads them, instead of being moved there each time (18 of 244
// instructions of a step).
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
__device__ __forceinline__ int warpgroup() { return uniform(threadIdx.x / 128); }

__device__ __forceinline__ void hold(float (&d)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Four 8 x 8 matrices: lane i gives the address of row i % 8 of matrix i / 8.
template <bool TRANSPOSE> __device__ __forceinline__ void load_fragment(u32 (&r)[4], u32 address) {
  if (TRANSPOSE)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

#if WGMMA
__device__ __forceinline__ void matrix_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void matrix_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Ordinary writes to shared memory become visible to the tensor cores.
__device__ __forceinline__ void matrix_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Operand of a product: the low word of a matrix descriptor (address / 16). The high word is constant:
// 128-byte swizzle, 1024 bytes from one group of eight rows to the next.
__device__ __forceinline__ u32 handle(u32 address) { return ((address & 0x3ffff) >> 4) | (1u << 16); }
__device__ __forceinline__ u32 advance(u32 h, int bytes) { return h + bytes / 16; }
constexpr u32 DESCRIPTOR_HIGH = 0x40000040u;

#define ACC32(d)                                                                                              \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define REG32                                                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}"

// A and B in shared memory (handles of panels); `step` counts 16-wide slices of the inner dimension inside the panels.
template <bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void product(float (&d)[32], u32 a, u32 b, int step, bool add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %34, 0;\nmov.b64 da, {%32, %37};\nmov.b64 db, {%33, %37};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REG32 ", da, db, p, 1, 1, %35, %36;\n}\n"
      : ACC32(d)
      : "r"(advance(a, step * (A_ACROSS ? 2048 : 32))), "r"(advance(b, step * (B_ACROSS ? 2048 : 32))), "r"((int)add),
        "n"(A_ACROSS ? 1 : 0), "n"(B_ACROSS ? 1 : 0), "r"(DESCRIPTOR_HIGH));
}
// A in registers
template <bool B_ACROSS>
__device__ __forceinline__ void product(float (&d)[32], const u32 (&a)[4], u32 b, int step, bool add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 db;\nsetp.ne.b32 p, %37, 0;\nmov.b64 db, {%36, %39};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REG32 ", {%32, %33, %34, %35}, db, p, 1, 1, %38;\n}\n"
      : ACC32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(advance(b, step * (B_ACROSS ? 2048 : 32))), "r"((int)add),
        "n"(B_ACROSS ? 1 : 0), "r"(DESCRIPTOR_HIGH));
}
#else
__device__ __forceinline__ void matrix_begin() {}
__device__ __forceinline__ void matrix_commit() {}
template <int PENDING> __device__ __forceinline__ void matrix_wait() {}
__device__ __forceinline__ void matrix_publish() {}
__device__ __forceinline__ u32 handle(u32 address) { return address; }
__device__ __forceinline__ u32 advance(u32 h, int bytes) { return h + bytes; }

template <bool B_ACROSS>
__device__ __forceinline__ void product(float (&d)[32], const u32 (&a)[4], u32 b, int step, bool add) {
  const int lane = threadIdx.x & 31;
  if (!add) {
#pragma unroll
    for (int i = 0; i < 32; i++) d[i] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < 4; n++) {
    u32 r[4];
    if (B_ACROSS) load_fragment<true>(r, b + swizzle(step * 16 + (lane & 15), n * 2 + (lane >> 4)));
    else load_fragment<false>(r, b + swizzle(n * 16 + (lane >> 4) * 8 + (lane & 7), step * 2 + ((lane >> 3) & 1)));
    mma_bf16(d + n * 8, a[0], a[1], a[2], a[3], r[0], r[1]);
    mma_bf16(d + n * 8 + 4, a[0], a[1], a[2], a[3], r[2], r[3]);
  }
}
template <bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void product(float (&d)[32], u32 a, u32 b, int step, bool add) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  u32 r[4];
  if (A_ACROSS)
    load_fragment<true>(r, a + swizzle(step * 16 + (lane >> 4) * 8 + (lane & 7), warp * 2 + ((lane >> 3) & 1)));
  else load_fragment<false>(r, a + swizzle(warp * 16 + (lane & 15), step * 2 + (lane >> 4)));
  product<B_ACROSS>(d, r, b, step, add);
}
#endif

// D = A * B^T over D columns, both operands as panels of rows (queries x keys)
template <int D> __device__ __forceinline__ void product_rows(float (&d)[32], u32 a, u32 b) {
#pragma unroll
  for (int s = 0; s < (D + 15) / 16; s++)
    product<ALONG, ALONG>(d, advance(a, (s / 4) * PANEL), advance(b, (s / 4) * PANEL), s % 4, s > 0);
}

// The accumulator of one product becomes the A fragments of the next (four 16-wide steps).
__device__ __forceinline__ void as_operand(u32 (&a)[4][4], const float (&d)[32]) {
#pragma unroll
  for (int s = 0; s < 4; s++)
#pragma unroll
    for (int e = 0; e < 4; e++) a[s][e] = pack_bf16(d[s * 8 + e * 2], d[s * 8 + e * 2 + 1]);
}

// The accumulator as bf16 rows, 16 bytes at a time, by exchanges inside a quad of lanes. x[i]: columns
// 32 * (i / 2) + 8 * (lane % 4) and following of row lane / 4 + 8 * (i % 2) of the warp.
__device__ __forceinline__ void quad_rows(uint4 (&x)[4], const float (&d)[32], float scale0, float scale1) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float scale = i & 1 ? scale1 : scale0;
    u32 w[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int at = ((i / 2) * 4 + n) * 4 + (i & 1) * 2;
      w[n] = pack_bf16(d[at] * scale, d[at + 1] * scale);
    }
    // The transpose of 4 x 4 words: chunks of eight columns by lanes.
    const u32 a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    w[0] = odd ? a : w[0], w[1] = odd ? w[1] : a, w[2] = odd ? b : w[2], w[3] = odd ? w[3] : b;
    const u32 c = __shfl_xor_sync(~0u, upper ? w[0] : w[2], 2), e = __shfl_xor_sync(~0u, upper ? w[1] : w[3], 2);
    x[i] = make_uint4(upper ? c : w[0], upper ? e : w[1], upper ? w[2] : c, upper ? w[3] : e);
  }
}

// A warpgroup's accumulator leaves as bf16 rows, 16 bytes a thread, through a panel of shared memory.
// A warp handles its own sixteen rows. sink(i, r, chunk, x): x is columns 8 * chunk ... of row r, the i-th of
// four that this thread is given.
__device__ __forceinline__ void stage_rows(const float (&d)[32], unsigned char* panel, float scale0, float scale1) {
  const int lane = threadIdx.x & 31, first = ((threadIdx.x & 127) / 32) * 16;
#if __CUDA_ARCH__ >= 900
#pragma unroll
  for (int s = 0; s < 4; s++)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(panel) + swizzle(first + (lane & 15), s * 2 + lane / 16)),
                 "r"(pack_bf16(d[s * 8] * scale0, d[s * 8 + 1] * scale0)),
                 "r"(pack_bf16(d[s * 8 + 2] * scale1, d[s * 8 + 3] * scale1)),
                 "r"(pack_bf16(d[s * 8 + 4] * scale0, d[s * 8 + 5] * scale0)),
                 "r"(pack_bf16(d[s * 8 + 6] * scale1, d[s * 8 + 7] * scale1))
                 : "memory");
#else
#pragma unroll
  for (int n = 0; n < 8; n++) {
    *(u32*)(panel + swizzle(first + lane / 4, n) + (lane & 3) * 4) =
        pack_bf16(d[n * 4] * scale0, d[n * 4 + 1] * scale0);
    *(u32*)(panel + swizzle(first + lane / 4 + 8, n) + (lane & 3) * 4) =
        pack_bf16(d[n * 4 + 2] * scale1, d[n * 4 + 3] * scale1);
  }
#endif
  __syncwarp();
}
template <class Sink> __device__ __forceinline__ void emit_rows(const unsigned char* panel, Sink sink) {
  const int lane = threadIdx.x & 31, first = ((threadIdx.x & 127) / 32) * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int r = first + i * 4 + lane / 8, chunk = lane % 8;
    sink(i, r, chunk, *(const uint4*)(panel + swizzle(r, chunk)));
  }
  __syncwarp();
}
template <class Sink> __device__ __forceinline__ void store_rows(const float (&d)[32], unsigned char* panel,
                                                                 float scale0, float scale1, Sink sink) {
  stage_rows(d, panel, scale0, scale1);
  emit_rows(panel, sink);
}
