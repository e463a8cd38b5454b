// The peaks of this machine, on every thread at once: fused multiply-adds on registers only, and reading memory.
#if !defined(__wasm__)
#include <time.h>
#endif

#include "runtime.h"
#include "simd.h"

namespace {

// Ten chains hide the latency of one multiply-add (4 cycles) on two units, and fit the registers of every instruction set.
__attribute__((noinline)) float chains(int64_t rounds, const float* start) {
  vec a = load(start), b = a + 1, c = a + 2, d = a + 3, e = a + 4, f = a + 5, g = a + 6, h = a + 7, i = a + 8, j = a + 9;
  const vec factor = load(start + kLanes), add = load(start + 2 * kLanes);
  for (int64_t r = 0; r < rounds; ++r) {
    a = multiply_add(a, factor, add);
    b = multiply_add(b, factor, add);
    c = multiply_add(c, factor, add);
    d = multiply_add(d, factor, add);
    e = multiply_add(e, factor, add);
    f = multiply_add(f, factor, add);
    g = multiply_add(g, factor, add);
    h = multiply_add(h, factor, add);
    i = multiply_add(i, factor, add);
    j = multiply_add(j, factor, add);
  }
  return sum(a + b + c + d + e + f + g + h + i + j);
}

// Reads `count` floats, a multiple of 4 vectors, as a product of one row reads weights.
__attribute__((noinline)) float stream(const float* data, int64_t count) {
  constexpr int64_t kAhead = 8192 / sizeof(float);
  vec a = {}, b = {}, c = {}, d = {};
  for (int64_t i = 0; i < count; i += 4 * kLanes) {
    for (int64_t line = 0; line < 4 * kLanes; line += 16) __builtin_prefetch(data + i + kAhead + line);
    a += load(data + i);
    b += load(data + i + kLanes);
    c += load(data + i + 2 * kLanes);
    d += load(data + i + 3 * kLanes);
  }
  return sum(a + b + c + d);
}

#if defined(__wasm__)
extern "C" __attribute__((import_module("env"), import_name("seconds"))) double trefoil_seconds();
double thread_seconds() { return trefoil_seconds(); }  // there is no clock of a thread
#else
// Seconds of processor time of the calling thread. Unlike wall time it stands still while other programs run, so that a busy
// machine does not lower the peak.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}
#endif

}  // namespace

extern "C" {

// Runs `rounds` rounds in each of `threads` tasks at once. out [2, threads]: operations per second of processor time of each
// task, then the results, which keeps the compiler from dropping the work.
void peak_fma(double* out, int64_t threads, int64_t rounds) {
  float start[3 * kLanes];
  for (int i = 0; i < 3 * kLanes; ++i) start[i] = 0.5f;
  const double operations = 2.0 * 10 * kLanes * static_cast<double>(rounds);
  parallel(threads, [&](int64_t t) {
    const double started = thread_seconds();
    out[threads + t] = chains(rounds, start);
    out[t] = operations / (thread_seconds() - started);
  });
}

// Reads `count` floats of `data` in each of `threads` tasks at once, each its own. out [2, threads]: bytes per second of
// processor time of each task, then the results.
void peak_read(double* out, const float* data, int64_t threads, int64_t count) {
  parallel(threads, [&](int64_t t) {
    const double started = thread_seconds();
    out[threads + t] = stream(data + t * count, count);
    out[t] = static_cast<double>(count * sizeof(float)) / (thread_seconds() - started);
  });
}
}
