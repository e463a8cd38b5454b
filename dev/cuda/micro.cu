// Ceilings of the machine that decide tile sizes: L2 -> SM copies, matrix and exp2 rates, fp32 reductions.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "../../src/ops/attention/fused/matrix.cuh"

template <class F> static double measure(F f) {
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  f();
  std::vector<float> t;
  for (int i = 0; i < 5; i++) {
    cudaEventRecord(a);
    f();
    cudaEventRecord(b);
    cudaEventSynchronize(b);
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    t.push_back(ms);
  }
  const cudaError_t e = cudaDeviceSynchronize();
  if (e != cudaSuccess) printf("error: %s\n", cudaGetErrorString(e));
  std::sort(t.begin(), t.end());
  return t[2];
}

__global__ void l2_cp_async(const unsigned char* from, int tiles, int steps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared);
  u32 tile = blockIdx.x * 977u;
  for (int i = 0; i < steps; i++) {
    const unsigned char* p = from + (size_t)(tile++ * 7919u % tiles) * 16384;
#pragma unroll
    for (int c = 0; c < 8; c++)
      copy16(base + (i & 3) * 16384 + (c * 128 + threadIdx.x) * 16, p + (c * 128 + threadIdx.x) * 16, true);
    copies_commit();
    copies_wait<2>();
  }
  copies_wait<0>();
}
__global__ void l2_bulk(const unsigned char* from, int tiles, int steps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) u64 bars[4];
  const u32 base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&bars[i])));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    u32 tile = blockIdx.x * 977u;
    for (int i = 0; i < steps + 3; i++) {
      if (i < steps) {
        const u32 bar = shared_address(&bars[i & 3]);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16384;" ::"r"(bar) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16384, [%2];" ::"r"(
                         base + (i & 3) * 16384),
                     "l"(from + (size_t)(tile++ * 7919u % tiles) * 16384), "r"(bar)
                     : "memory");
      }
      if (i >= 3) {
        const int w = i - 3;
        u32 done = 0;
        while (!done)
          asm volatile(
              "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
              : "=r"(done)
              : "r"(shared_address(&bars[w & 3])), "r"((w >> 2) & 1)
              : "memory");
      }
    }
  }
}
template <int MODE>
__global__ void __launch_bounds__(128) matrix_rate(float* sink, int steps) {  // 0 SS, 1 RS, 2 RS + exp2, 3 exp2 only
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = handle((shared_address(shared) + 1023) & ~1023u), second = advance(base, PANEL);
  float d[32], e[32];
  u32 a[4] = {threadIdx.x, threadIdx.x, 1, 2};
  for (int i = 0; i < 32; i++) d[i] = 0, e[i] = threadIdx.x * 0.01f + i;
  for (int s = 0; s < steps; s++) {
    if (MODE < 3) {
      matrix_begin();
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (MODE == 0) product<ALONG, ALONG>(d, base, second, i & 3, true);
        else product<ACROSS>(d, a, second, i & 3, true);
      }
      matrix_commit();
    }
    if (MODE >= 2) {
#pragma unroll
      for (int i = 0; i < 32; i++) e[i] = exp2_approximate(fmaf(e[i], -0.5f, 0.25f));
    }
    if (MODE < 3) {
      matrix_wait<0>();
      hold(d);
    }
  }
  float x = 0;
  for (int i = 0; i < 32; i++) x += d[i] + e[i];
  if (x == 12345.678f) sink[0] = x;
}
__global__ void __launch_bounds__(128) mma_rate(float* sink, int steps) {
  float d[8][4] = {};
  unsigned a[4] = {1, 2, 3, threadIdx.x}, b0 = threadIdx.x, b1 = 7;
  for (int s = 0; s < steps; s++)
#pragma unroll
    for (int i = 0; i < 8; i++)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
          : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  float x = 0;
  for (int i = 0; i < 8; i++) x += d[i][0] + d[i][1] + d[i][2] + d[i][3];
  if (x == 12345.678f) sink[0] = x;
}
// 64 rows of 256 bytes a step, as dQ: rows are groups of six neighbours at random places
template <int MODE> __global__ void __launch_bounds__(128) reduce_rate(float* to, int rows, int steps) {
  __shared__ __align__(128) float tile[64 * 72];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < 64 * 72; i += 128) tile[i] = 0;
  __syncthreads();
  for (int s = 0; s < steps; s++) {
    const u32 seed = (blockIdx.x * 4099u + s * 1009u);
    const auto row_at = [&](int r) { return (size_t)((seed + r / 6) * 2654435761u % (u32)(rows / 6)) * 6 + r % 6; };
    if (MODE == 0) {
      const int r = warp * 16 + lane / 4;
      float *p = to + row_at(r) * 64 + (lane & 3) * 2, *p8 = to + row_at(r + 8) * 64 + (lane & 3) * 2;
#pragma unroll
      for (int n = 0; n < 8; n++) reduce2(p + n * 8, 0.f, 0.f), reduce2(p8 + n * 8, 0.f, 0.f);
    } else if (MODE == 1) {
      float* p = to + row_at(warp * 16 + lane / 4 + (lane & 1) * 8) * 64 + (lane & 2) * 2;
#pragma unroll
      for (int n = 0; n < 8; n++) reduce4(p + n * 8, 0.f, 0.f, 0.f, 0.f);
    } else if (MODE == 2) {  // a warp covers two whole rows an instruction
#pragma unroll
      for (int n = 0; n < 8; n++)
        reduce4(to + row_at(warp * 16 + n * 2 + lane / 16) * 64 + (lane & 15) * 4, 0.f, 0.f, 0.f, 0.f);
    } else if (threadIdx.x < 64) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 256;" ::"l"(
                       to + row_at(threadIdx.x) * 64),
                   "r"(shared_address(tile + threadIdx.x * 72))
                   : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    }
  }
  if (MODE == 3) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

