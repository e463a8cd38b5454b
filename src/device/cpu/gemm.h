// Blocked matrix products on packed panels: the inner loop of every operation that multiplies matrices.
//
// A tile of C [kTileRows, kPanel] stays in registers while k advances. B is packed in panels [k][kPanel], so that a row of the
// panel is loaded once and multiplied with kTileRows broadcast values of A. A is not packed but read with strides.
#pragma once
#include <type_traits>

#include "simd.h"

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kPanelVectors = 4;  // 24 of 32 registers hold C
#elif defined(__ARM_NEON)
constexpr int kTileRows = 6, kPanelVectors = 4;
#elif defined(__wasm__)
constexpr int kTileRows = 4, kPanelVectors = 2;  // with more, V8 keeps some of C in memory: half the speed
#else
constexpr int kTileRows = 6, kPanelVectors = 2;  // 12 of 16 registers hold C
#endif
constexpr int kPanel = kPanelVectors * kLanes;

constexpr int64_t panels(int64_t n) { return (n + kPanel - 1) / kPanel; }

enum class Into { kOverwrite, kAdd };

// While a tile of a large product is computed, the next operands are prefetched a few cache lines at a time, every kAheadStep
// steps of k: many at once would hold up the loads of B.
constexpr int64_t kAheadStep = 8, kLineFloats = 16;

// Parameters of large products.
struct Large {
  const float* panel;  // the next panel of B, in L3: without its prefetch linear layers take a quarter longer
  bool rows;           // prefetch the rows of A of the next tile, which reads them for the first time
  const float* plus;   // added to the finished C, with the strides of C; or null
};
// Small products: their operands are in L1 or L2, so prefetching would only cost.
struct Small {};

// Floats of the next panel that one tile prefetches.
constexpr int64_t ahead_of_tile(int64_t depth) { return (depth + kAheadStep - 1) / kAheadStep * kLineFloats; }

// The prefetches of one tile at step k. `below` is the first row of A of the next tile, or null.
template <int Rows, int V>
inline __attribute__((always_inline)) void prefetch_at(int64_t k, const float* panel, const float* below, int64_t row,
                                                       const float* c, int64_t ldc) {
  const int64_t line = k / kAheadStep;
  __builtin_prefetch(panel + line * kLineFloats, 0, 2);
  if (line < Rows * V) __builtin_prefetch(c + line / V * ldc + line % V * kLanes, 1);
  if (below == nullptr) return;
  constexpr int kHalf = (Rows + 1) / 2;  // a line holds two steps: half of the rows in each
  const float* first = below + k / kLineFloats * kLineFloats + (line % 2 == 0 ? 0 : kHalf * row);
#pragma GCC unroll 8
  for (int r = 0; r < kHalf; ++r) __builtin_prefetch(first + r * row, 0, 2);
}

