// Weights that are only read, packed once when a model is loaded: the panels of gemm.h in the type of the model's file.
//
// Panel p holds outputs [p * kPanel, (p + 1) * kPanel) as [inputs][kPanel] elements; columns past the last output are zero. In
// int8 the scales f32 [groups][kPanel] lie in front of them, one per output and kGroup inputs, counted from the start of each
// slab. A weight is then scale * element, rounded to f32: products are those of the f32 matrix of these values. In bf16 columns j
// and j + kLanes are neighbours: one load and two operations on bits widen both vectors.
#pragma once
#include <algorithm>

#include "bfloat16.h"
#include "gemm.h"

constexpr int64_t kDepthBlock = 512;  // k runs in slabs of at most this: A's block and two panels of B stay in L2
constexpr int64_t kGroup = 64;        // inputs that share a scale
// Bytes that are prefetched ahead of a product of few rows: the panels are a stream from memory, longer than any cache.
constexpr int64_t kStreamAhead = 8192;

constexpr int64_t slab_of(int64_t depth) {
  const int64_t slabs = (depth + kDepthBlock - 1) / kDepthBlock;
  return slabs == 0 ? 1 : (depth + slabs - 1) / slabs;
}

typedef uint32_t uvec __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t half_words __attribute__((vector_size(kLanes * sizeof(uint16_t))));

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline uvec words(const uint16_t* p) {
  half_words h;
  std::memcpy(&h, p, sizeof(h));
  return __builtin_convertvector(h, uvec);
}

