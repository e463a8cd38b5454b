// The CPU runtime: one thread pool and per-thread scratch memory, shared by all kernel libraries of the process.
//
// Not OpenMP: Apple's compiler does not support it, and an OpenMP pool that is alive when Node unloads the library at exit
// crashes the process. These threads are never joined, and the library is never unloaded.
#include "runtime.h"

#include "simd.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Body = void (*)(void*, int64_t);

// A launch in one word: its number, whether helpers may still join it, and how many have joined and not left it.
constexpr uint64_t kJoined = 0xFFFF, kOpen = 1 << 16;
constexpr int kNumberShift = 17;
constexpr uint64_t number_of(uint64_t launch) { return launch >> kNumberShift; }

struct Pool {
  std::atomic_flag taken = ATOMIC_FLAG_INIT;  // one launch at a time: worker threads of Node share this pool
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<uint64_t> launch{0};
  std::atomic<int64_t> next{0};
  int64_t count = 0;
  Body body = nullptr;
  void* context = nullptr;
  int started = 0;   // number of helper threads
  std::atomic<int> threads{1};  // threads that take part, including the caller
};

Pool& pool() {
  static Pool* instance = new Pool();  // leaked intentionally: helper threads outlive static destruction
  return *instance;
}

inline void spin_hint() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Short waits spin (a training step has hundreds of launches), long ones sleep.
constexpr int kSpins = 4000;

void drain(Pool& p) {
  for (;;) {
    const int64_t index = p.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= p.count) return;
    p.body(p.context, index);
  }
}

// Joins a launch that is open. On a busy machine a helper wakes late. If the caller has done all the work by then, the launch
// is closed, and the caller has not waited for this helper.
bool join(Pool& p, uint64_t& launch) {
  while (launch & kOpen)
    if (p.launch.compare_exchange_weak(launch, launch + 1, std::memory_order_acquire)) return true;
  return false;
}

void helper(int id, uint64_t seen) {
  Pool& p = pool();
  for (;;) {
    int spins = 0;
    uint64_t launch;
    while (number_of(launch = p.launch.load(std::memory_order_acquire)) == seen) {
      if (++spins < kSpins) {
        spin_hint();
      } else {
        std::unique_lock<std::mutex> lock(p.mutex);
        p.wake.wait(lock, [&] { return number_of(p.launch.load(std::memory_order_acquire)) != seen; });
      }
    }
    if (id < p.threads && join(p, launch)) {
      drain(p);
      p.launch.fetch_sub(1, std::memory_order_release);
    }
    seen = number_of(launch);
  }
}

// Whole pages, huge ones where the system has them and the block fills one: tensors are read from end to end, and with pages
// of 4 KiB looking up addresses takes two to three percent of a step. Null if there is no memory.
void* allocate(size_t bytes) {
  constexpr size_t kPage = 4096;
  const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
#if defined(MADV_HUGEPAGE)
  constexpr size_t kHugePage = size_t(2) << 20;
  if (rounded >= kHugePage) {
    void* memory = std::aligned_alloc(kHugePage, rounded);
    if (memory != nullptr) madvise(memory, rounded, MADV_HUGEPAGE);  // only a wish: an error changes nothing
    return memory;
  }
#endif
  return std::aligned_alloc(kPage, rounded);
}

std::atomic<int64_t> scratch_total{0};

struct Scratch {
  void* memory[kScratchSlots] = {};
  size_t bytes[kScratchSlots] = {};
};
thread_local Scratch thread_scratch;

char last_words[32][128];  // by signal number

// Async-signal-safe. SA_RESETHAND has restored the default action, which follows when the handler returns.
void end_by_signal(int signal) {
  const char* text = last_words[signal];
  const ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
  (void)written;  // an error cannot be reported: the process ends here
  raise(signal);
}

struct Deadline {
  struct sigaction before;  // the handler that was there
  int seconds;
};
Deadline deadlines[32];  // by signal number
char deadline_line[128];

// Async-signal-safe, as are all functions here. Not by exit(): that would wait for threads, which may hang.
void end_now(int) {
  const ssize_t written = write(STDERR_FILENO, deadline_line, std::strlen(deadline_line));
  (void)written;
  _exit(0);
}

void start_deadline(int signal) {
  alarm(static_cast<unsigned>(deadlines[signal].seconds));
  const struct sigaction& before = deadlines[signal].before;
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(signal);
}

}  // namespace

