// The end of the queries' gradient: shares of the selected branch are added to what the other branches gave, and the
// result is turned back by the rotary angles into the gradient of the fused projection. Eight columns a thread.
#include "../../rope/angle.cuh"
#include "../shape.cuh"
#include "elements.cuh"

constexpr int DQ_LANES = DK <= 32 ? 4 : DK <= 64 ? 8 : DK <= 128 ? 16 : 32;  // threads of a row (token, head)
constexpr int ROWS = 256 / DQ_LANES, HALF = DK / 2;
constexpr int TOKENS = (ROWS - 1 + HEADS - 1) / HEADS + 1;  // that the rows of a block belong to, at most

static_assert(HALF % 8 == 0, "a thread's columns lie in one half of a head");

// dq [T, H, Dk] holds the gradient of the compressed and window branches. Without d_fused (null) the shares are added
// to it. Otherwise dq is only read, and the first H * Dk of d_fused's `width` columns get the gradient before rotation.
extern "C" __global__ void __launch_bounds__(256)
selected_query_gradient(bf16* dq, const bf16* shares, const int* selected, int tokens, bf16* d_fused, i64 width,
                        const float* frequencies, float position_scale, float amplitude, const int* cu_seqlens,
                        int sequences) {
  __shared__ float2 turns[TOKENS * HALF];  // cosine and sine of the block's tokens
  const i64 first = (i64)blockIdx.x * ROWS, row = first + threadIdx.x / DQ_LANES, rows = (i64)tokens * HEADS;
  const int chunk = threadIdx.x % DQ_LANES, first_token = (int)(first / HEADS);
  if (d_fused != nullptr) {
    const int last = (int)((first + ROWS < rows ? first + ROWS : rows) - 1) / HEADS;
    for (int i = threadIdx.x; i < (last - first_token + 1) * HALF; i += 256) {
      const int t = first_token + i / HALF, position = t - cu_seqlens[sequence_of(cu_seqlens, sequences, t)];
      const float2 turn = cosine_sine(__fmul_rn(__fdiv_rn((float)position, position_scale), frequencies[i % HALF]));
      turns[i] = make_float2(amplitude * turn.x, amplitude * turn.y);
    }
  }
  const bool present = row < rows && chunk * 8 < DK;
  const int token = present ? (int)(row / HEADS) : first_token, head = present ? (int)(row % HEADS) : 0;
  float o[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  if (present) {
    const i64 group = (i64)token * GROUPS + head / HPG;
    const int* const blocks = selected + group * SEL_N;
    const bf16* const own = shares + (group * SEL_N * HPG + head % HPG) * DK + chunk * 8;
    const auto add = [&](const uint4 x) {
      o[0] += low_bf16(x.x), o[1] += high_bf16(x.x), o[2] += low_bf16(x.y), o[3] += high_bf16(x.y);
      o[4] += low_bf16(x.z), o[5] += high_bf16(x.z), o[6] += low_bf16(x.w), o[7] += high_bf16(x.w);
    };
#pragma unroll
    for (int s = 0; s < SEL_N; s++)
      if (blocks[s] >= 0) add(*(const uint4*)(own + s * HPG * DK));
    const float scale = 1.0f / sqrtf((float)DK);
#pragma unroll
    for (int i = 0; i < 8; i++) o[i] *= scale;
    add(*(const uint4*)(dq + row * DK + chunk * 8));
  }
  if (d_fused == nullptr) {
    if (present) store(dq + row * DK + chunk * 8, o);
    return;
  }
  __syncthreads();
  const bool upper = chunk * 8 >= HALF;  // the pair of column j is column j + HALF, in another lane of the row
  const int other = chunk * 8 < DK ? (upper ? chunk - HALF / 8 : chunk + HALF / 8) : chunk;
  const float2* const angles = turns + (token - first_token) * HALF + (chunk * 8 < DK ? chunk * 8 % HALF : 0);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float pair = __shfl_sync(~0u, o[i], (int)threadIdx.x % 32 - chunk + other);
    const float2 angle = angles[i];
    o[i] = o[i] * angle.x + pair * (upper ? -angle.y : angle.y);
  }
  if (present) store(d_fused + (i64)token * width + head * DK + chunk * 8, o);
}