int main() {
  unsigned char* buffer;
  const size_t bytes = (size_t)65536 * 12 * 64 * 4;
  cudaMalloc(&buffer, bytes);
  cudaMemset(buffer, 0, bytes);
  for (void* f : {(void*)l2_cp_async, (void*)l2_bulk, (void*)matrix_rate<0>, (void*)matrix_rate<1>,
                  (void*)matrix_rate<2>, (void*)matrix_rate<3>})
    cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, 66 * 1024);
  for (int mb : {8, 32, 192}) {
    const int tiles = mb * 64, blocks = 132 * 3, steps = 400;
    const double a = measure([&] { l2_cp_async<<<blocks, 128, 65536>>>(buffer, tiles, steps); });
    const double b = measure([&] { l2_bulk<<<blocks, 128, 65536>>>(buffer, tiles, steps); });
    printf("read %3d MB working set: cp.async %.2f TB/s, bulk %.2f TB/s\n", mb,
           blocks * (double)steps * 16384 / a / 1e9, blocks * (double)steps * 16384 / b / 1e9);
  }
  for (int per : {1, 2, 3, 4}) {
    const int blocks = 132 * per, steps = 2000;
    const double flop = (double)blocks * steps * 8 * 64 * 64 * 16 * 2, exps = (double)blocks * steps * 128 * 32;
    const double ss = measure([&] { matrix_rate<0><<<blocks, 128, 20000>>>((float*)buffer, steps); });
    const double rs = measure([&] { matrix_rate<1><<<blocks, 128, 20000>>>((float*)buffer, steps); });
    const double both = measure([&] { matrix_rate<2><<<blocks, 128, 20000>>>((float*)buffer, steps); });
    const double ex = measure([&] { matrix_rate<3><<<blocks, 128, 20000>>>((float*)buffer, steps); });
    const double mm = measure([&] { mma_rate<<<blocks, 128>>>((float*)buffer, steps * 4); });
    printf(
        "%d warpgroups an SM: wgmma SS %.0f RS %.0f TFLOP/s, with 32 exp2 per 8 products %.0f, exp2 alone %.2f T/s, "
        "mma.sync %.0f TFLOP/s\n",
        per, flop / ss / 1e9, flop / rs / 1e9, flop / both / 1e9, exps / ex / 1e9,
        (double)blocks * 4 * steps * 4 * 8 * 4096 / mm / 1e9);
  }
  for (int mb : {16, 192}) {
    const int rows = mb * 4096, blocks = 132 * 4, steps = 200;
    const double gb = (double)blocks * steps * 64 * 256 / 1e9;
    const double a = measure([&] { reduce_rate<0><<<blocks, 128>>>((float*)buffer, rows, steps); });
    const double b = measure([&] { reduce_rate<1><<<blocks, 128>>>((float*)buffer, rows, steps); });
    const double c = measure([&] { reduce_rate<2><<<blocks, 128>>>((float*)buffer, rows, steps); });
    const double d = measure([&] { reduce_rate<3><<<blocks, 128>>>((float*)buffer, rows, steps); });
    printf("fp32 reductions into %d MB: v2 %.2f TB/s, v4 half-sectors %.2f, v4 whole rows %.2f, bulk %.2f\n", mb,
           gb / a, gb / b, gb / c, gb / d);
  }
}
