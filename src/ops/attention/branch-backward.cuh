// The backward passes of the branch kernels: dq row by row, dk and dv key by key. Included by branch.cuh.
#pragma once

struct Gradients {
  const Element* out;
  const float* lse;
  const Element* d_out;
  bool accumulate_q, accumulate_k, accumulate_v;
};

// dots[i] of load_tile, summed over the sixteen threads of each row, become the rows' deltas: sum of d_out * out.
__device__ __forceinline__ void store_deltas(float* delta, const float (&dots)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float sum = row_sum(dots[i]);
    if (threadIdx.x % 16 == 0) delta[i * 16 + threadIdx.x / 16] = sum;
  }
}

// From scores and d_out * v to probabilities and the gradients of the scores, both 0 where the row does not see the
// key.
__device__ __forceinline__ void score_gradients(float (&score)[4][4], float (&d_score)[4][4], const i64* place,
                                                const u64* seen, const float* delta, const float* lse, float scale) {
  const int y = threadIdx.x / 16 * 4, x = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u64 mask = seen[y + i];
    const float row_lse = mask ? lse[place[y + i]] : 0.0f, row_delta = delta[y + i];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const bool visible = sees(mask, x + 16 * j);
      const float p = visible ? expf(score[i][j] * scale - row_lse) : 0.0f;
      score[i][j] = p;
      d_score[i][j] = visible ? p * (d_score[i][j] - row_delta) : 0.0f;
    }
  }
}

__device__ __forceinline__ void store_tile(float* to, const float (&values)[4][4]) {
  const int y = threadIdx.x / 16 * 4, x = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) to[(y + i) * STRIDE + x + 16 * j] = values[i][j];
}

