// Cross entropy over rows of logits, a block for each row. A row is read once for its maximum and the sum of its
// exponentials together, and a second time for the gradient, from shared memory where a row fits there twice (one block
// reads while another one writes); the softmax exists only as the gradient that is being written.
//
// The host is not asked about targets outside the vocabulary: their loss and their gradients are NaN, which the
// gradient's norm will show.
#include "fp8.cuh"

typedef DTYPE T;
typedef DTYPE_INTO U;  // of crossentropy_scale: what is written

constexpr i32 IGNORED = -100;
constexpr int BLOCK = 512;
// A probability of 1 in e5m2, which holds up to 1.75 times that and down to 2^-31 of it.
constexpr float CODE_OF_ONE = 32768.0f;

// A row in pieces of 16 bytes from its first aligned number on; what lies before and after is taken one by one.
// body(index, Count<N>) runs for all of it.
template <class Body> __device__ __forceinline__ void each_in_row(const T* row, i64 n, const Body& body) {
  constexpr int N = WIDE<T>;
  i64 head = ((16 - ((u64)row & 15)) & 15) / sizeof(T);
  if (head > n) head = n;
  const i64 vectors = (n - head) / N;
  for (i64 i = threadIdx.x; i < head; i += BLOCK) body(i, Count<1>{});
#pragma unroll 2
  for (i64 i = threadIdx.x; i < vectors; i += BLOCK) body(head + i * N, Count<N>{});
  for (i64 i = head + vectors * N + threadIdx.x; i < n; i += BLOCK) body(i, Count<1>{});
}

struct RowSum {
  float top;  // largest logit
  float sum;  // of exp(logit - top); NaN if the row holds one
};

// Subtracted from exponents. Zero for a row of nothing but -inf, which must not become inf - inf.
__device__ __forceinline__ float base_of(float top) { return top == -positive_infinity() ? 0.0f : top; }
__device__ __forceinline__ float exp_of(float x) { return exp2_approximate(x * LOG2_E); }

// A thread's part of a row: its own maximum, and the sum, rescaled when that grows.
struct PartSum {
  float top = -positive_infinity(), sum = 0.0f;

  template <int N> __device__ __forceinline__ void take(const float (&x)[N]) {
    float most = x[0];
#pragma unroll
    for (int k = 1; k < N; k++) most = fmaxf(most, x[k]);
    if (most > top) {
      sum *= exp_of(top - base_of(most));
      top = most;
    }
    const float base = base_of(top);
#pragma unroll
    for (int k = 0; k < N; k++) sum += exp_of(x[k] - base);
  }

  // Sum over the whole block. Ends with a barrier.
  __device__ __forceinline__ RowSum row() const {
    __shared__ float room[32];
    const float all = block_max(top, room), base = base_of(all);
    return {all, block_sum(top == -positive_infinity() ? sum : sum * exp_of(top - base), room)};
  }
};

__device__ __forceinline__ RowSum row_sum(const T* row, i64 n) {
  PartSum part;
  each_in_row(row, n, [&](i64 i, auto count) {
    float x[decltype(count)::value];
    load(x, row + i);
    part.take(x);
  });
  return part.row();
}

// In float64: the difference of two large numbers is a small loss.
__device__ __forceinline__ float loss_of(RowSum s, float target_logit) {
  return (float)(log((double)s.sum) - ((double)target_logit - (double)base_of(s.top)));
}

// inverse_count[0] = 1 / (targets not ignored), 0 if there are none; first_bad[0] = the first target outside the
// vocabulary, or -1. One block of 1024.
extern "C" __global__ void __launch_bounds__(1024)
crossentropy_count(const i32* targets, float* inverse_count, i32* first_bad, i64 tokens, i64 vocab) {
  __shared__ i64 room[32];
  __shared__ i32 first;
  if (threadIdx.x == 0) first = 0x7fffffff;
  i64 count = 0;
  i32 bad = 0x7fffffff;
#pragma unroll 4
  for (i64 t = threadIdx.x; t < tokens; t += 1024) {
    const i32 id = targets[t];
    count += id != IGNORED;
    if (id != IGNORED && (id < 0 || id >= vocab) && t < bad) bad = (i32)t;
  }
  count = block_sum(count, room);
  if (bad != 0x7fffffff) atomicMin(&first, bad);
  __syncthreads();
  if (threadIdx.x != 0) return;
  inverse_count[0] = count == 0 ? 0.0f : (float)(1.0 / (double)count);
  first_bad[0] = first == 0x7fffffff ? -1 : first;
}

