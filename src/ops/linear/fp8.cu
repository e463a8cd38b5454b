// Matrices in FP8 for the tensor cores: the largest magnitude of a bf16 matrix and bounds on that of other matrices, the
// conversion of a matrix, of SiLU and of its gradient to e4m3 or e5m2, and the transposed copy that a product over the rows
// needs, because cuBLASLt multiplies FP8 only along contiguous terms.
#include "fp8.cuh"

// Sources of the conversion, 8 numbers at a time from index i on: read(i) fetches them, values(v, that) computes them.
// SOURCE is one of these.
struct Plain {  // x
  const bf16 *x, *dy;
  __device__ __forceinline__ uint4 read(i64 i) const { return *(const uint4*)(x + i); }
  __device__ __forceinline__ void values(float (&v)[8], uint4 raw) const { load(v, (const bf16*)&raw); }
};

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exp2_approximate(-LOG2_E * x)); }

struct Silu {  // silu(x)
  const bf16 *x, *dy;
  __device__ __forceinline__ uint4 read(i64 i) const { return *(const uint4*)(x + i); }
  __device__ __forceinline__ void values(float (&v)[8], uint4 raw) const {
    load(v, (const bf16*)&raw);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] *= sigmoid(v[k]);
  }
};

struct TwoPieces {
  uint4 x, dy;
};

struct SiluGradient {  // dy silu'(x)
  const bf16 *x, *dy;
  __device__ __forceinline__ TwoPieces read(i64 i) const { return {*(const uint4*)(x + i), *(const uint4*)(dy + i)}; }
  __device__ __forceinline__ void values(float (&v)[8], TwoPieces raw) const {
    float x[8];
    load(x, (const bf16*)&raw.x);
    load(v, (const bf16*)&raw.dy);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const float s = sigmoid(x[k]);
      v[k] *= s * (1.0f + x[k] * (1.0f - s));
    }
  }
};

// scale[0] = the largest magnitude; it must be zero before. `count` is a multiple of 8; dy is SiluGradient's alone.
extern "C" __global__ void __launch_bounds__(256)
fp8_largest(const bf16* x, const bf16* dy, float* scale, i64 count) {
  const SOURCE source{x, dy};
  const i64 step = 8 * (i64)gridDim.x * blockDim.x;
  u32 top = 0;
#pragma unroll 4
  for (i64 i = 8 * ((i64)blockIdx.x * blockDim.x + threadIdx.x); i < count; i += step) {
    float v[8];
    source.values(v, source.read(i));
    top = magnitude(v, top);
  }
  add_largest(scale, top);
}

// scale[0] = a bound on SiLU's slope times a product of `terms` terms, whose matrices have the largest magnitudes a[0] and
// b[0]: the slope is below 1.1, and the codes and bf16 round up by less than a half. Not the largest magnitude itself, but
// e5m2 has 30 powers of two: numbers keep their two bits far below the bound.
extern "C" __global__ void fp8_slope_bound(const float* a, const float* b, float terms, float* scale) {
  scale[0] = 1.65f * terms * a[0] * b[0];
}

// scale[0] = a bound on the magnitudes of rows of `dim` numbers divided by their rms, times `weight` [dim], and on the
// norm of such a row: the largest weight times the square root of dim. One warp.
extern "C" __global__ void fp8_norm_bound(const float* weight, int dim, float* scale) {
  u32 top = 0;
  for (int i = threadIdx.x; i < dim; i += 32) top = max(top, magnitude(weight[i]));
  top = warp_max(top);
  if (threadIdx.x == 0) scale[0] = 1.001f * sqrtf((float)dim) * __uint_as_float(top);
}

// scale[0] = a bound on the magnitudes of silu(x wᵀ), for rows of x whose norms are at most x_scale[0] and w [rows, columns]:
// the largest norm of a row of w times that of x. Codes of both round up by less than 1.07 each. Zero before; a warp takes
// a row, and columns are a multiple of 8. |silu(u)| is at most |u| for positive u and 0.2785 for negative u.
extern "C" __global__ void __launch_bounds__(256)
fp8_silu_bound(const bf16* w, const float* x_scale, float* scale, i64 rows, i64 columns) {
  const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  float squares = 0.0f;
  for (i64 c = 8 * (threadIdx.x % 32); c < columns; c += 256) {
    float v[8];
    load(v, w + row * columns + c);
#pragma unroll
    for (int k = 0; k < 8; k++) squares += v[k] * v[k];
  }
  const float bound = 1.2f * x_scale[0] * sqrtf(warp_sum(squares));
  if (threadIdx.x % 32 == 0) atomicMax((u32*)scale, __float_as_uint(bound < 0.28f ? 0.28f : bound));
}