// dq, rows by rows.
template <class Visible> __device__ __forceinline__ void attend_backward_queries(const Inputs& in,
                                                                                 const Visible& visible,
                                                                                 const Gradients& g, Element* dq) {
  __shared__ i64 place[TILE];
  __shared__ u64 seen[TILE];
  __shared__ float delta[TILE];
  float *const queries = tile_buffer(0), *const d_outs = tile_buffer(1), *const others = tile_buffer(2);
  float* const weights = tile_buffer(3);
  const int y = threadIdx.x / 16 * 4, x = threadIdx.x % 16;
  const float scale = in.scale();
  const auto row = [&](int r) { return place[r]; };
  Walk walk(in.offsets, in.sequences, in.tile_tokens());
  for (i64 item = blockIdx.x; walk.seek(item / in.groups); item += gridDim.x) {
    Span span(in, walk.sequence, (int)(item % in.groups));
    set_tokens(span, walk);
    __syncthreads();
    place_rows(place, in, span);
    __syncthreads();
    if (KC == 1) load_tile(queries, in.q, in.dk, 0, row);
    float dots[4] = {};
#pragma unroll
    for (int c = 0; c < VC; c++) load_tile(d_outs, g.d_out, in.dv, c * TILE, row, g.out, dots);
    store_deltas(delta, dots);
    float result[KC][4][4] = {};
    for (int tile = visible.next(in, span, -1); tile >= 0; tile = visible.next(in, span, tile)) {
      const int k0 = tile * TILE;
      const auto key = [&](int r) { return span.key(in, k0 + r); };
      __syncthreads();
      mark_rows(seen, in, visible, span, k0);
      float score[4][4] = {}, d_score[4][4] = {};
#pragma unroll
      for (int c = 0; c < VC; c++) {
        if (c > 0) __syncthreads();
        if (VC > 1) load_tile(d_outs, g.d_out, in.dv, c * TILE, row);
        load_tile(others, in.v, in.dv, c * TILE, key);
        __syncthreads();
        multiply_rows(d_score, d_outs, others, used_columns(in.dv, c));
      }
      float zero = 0;
#pragma unroll
      for (int c = 0; c < KC; c++) {
        __syncthreads();
        if (KC > 1) load_tile(queries, in.q, in.dk, c * TILE, row);
        zero = load_tile(others, in.k, in.dk, c * TILE, key);
        __syncthreads();
        multiply_rows(score, queries, others, used_columns(in.dk, c));
      }
      score_gradients(score, d_score, place, seen, delta, g.lse, scale);
      store_tile(weights, d_score);
#pragma unroll
      for (int c = 0; c < KC; c++) {
        if (KC > 1) {
          __syncthreads();
          zero = load_tile(others, in.k, in.dk, c * TILE, key);
        }
        const bool guarded = __syncthreads_or(zero != 0.0f);
        multiply_keys(result[c], weights, others, seen, guarded);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const i64 at = place[y + i];
      if (at < 0) continue;
#pragma unroll
      for (int c = 0; c < KC; c++) put4(dq + at * in.dk, in.dk, c * TILE + x * 4, result[c][i], scale, g.accumulate_q);
    }
  }
}

// dk and dv, keys by keys. The tokens that see a tile of keys are found by asking all that may: the table of a token's
// selected blocks is small, and nothing has to be held but the next few tokens.
template <class Visible> __device__ __forceinline__ void attend_backward_keys(const Inputs& in, const Visible& visible,
                                                                              const Gradients& g, Element* d_k,
                                                                              Element* d_v) {
  __shared__ i64 place[TILE];
  __shared__ u64 seen[TILE];
  __shared__ float delta[TILE];
  __shared__ u64 waiting_mask[THREADS + TILE];
  __shared__ int waiting_token[THREADS + TILE];
  __shared__ int found[WARPS];
  float *const keys = tile_buffer(0), *const values = tile_buffer(1), *const others = tile_buffer(2);
  float* const weights = tile_buffer(3);
  const int y = threadIdx.x / 16 * 4, x = threadIdx.x % 16, h = in.per_group(), size = in.tile_tokens();
  const float scale = in.scale();
  const auto row = [&](int r) { return place[r]; };
  Walk walk(in.key_offsets, in.sequences, TILE);
  for (i64 item = blockIdx.x; walk.seek(item / in.groups); item += gridDim.x) {
    const Span span(in, walk.sequence, (int)(item % in.groups));
    const int k0 = walk.tile * TILE;
    const auto key = [&](int r) { return span.key(in, k0 + r); };
    __syncthreads();
    if (KC == 1) load_tile(keys, in.k, in.dk, 0, key);
    if (VC == 1) load_tile(values, in.v, in.dv, 0, key);
    float d_keys[KC][4][4] = {}, d_values[VC][4][4] = {};
    i64 token = visible.first_token(k0), end = visible.end_token(k0);
    if (end > span.length) end = span.length;
    int waiting = 0, begin = 0;
    for (;;) {
      while (waiting < size && token < end) {
        // The tokens that still wait move to the front, those found among the next THREADS tokens go after them.
        u64 mask = 0;
        int moved = 0;
        if (threadIdx.x < waiting) mask = waiting_mask[begin + threadIdx.x], moved = waiting_token[begin + threadIdx.x];
        __syncthreads();
        if (threadIdx.x < waiting) waiting_mask[threadIdx.x] = mask, waiting_token[threadIdx.x] = moved;
        begin = 0;
        const i64 t = token + threadIdx.x;
        mask = t < end ? visible.mask(in, span, (int)t, k0) : 0;
        const u32 ballot = __ballot_sync(~0u, mask != 0);
        if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = __popc(ballot);
        __syncthreads();
        int at = waiting + __popc(ballot & ((1u << threadIdx.x % 32) - 1));
        for (int w = 0; w < WARPS; w++) {
          if (w < threadIdx.x / 32) at += found[w];
          waiting += found[w];
        }
        if (mask != 0) waiting_mask[at] = mask, waiting_token[at] = (int)t;
        token += THREADS;
        __syncthreads();
      }
      if (waiting == 0) break;
      const int count = min(waiting, size);
      __syncthreads();
      if (threadIdx.x < TILE) {
        const int i = threadIdx.x / h;
        place[threadIdx.x] = i < count ? span.row(in, waiting_token[begin + i], threadIdx.x % h) : -1;
        seen[threadIdx.x] = i < count ? waiting_mask[begin + i] : 0;
      }
      begin += count;
      waiting -= count;
      float score[4][4] = {}, d_score[4][4] = {}, dots[4] = {};
#pragma unroll
      for (int c = 0; c < VC; c++) {
        __syncthreads();
        load_tile(others, g.d_out, in.dv, c * TILE, row, g.out, dots);
        if (VC > 1) load_tile(values, in.v, in.dv, c * TILE, key);
        __syncthreads();
        multiply_rows(d_score, others, values, used_columns(in.dv, c));
      }
      store_deltas(delta, dots);
      float zero = 0;
#pragma unroll
      for (int c = 0; c < KC; c++) {
        __syncthreads();
        zero = load_tile(others, in.q, in.dk, c * TILE, row);
        if (KC > 1) load_tile(keys, in.k, in.dk, c * TILE, key);
        __syncthreads();
        multiply_rows(score, others, keys, used_columns(in.dk, c));
      }
      score_gradients(score, d_score, place, seen, delta, g.lse, scale);
      store_tile(weights, d_score);
#pragma unroll
      for (int c = 0; c < KC; c++) {
        if (KC > 1) {
          __syncthreads();
          zero = load_tile(others, in.q, in.dk, c * TILE, row);
        }
        const bool guarded = __syncthreads_or(zero != 0.0f);
        multiply_columns(d_keys[c], weights, others, seen, guarded);
      }
      __syncthreads();
      store_tile(weights, score);
#pragma unroll
      for (int c = 0; c < VC; c++) {
        if (c > 0) __syncthreads();
        zero = load_tile(others, g.d_out, in.dv, c * TILE, row);
        const bool guarded = __syncthreads_or(zero != 0.0f);
        multiply_columns(d_values[c], weights, others, seen, guarded);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const i64 at = key(y + i);
      if (at < 0) continue;
#pragma unroll
      for (int c = 0; c < KC; c++) put4(d_k + at * in.dk, in.dk, c * TILE + x * 4, d_keys[c][i], scale, g.accumulate_k);
#pragma unroll
      for (int c = 0; c < VC; c++)
        put4(d_v + at * in.dv, in.dv, c * TILE + x * 4, d_values[c][i], 1.0f, g.accumulate_v);
    }
  }
}
