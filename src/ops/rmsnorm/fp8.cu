// RMSNorm whose result is written in e4m3 alone, in both layouts, so that the bf16 rows are read once and nothing else is.
// A warp holds four rows at a time in registers, VECTORS pieces of 16 bytes of each in every thread; a block takes ROWS
// rows and collects their codes by column in shared memory.
#include "fp8.cuh"

constexpr int BLOCK = 256, TOGETHER = 4, WORDS = ROWS / 4;  // words of a column's codes

// Position of word `g` of column `c`. Threads that write hold columns 8 apart, which would all be in one bank: words are
// exchanged by the column.
__device__ __forceinline__ int place(int c, int g) { return c * WORDS + (g ^ c / 8 % WORDS); }

// `x` [rows, dim] and `weight` [dim]; dim is a multiple of 16 and at most 256 VECTORS, rows are a multiple of 16. scale[0] is
// a bound on the result; scale[INVERSE] = what codes are to be multiplied by, NaN if the bound is not finite. `transposed`
// may be null.
extern "C" __global__ void __launch_bounds__(BLOCK)
rmsnorm_codes(const bf16* x, const float* weight, float* scale, float* inverse_rms, u8* straight, u8* transposed,
              i64 rows, int dim, float epsilon) {
  extern __shared__ uint4 columns[];  // [dim][ROWS] codes
  const int lane = threadIdx.x % 32;
  const i64 first = (i64)blockIdx.x * ROWS;
  const u32 most = __float_as_uint(scale[0]);
  const int exponent = scale_exponent<E4m3>(most);
  const float factor = __uint_as_float((u32)(127 + exponent) << 23);
  if (blockIdx.x == 0 && threadIdx.x == 0)
    scale[INVERSE] = most < 0x7f800000u ? __uint_as_float((u32)(127 - exponent) << 23) : not_a_number();
  for (int group = threadIdx.x / 32; group < WORDS; group += BLOCK / 32) {
    const i64 row = first + TOGETHER * group;
    if (row >= rows) break;
    uint4 raw[TOGETHER][VECTORS];
#pragma unroll
    for (int r = 0; r < TOGETHER; r++)
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        const int column = 8 * (32 * v + lane);
        raw[r][v] = column < dim ? *(const uint4*)(x + (row + r) * dim + column) : make_uint4(0, 0, 0, 0);
      }
    float size[TOGETHER];
#pragma unroll
    for (int r = 0; r < TOGETHER; r++) {
      float squares = 0.0f;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        float a[8];
        load(a, (const bf16*)&raw[r][v]);
#pragma unroll
        for (int k = 0; k < 8; k++) squares += a[k] * a[k];
      }
      size[r] = 1.0f / sqrtf(warp_sum(squares) / (float)dim + epsilon);
      if (lane == 0) inverse_rms[row + r] = size[r];
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int column = 8 * (32 * v + lane);
      if (column >= dim) break;
      float w[8];
      load(w, weight + column);
      uint2 codes[TOGETHER];
#pragma unroll
      for (int r = 0; r < TOGETHER; r++) {
        float a[8];
        load(a, (const bf16*)&raw[r][v]);
#pragma unroll
        for (int k = 0; k < 8; k++) a[k] *= size[r] * w[k] * factor;
        codes[r] = make_uint2(pack_fp8<E4m3>(a[0], a[1]) | pack_fp8<E4m3>(a[2], a[3]) << 16,
                              pack_fp8<E4m3>(a[4], a[5]) | pack_fp8<E4m3>(a[6], a[7]) << 16);
        *(uint2*)(straight + (row + r) * dim + column) = codes[r];
      }
      if (transposed == nullptr) continue;
      u32 turned[2][4];
      transpose_bytes(turned[0], codes[0].x, codes[1].x, codes[2].x, codes[3].x);
      transpose_bytes(turned[1], codes[0].y, codes[1].y, codes[2].y, codes[3].y);
#pragma unroll
      for (int j = 0; j < 8; j++) ((u32*)columns)[place(column + j, group)] = turned[j / 4][j % 4];
    }
  }
  if (transposed == nullptr) return;
  __syncthreads();
  for (int i = threadIdx.x; i < dim * (ROWS / 16); i += BLOCK) {
    const int c = i / (ROWS / 16), part = i % (ROWS / 16);
    if (first + 16 * part >= rows) continue;
    const int s = c / 8 % WORDS;
    uint4 piece = columns[place(c, 4 * part) / 4];
    if (s & 1) piece = make_uint4(piece.y, piece.x, piece.w, piece.z);
    if (s & 2) piece = make_uint4(piece.z, piece.w, piece.x, piece.y);
    *(uint4*)(transposed + c * rows + first + 16 * part) = piece;
  }
}
