// A whole decode step in one launch: the blocks, one on each multiprocessor, go through the layers together and wait for
// each other at barriers of the grid. One token for each of up to 32 sequences, sparse attention.
//
// A layer has five barriers: projection | attention | output | up | down. Inside attention no barrier is needed: blocks
// take items in order, shares of the compressed keys of every (sequence, group) and later its selection, which waits for
// a count of the shares; so one pair's ranking hides behind another's keys. Between its arrival at a barrier and the
// wait a block loads what no other block writes: its weights of the next layer of the network, into registers.
#include "whole-attention.cuh"
#include "angle.cuh"

#ifndef DIM
#define DIM 768
#define HIDDEN 3072
#define PROJECTION_TILES 2
#define OUTPUT_TILES 1
#define UP_TILES 4
#define HEAD_TILES 4
#define ACTIVATION 1
#endif

constexpr int LINEAR = 16, ALL = 31;  // of the parts of the work; fewer than all are measured, and no step is made

constexpr int larger(int a, int b) { return a > b ? a : b; }
using Projection = Product<DIM, PROJECTION_TILES, true>;
using Output = Product<HEADS * DV, OUTPUT_TILES, false>;
using Up = Product<DIM, UP_TILES, true>;
using Down = Product<HIDDEN, OUTPUT_TILES, false>;
using Head = Product<DIM, HEAD_TILES, true>;
// Behind the attention's own memory lie two numbers for every selection block.
constexpr int WHOLE_SHARED = larger(larger(larger(Projection::SHARED, Output::SHARED), larger(Up::SHARED, Down::SHARED)),
                                    larger(Head::SHARED, (int)sizeof(AttentionShared)));

__device__ __forceinline__ void begin_step(const Step& s, float rope_scale, int batch, int vocabulary) {
  for (int b = blockIdx.x; b < batch; b += gridDim.x) {
    const int id = s.ids[b];
    const bool known = id >= 0 && id < vocabulary;
    for (int c = threadIdx.x; c < DIM; c += THREADS)
      write_one(s.x + (i64)b * DIM + c, known ? s.table[(i64)id * DIM + c] : not_a_number());
    for (int i = threadIdx.x; i < DK; i += THREADS) {
      const int position = i < DK / 2 ? s.positions[b] : count_compressed(s.positions[b]) * CMP_D;
      s.rotations[b * DK + i] = cosine_sine(__fmul_rn(__fdiv_rn((float)position, rope_scale), s.frequencies[i % (DK / 2)]));
    }
  }
}

