// The two ends of a decode step: the token's embedding with the rotations of its position, and the choice of the next.
#include "../../../rope/angle.cuh"
#include "decode.cuh"

#ifndef DIM
#define DIM 768
#endif

// x [batch][DIM] = table[ids]; rotations [batch][2][DK / 2] of the token's position, and of the first position of the
// compressed block that it may complete. frequencies: [DK / 2].
extern "C" __global__ void __launch_bounds__(256) step_begin(const float* table, const int* ids, const int* positions,
                                                             const float* frequencies, float scale, float amplitude,
                                                             bf16* x, float2* rotations, int vocabulary) {
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.x, id = ids[b];
  const bool known = id >= 0 && id < vocabulary;
  for (int c = threadIdx.x; c < DIM; c += 256)
    write_one(x + (i64)b * DIM + c, known ? table[(i64)id * DIM + c] : not_a_number());
  for (int i = threadIdx.x; i < DK; i += 256) {
    const int position = i < DK / 2 ? positions[b] : count_compressed(positions[b]) * CMP_D;
    const float2 turn = cosine_sine(__fmul_rn(__fdiv_rn((float)position, scale), frequencies[i % (DK / 2)]));
    rotations[b * DK + i] = make_float2(amplitude * turn.x, amplitude * turn.y);
  }
}

// Bias and norms of the fused projection [batch][columns], in place, a warp for each head: HEADS queries, then GROUPS
// keys and GROUPS values for each of `branches`. bias: [columns], or null; query_norm and key_norm: [DK], or null.
extern "C" __global__ void __launch_bounds__(128) step_heads(bf16* projection, const float* bias,
                                                             const float* query_norm, const float* key_norm,
                                                             float epsilon, int branches) {
  constexpr int PER_LANE = ((DK > DV ? DK : DV) + 31) / 32;
  let_next_start();
  wait_for_previous();
  const int head = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (head >= HEADS + 2 * branches * GROUPS) return;
  const int behind = head - HEADS, branch = behind / (2 * GROUPS), within = behind % (2 * GROUPS);
  const bool is_query = behind < 0, is_value = !is_query && within >= GROUPS;
  const int size = is_value ? DV : DK;
  const int column = is_query ? head * DK
                              : HEADS * DK + branch * GROUPS * (DK + DV) +
                                    (is_value ? GROUPS * DK + (within - GROUPS) * DV : within * DK);
  bf16* const row = projection + (i64)blockIdx.y * (HEADS * DK + branches * GROUPS * (DK + DV)) + column;
  float x[PER_LANE], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int c = lane + 32 * i;
    x[i] = c < size ? read_one(row + c) + (bias != nullptr ? bias[column + c] : 0.0f) : 0.0f;
    squares += x[i] * x[i];
  }
  squares = warp_sum(squares);
  const float* const weight = is_value ? nullptr : is_query ? query_norm : key_norm;
  const float scale = 1.0f / sqrtf(squares / (float)size + epsilon);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int c = lane + 32 * i;
    if (c < size) write_one(row + c, weight != nullptr ? x[i] * scale * weight[c] : x[i]);
  }
}

// The most probable of the first `vocabulary` tokens, the lower of equals, -1 if logits are not sound, becomes the next
// input of its sequence, which is one token longer now. A host that draws tokens by itself writes over `ids` before the
// next step.
extern "C" __global__ void __launch_bounds__(1024) step_end(const float* logits, int width, int vocabulary, int* ids,
                                                            int* positions, int* next) {
  __shared__ float values[32];
  __shared__ int indices[32];
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* row = logits + (i64)b * width;
  float best = -positive_infinity();
  int index = 0x7fffffff;
  const auto offer = [&](float value, int at) {
    if (value > best || (value == best && at < index)) best = value, index = at;
  };
  // One block reads a whole row: many loads must be in flight.
  constexpr int AHEAD = 16;
  for (int first = threadIdx.x; first < vocabulary; first += AHEAD * 1024) {
    float x[AHEAD];
#pragma unroll
    for (int n = 0; n < AHEAD; n++) x[n] = first + n * 1024 < vocabulary ? row[first + n * 1024] : -positive_infinity();
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      if (first + n * 1024 >= vocabulary) break;
      // NaN and +inf win, as token -1: a sound model never produces them.
      if (x[n] != x[n] || x[n] == positive_infinity()) offer(positive_infinity(), -1);
      else offer(x[n], first + n * 1024);
    }
  }
  const auto reduce = [&] {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) offer(__shfl_xor_sync(~0u, best, step), __shfl_xor_sync(~0u, index, step));
  };
  reduce();
  if (lane == 0) values[warp] = best, indices[warp] = index;
  __syncthreads();
  if (warp != 0) return;
  best = values[lane], index = indices[lane];
  reduce();
  if (lane != 0) return;
  if (best == -positive_infinity()) index = -1;  // every token is ruled out
  next[b] = index;
  ids[b] = index;
  positions[b] += 1;
}