constexpr int TILE = 128;  // rows and columns of a block's tile (fp8.ts has the same)

// A tile of codes [rows, columns], written to `straight` as it is and to `transposed` [columns, rows], unless null. Rows
// and columns are multiples of 16; read(row, column) fetches 8 columns of a row, code(that) has their codes. Four rows of
// 8 columns become 8 words of four rows in a thread; shared memory then collects the rows of a column. There, pieces of
// 16 bytes are exchanged by the column, so that neither side meets its own banks more than twice.
template <class Read, class Code>
__device__ __forceinline__ void write_tile(i64 rows, i64 columns, u8* straight, u8* transposed, const Read& read,
                                           const Code& code) {
  __shared__ uint4 staged[TILE * TILE / 16];
  const i64 first_row = (i64)blockIdx.y * TILE, first_column = (i64)blockIdx.x * TILE;
  const int piece = threadIdx.x % 16;
  const i64 column = first_column + 8 * piece;
  decltype(read(0, 0)) raw[8] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const i64 row = first_row + 4 * (threadIdx.x / 16) + 64 * (i / 4) + i % 4;
    if (row < rows && column < columns) raw[i] = read(row, column);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int group = threadIdx.x / 16 + 16 * half;  // of four rows
    uint2 codes[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const i64 row = first_row + 4 * group + r;
      codes[r] = code(raw[4 * half + r]);
      if (straight != nullptr && row < rows && column < columns) *(uint2*)(straight + row * columns + column) = codes[r];
    }
    if (transposed == nullptr) continue;
    u32 turned[2][4];
    transpose_bytes(turned[0], codes[0].x, codes[1].x, codes[2].x, codes[3].x);
    transpose_bytes(turned[1], codes[0].y, codes[1].y, codes[2].y, codes[3].y);
#pragma unroll
    for (int j = 0; j < 8; j++)
      ((u32*)staged)[(8 * piece + j) * (TILE / 4) + ((group / 4 ^ piece % 8) * 4) + group % 4] = turned[j / 4][j % 4];
  }
  if (transposed == nullptr) return;
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < TILE * TILE / 16; i += 256) {
    const int c = i / 8, part = i % 8;
    const i64 row = first_row + 16 * part;
    if (first_column + c < columns && row < rows)
      *(uint4*)(transposed + (first_column + c) * rows + row) = staged[c * 8 + (part ^ c / 8 % 8)];
  }
}

// The source [rows, columns] in codes. scale[0] is its largest magnitude or a bound on it; scale[INVERSE] = what codes are to be multiplied
// by, NaN if the source holds an infinity or a NaN, so that the product shows it.
template <class F>
__device__ __forceinline__ void convert(const SOURCE& source, float* scale, u8* straight, u8* transposed, i64 rows,
                                        i64 columns) {
  const u32 most = __float_as_uint(scale[0]);
  const int exponent = scale_exponent<F>(most);
  const float factor = __uint_as_float((u32)(127 + exponent) << 23);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
    scale[INVERSE] = most < 0x7f800000u ? __uint_as_float((u32)(127 - exponent) << 23) : not_a_number();
  write_tile(
      rows, columns, straight, transposed, [=](i64 row, i64 column) { return source.read(row * columns + column); },
      [=](const auto& raw) {
        float v[8];
        source.values(v, raw);
        const auto four = [&](int k) {
          return pack_fp8<F>(v[k] * factor, v[k + 1] * factor) | pack_fp8<F>(v[k + 2] * factor, v[k + 3] * factor) << 16;
        };
        return make_uint2(four(0), four(4));
      });
}

extern "C" __global__ void __launch_bounds__(256)
fp8_e4m3(const bf16* x, const bf16* dy, float* scale, u8* straight, u8* transposed, i64 rows, i64 columns) {
  convert<E4m3>(SOURCE{x, dy}, scale, straight, transposed, rows, columns);
}

extern "C" __global__ void __launch_bounds__(256)
fp8_e5m2(const bf16* x, const bf16* dy, float* scale, u8* straight, u8* transposed, i64 rows, i64 columns) {
  convert<E5m2>(SOURCE{x, dy}, scale, straight, transposed, rows, columns);
}

// Codes [rows, columns], whose rows begin `stride` bytes apart, as [columns, rows].
extern "C" __global__ void __launch_bounds__(256)
fp8_transpose(const u8* codes, i64 stride, u8* transposed, i64 rows, i64 columns) {
  write_tile(
      rows, columns, nullptr, transposed,
      [=](i64 row, i64 column) { return *(const uint2*)(codes + row * stride + column); },
      [](uint2 raw) { return raw; });
}
