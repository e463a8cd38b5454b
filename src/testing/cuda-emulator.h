// CUDA threads on one CPU thread: every thread of the blocks that run together (a cluster) is a coroutine
// that runs until it waits, and between two barriers they take turns in random order, so that a missing barrier shows.
// Enough of CUDA for src/ops/attention/decode/step and the forward pass of the streamed branches; what is written in PTX there is replaced by
// emulated-cuda.ts and dev/cuda/emulate/run.py. Slow, exact, no GPU.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __constant__
#define __shared__ static  // only in kernels whose blocks run one after the other

struct int2 { int x, y; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
static inline int2 make_int2(int a, int b) { return {a, b}; }
static inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static inline float2 make_float2(float a, float b) { return {a, b}; }
static inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

using std::max;
using std::min;

struct Dimensions { int x, y, z; };

namespace emulator {

struct Barrier {
  int members = 0, arrived = 0;
  std::vector<int> waiting;
};
struct Warp {
  Barrier barrier;
  unsigned long long words[32];  // values that lanes exchange
  unsigned fragments[32][6];  // operands of a tensor-core product
};
struct Block {
  Barrier named[16];  // bar.sync with a number
  Barrier barrier;
  std::vector<Warp> warps;
  Dimensions index;
  int rank, count, result;
  bool ended = false;  // a thread of it is done: its shared memory may be gone
  char* memory() const;
};
// Dynamic shared memory of the blocks that run together. Static, as that which kernels declare: then an address of either
// is a 32-bit offset.
constexpr int MAX_TOGETHER = 16, MAX_SHARED = 256 * 1024;
alignas(1024) static char arena[MAX_TOGETHER][MAX_SHARED + 1024];
inline char* Block::memory() const { return arena[rank] + 128; }  // aligned as little as a GPU promises

struct Thread {
  ucontext_t context;
  jmp_buf place;
  std::vector<char> stack;
  Dimensions index;
  Block* block;
  bool started, done;
  int arrivals, waits;  // at the barrier of the cluster
};
struct State {
  std::vector<Thread> threads;
  std::vector<Block> blocks;
  std::vector<int> ready;
  Barrier cluster;
  int meetings;     // how often all threads of the cluster have arrived at its barrier
  bool trespassed;  // a block has used memory of another that may not run, or a thread has waited without arriving
  ucontext_t scheduler;
  jmp_buf place;
  int current;
  long turns;  // given to threads that only asked whether something has happened
  Dimensions block_size, grid_size;
  std::function<void()> kernel;
};
static State state;

static inline Thread& self() { return state.threads[state.current]; }
static inline Warp& warp() { return self().block->warps[self().index.x / 32]; }
static inline int lane() { return self().index.x % 32; }
static inline void leave() {
  if (_setjmp(self().place) == 0) _longjmp(state.place, 1);
}
// Others get a turn: for loops that ask memory until another block has written.
static inline void pause() {
  state.turns++;
  state.ready.push_back(state.current);
  leave();
}
static inline void wait(Barrier& barrier) {
  state.turns = 0;
  if (++barrier.arrived < barrier.members) {
    barrier.waiting.push_back(state.current);
    leave();
    return;
  }
  barrier.arrived = 0;
  state.ready.insert(state.ready.end(), barrier.waiting.begin(), barrier.waiting.end());
  barrier.waiting.clear();
  state.ready.push_back(state.current);  // the last thread to arrive does not necessarily continue first
  leave();
}

// The barrier of the cluster in two halves: what a thread does between arriving and waiting is not ordered.
static inline void cluster_arrive() {
  self().arrivals++;
  if (++state.cluster.arrived < state.cluster.members) return;
  state.cluster.arrived = 0;
  state.meetings++;
  state.ready.insert(state.ready.end(), state.cluster.waiting.begin(), state.cluster.waiting.end());
  state.cluster.waiting.clear();
}
static inline void cluster_wait() {
  state.turns = 0;
  if (++self().waits != self().arrivals) state.trespassed = true;
  if (state.meetings < self().arrivals) state.cluster.waiting.push_back(state.current);
  else state.ready.push_back(state.current);
  leave();
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

// fp16: a sign, five bits of an exponent, ten of a fraction.
static inline unsigned short to_f16(double x) {
  const unsigned sign = std::signbit(x) ? 0x8000 : 0;
  const double size = std::fabs(x);
  if (x != x) return 0x7fff;
  if (size >= 65520) return sign | 0x7c00;
  int exponent = size < std::ldexp(1, -14) ? -14 : std::ilogb(size);
  int steps = (int)std::nearbyint(std::ldexp(size, 10 - exponent));  // of the last digit
  if (steps == 2048) steps = 1024, exponent++;
  return sign | (steps < 1024 ? steps : (exponent + 15) << 10 | (steps - 1024));
}
static inline float from_f16(unsigned x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp((float)fraction, -24)
                                     : std::ldexp((float)(1024 + fraction), exponent - 25);
  return x & 0x8000 ? -size : size;
}
template <class F> static inline unsigned pairwise_f16(unsigned a, unsigned b, const F& f) {
  return to_f16(f(from_f16(a), from_f16(b))) | (unsigned)to_f16(f(from_f16(a >> 16), from_f16(b >> 16))) << 16;
}

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
template <class X> static inline X* shared_of(int rank, X* own) {
  Block& there = state.blocks[rank];
  if (&there != self().block && (state.meetings == 0 || there.ended)) state.trespassed = true;
  return (X*)(there.memory() + ((const char*)own - self().block->memory()));
}
template <class X> static inline X read_shared(int rank, const X* own) { return *shared_of(rank, own); }
template <class X> static inline void write_shared(int rank, X* own, X value) { *shared_of(rank, own) = value; }

// An mbarrier that counts arrivals and bytes, in eight bytes. More bytes than expected never end the wait.
struct Expected { int arrivals, bytes; };
static inline void exchange_begin(unsigned long long* own, int arrivals, int bytes) { *(Expected*)own = {arrivals, bytes}; }
static inline void exchange_arrive(unsigned long long* own, int rank) { ((Expected*)shared_of(rank, own))->arrivals--; }
// A store on its way to another block. Stores arrive late and in any order, and until then their place holds a NaN, which a
// reader that does not wait for the exchange finds.
struct Message { char* to; Expected* exchange; int block, size; char bytes[16]; };
static std::vector<Message> messages;
static inline void deliver(int most) {
  for (; most > 0 && !messages.empty(); most--) {
    std::swap(messages[(size_t)rand() % messages.size()], messages.back());
    const Message m = messages.back();
    messages.pop_back();
    if (state.blocks[m.block].ended) state.trespassed = true;
    memcpy(m.to, m.bytes, m.size);
    m.exchange->bytes -= m.size;
  }
}
static inline void exchange_wait(unsigned long long* own) {
  while (((Expected*)own)->arrivals != 0 || ((Expected*)own)->bytes != 0) {
    if (rand() % 64 == 0) deliver(rand() % 40);
    pause();
  }
}
template <class X> static inline void send(int rank, X* own, X value, unsigned long long* exchange) {
  Message m = {(char*)shared_of(rank, own), (Expected*)shared_of(rank, exchange), rank, sizeof(X), {}};
  memcpy(m.bytes, &value, sizeof(X));
  for (int i = 0; i < m.size; i += 4) *(unsigned*)(m.to + i) = 0x7fc0dead;
  messages.push_back(m);
}

static void enter() {
  state.kernel();
  self().done = self().block->ended = true;
  _longjmp(state.place, 1);
}

// Runs the blocks from `first` on, `count` of them side by side; false: they wait for each other for ever, or one uses shared
// memory of another that may not have begun or may have ended.
static bool run(int first, int count, int threads, size_t shared) {
  const Dimensions grid = state.grid_size;
  const int all = count * threads;
  if (count > MAX_TOGETHER || shared > MAX_SHARED) return false;
  state.blocks.assign(count, Block());
  state.cluster = Barrier{all};
  state.ready.clear();
  state.turns = 0;
  state.meetings = 0;
  state.trespassed = false;
  for (int rank = 0; rank < count; rank++) {
    Block& block = state.blocks[rank];
    const int n = first + rank;
    block.barrier.members = threads, block.rank = rank, block.index = {n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y};
    block.warps.resize((threads + 31) / 32);
    for (int w = 0; w < (int)block.warps.size(); w++) block.warps[w].barrier.members = std::min(32, threads - 32 * w);
    memset(block.memory(), 0xff, shared);  // no number: what is read before it is written shows, even times zero
  }
  for (int i = 0; i < all; i++) {
    Thread& thread = state.threads[i];
    if (thread.stack.empty()) thread.stack.resize(1 << 16);
    thread.index = {i % threads, 0, 0}, thread.block = &state.blocks[i / threads], thread.started = thread.done = false;
    thread.arrivals = thread.waits = 0;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, enter, 0);
    state.ready.push_back(i);
  }
  for (volatile int left = all; left > 0;) {
    if (state.ready.empty() || state.turns > 20000000) return false;
    const size_t pick = rand() % state.ready.size();
    state.current = state.ready[pick];
    state.ready[pick] = state.ready.back();
    state.ready.pop_back();
    if (_setjmp(state.place) == 0) {
      if (self().started) _longjmp(self().place, 1);
      self().started = true;
      setcontext(&self().context);
    }
    if (self().done) left = left - 1;
  }
  return !state.trespassed;
}

// Runs `kernel` for every thread of the grid; the blocks of a cluster, neighbours in x, run together.
static bool launch(Dimensions grid, int threads, int together, size_t shared, std::function<void()> kernel) {
  state.kernel = std::move(kernel), state.grid_size = grid, state.block_size = {threads, 1, 1};
  if ((int)state.threads.size() < together * threads) state.threads.resize(together * threads);
  for (int first = 0; first < grid.x * grid.y * grid.z; first += together)
    if (!run(first, together, threads, shared)) return false;
  return true;
}

// Shared memory by its address, which is an offset.
static inline char* at(unsigned address) { return self().block->memory() + (int)address; }

static inline void named_barrier(int id, int threads) {
  Barrier& barrier = self().block->named[id];
  barrier.members = threads;
  wait(barrier);
}

// bar.arrive: no wait. The caller goes on; the barrier completes when the others have arrived.
static inline void named_pass(int id, int threads) {
  Barrier& barrier = self().block->named[id];
  barrier.members = threads;
  if (++barrier.arrived < barrier.members) return;
  barrier.arrived = 0;
  state.ready.insert(state.ready.end(), barrier.waiting.begin(), barrier.waiting.end());
  barrier.waiting.clear();
}

// An mbarrier of eight bytes: arrivals of a phase, those still missing, and the phase.
struct Phases { unsigned short count, missing; unsigned phase; };
static inline void phases_init(unsigned address, int arrivals) { *(Phases*)at(address) = {(unsigned short)arrivals, (unsigned short)arrivals, 0}; }
static inline void phases_arrive(unsigned address) {
  Phases& p = *(Phases*)at(address);
  if (--p.missing == 0) p.missing = p.count, p.phase++;
}
static inline void phases_wait(unsigned address, int parity) {
  while ((((Phases*)at(address))->phase & 1) == (unsigned)parity) pause();
}

// ldmatrix.x4: lane l names row l % 8 of matrix l / 8 and gets two neighbours of each matrix, of a row or of a column.
static inline void load_matrices(unsigned (&r)[4], unsigned address, bool transpose) {
  Warp& all = warp();
  const int l = lane();
  all.words[l] = address;
  wait(all.barrier);
  for (int m = 0; m < 4; m++) {
    const auto half = [&](int row, int column) { return (unsigned)((unsigned short*)at(all.words[m * 8 + row]))[column]; };
    const int a = l / 4, b = l % 4 * 2;
    r[m] = transpose ? half(b, a) | half(b + 1, a) << 16 : half(a, b) | half(a, b + 1) << 16;
  }
  wait(all.barrier);
}

template <class... P, size_t... I>
static void call(void (*kernel)(P...), void** values, std::index_sequence<I...>) {
  kernel(*(typename std::remove_const<P>::type*)values[I]...);
}
// shape: grid, threads, blocks that run together, bytes of shared memory. values: addresses of the arguments.
template <class... P> static int launch(void (*kernel)(P...), const int* shape, void** values) {
  return launch({shape[0], shape[1], shape[2]}, shape[3], shape[4], shape[5],
                [=] { call(kernel, values, std::index_sequence_for<P...>()); });
}

}  // namespace emulator

#define threadIdx (emulator::self().index)
#define blockIdx (emulator::self().block->index)
#define blockDim (emulator::state.block_size)
#define gridDim (emulator::state.grid_size)
#define shared_memory ((float4*)emulator::self().block->memory())

static inline void __syncthreads() { emulator::wait(emulator::self().block->barrier); }
static inline int __syncthreads_count(int x) {
  emulator::Block& block = *emulator::self().block;
  if (block.count++ == 0) block.result = 0;
  block.result += x != 0;
  __syncthreads();
  const int all = block.result;
  block.count = 0;
  __syncthreads();
  return all;
}
static inline int __syncthreads_or(int x) { return __syncthreads_count(x) > 0; }
static inline void __syncwarp() { emulator::wait(emulator::warp().barrier); }
static inline unsigned __activemask() { return ~0u; }
static inline void __syncwarp(unsigned) { __syncwarp(); }  // of whole warps only
static inline void __threadfence() {}
static inline void __threadfence_block() {}
template <class T> static inline T __shfl_sync(unsigned, T x, int from) {
  emulator::Warp& warp = emulator::warp();
  memcpy(&warp.words[emulator::lane()], &x, sizeof x);
  emulator::wait(warp.barrier);
  T y;
  memcpy(&y, &warp.words[from & 31], sizeof y);
  emulator::wait(warp.barrier);
  return y;
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T x, int bits) {
  return __shfl_sync(mask, x, emulator::lane() ^ bits);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T x, int by) {
  return __shfl_sync(mask, x, emulator::lane() < by ? emulator::lane() : emulator::lane() - by);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T x, int by) {
  return __shfl_sync(mask, x, emulator::lane() + by > 31 ? emulator::lane() : emulator::lane() + by);
}
static inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned all = 0;
  for (int l = 0; l < 32; l++) all |= (unsigned)__shfl_sync(~0u, (int)x, l) << l;
  return all;
}
static inline bool __any_sync(unsigned, bool x) { return __ballot_sync(~0u, x) != 0; }
static inline int __reduce_add_sync(unsigned, int x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}
static inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  for (int mask = 16; mask > 0; mask /= 2) x = std::max(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned chosen = 0;
  for (int i = 0; i < 4; i++) chosen |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return chosen;
}
template <class T> static inline T atomicMin(T* to, T x) { return std::exchange(*to, std::min(*to, x)); }
template <class T> static inline T atomicMax(T* to, T x) { return std::exchange(*to, std::max(*to, x)); }
template <class T> static inline T atomicOr(T* to, T x) { return std::exchange(*to, *to | x); }
template <class T> static inline T atomicAdd(T* to, T x) { return std::exchange(*to, *to + x); }
static inline float __int_as_float(int x) { return emulator::bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double x) { return std::sqrt(x); }
static inline float __double2float_rn(double x) { return (float)x; }
static inline long long __double_as_longlong(double x) {
  long long y;
  memcpy(&y, &x, 8);
  return y;
}
static inline double __longlong_as_double(long long x) {
  double y;
  memcpy(&y, &x, 8);
  return y;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline unsigned __ballot_sync(unsigned, int x) {
  unsigned all = 0;
  for (int lane = 0; lane < 32; lane++) all |= (unsigned)(__shfl_sync(~0u, x != 0, lane)) << lane;
  return all;
}
static inline unsigned __match_any_sync(unsigned, unsigned x) {
  unsigned same = 0;
  for (int lane = 0; lane < 32; lane++) same |= (unsigned)(__shfl_sync(~0u, x, lane) == x) << lane;
  return same;
}
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
static inline float __fdividef(float a, float b) { return a / b; }