// C[r][0..V vectors) (+)= sum over k of A[r*row + k*col] * B[k*ldb ...], for Rows rows.
template <int Rows, int V, Into into, class Size>
inline __attribute__((always_inline)) void tile_rows(const float* a, int64_t row, int64_t col, const float* b,
                                                     int64_t ldb, float* c, int64_t ldc, int64_t depth,
                                                     const Size& size) {
  constexpr bool kLarge = std::is_same_v<Size, Large>;
  vec acc[Rows][V];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = vec{};
  const float* below = nullptr;
  if constexpr (kLarge) below = size.rows ? a + Rows * row : nullptr;
  const int64_t step = kLarge ? kAheadStep : depth;
  for (int64_t k0 = 0; k0 < depth; k0 += step) {
    if constexpr (kLarge) prefetch_at<Rows, V>(k0, size.panel, below, row, c, ldc);
    const int64_t k1 = k0 + step < depth ? k0 + step : depth;
    for (int64_t k = k0; k < k1; ++k) {
      vec bv[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) bv[v] = load(b + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const vec av = splat(a[r * row]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(av, bv[v], acc[r][v]);
      }
      a += col;
      b += ldb;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* to = c + r * ldc + v * kLanes;
      vec total = into == Into::kAdd ? load(to) + acc[r][v] : acc[r][v];
      if constexpr (kLarge)
        if (size.plus != nullptr) total += load(size.plus + r * ldc + v * kLanes);
      store(to, total);
    }
}

// The same for any number of rows, in decreasing tile heights. The sum of a row runs over k in order in every tile height, so
// results do not depend on how many rows are computed together.
template <int V, Into into, class Size = Small>
inline void tile(int64_t rows, const float* a, int64_t row, int64_t col, const float* b, int64_t ldb, float* c,
                 int64_t ldc, int64_t depth, Size size = {}) {
  constexpr int kTall = V == kPanelVectors ? kTileRows : (V * 8 <= kTileRows * kPanelVectors ? 8 : kTileRows);
  const auto step = [&](auto height) {
    constexpr int kRows = decltype(height)::value;
    for (; rows >= kRows; rows -= kRows, a += kRows * row, c += kRows * ldc) {
      tile_rows<kRows, V, into>(a, row, col, b, ldb, c, ldc, depth, size);
      if constexpr (std::is_same_v<Size, Large>) {
        size.panel += ahead_of_tile(depth);
        if (size.plus != nullptr) size.plus += kRows * ldc;
      }
    }
  };
  step(std::integral_constant<int, kTall>{});
  step(std::integral_constant<int, 4>{});
  step(std::integral_constant<int, 2>{});
  step(std::integral_constant<int, 1>{});
}

// C [rows, columns] (+)= A B with B row-major [depth, ldb]; columns is a multiple of kLanes.
template <Into into>
inline void multiply(int64_t rows, const float* a, int64_t row, int64_t col, const float* b, int64_t ldb, float* c,
                     int64_t ldc, int64_t depth, int64_t columns) {
  for (; columns >= kPanel; columns -= kPanel, b += kPanel, c += kPanel)
    tile<kPanelVectors, into>(rows, a, row, col, b, ldb, c, ldc, depth);
  if constexpr (kPanelVectors > 2) {
    if (columns >= 3 * kLanes) return tile<3, into>(rows, a, row, col, b, ldb, c, ldc, depth);
    if (columns >= 2 * kLanes) return tile<2, into>(rows, a, row, col, b, ldb, c, ldc, depth);
  }
  if (columns >= kLanes) tile<1, into>(rows, a, row, col, b, ldb, c, ldc, depth);
}

// Packs one panel of a row-major matrix read transposed: out[k][j] = source[j*ld + k], columns past n become zero.
inline void pack_panel_transposed(const float* source, int64_t ld, int64_t n, int64_t depth, float* out) {
  int64_t k0 = 0;
  for (; k0 + kLanes <= depth; k0 += kLanes) {
    int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) transpose_square(source + j * ld + k0, ld, out + k0 * kPanel + j, kPanel);
    for (; j < kPanel; ++j)
      for (int64_t k = k0; k < k0 + kLanes; ++k) out[k * kPanel + j] = j < n ? source[j * ld + k] : 0.0f;
  }
  for (; k0 < depth; ++k0)
    for (int64_t j = 0; j < kPanel; ++j) out[k0 * kPanel + j] = j < n ? source[j * ld + k0] : 0.0f;
}

// Packs one panel of a row-major matrix: out[k][j] = source[k*ld + j], columns past n become zero.
inline void pack_panel(const float* source, int64_t ld, int64_t n, int64_t depth, float* out) {
  for (int64_t k = 0; k < depth; ++k, source += ld, out += kPanel) {
    if (n >= kPanel) {
      std::memcpy(out, source, sizeof(float) * kPanel);
    } else {
      for (int64_t j = 0; j < kPanel; ++j) out[j] = j < n ? source[j] : 0.0f;
    }
  }
}
