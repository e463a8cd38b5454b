#include <cstdint>
#include <cstring>

// sample[p] = the rows of tokens t - 1 and t of `selected` [tokens, width], t = 1 + p * (tokens - 1) / pairs.
extern "C" void selection_sample(const int32_t* selected, int32_t* sample, int64_t tokens, int64_t width,
                                 int64_t pairs) {
  for (int64_t p = 0; p < pairs; p++) {
    const int64_t token = 1 + p * (tokens - 1) / pairs;
    std::memcpy(sample + 2 * p * width, selected + (token - 1) * width, 2 * width * sizeof(int32_t));
  }
}
