#include <cstdint>

// counts[c] += rows of `selected` with c blocks.
extern "C" void selection_counts(const int32_t* selected, int32_t* counts, int64_t rows, int64_t slots) {
  for (int64_t row = 0; row < rows; row++) {
    int64_t count = 0;
    for (int64_t s = 0; s < slots; s++) count += selected[row * slots + s] >= 0;
    counts[count]++;
  }
}
