// The runtime of CPU kernels: a thread pool and scratch memory.
//
// The number of tasks depends on the shapes only, never on the number of threads, and the result of a task does not depend
// on the thread that runs it. So results are bitwise the same for any number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
// Runs body(context, i) for i in [0, count); returns when all have finished. If another call is running, in another thread or
// as the caller of this one, the calling thread runs all of them.
void trefoil_parallel(int64_t count, void (*body)(void* context, int64_t index), void* context);
// Scratch memory of the calling thread, 64-byte aligned, at least `bytes`; slots keep their memory between calls.
void* trefoil_scratch(int slot, size_t bytes);
}

constexpr int kScratchSlots = 24;

// A pointer in a struct that JavaScript fills: 8 bytes on every machine, 32-bit ones too.
template <class T>
struct Address {
  uint64_t bits;
  operator T*() const { return reinterpret_cast<T*>(static_cast<uintptr_t>(bits)); }
};

template <class Body>
inline void parallel(int64_t count, const Body& body) {
  trefoil_parallel(count, [](void* context, int64_t index) { (*static_cast<const Body*>(context))(index); },
                   const_cast<void*>(static_cast<const void*>(&body)));
}

// Splits [0, total) into chunks of a fixed size and runs body(begin, end) for each.
template <class Body>
inline void parallel_chunks(int64_t total, int64_t chunk, const Body& body) {
  parallel((total + chunk - 1) / chunk, [&](int64_t i) {
    const int64_t begin = i * chunk;
    body(begin, begin + chunk < total ? begin + chunk : total);
  });
}

template <class T>
inline T* scratch(int slot, int64_t count) {
  return static_cast<T*>(trefoil_scratch(slot, static_cast<size_t>(count) * sizeof(T)));
}
