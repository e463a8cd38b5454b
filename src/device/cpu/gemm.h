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
#else
constexpr int kTileRows = 6, kPanelVectors = 2;  // 12 of 16 registers hold C
#endif
constexpr int kPanel = kPanelVectors * kLanes;

constexpr int64_t panels(int64_t n) { return (n + kPanel - 1) / kPanel; }

enum class Into { kOverwrite, kAdd };

// While a tile is computed, a cache line of `ahead` (the next panel of B, or null) is prefetched every kAheadStep steps of k.
// It is in L3; without the prefetch linear layers take a quarter longer.
constexpr int64_t kAheadStep = 8, kLineFloats = 16;

// Floats of `ahead` that one tile prefetches.
constexpr int64_t ahead_of_tile(int64_t depth) { return (depth + kAheadStep - 1) / kAheadStep * kLineFloats; }

// C[r][0..V vectors) (+)= sum over k of A[r*row + k*col] * B[k*ldb ...], for Rows rows.
template <int Rows, int V, Into into>
inline __attribute__((always_inline)) void tile_rows(const float* a, int64_t row, int64_t col, const float* b,
                                                     int64_t ldb, float* c, int64_t ldc, int64_t depth,
                                                     const float* ahead) {
  vec acc[Rows][V];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      acc[r][v] = vec{};
      // A large C is in L3 too and is prefetched. A small one is in L1 or L2, where prefetching only costs.
      if (ahead != nullptr) __builtin_prefetch(c + r * ldc + v * kLanes, 1);
    }
  const int64_t step = ahead == nullptr ? depth : kAheadStep;
  for (int64_t k0 = 0; k0 < depth; k0 += step) {
    if (ahead != nullptr) __builtin_prefetch(ahead + k0 / kAheadStep * kLineFloats, 0, 2);
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
      store(to, into == Into::kAdd ? load(to) + acc[r][v] : acc[r][v]);
    }
}

// The same for any number of rows, in decreasing tile heights. The sum of a row runs over k in order in every tile height, so
// results do not depend on how many rows are computed together.
template <int V, Into into>
inline void tile(int64_t rows, const float* a, int64_t row, int64_t col, const float* b, int64_t ldb, float* c,
                 int64_t ldc, int64_t depth, const float* ahead) {
  constexpr int kTall = V == kPanelVectors ? kTileRows : (V * 8 <= kTileRows * kPanelVectors ? 8 : kTileRows);
  const auto step = [&](auto height) {
    constexpr int kRows = decltype(height)::value;
    for (; rows >= kRows; rows -= kRows, a += kRows * row, c += kRows * ldc) {
      tile_rows<kRows, V, into>(a, row, col, b, ldb, c, ldc, depth, ahead);
      if (ahead != nullptr) ahead += ahead_of_tile(depth);
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
    tile<kPanelVectors, into>(rows, a, row, col, b, ldb, c, ldc, depth, nullptr);
  if constexpr (kPanelVectors > 2) {
    if (columns >= 3 * kLanes) return tile<3, into>(rows, a, row, col, b, ldb, c, ldc, depth, nullptr);
    if (columns >= 2 * kLanes) return tile<2, into>(rows, a, row, col, b, ldb, c, ldc, depth, nullptr);
  }
  if (columns >= kLanes) tile<1, into>(rows, a, row, col, b, ldb, c, ldc, depth, nullptr);
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
