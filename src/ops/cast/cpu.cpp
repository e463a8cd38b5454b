// float32 <-> bfloat16.
#include "bfloat16.h"
#include "runtime.h"

namespace {

constexpr int64_t kNumbers = 1 << 14;  // per task

}  // namespace

extern "C" {

void cast_f32_to_bf16(const uint32_t* __restrict from, uint16_t* __restrict into, int64_t count) {
  parallel_chunks(count, kNumbers, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) into[i] = round_to_bf16(from[i]);
  });
}

void cast_bf16_to_f32(const uint16_t* __restrict from, uint32_t* __restrict into, int64_t count) {
  parallel_chunks(count, kNumbers, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) into[i] = widen_bf16(from[i]);
  });
}
}