// Losses of rows and, unless null, their log-sum-exp; ignored rows are not read and have loss 0.
extern "C" __global__ void __launch_bounds__(BLOCK)
crossentropy_forward(const T* logits, const i32* targets, float* losses, float* lse, i64 vocab) {
  const i64 t = blockIdx.x;
  const i32 id = targets[t];
  const T* row = logits + t * vocab;
  const RowSum s = id == IGNORED ? RowSum{0.0f, 1.0f} : row_sum(row, vocab);
  if (threadIdx.x != 0) return;
  const bool known = id >= 0 && id < vocab;
  losses[t] = id == IGNORED ? 0.0f : known ? loss_of(s, read_one(row + id)) : not_a_number();
  if (lse != nullptr) lse[t] = (float)((double)base_of(s.top) + log((double)s.sum));
}

// The mean in float64, each thread adding a stretch of tokens in order. One block of 1024.
extern "C" __global__ void __launch_bounds__(1024)
crossentropy_mean(const float* losses, const float* inverse_count, float* loss, i64 tokens) {
  __shared__ double room[32];
  double sum = 0;
#pragma unroll 4
  for (i64 t = threadIdx.x; t < tokens; t += 1024) sum += losses[t];
  sum = block_sum(sum, room);
  if (threadIdx.x == 0) loss[0] = (float)(sum * inverse_count[0]);
}

// d_logits (+)= (softmax - onehot) * inverse_count * d_loss
extern "C" __global__ void __launch_bounds__(BLOCK)
crossentropy_backward(const T* logits, const i32* targets, const float* lse, const float* inverse_count,
                      const float* d_loss, T* d_logits, i64 vocab, int accumulate) {
  const i64 t = blockIdx.x;
  const i32 id = targets[t];
  const T* row = logits + t * vocab;
  T* out = d_logits + t * vocab;
  const bool ignored = id == IGNORED, known = id >= 0 && id < vocab;
  if (ignored && accumulate) return;
  const float scale = known ? inverse_count[0] * d_loss[0] : not_a_number(), shift = ignored ? 0.0f : lse[t];
  const auto body = [=](i64 i, auto count) {
    constexpr int N = decltype(count)::value;
    float x[N] = {};
    if (!ignored) {
      load(x, row + i);
#pragma unroll
      for (int k = 0; k < N; k++) x[k] = exp_of(x[k] - shift) * scale - (i + k == id ? scale : 0.0f);
    }
    store(out + i, x, accumulate);
  };
  // Rows of both tensors are aligned alike, or everything is taken one by one.
  if (((u64)row & 15) == ((u64)out & 15)) return each_in_row(out, vocab, body);
  for (i64 i = threadIdx.x; i < vocab; i += BLOCK) body(i, Count<1>{});
}

// Losses of rows, and the gradient for a slope of 1 in place of the logits.
extern "C" __global__ void __launch_bounds__(BLOCK)
crossentropy_in_place(T* logits, const i32* targets, const float* inverse_count, float* losses, i64 vocab) {
  const i64 t = blockIdx.x;
  const i32 id = targets[t];
  T* row = logits + t * vocab;
  if (id == IGNORED) {
    if (threadIdx.x == 0) losses[t] = 0.0f;
    each_in_row(row, vocab, [=](i64 i, auto count) {
      const float zeros[decltype(count)::value] = {};
      store(row + i, zeros);
    });
    return;
  }
  const bool known = id >= 0 && id < vocab;
  const float target_logit = known ? read_one(row + id) : not_a_number();
  const RowSum s = row_sum(row, vocab);
  // row_sum ends with a barrier: no thread writes before all have read the target's logit.
  if (threadIdx.x == 0) losses[t] = known ? loss_of(s, target_logit) : not_a_number();
  const float scale = known ? inverse_count[0] : not_a_number(), base = base_of(s.top), share = scale / s.sum;
  each_in_row(row, vocab, [=](i64 i, auto count) {
    constexpr int N = decltype(count)::value;
    float x[N];
    load(x, row + i);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = exp_of(x[k] - base) * share - (i + k == id ? scale : 0.0f);
    store(row + i, x);
  });
}

