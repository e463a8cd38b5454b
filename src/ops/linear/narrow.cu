// Products with few columns (the gate's 3 numbers a head), where all the time goes into one pass over x or dx: a library
// made for square products reads rows of 72 bytes in small pieces. Tensor cores, bf16 in, f32 sums.
//
// OUTPUTS, even and at most 64, is the number of outputs of the layer; inputs are a multiple of 32.
#include "elements.cuh"

constexpr int BLOCK = 256, WARPS = BLOCK / 32, ROWS = 32;  // rows of a warp: two tiles of 16

// d [16,8] += a [16,16] b [16,8]. Lane 4g + t holds of a the rows g and g+8 (a[0] and a[2], a[1] and a[3]) at the terms
// 2t, 2t+1 and 2t+8, 2t+9; of b column g at the same terms; of d the rows g and g+8 at columns 2t, 2t+1.
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// y [rows, OUTPUTS] = x [rows, inputs] w [OUTPUTS, inputs]ᵀ, straight from memory to the tensor cores: in which order the
// terms of a sum come is free, so lane t takes eight neighbours, 16 bytes, of every 32 terms for two products. A warp has
// 32 rows; w comes from the L1 cache.
extern "C" __global__ void __launch_bounds__(BLOCK, 2)
narrow_forward(const bf16* x, const bf16* w, bf16* y, i64 rows, int inputs) {
  constexpr int TILES = (OUTPUTS + 7) / 8;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const i64 first = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
  if (first >= rows) return;
  const uint4* from[4];  // rows g, g + 8, g + 16, g + 24; one that is not there is another's, and is not written
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const i64 row = first + g + 8 * r;
    from[r] = (const uint4*)(x + (row < rows ? row : first) * inputs) + t;
  }
  const uint4* const weights = (const uint4*)(w + (i64)g * inputs) + t;
  const int stride = inputs;  // 16-byte pieces of eight rows of w
  float sums[2][TILES][4] = {};
  const int steps = inputs / 32;
  uint4 next[4];
#pragma unroll
  for (int r = 0; r < 4; r++) next[r] = from[r][0];
  for (int step = 0; step < steps; step++) {
    uint4 now[4], b[TILES];
#pragma unroll
    for (int r = 0; r < 4; r++) now[r] = next[r];
    if (step + 1 < steps) {
#pragma unroll
      for (int r = 0; r < 4; r++) next[r] = from[r][4 * (step + 1)];
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
      b[n] = OUTPUTS % 8 == 0 || n < TILES - 1 || n * 8 + g < OUTPUTS ? weights[n * stride + 4 * step]
                                                                      : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const uint4 upper = now[2 * m], lower = now[2 * m + 1];
      const u32 a[4] = {upper.x, lower.x, upper.y, lower.y}, c[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        multiply(sums[m][n], a, b[n].x, b[n].y);
        multiply(sums[m][n], c, b[n].z, b[n].w);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const i64 row = first + g + 8 * r;
    if (row >= rows) continue;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int column = n * 8 + 2 * t;
      const float* sum = sums[r / 2][n] + 2 * (r % 2);
      if (column < OUTPUTS) *(u32*)(y + row * OUTPUTS + column) = pack_bf16(sum[0], sum[1]);
    }
  }
}

// dx [rows, inputs] (+)= dy [rows, OUTPUTS] w [OUTPUTS, inputs]: a block has COLUMNS of dx and keeps their part of w, two
// rows of it in a word, as the tensor cores want it. Which column of a tile is which of dx is free as well: a lane gets
// eight neighbours, 16 bytes, out of four tiles.
constexpr int COLUMNS = 256, PITCH = COLUMNS + 2;  // the pitch keeps the lanes of a warp in different banks

extern "C" __global__ void __launch_bounds__(BLOCK, 2)
narrow_backward_input(const bf16* dy, const bf16* w, bf16* dx, i64 rows, int inputs, int accumulate) {
  constexpr int STEPS = (OUTPUTS + 15) / 16;
  __shared__ u32 pairs[8 * STEPS][PITCH];
  const int begin = (int)blockIdx.y * COLUMNS, columns = inputs - begin < COLUMNS ? inputs - begin : COLUMNS;
  for (int i = threadIdx.x; i < 8 * STEPS * columns; i += BLOCK) {
    const int pair = i / columns, column = i - pair * columns;
    const bf16* from = w + (i64)(2 * pair) * inputs + begin + column;
    pairs[pair][column] = 2 * pair < OUTPUTS ? (u32)from[0] | (u32)from[inputs] << 16 : 0;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const i64 first = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
  if (first >= rows) return;
  u32 a[2][STEPS][4];
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const i64 row = first + 16 * m + g + 8 * (i % 2);
        const int term = 16 * s + 2 * t + 8 * (i / 2);
        a[m][s][i] = row < rows && term < OUTPUTS ? *(const u32*)(dy + row * OUTPUTS + term) : 0;
      }
  for (int column = 0; column < columns; column += 32) {
    float sums[2][4][4] = {};
    const u32* const at = &pairs[t][column + 8 * (g / 2) + g % 2];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const u32 b0 = at[8 * s * PITCH + 2 * n], b1 = at[(8 * s + 4) * PITCH + 2 * n];
        multiply(sums[0][n], a[0][s], b0, b1);
        multiply(sums[1][n], a[1][s], b0, b1);
      }
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const i64 row = first + g + 8 * r;
      if (row >= rows) continue;
      float out[8];
#pragma unroll
      for (int n = 0; n < 4; n++) {
        out[2 * n] = sums[r / 2][n][2 * (r % 2)];
        out[2 * n + 1] = sums[r / 2][n][2 * (r % 2) + 1];
      }
      store(dx + row * inputs + begin + column + 8 * t, out, accumulate);
    }
  }
}
