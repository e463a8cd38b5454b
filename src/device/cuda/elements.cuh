// Shared by elementwise and row-wise kernels: access to f32 and bf16 memory in units of 16 bytes with float in registers, sums in a
// fixed order, and the search for the sequence of a token. No host code and no standard headers, so that NVRTC compiles it
// without a toolkit.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef int i32;
typedef float f32;
typedef double f64;
typedef unsigned short bf16;  // the upper half of a float

// Elements of a type in 16 bytes, the widest memory access.
template <class T> constexpr int WIDE = 16 / (int)sizeof(T);

// A compile-time count, for bodies that are instantiated for vectors and for scalars.
template <int N> struct Count {
  static constexpr int value = N;
};

constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float positive_infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two bf16 in one word, rounded to nearest, ties to even; `low` is first in memory.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float low_bf16(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }

__device__ __forceinline__ float read_one(const f32* from) { return *from; }
__device__ __forceinline__ float read_one(const bf16* from) { return __uint_as_float((u32)*from << 16); }
__device__ __forceinline__ void write_one(f32* to, float x) { *to = x; }
__device__ __forceinline__ void write_one(bf16* to, float x) { *to = (bf16)pack_bf16(x, 0.0f); }

// N elements: one, or a multiple of 4 that is aligned to 16 bytes (8 for four bf16).
template <int N> __device__ __forceinline__ void load(float (&to)[N], const f32* from) {
  if constexpr (N == 1) {
    to[0] = *from;
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 x = *(const float4*)(from + i);
      to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
  }
}
template <int N> __device__ __forceinline__ void load(float (&to)[N], const bf16* from) {
  if constexpr (N == 1) {
    to[0] = read_one(from);
  } else if constexpr (N == 4) {
    const uint2 x = *(const uint2*)from;
    to[0] = low_bf16(x.x), to[1] = high_bf16(x.x), to[2] = low_bf16(x.y), to[3] = high_bf16(x.y);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 8) {
      const uint4 x = *(const uint4*)(from + i);
      to[i] = low_bf16(x.x), to[i + 1] = high_bf16(x.x), to[i + 2] = low_bf16(x.y);
      to[i + 3] = high_bf16(x.y), to[i + 4] = low_bf16(x.z), to[i + 5] = high_bf16(x.z);
      to[i + 6] = low_bf16(x.w), to[i + 7] = high_bf16(x.w);
    }
  }
}
template <int N> __device__ __forceinline__ void store(f32* to, const float (&from)[N]) {
  if constexpr (N == 1) {
    *to = from[0];
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      *(float4*)(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
  }
}
template <int N> __device__ __forceinline__ void store(bf16* to, const float (&from)[N]) {
  if constexpr (N == 1) {
    write_one(to, from[0]);
  } else if constexpr (N == 4) {
    *(uint2*)to = make_uint2(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]));
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 8)
      *(uint4*)(to + i) =
          make_uint4(pack_bf16(from[i], from[i + 1]), pack_bf16(from[i + 2], from[i + 3]),
                     pack_bf16(from[i + 4], from[i + 5]), pack_bf16(from[i + 6], from[i + 7]));
  }
}
// The same, added to the present values if `accumulate`.
template <int N, class T> __device__ __forceinline__ void store(T* to, const float (&from)[N], bool accumulate) {
  if (!accumulate) return store(to, from);
  float sum[N];
  load(sum, to);
#pragma unroll
  for (int i = 0; i < N; i++) sum[i] += from[i];
  store(to, sum);
}

__device__ __forceinline__ bool aligned(const void* p) { return ((u64)p & 15) == 0; }

// Grid-stride loop over `count` elements: body(index, Count<N>) for vectors of N if `wide`, body(index, Count<1>) for the rest.
template <int N, class Body> __device__ __forceinline__ void each(i64 count, bool wide, const Body& body) {
  const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
  const i64 vectors = wide ? count / N : 0;
  for (i64 i = thread; i < vectors; i += threads) body(i * N, Count<N>{});
  for (i64 i = vectors * N + thread; i < count; i += threads) body(i, Count<1>{});
}

// Sums and maxima over a warp; every lane gets the same bits.
template <class T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) x += __shfl_xor_sync(~0u, x, s);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, s));
  return x;
}

// The bits of a magnitude, whose order is that of the numbers: NaN above infinity above all others.
__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
template <int N> __device__ __forceinline__ u32 magnitude(const float (&x)[N], u32 top) {
#pragma unroll
  for (int k = 0; k < N; k++) top = top > magnitude(x[k]) ? top : magnitude(x[k]);
  return top;
}
__device__ __forceinline__ u32 warp_max(u32 x) {
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) {
    const u32 other = __shfl_xor_sync(~0u, x, s);
    x = other > x ? other : x;
  }
  return x;
}
// *to = the largest magnitude of all threads, given as bits; it is zero before the first launch that adds to it. All
// threads of a warp must call it.
__device__ __forceinline__ void add_largest(float* to, u32 top) {
  top = warp_max(top);
  if (threadIdx.x % 32 == 0 && top > 0) atomicMax((u32*)to, top);
}

// The same over a quad: four adjacent lanes, which share rows of a tensor-core product.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Inclusive prefix sum over a warp: lane i gets the sum of x over the lanes 0 ... i.
template <class T> __device__ __forceinline__ T warp_prefix_sum(T x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

// The same over a block of whole warps. `room` has one T per warp and may be reused when all threads have returned.
template <class T> __device__ __forceinline__ T block_sum(T x, T* room) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  x = warp_sum(x);
  if (lane == 0) room[warp] = x;
  __syncthreads();
  x = warp_sum(lane < warps ? room[lane] : T(0));
  __syncthreads();
  return x;
}
__device__ __forceinline__ float block_max(float x, float* room) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  x = warp_max(x);
  if (lane == 0) room[warp] = x;
  __syncthreads();
  x = warp_max(lane < warps ? room[lane] : -positive_infinity());
  __syncthreads();
  return x;
}

// total[i] (+)= partial[0][i] + partial[1][i] + ... for `count` columns. A block of 32 x 32 threads (as 1024) takes 32 adjacent
// columns: each warp adds every 32nd partial sum, then one warp adds the results of the warps in order.
__device__ __forceinline__ void add_partial_sums(const float* partial, i64 partials, float* total, i64 count,
                                                 bool accumulate) {
  __shared__ float sums[32][33];
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
  const i64 column = (i64)blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < count) {
#pragma unroll 4
    for (i64 p = row; p < partials; p += 32) sum += partial[p * count + column];
  }
  sums[row][lane] = sum;
  __syncthreads();
  if (row != 0 || column >= count) return;
  sum = accumulate ? total[column] : 0.0f;
#pragma unroll
  for (int r = 0; r < 32; r++) sum += sums[r][lane];
  total[column] = sum;
}

// The sequence that contains the row: offsets[s] <= row < offsets[s + 1].
template <class Row> __device__ __forceinline__ int sequence_of(const i32* offsets, i64 sequences, Row row) {
  int low = 0, high = (int)sequences;  // offsets[low] <= row < offsets[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}

// Tensor cores: d [16,8] += a [16,16] b [16,8], bf16 in, fp32 out. Lane 4g + t holds of a the rows g and g+8 (a0 and a2, a1
// and a3) at the terms 2t, 2t+1 and 2t+8, 2t+9; of b column g at the same terms; of d the rows g and g+8 at columns 2t, 2t+1.
__device__ __forceinline__ void mma_bf16(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