// Eight numbers as codes in e5m2.
template <int N> __device__ __forceinline__ uint2 e5m2_codes(const float (&x)[N]) {
  const auto four = [&](int k) { return pack_fp8<E5m2>(x[k], x[k + 1]) | pack_fp8<E5m2>(x[k + 2], x[k + 3]) << 16; };
  return make_uint2(four(0), four(4));
}

// The same with one read of the logits, for rows of whole 16-byte pieces from an aligned address on, whose pieces fit
// into the shared memory. With CODES the gradient, as a multiple of `inverse_count` times 2^-15, is written in e5m2 to
// the first half of the row.
template <bool CODES>
__device__ __forceinline__ void staged_row(T* logits, const i32* targets, const float* inverse_count, float* losses,
                                           i64 vocab) {
  constexpr int N = WIDE<T>, BATCH = 4;
  extern __shared__ uint4 staged[];
  const int pieces = (int)(vocab / N);
  const i64 t = blockIdx.x;
  const i32 id = targets[t];
  T* row = logits + t * vocab;
  uint4* const out = (uint4*)row;
  if (id == IGNORED) {
    if (threadIdx.x == 0) losses[t] = 0.0f;
    for (int i = threadIdx.x; i < (CODES ? pieces / 2 : pieces); i += BLOCK) out[i] = make_uint4(0, 0, 0, 0);
    return;
  }
  const bool known = id >= 0 && id < vocab;
  // A thread reads back only what it has staged itself, so no barrier is needed here. Several pieces are on their
  // way at a time.
  PartSum part;
  int first = threadIdx.x;
  for (; first + (BATCH - 1) * BLOCK < pieces; first += BATCH * BLOCK) {
    uint4 raw[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) raw[b] = out[first + b * BLOCK];
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      staged[first + b * BLOCK] = raw[b];
      float x[N];
      load(x, (const T*)&raw[b]);
      part.take(x);
    }
  }
  for (; first < pieces; first += BLOCK) {
    const uint4 raw = out[first];
    staged[first] = raw;
    float x[N];
    load(x, (const T*)&raw);
    part.take(x);
  }
  const RowSum s = part.row();
  if (threadIdx.x == 0) losses[t] = known ? loss_of(s, read_one((const T*)staged + id)) : not_a_number();
  const float scale = known ? CODES ? CODE_OF_ONE : inverse_count[0] : not_a_number();
  const float base = base_of(s.top), share = scale / s.sum;
#pragma unroll 2
  for (int i = threadIdx.x; i < pieces; i += BLOCK) {
    float x[N];
    load(x, (const T*)(staged + i));
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = exp_of(x[k] - base) * share;
    if (i == id / N) {
#pragma unroll
      for (int k = 0; k < N; k++) x[k] -= i * N + k == id ? scale : 0.0f;
    }
    if constexpr (CODES) ((uint2*)row)[i] = e5m2_codes(x);
    else store(row + i * N, x);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 2)
crossentropy_staged(T* logits, const i32* targets, const float* inverse_count, float* losses, i64 vocab) {
  staged_row<false>(logits, targets, inverse_count, losses, vocab);
}

#ifdef CODES_OF_LOGITS
// factor[0] = what the codes are to be multiplied by. bf16 logits, vocab a multiple of 16.
extern "C" __global__ void __launch_bounds__(BLOCK, 2)
crossentropy_codes(bf16* logits, const i32* targets, const float* inverse_count, float* losses, float* factor, i64 vocab) {
  if (blockIdx.x == 0 && threadIdx.x == 0) factor[0] = inverse_count[0] / CODE_OF_ONE;
  staged_row<true>(logits, targets, inverse_count, losses, vocab);
}
#endif

// into (+)= value * factor[0]
extern "C" __global__ void __launch_bounds__(256)
crossentropy_scale(const T* value, const float* factor, U* into, i64 count, int accumulate) {
  const float scale = factor[0];
  each<WIDE<T>>(count, aligned(value) && aligned(into), [=](i64 i, auto n) {
    constexpr int N = decltype(n)::value;
    float x[N];
    load(x, value + i);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] *= scale;
    store(into + i, x, accumulate);
  });
}
