// The runtime of CPU kernels in WebAssembly: what ../cpu/runtime.cpp is for native ones. Memory is one block of up to 4 GiB that
// all threads share; helpers are workers, which call `trefoil_help` and never return from it (worker.ts).
#include "../cpu/runtime.h"

#include <atomic>
#include <cstring>

#include "../cpu/simd.h"

namespace {

using Body = void (*)(void*, int64_t);

// A launch in one word, as in ../cpu/runtime.cpp: its number, whether helpers may still join it, and how many are in it.
constexpr uint64_t kJoined = 0xFFFF, kOpen = 1 << 16;
constexpr int kNumberShift = 17;
constexpr uint64_t number_of(uint64_t launch) { return launch >> kNumberShift; }

std::atomic_flag taken = ATOMIC_FLAG_INIT;
std::atomic<uint64_t> current{0};
std::atomic<int64_t> next_index{0};
std::atomic<int32_t> allowed{0};  // helpers that may take part
std::atomic<int32_t> failed{0};   // a helper has crashed: what it was to compute is missing
int64_t index_count = 0;
Body running = nullptr;
void* running_context = nullptr;

constexpr int kSpins = 4000;

void drain() {
  for (;;) {
    const int64_t index = next_index.fetch_add(1, std::memory_order_relaxed);
    if (index >= index_count) return;
    running(running_context, index);
  }
}

bool join(uint64_t& launch) {
  while (launch & kOpen)
    if (current.compare_exchange_weak(launch, launch + 1, std::memory_order_acquire)) return true;
  return false;
}

void wait_while(uint64_t value) {
  __builtin_wasm_memory_atomic_wait64(reinterpret_cast<int64_t*>(&current), static_cast<int64_t>(value), -1);
}
void wake_all() { __builtin_wasm_memory_atomic_notify(reinterpret_cast<int32_t*>(&current), 0xFFFFFFFFu); }

// Free blocks lie in a list by address, each beginning with its size and the next one; neighbours are joined. The pool above
// (pool.ts) keeps what it frees, so the list is short and rarely walked.
struct Free {
  uint32_t bytes;
  Free* next;
};
constexpr uint32_t kUnit = 64, kPage = 65536;
std::atomic_flag memory_taken = ATOMIC_FLAG_INIT;
Free* free_blocks = nullptr;

struct MemoryLock {
  MemoryLock() {
    while (memory_taken.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~MemoryLock() { memory_taken.clear(std::memory_order_release); }
};

// `before` is the last free block in front of it, or null.
void insert(Free* before, Free* block) {
  Free* after = before ? before->next : free_blocks;
  block->next = after;
  (before ? before->next : free_blocks) = block;
  const auto join_next = [](Free* one) {
    if (reinterpret_cast<uint32_t>(one) + one->bytes != reinterpret_cast<uint32_t>(one->next)) return;
    one->bytes += one->next->bytes;
    one->next = one->next->next;
  };
  if (after) join_next(block);
  if (before) join_next(before);
}

void release(void* memory, uint32_t bytes) {
  Free* block = static_cast<Free*>(memory);
  block->bytes = bytes;
  Free* before = nullptr;
  for (Free* one = free_blocks; one && one < block; one = one->next) before = one;
  insert(before, block);
}

uint32_t rounded(size_t bytes) { return static_cast<uint32_t>((bytes + kUnit - 1) / kUnit * kUnit); }

// 0 if there is no memory. In front of every block lies its size.
void* allocate(size_t wanted) {
  if (wanted > 0xFFFF0000u - 2 * kUnit) return nullptr;
  const uint32_t bytes = rounded(wanted) + kUnit;
  const MemoryLock lock;
  for (int attempt = 0; attempt < 2; ++attempt) {
    Free* before = nullptr;
    for (Free* block = free_blocks; block; before = block, block = block->next) {
      if (block->bytes < bytes) continue;
      const uint32_t left = block->bytes - bytes;
      Free*& link = before ? before->next : free_blocks;
      if (left >= kUnit) {
        Free* rest = reinterpret_cast<Free*>(reinterpret_cast<char*>(block) + bytes);
        rest->bytes = left;
        rest->next = block->next;
        link = rest;
      } else {
        link = block->next;
      }
      *reinterpret_cast<uint32_t*>(block) = left >= kUnit ? bytes : bytes + left;
      return reinterpret_cast<char*>(block) + kUnit;
    }
    const uint32_t pages = (bytes + kPage - 1) / kPage;
    const size_t first = __builtin_wasm_memory_grow(0, pages);
    if (first == static_cast<size_t>(-1)) return nullptr;
    // The last page stays out: a block must not end at address 2^32, which is 0.
    uint32_t size = pages * kPage;
    if (first + pages == kPage) size -= kUnit;
    release(reinterpret_cast<void*>(first * kPage), size);
  }
  return nullptr;
}

void deallocate(void* memory) {
  if (memory == nullptr) return;
  char* block = static_cast<char*>(memory) - kUnit;
  const MemoryLock lock;
  release(block, *reinterpret_cast<uint32_t*>(block));
}

struct Scratch {
  void* memory[kScratchSlots] = {};
  size_t bytes[kScratchSlots] = {};
};
thread_local Scratch thread_scratch;
std::atomic<int64_t> scratch_total{0};

}  // namespace

extern "C" {

// Given by JavaScript: ends the call with an error. A kernel needs `bytes` that there are not; 0 if a helper has crashed.
__attribute__((import_module("env"), import_name("fail"))) void trefoil_fail(double bytes);

void trefoil_parallel(int64_t count, Body body, void* context) {
  if (allowed.load(std::memory_order_relaxed) == 0 || count <= 1 || taken.test_and_set(std::memory_order_acquire)) {
    for (int64_t i = 0; i < count; ++i) body(context, i);
    return;
  }
  index_count = count;
  running = body;
  running_context = context;
  next_index.store(0, std::memory_order_relaxed);
  const uint64_t number = number_of(current.load(std::memory_order_relaxed)) + 1;
  current.store(number << kNumberShift | kOpen, std::memory_order_release);
  wake_all();
  drain();
  current.fetch_and(~kOpen, std::memory_order_relaxed);
  // The caller spins: the main thread of a page must not wait.
  while ((current.load(std::memory_order_acquire) & kJoined) > 0)
    if (failed.load(std::memory_order_relaxed) != 0) trefoil_fail(0);
  taken.clear(std::memory_order_release);
}

// The life of helper `id`, from 1 on.
void trefoil_help(int32_t id) {
  uint64_t seen = number_of(current.load(std::memory_order_acquire));
  for (;;) {
    int spins = 0;
    uint64_t launch;
    while (number_of(launch = current.load(std::memory_order_acquire)) == seen)
      if (++spins >= kSpins) wait_while(launch);
    if (id <= allowed.load(std::memory_order_relaxed) && join(launch)) {
      drain();
      current.fetch_sub(1, std::memory_order_release);
    }
    seen = number_of(launch);
  }
}

void trefoil_allow(int32_t helpers) { allowed.store(helpers, std::memory_order_relaxed); }
int32_t* trefoil_failed() { return reinterpret_cast<int32_t*>(&failed); }

void* trefoil_scratch(int slot, size_t bytes) {
  Scratch& s = thread_scratch;
  if (s.bytes[slot] < bytes) {
    const size_t wanted = rounded(bytes + bytes / 4);
    deallocate(s.memory[slot]);
    scratch_total.fetch_sub(static_cast<int64_t>(s.bytes[slot]));
    s.bytes[slot] = 0;
    s.memory[slot] = allocate(wanted);
    if (s.memory[slot] == nullptr) trefoil_fail(static_cast<double>(wanted));
    s.bytes[slot] = wanted;
    scratch_total.fetch_add(static_cast<int64_t>(wanted));
  }
  return s.memory[slot];
}

double trefoil_scratch_bytes() { return static_cast<double>(scratch_total.load()); }
void* trefoil_allocate(size_t bytes) { return allocate(bytes); }
void trefoil_free(void* memory) { deallocate(memory); }

// 1 if a product and a sum are rounded once: relaxed instructions may do either.
int32_t trefoil_is_fused() { return rounds_once(); }
}

// The compiler calls these for copies of a size that it does not know: there is no C library. Each is one instruction.
extern "C" {
void* memcpy(void* to, const void* from, size_t bytes) { return __builtin_memcpy(to, from, bytes); }
void* memmove(void* to, const void* from, size_t bytes) { return __builtin_memmove(to, from, bytes); }
void* memset(void* to, int value, size_t bytes) { return __builtin_memset(to, value, bytes); }
}
