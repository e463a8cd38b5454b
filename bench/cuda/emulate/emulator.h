// CUDA threads on one CPU thread: every thread of a cluster is a coroutine that runs until it waits, and between two
// barriers they take turns in random order, so that a missing barrier shows. Enough of CUDA for src/ops/step; what is
// written in PTX there is replaced by run.py with the functions below. Slow, exact, and needs no GPU.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) alignas(n)
#define __shared__ static  // only in kernels without clusters, whose blocks run one after the other

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
static inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static inline float2 make_float2(float a, float b) { return {a, b}; }
static inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

struct Dimensions { int x, y, z; };

namespace emulator {

struct Barrier { int members = 0, arrived = 0, round = 0; };
struct Warp {
  Barrier barrier;
  unsigned words[32];         // what lanes exchange
  unsigned fragments[32][6];  // operands of a tensor-core product
};
struct Block {
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<char> shared;
  Dimensions index;
  int rank;
  char* memory() { return (char*)(((size_t)shared.data() + 15) / 16 * 16); }
};
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  Dimensions index;
  Block* block;
  bool done;
};
struct State {
  std::vector<Thread> threads;
  std::vector<Block> blocks;
  Barrier cluster;
  ucontext_t scheduler;
  int current;
  Dimensions block_size, grid_size;
  std::function<void()> kernel;
};
static State state;

static inline Thread& self() { return state.threads[state.current]; }
static inline Warp& warp() { return self().block->warps[self().index.x / 32]; }
static inline int lane() { return self().index.x % 32; }
static inline void pause() { swapcontext(&self().context, &state.scheduler); }
static inline void wait(Barrier& barrier) {
  const int round = barrier.round;
  if (++barrier.arrived == barrier.members) barrier.arrived = 0, barrier.round++;
  else while (barrier.round == round) pause();
}

template <class To, class From> static inline To bits(From x) {
  To y;
  memcpy(&y, &x, 4);
  return y;
}
static inline unsigned short to_bf16(float x) {
  const unsigned u = bits<unsigned>(x);
  return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static inline float from_bf16(unsigned x) { return bits<float>((x & 0xffff) << 16); }

// d [16,8] += a [16,16] b [16,8], by the definition of the fragments of mma.m16n8k16.
static inline void product(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  Warp& all = warp();
  const int l = lane(), g = l / 4, t = l % 4;
  const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(all.fragments[l], own, sizeof own);
  wait(all.barrier);
  const auto half = [](unsigned pair, int k) { return from_bf16(k % 2 ? pair >> 16 : pair); };
  const auto a = [&](int row, int k) { return half(all.fragments[row % 8 * 4 + k % 8 / 2][(row >= 8) + 2 * (k >= 8)], k); };
  const auto b = [&](int k, int column) { return half(all.fragments[column * 4 + k % 8 / 2][4 + (k >= 8)], k); };
  for (int e = 0; e < 4; e++) {
    float sum = 0;
    for (int k = 0; k < 16; k++) sum += a(g + 8 * (e / 2), k) * b(k, 2 * t + e % 2);
    d[e] += sum;
  }
  wait(all.barrier);
}

// The same place in the shared memory of another block of the cluster.
template <class X> static inline X read_shared(int rank, const X* own) {
  return *(const X*)(state.blocks[rank].memory() + ((const char*)own - self().block->memory()));
}

static void enter() {
  state.kernel();
  self().done = true;
  pause();
}

// Runs `kernel` for every thread of the grid; the blocks of a cluster, neighbours in x, run together.
static void launch(Dimensions grid, int threads, int cluster, size_t shared, std::function<void()> kernel) {
  const int count = cluster * threads;
  state.kernel = std::move(kernel), state.grid_size = grid, state.block_size = {threads, 1, 1};
  if ((int)state.threads.size() < count) state.threads.resize(count);
  for (int z = 0; z < grid.z; z++)
    for (int y = 0; y < grid.y; y++)
      for (int x = 0; x < grid.x; x += cluster) {
        state.blocks.assign(cluster, Block());
        state.cluster = Barrier{count};
        for (int rank = 0; rank < cluster; rank++) {
          Block& block = state.blocks[rank];
          block.barrier.members = threads, block.index = {x + rank, y, z}, block.rank = rank;
          block.warps.resize(threads / 32);
          for (Warp& w : block.warps) w.barrier.members = 32;
          block.shared.assign(shared + 16, (char)0xcd);
        }
        std::vector<int> order(count);
        for (int i = 0; i < count; i++) {
          Thread& thread = state.threads[i];
          if (thread.stack.empty()) thread.stack.resize(1 << 17);
          thread.index = {i % threads, 0, 0}, thread.block = &state.blocks[i / threads], thread.done = false;
          getcontext(&thread.context);
          thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = thread.stack.size();
          makecontext(&thread.context, enter, 0);
          order[i] = i;
        }
        int left = count;
        for (long rounds = 0; left > 0; rounds++) {
          if (rounds > 2000000) printf("threads wait for each other\n"), exit(1);
          for (int i = count - 1; i > 0; i--) std::swap(order[i], order[rand() % (i + 1)]);
          for (int i : order) {
            if (state.threads[i].done) continue;
            state.current = i;
            swapcontext(&state.scheduler, &state.threads[i].context);
            left -= state.threads[i].done;
          }
        }
      }
}

}  // namespace emulator

#define threadIdx (emulator::self().index)
#define blockIdx (emulator::self().block->index)
#define blockDim (emulator::state.block_size)
#define gridDim (emulator::state.grid_size)

static inline void __syncthreads() { emulator::wait(emulator::self().block->barrier); }
static inline void __syncwarp() { emulator::wait(emulator::warp().barrier); }
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int mask) {
  emulator::Warp& warp = emulator::warp();
  memcpy(&warp.words[emulator::lane()], &x, 4);
  emulator::wait(warp.barrier);
  T y;
  memcpy(&y, &warp.words[emulator::lane() ^ mask], 4);
  emulator::wait(warp.barrier);
  return y;
}
static inline int __reduce_add_sync(unsigned, int x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}
static inline int atomicAdd(int* to, int x) { return std::exchange(*to, *to + x); }
static inline float __int_as_float(int x) { return emulator::bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