extern "C" {

void trefoil_parallel(int64_t count, Body body, void* context) {
  Pool& p = pool();
  if (p.threads <= 1 || count <= 1 || p.taken.test_and_set(std::memory_order_acquire)) {
    for (int64_t i = 0; i < count; ++i) body(context, i);
    return;
  }
  p.count = count;
  p.body = body;
  p.context = context;
  p.next.store(0, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(p.mutex);
    const uint64_t number = number_of(p.launch.load(std::memory_order_relaxed)) + 1;
    p.launch.store(number << kNumberShift | kOpen, std::memory_order_release);
  }
  p.wake.notify_all();
  drain(p);
  p.launch.fetch_and(~kOpen, std::memory_order_relaxed);
  int spins = 0;
  while ((p.launch.load(std::memory_order_acquire) & kJoined) > 0) {
    if (++spins < kSpins) spin_hint();
    else std::this_thread::yield();
  }
  p.taken.clear(std::memory_order_release);
}

void trefoil_set_threads(int threads) {
  Pool& p = pool();
  while (p.taken.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  if (threads < 1) threads = 1;
  while (p.started < threads - 1) {
    try {
      std::thread(helper, p.started + 1, number_of(p.launch.load())).detach();
    } catch (const std::system_error&) {  // no more threads available: fewer compute the same result
      threads = p.started + 1;
      break;
    }
    ++p.started;
  }
  p.threads = threads;
  p.taken.clear(std::memory_order_release);
}

// 1 if a product and a sum are rounded once.
int trefoil_is_fused() { return rounds_once(); }

int trefoil_threads() { return pool().threads; }

void* trefoil_scratch(int slot, size_t bytes) {
  Scratch& s = thread_scratch;
  if (s.bytes[slot] < bytes) {
    const size_t rounded = (bytes + bytes / 4 + 4095) & ~size_t(4095);
    std::free(s.memory[slot]);
    scratch_total.fetch_add(static_cast<int64_t>(rounded) - static_cast<int64_t>(s.bytes[slot]));
    s.memory[slot] = allocate(rounded);
    if (s.memory[slot] == nullptr) {
      std::fprintf(stderr, "out of memory: a kernel needs %zu bytes for itself; lower train.batch_size or train.seq_len\n", rounded);
      std::abort();  // a kernel cannot report an error to its caller
    }
    s.bytes[slot] = rounded;
  }
  return s.memory[slot];
}

int64_t trefoil_scratch_bytes() { return scratch_total.load(); }

// Makes recorded calls (launch-list.ts). On x86-64 (System V) and AArch64 integers and floating-point numbers are passed
// independently of each other: each kind in registers of its own, and integers after those on the stack, in order. So one type
// fits all kernels: those with fewer arguments ignore the rest. An f32 lies in the lower half of its register.
constexpr int kMaxWords = 32, kMaxFloats = 4;
struct Call {
  void (*kernel)(const int64_t*, const double*);
  int64_t words[kMaxWords];
  double floats[kMaxFloats];
};
#define EIGHT(w) w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
void trefoil_replay(const Call* calls, int64_t count) {
  using Word = int64_t;
  using Any = void (*)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                       Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, double, double,
                       double, double);
  for (const Call* call = calls; call < calls + count; ++call) {
    const int64_t* w = call->words;
    const double* f = call->floats;
    // By way of void*: compilers warn of a cast between function types.
    const auto kernel = reinterpret_cast<Any>(reinterpret_cast<void*>(call->kernel));
    kernel(EIGHT(w), EIGHT((w + 8)), EIGHT((w + 16)), EIGHT((w + 24)), f[0], f[1], f[2], f[3]);
  }
}

void* trefoil_allocate(size_t bytes) { return allocate(bytes); }
void trefoil_free(void* memory) { std::free(memory); }
void trefoil_copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
void trefoil_zero(void* memory, size_t bytes) { std::memset(memory, 0, bytes); }

// Ends the process on `signal` by its default action, after `line` has been written to stderr; an empty line restores the
// default action alone. Node runs handlers in JavaScript between calls only, so during a long kernel they come too late.
void trefoil_end_on_signal(int signal, const char* line) {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  char* text = last_words[signal];
  std::snprintf(text, sizeof(last_words[signal]), "%s", line);
  if (text[0] == 0) return;
  action.sa_handler = end_by_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(signal, &action, nullptr);
}

// After `signal` the process has `seconds` to end, whatever its threads do; then `line` is written to stderr and it ends with
// code 0. The handler that was there runs as before.
void trefoil_end_within(int signal, int seconds, const char* line) {
  std::snprintf(deadline_line, sizeof(deadline_line), "%s", line);
  struct sigaction action = {};
  action.sa_handler = end_now;
  sigaction(SIGALRM, &action, nullptr);
  deadlines[signal].seconds = seconds;
  action.sa_handler = start_deadline;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, &deadlines[signal].before);
}

}  // extern "C"