// The most probable of the candidates of all blocks becomes the next input of its sequence, which is one token longer then.
__device__ __forceinline__ void end_step(const Step& s, int batch, bool goes_on) {
  for (int b = blockIdx.x; b < batch; b += gridDim.x) {
    if (threadIdx.x >= 32) continue;
    Best best;
    for (int i = threadIdx.x; i < (int)gridDim.x; i += 32) best.offer(s.best_values[i * batch + b], s.best_indices[i * batch + b]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      best.offer(__shfl_xor_sync(~0u, best.value, step), __shfl_xor_sync(~0u, best.index, step));
    if (threadIdx.x != 0) continue;
    const int index = best.value == -positive_infinity() ? -1 : best.index;  // -inf: every token is ruled out
    s.next[b] = index;
    if (goes_on) s.ids[b] = index, s.positions[b] += 1;
  }
}

// A linear layer: weights are on their way while the block waits for the others. Ends with the block's arrival at the next
// barrier.
template <class Of, int KIND, class Result> __device__ __forceinline__ void multiply(const Linear of, Result* y) {
  Of product;
  product.template load<KIND>(of);
  fixed().barrier.wait();
  product.template run<KIND>(of, y, work_memory());
  fixed().barrier.arrive();
}

// The logits, and the best token of this block's share of them for every sequence.
__device__ __forceinline__ void multiply_head(const Linear of, int vocabulary) {
  const Step& s = fixed().step;
  Head head;
  head.load<0>(of);
  fixed().barrier.wait();
  Best best[Head::RESULTS_OF_THREAD];
  head.run<0>(of, s.logits, work_memory(), [&](int k, int token, float value) {
    // What no sound model gives wins, as token -1.
    if (token >= vocabulary) return;
    if (value != value || value == positive_infinity()) best[k].offer(positive_infinity(), -1);
    else best[k].offer(value, token);
  });
  Head::keep_best(best, of.batch, s.best_values, s.best_indices, work_memory());
  fixed().barrier.arrive();
}

// counters: the barrier's; then zero before and after a step [layers] items taken, [layers][batch * GROUPS] shares done, and
// the same of parts done.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
step_whole(const i64* layers, const i64* step, int* counters, int count, int batch, int splits, int parts_of_pair, i64 capacity,
           float epsilon, float rope_scale, int gate, float temperature, float gate_cmp, float gate_sel, float gate_win,
           int width, int vocabulary, int parts) {
  constexpr int STEP_WORDS = sizeof(Step) / 8, LAYER_WORDS = sizeof(Layer) / 8;
  Fixed& f = fixed();
  for (int i = threadIdx.x; i < STEP_WORDS; i += THREADS) ((i64*)&f.step)[i] = step[i];
  for (int i = threadIdx.x; i < count * LAYER_WORDS; i += THREADS) ((i64*)f.layers)[i] = layers[i];
  if (threadIdx.x == 0) {
    const int work = (int)((sizeof(Fixed) + (count - 1) * sizeof(Layer) + 127) / 128 * 8);
    f.call = Call{{gate, temperature, {gate_cmp, gate_sel, gate_win}}, epsilon, batch, splits, parts_of_pair, parts, work, capacity};
    f.barrier.start((u32*)counters);
  }
  __syncthreads();
  const Step& s = f.step;
  const bool whole = (parts & LINEAR) != 0;
  const int pairs = batch * GROUPS;
  int* const taken = counters + COUNTERS_APART;
  if (whole) {
    begin_step(s, rope_scale, batch, width);
    f.barrier.arrive();
  }
  for (int l = 0; l < count; l++) {
    const Layer& layer = f.layers[l];
    if (whole) {
      multiply<Projection, 0>(Linear{s.x, layer.attention_norm, epsilon, layer.projection, WIDTH, layer.gate, 3 * HEADS, s.gates,
                                     nullptr, batch},
                              s.projection);
      // What the layer reads next is on its way to L2 while attention waits for keys and for itself.
      prefetch_share(layer.out, (i64)DIM * HEADS * DV);
      f.barrier.wait();
    }
    attend(l, taken + l, taken + count + l * pairs, taken + count + (count + l) * pairs);
    if (!whole) {
      f.barrier.arrive();
      f.barrier.wait();
      continue;
    }
    prefetch_share(layer.up, (i64)DIM * HIDDEN * (ACTIVATION == 2 ? 2 : 1));
    prefetch_share(layer.down, (i64)DIM * HIDDEN);
    f.barrier.arrive();
    multiply<Output, 0>(Linear{s.attended, nullptr, 0.0f, layer.out, DIM, nullptr, 0, nullptr, s.x, batch}, s.middle);
    if (l + 1 < count) prefetch_share(f.layers[l + 1].projection, (i64)WIDTH * DIM);
    multiply<Up, ACTIVATION>(Linear{s.middle, layer.mlp_norm, epsilon, layer.up, HIDDEN, nullptr, 0, nullptr, nullptr, batch},
                             s.active);
    multiply<Down, 0>(Linear{s.active, nullptr, 0.0f, layer.down, DIM, nullptr, 0, nullptr, s.middle, batch}, s.x);
  }
  if (whole) {
    multiply_head(Linear{s.x, s.norm, epsilon, s.head, width, nullptr, 0, nullptr, nullptr, batch}, vocabulary);
    f.barrier.wait();
    end_step(s, batch, parts == ALL);
  }
  // For the next step: all blocks are behind the last barrier.
  if (blockIdx.x == gridDim.x - 1)
    for (int i = threadIdx.x; i < count + 2 * count * pairs; i += THREADS) taken[i] = 0;
}

// Bytes of shared memory: what stands in front, for each layer, and what the phases need.
extern "C" __device__ int step_whole_front = sizeof(Fixed) + 128;
extern "C" __device__ int step_whole_layer = sizeof(Layer);
extern "C" __device__ int step_whole_shared = WHOLE_SHARED;
extern "C" __device__ int step_whole_step = sizeof(Step);
extern "C" __device__ int step_whole_threads = THREADS;