// Element types. `widen` is exact; `raw` and `put` move bits through vectors of floats.
struct F32 {
  using Stored = float;
  static constexpr bool kScaled = false, kPaired = false;
  static vec widen(const float* p) { return load(p); }
  static float widen_one(float x) { return x; }
  static vec raw(const float* p) { return load(p); }
  static void put(vec bits, float* p) { store(p, bits); }
  static float put_one(float bits) { return bits; }
};
struct SixteenBits {
  using Stored = uint16_t;
  static constexpr bool kScaled = false, kPaired = false;
  static vec raw(const uint16_t* p) { return bits_of<vec>(words(p)); }
  static void put(vec bits, uint16_t* p) {
    const half_words h = __builtin_convertvector(bits_of<uvec>(bits), half_words);
    std::memcpy(p, &h, sizeof(h));
  }
  static uint16_t put_one(float bits) { return static_cast<uint16_t>(bits_of<uint32_t>(bits)); }
};
struct Bf16 : SixteenBits {
  static constexpr bool kPaired = true;
  static void widen_pair(const uint16_t* p, vec& low, vec& high) {
    uvec both;
    std::memcpy(&both, p, sizeof(both));
    low = bits_of<vec>(both << 16);
    high = bits_of<vec>(both & 0xFFFF0000u);
  }
  static vec widen(const uint16_t* p) { return bits_of<vec>(words(p) << 16); }
  static float widen_one(uint16_t x) { return bits_of<float>(widen_bf16(x)); }
};
struct F16 : SixteenBits {
  // The exponent is rebiased by a product, which is exact for subnormal numbers too; infinity and NaN get theirs by hand.
  static float widen_one(uint16_t x) {
    const uint32_t magnitude = x & 0x7FFFu;
    uint32_t bits = bits_of<uint32_t>(bits_of<float>(magnitude << 13) * 0x1p112f);
    if (magnitude >= 0x7C00u) bits |= 0x7F800000u;
    return bits_of<float>(bits | static_cast<uint32_t>(x & 0x8000u) << 16);
  }
#if defined(__AVX512F__)
  static vec widen(const uint16_t* p) {
    return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
#elif defined(__F16C__)
  static vec widen(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
#else
  static vec widen(const uint16_t* p) {
    const uvec x = words(p), magnitude = x & 0x7FFFu;
    const uvec bits = bits_of<uvec>(bits_of<vec>(magnitude << 13) * splat(0x1p112f));
    const uvec special = bits_of<uvec>(magnitude >= 0x7C00u) & 0x7F800000u;
    return bits_of<vec>(bits | special | (x & 0x8000u) << 16);
  }
#endif
};
struct Int8 {
  using Stored = int8_t;
  static constexpr bool kScaled = true, kPaired = false;
  // g++ 12 widens bytes one by one without the intrinsics.
#if defined(__AVX512F__)
  static vec widen(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
#elif defined(__AVX2__)
  static vec widen(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
#else
  static vec widen(const int8_t* p) {
    typedef int8_t bytes __attribute__((vector_size(kLanes)));
    bytes b;
    std::memcpy(&b, p, sizeof(b));
    return __builtin_convertvector(__builtin_convertvector(b, ivec), vec);
  }
#endif
  static float widen_one(int8_t x) { return static_cast<float>(x); }
};

// Calls body with the element type that is held: 0 f32, 1 bf16, 2 f16, 3 int8 (packed.ts has the same order).
template <class Body>
inline void with_type(int64_t type, const Body& body) {
  if (type == 0) body(F32{});
  else if (type == 1) body(Bf16{});
  else if (type == 2) body(F16{});
  else body(Int8{});
}

// Where column j of a panel lies in each of its rows.
template <class T>
constexpr int64_t position(int64_t j) {
  constexpr int64_t kPair = 2 * kLanes;
  return T::kPaired ? j / kPair * kPair + j % kPair % kLanes * 2 + j % kPair / kLanes : j;
}

// Columns [0, kPanel) of one row of a panel as f32, before scales.
template <class T>
inline __attribute__((always_inline)) void widen_row(const typename T::Stored* b, vec (&out)[kPanelVectors]) {
  static_assert(kPanelVectors % 2 == 0, "pairs of vectors");
#pragma GCC unroll 8
  for (int v = 0; v < kPanelVectors; ++v)
    if constexpr (T::kPaired) {
      if (v % 2 == 0) T::widen_pair(b + v * kLanes, out[v], out[v + 1]);
    } else {
      out[v] = T::widen(b + v * kLanes);
    }
}

// Where the numbers of a packed matrix [outputs, inputs] lie.
template <class T>
struct Packed {
  using Stored = typename T::Stored;
  char* data;
  int64_t depth;

  int64_t slab() const { return slab_of(depth); }
  int64_t groups_of_slab() const { return (slab() + kGroup - 1) / kGroup; }
  int64_t scale_count() const { return T::kScaled ? (depth + slab() - 1) / slab() * groups_of_slab() * kPanel : 0; }
  int64_t panel_bytes() const { return scale_count() * sizeof(float) + depth * kPanel * sizeof(Stored); }

  float* scales(int64_t p, int64_t k) const {  // of the group of input k, for the outputs of panel p
    const int64_t group = k / slab() * groups_of_slab() + k % slab() / kGroup;
    return reinterpret_cast<float*>(data + p * panel_bytes()) + (T::kScaled ? group * kPanel : 0);
  }
  Stored* at(int64_t p, int64_t k) const {
    return reinterpret_cast<Stored*>(data + p * panel_bytes() + scale_count() * sizeof(float)) + k * kPanel;
  }
};

// C [Rows, kPanel] (+)= A B for one slab of a panel, in the order of `tile_rows`: the same bits.
template <class T, int Rows, Into into>
inline __attribute__((always_inline)) void stream_rows(const float* a, int64_t row, const typename T::Stored* b, const float* scales,
                                                       float* c, int64_t ldc, int64_t depth) {
  vec acc[Rows][kPanelVectors] = {};
  for (int64_t k = 0; k < depth; scales += kPanel) {
    vec scale[kPanelVectors] = {};
    if constexpr (T::kScaled)
      for (int v = 0; v < kPanelVectors; ++v) scale[v] = load(scales + v * kLanes);
    const int64_t end = T::kScaled ? std::min(k + kGroup, depth) : depth;
    for (; k < end; ++k, b += kPanel) {
      constexpr int64_t kRowBytes = kPanel * sizeof(*b);
#pragma GCC unroll 4
      for (int64_t line = 0; line < kRowBytes; line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(b) + kStreamAhead + line);
      vec bv[kPanelVectors];
      widen_row<T>(b, bv);
      if constexpr (T::kScaled)
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v) bv[v] *= scale[v];
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const vec av = splat(a[r * row + k]);
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = multiply_add(av, bv[v], acc[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      float* to = c + r * ldc + v * kLanes;
      store(to, into == Into::kAdd ? load(to) + acc[r][v] : acc[r][v]);
    }
}

// The same for any number of rows. From the second tile on the slab is read from L2, and widened again in registers: that costs
// less than reading f32, which takes twice as many bytes.
template <class T, Into into>
inline void stream_slab(int64_t rows, const float* a, int64_t row, const typename T::Stored* b, const float* scales, float* c,
                        int64_t ldc, int64_t depth) {
  const auto step = [&](auto height) {
    constexpr int kRows = decltype(height)::value;
    for (; rows >= kRows; rows -= kRows, a += kRows * row, c += kRows * ldc)
      stream_rows<T, kRows, into>(a, row, b, scales, c, ldc, depth);
  };
  step(std::integral_constant<int, kTileRows>{});
  step(std::integral_constant<int, 4>{});
  step(std::integral_constant<int, 3>{});
  step(std::integral_constant<int, 2>{});
  step(std::integral_constant<int, 1>{});
}

// Columns of panel p of y [rows, outputs] = x wᵀ: the share of the slab from input k0 on, added to that of the slabs before it.
// With the last one `plus` is added, unless it is null.
template <class T>
inline void stream_panel(const Packed<T>& w, int64_t p, int64_t k0, const float* x, int64_t rows, float* y, int64_t outputs,
                         const float* plus) {
  const int64_t size = std::min(w.slab(), w.depth - k0), n = std::min<int64_t>(kPanel, outputs - p * kPanel);
  const auto run = k0 == 0 ? stream_slab<T, Into::kOverwrite> : stream_slab<T, Into::kAdd>;
  const auto slab = [&](int64_t r, int64_t count, float* to, int64_t ld) {
    run(count, x + r * w.depth + k0, w.depth, w.at(p, k0), w.scales(p, k0), to, ld, size);
  };
  float* out = y + p * kPanel;
  if (n == kPanel) {
    slab(0, rows, out, outputs);
  } else {  // y has no padding
    float buffer[kTileRows * kPanel] = {};
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const int64_t count = std::min<int64_t>(kTileRows, rows - r);
      for (int64_t i = 0; k0 > 0 && i < count; ++i) std::memcpy(buffer + i * kPanel, out + (r + i) * outputs, sizeof(float) * n);
      slab(r, count, buffer, kPanel);
      for (int64_t i = 0; i < count; ++i) std::memcpy(out + (r + i) * outputs, buffer + i * kPanel, sizeof(float) * n);
    }
  }
  if (plus == nullptr || k0 + size < w.depth) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = r * outputs; j < r * outputs + n; ++j) out[j] += plus[p * kPanel + j];
}

// Packs rows [0, rows) of `source` [rows, inputs] as columns [column, column + rows) of panel p. From and To are the same type,
// or To is int8: its scale is the largest magnitude of the group over 127, and NaN if one of them is not finite.
template <class From, class To>
inline void pack_columns(const typename From::Stored* source, int64_t rows, const Packed<To>& w, int64_t p, int64_t column) {
  constexpr int64_t kParts = To::kPaired ? 2 : 1, kColumns = kParts * kLanes;
  const int64_t slab = w.slab();
  for (int64_t j = 0; j < rows; j += kColumns)
    for (int64_t k0 = 0, count = 0; k0 < w.depth; k0 += count) {
      count = std::min({kGroup, w.depth - k0, slab - k0 % slab});
      const int64_t columns = std::min(kColumns, rows - j);
      float square[kLanes][kLanes], turned[kParts][kGroup][kLanes];  // turned[part][k][row]
      for (int64_t part = 0; part < kParts; ++part)
        for (int64_t k = 0; k < count; k += kLanes) {
          for (int64_t r = 0; r < kLanes; ++r) {
            typename From::Stored some[kLanes] = {};
            const bool exists = part * kLanes + r < columns;
            const typename From::Stored* from = source + (j + part * kLanes + r) * w.depth + k0 + k;
            if (!exists || k + kLanes > count) {
              if (exists) std::memcpy(some, from, (count - k) * sizeof(*some));
              from = some;
            }
            store(square[r], To::kScaled ? From::widen(from) : From::raw(from));
          }
          transpose_square(square[0], kLanes, turned[part][k], kLanes);
        }
      typename To::Stored* out = w.at(p, k0);
      if constexpr (To::kScaled) {
        vec most = {}, sound = {};
        for (int64_t k = 0; k < count; ++k) {
          const vec x = load(turned[0][k]);
          most = max(most, max(x, -x));
          sound += x - x;  // NaN if x is not finite
        }
        const vec scale = most * splat(1.0f / 127.0f) + sound;
        const vec inverse = most > vec{} ? splat(127.0f) / most : vec{};
        store_part(w.scales(p, k0) + column + j, scale, static_cast<int>(columns));
        const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
        for (int64_t k = 0; k < count; ++k) {
          const ivec rounded = bits_of<ivec>(load(turned[0][k]) * inverse + magic) - 0x4B400000;
          for (int64_t r = 0; r < columns; ++r) out[k * kPanel + column + j + r] = static_cast<int8_t>(rounded[r]);
        }
      } else if (columns < kColumns || (column + j) % kColumns != 0) {
        for (int64_t k = 0; k < count; ++k)
          for (int64_t r = 0; r < columns; ++r)
            out[k * kPanel + position<To>(column + j + r)] = To::put_one(turned[r / kLanes][k][r % kLanes]);
      } else {
        for (int64_t k = 0; k < count; ++k) {
          typename To::Stored* to = out + k * kPanel + column + j;
          if constexpr (To::kPaired) {
            const uvec both = bits_of<uvec>(load(turned[0][k])) | bits_of<uvec>(load(turned[1][k])) << 16;
            std::memcpy(to, &both, sizeof(both));
          } else {
            To::put(load(turned[0][k]), to);
          }
        }
      }
    }
}

// Sets what holds no weight to zero: the columns past the last output, and the last scale of each panel, which a short last slab
// may leave over. A sum of the bytes then depends on the weights alone.
template <class T>
inline void clear_padding(const Packed<T>& w, int64_t outputs) {
  if (T::kScaled && (w.depth - 1) % w.slab() / kGroup + 1 < w.groups_of_slab())
    for (int64_t q = 0; q < panels(outputs); ++q) std::memset(w.scales(q, w.depth - 1) + kPanel, 0, kPanel * sizeof(float));
  const int64_t p = panels(outputs) - 1;
  for (int64_t j = outputs - p * kPanel; j < kPanel; ++j)
    for (int64_t k = 0; k < w.depth; ++k) {
      w.at(p, k)[position<T>(j)] = 0;
      if (T::kScaled) w.scales(p, k)[j] = 0;
    }
}
