// Matrices in FP8 for the tensor cores: the largest magnitude of a bf16 matrix, its conversion to e4m3 or e5m2, and the
// transposed copy that a product over the rows needs, because cuBLASLt multiplies FP8 only along contiguous terms.
#include "fp8.cuh"

// scale[0] = the largest magnitude, NaN above infinity above all numbers, as their bits are ordered; it must be zero
// before. `count` is a multiple of 8.
extern "C" __global__ void __launch_bounds__(256) fp8_largest(const bf16* x, float* scale, i64 count) {
  const i64 pieces = count / 8, threads = (i64)gridDim.x * blockDim.x;
  u32 top = 0;
  const auto take = [&](u32 pair) {
    const u32 low = pair << 16 & 0x7fff0000u, high = pair & 0x7fff0000u, larger = low > high ? low : high;
    if (larger > top) top = larger;
  };
#pragma unroll 4
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += threads) {
    const uint4 eight = ((const uint4*)x)[i];
    take(eight.x), take(eight.y), take(eight.z), take(eight.w);
  }
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) {
    const u32 other = __shfl_xor_sync(~0u, top, s);
    if (other > top) top = other;
  }
  if (threadIdx.x % 32 == 0 && top > 0) atomicMax((u32*)scale, top);
}

constexpr int TILE = 128;  // rows and columns of a block's tile (fp8.ts has the same)

// The byte b of four words as one word, for b = 0 ... 3.
__device__ __forceinline__ void transpose_bytes(u32 (&to)[4], u32 a, u32 b, u32 c, u32 d) {
  const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  const u32 upper_ab = __byte_perm(a, b, 0x7362), upper_cd = __byte_perm(c, d, 0x7362);
  to[0] = __byte_perm(ab, cd, 0x5410), to[1] = __byte_perm(ab, cd, 0x7632);
  to[2] = __byte_perm(upper_ab, upper_cd, 0x5410), to[3] = __byte_perm(upper_ab, upper_cd, 0x7632);
}

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

// x [rows, columns] in codes. scale[0] is its largest magnitude; scale[1] = what codes are to be multiplied by, NaN if x
// holds an infinity or a NaN, so that the product shows it.
template <class F>
__device__ __forceinline__ void quantise(const bf16* x, float* scale, u8* straight, u8* transposed, i64 rows,
                                         i64 columns) {
  const u32 most = __float_as_uint(scale[0]);
  const int exponent = scale_exponent<F>(most);
  const float factor = __uint_as_float((u32)(127 + exponent) << 23);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
    scale[1] = most < 0x7f800000u ? __uint_as_float((u32)(127 - exponent) << 23) : not_a_number();
  write_tile(
      rows, columns, straight, transposed,
      [=](i64 row, i64 column) { return *(const uint4*)(x + row * columns + column); },
      [=](uint4 raw) {
        const auto two = [=](u32 pair) { return pack_fp8<F>(low_bf16(pair) * factor, high_bf16(pair) * factor); };
        return make_uint2(two(raw.x) | two(raw.y) << 16, two(raw.z) | two(raw.w) << 16);
      });
}

extern "C" __global__ void __launch_bounds__(256)
fp8_e4m3(const bf16* x, float* scale, u8* straight, u8* transposed, i64 rows, i64 columns) {
  quantise<E4m3>(x, scale, straight, transposed, rows, columns);
}

extern "C" __global__ void __launch_bounds__(256)
fp8_e5m2(const bf16* x, float* scale, u8* straight, u8* transposed, i64 rows, i64 columns) {
  quantise<E5m2>(x, scale, straight, transposed, rows, columns);
}

// Codes [rows, columns], whose rows begin `stride` bytes apart, as [columns, rows].
extern "C" __global__ void __launch_bounds__(256)
fp8_transpose(const u8* codes, i64 stride, u8* transposed, i64 rows, i64 columns) {
  write_tile(
      rows, columns, nullptr, transposed,
      [=](i64 row, i64 column) { return *(const uint2*)(codes + row * stride + column); },
      [](uint2 raw) { return raw; });
}
