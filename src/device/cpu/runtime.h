// What every CPU kernel may use of the runtime: a thread pool, scratch memory.
//
// Work is cut into tasks whose number depends on the shapes alone, never on the number of threads, and a task's
// result never depends on which thread ran it: so results are bitwise the same with one thread and with sixty-four.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
// Runs body(context, i) for i in [0, count); returns when all are done. While another thread's call is running, or
// inside one, the caller does all of it alone.
void trefoil_parallel(int64_t count, void (*body)(void* context, int64_t index), void* context);
// Scratch memory of the calling thread, 64-byte aligned, at least `bytes`; slots keep their memory between calls.
void* trefoil_scratch(int slot, size_t bytes);
}

constexpr int kScratchSlots = 24;

template <class Body>
inline void parallel(int64_t count, const Body& body) {
  trefoil_parallel(count, [](void* context, int64_t index) { (*static_cast<const Body*>(context))(index); },
                   const_cast<void*>(static_cast<const void*>(&body)));
}

// Cuts [0, total) into chunks of a fixed size and runs body(begin, end) for each.
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
