// Weights that are only read, packed once when a model is loaded: the panels of gemm.h in the type of the model's file.
//
// Panel p holds outputs [p * kPanel, (p + 1) * kPanel) as [inputs][kPanel] elements; columns past the last output are zero. In
// bf16 columns j and j + kLanes are neighbours: one load and two operations on bits widen both vectors. In int8 the inputs of an
// output lie in fours, [inputs / 4][kPanel][4], as instructions that add four products read them, and in front of each kGroup
// inputs lie their scales f32 [kPanel]: a weight is scale * element, rounded to f32. A product rounds its activations to int8
// too, with a scale per row and group: sums of a group are whole numbers, exact in any order.
#pragma once
#include <algorithm>

#include "bfloat16.h"
#include "gemm.h"

constexpr int64_t kDepthBlock = 512;  // k runs in slabs of at most this: A's block and two panels of B stay in L2
constexpr int64_t kGroup = 64;        // inputs that share a scale
constexpr int64_t kFour = 4;          // inputs of a word in int8
// Bytes that are prefetched ahead of a product of few rows: the panels are a stream from memory, longer than any cache.
constexpr int64_t kStreamAhead = 8192;

constexpr int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

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
struct Int8 {  // stored as element + kBias: the instructions multiply unsigned with signed bytes
  using Stored = uint8_t;
  static constexpr bool kScaled = true, kPaired = false;
  static constexpr int32_t kBias = 128;
  static float widen_one(uint8_t x) { return static_cast<float>(static_cast<int32_t>(x) - kBias); }
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

  int64_t slab() const { return T::kScaled ? up_to(slab_of(depth), kGroup) : slab_of(depth); }
  int64_t groups() const { return (depth + kGroup - 1) / kGroup; }
  int64_t room() const { return T::kScaled ? up_to(depth, kFour) : depth; }  // inputs that a panel has room for
  static constexpr int64_t kScaleBytes = T::kScaled ? kPanel * sizeof(float) : 0;  // in front of a group
  int64_t panel_bytes() const { return groups() * kScaleBytes + room() * kPanel * sizeof(Stored); }

  float* scales(int64_t p, int64_t k) const {  // of the group of input k, for the outputs of panel p
    const int64_t before = k / kGroup * (kScaleBytes + kGroup * kPanel * sizeof(Stored));
    return reinterpret_cast<float*>(data + p * panel_bytes() + before);
  }
  Stored* at(int64_t p, int64_t k) const {  // the elements of input k; in int8 k is a multiple of kFour
    const int64_t scales = T::kScaled ? (k / kGroup + 1) * kScaleBytes : 0;
    return reinterpret_cast<Stored*>(data + p * panel_bytes() + scales) + k * kPanel;
  }
  Stored& element(int64_t p, int64_t k, int64_t j) const {
    return T::kScaled ? at(p, k / kFour * kFour)[j * kFour + k % kFour] : at(p, k)[position<T>(j)];
  }
};

// Rows of activations as products read them.
template <class T>
struct Activations {
  const float* x;
  int64_t depth;
};

// Prefetches what lies kStreamAhead bytes behind one step of a panel.
template <int64_t kBytes>
inline __attribute__((always_inline)) void prefetch_stream(const void* b) {
#pragma GCC unroll 4
  for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(static_cast<const char*>(b) + kStreamAhead + line);
}

template <int Rows, Into into>
inline __attribute__((always_inline)) void store_rows(const vec (&total)[Rows][kPanelVectors], float* c, int64_t ldc) {
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      float* to = c + r * ldc + v * kLanes;
      store(to, into == Into::kAdd ? load(to) + total[r][v] : total[r][v]);
    }
}

// C [Rows, kPanel] (+)= A B for `depth` inputs of panel p from k0 on, in the order of `tile_rows`: the same bits.
template <class T, int Rows, Into into>
inline __attribute__((always_inline)) void stream_rows(const Activations<T>& from, int64_t row, const Packed<T>& w, int64_t p, int64_t k0,
                                                       int64_t depth, float* c, int64_t ldc) {
  const float* a = from.x + row * from.depth + k0;
  const typename T::Stored* b = w.at(p, k0);
  vec acc[Rows][kPanelVectors] = {};
  for (int64_t k = 0; k < depth; ++k, b += kPanel) {
    prefetch_stream<kPanel * sizeof(*b)>(b);
    vec bv[kPanelVectors];
    widen_row<T>(b, bv);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const vec av = splat(a[r * from.depth + k]);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = multiply_add(av, bv[v], acc[r][v]);
    }
  }
  store_rows<Rows, into>(acc, c, ldc);
}

// A group's sum of (element + kBias) * q is a whole number below 2^24. With VNNI it is computed in integers, elsewhere in f32.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
using Rounded = int8_t;
using Offset = int32_t;
typedef ivec Sums;
inline Sums all_of(Offset x) { return x - ivec{}; }
inline vec as_floats(Sums sums) { return __builtin_convertvector(sums, vec); }
// sums[r][v] += four inputs of kLanes outputs times those of row r, whose rows are `ld` apart.
template <int Rows>
inline __attribute__((always_inline)) void add_fours(const uint8_t* b, const Rounded* a, int64_t ld, Sums (&sums)[Rows][kPanelVectors]) {
  __m512i words[kPanelVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kPanelVectors; ++v) words[v] = _mm512_loadu_si512(b + v * kLanes * kFour);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    int32_t four;
    std::memcpy(&four, a + r * ld, sizeof(four));
    const __m512i av = _mm512_set1_epi32(four);
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v)
      sums[r][v] = bits_of<ivec>(_mm512_dpbusd_epi32(bits_of<__m512i>(sums[r][v]), words[v], av));
  }
}
#else
using Rounded = float;
using Offset = float;
typedef vec Sums;
inline Sums all_of(Offset x) { return splat(x); }
inline vec as_floats(Sums sums) { return sums; }
template <int Rows>
inline __attribute__((always_inline)) void add_fours(const uint8_t* b, const Rounded* a, int64_t ld, Sums (&sums)[Rows][kPanelVectors]) {
  uvec words[kPanelVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kPanelVectors; ++v) std::memcpy(&words[v], b + v * kLanes * kFour, sizeof(words[v]));
#pragma GCC unroll 4
  for (int i = 0; i < kFour; ++i) {
    vec bv[kPanelVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v)
      bv[v] = __builtin_convertvector(bits_of<ivec>(words[v] >> 8 * i & 0xFFu), vec);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const vec av = splat(a[r * ld + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = multiply_add(av, bv[v], sums[r][v]);
    }
  }
}
#endif

// Activations in int8: q [rows][width] is zero behind the last input; scales and offsets are [rows][groups], and an offset is
// what the bias of the weights adds to the sum of its group, negative.
template <>
struct Activations<Int8> {
  const Rounded* q;
  const float* scales;
  const Offset* offsets;
  int64_t width, groups;
};

// Rounds one row: the largest magnitude of a group is 127 steps. A group that has a number that is not finite gets the scale NaN.
inline void round_row(const float* x, int64_t depth, Rounded* q, float* scales, Offset* offsets) {
  const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  for (int64_t k0 = 0; k0 < depth; k0 += kGroup, q += kGroup) {
    const int64_t count = std::min(kGroup, depth - k0);
    vec most = {}, sound = {};
    each_vector(0, count, [&](int64_t i, auto get, auto) {
      const vec values = get(x + k0 + i);
      most = max(most, max(values, -values));
      sound += values - values;  // NaN if a number is not finite
    });
    float broken = 0;
    for (int i = 0; i < kLanes; ++i) broken += sound[i];
    const float largest = max_lane(most);
    *scales++ = largest * (1.0f / 127.0f) + broken;
    const vec inverse = splat(largest > 0 ? 127.0f / largest : 0.0f);
    int32_t total = 0;
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      const int64_t left = std::clamp<int64_t>(count - i, 0, kLanes);
      const ivec rounded = bits_of<ivec>(load_part(x + k0 + i, static_cast<int>(left)) * inverse + magic) - 0x4B400000;
      for (int j = 0; j < kLanes; ++j) {
        const int8_t value = static_cast<int8_t>(rounded[j]);
        q[i + j] = static_cast<Rounded>(value);
        total += value;
      }
    }
    *offsets++ = static_cast<Offset>(-Int8::kBias * total);
  }
}

template <class T, int Rows, Into into>
inline __attribute__((always_inline)) void stream_rows(const Activations<Int8>& from, int64_t row, const Packed<Int8>& w, int64_t p,
                                                       int64_t k0, int64_t depth, float* c, int64_t ldc) {
  const Rounded* a = from.q + row * from.width + k0;
  const int64_t first = row * from.groups + k0 / kGroup;
  vec total[Rows][kPanelVectors] = {};
  for (int64_t k = 0, g = first; k < depth; k += kGroup, ++g) {
    const float* scales = w.scales(p, k0 + k);
    const uint8_t* b = w.at(p, k0 + k);
    prefetch_stream<Packed<Int8>::kScaleBytes>(scales);
    Sums sums[Rows][kPanelVectors];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = all_of(from.offsets[r * from.groups + g]);
    for (int64_t i = k; i < std::min(k + kGroup, depth); i += kFour, b += kFour * kPanel) {
      prefetch_stream<kFour * kPanel>(b);
      add_fours<Rows>(b, a + i, from.width, sums);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const vec scale = splat(from.scales[r * from.groups + g]);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v)
        total[r][v] = multiply_add(as_floats(sums[r][v]), load(scales + v * kLanes) * scale, total[r][v]);
    }
  }
  store_rows<Rows, into>(total, c, ldc);
}

// The same for any number of rows. From the second tile on the slab is read from L2, and widened again in registers: that costs
// less than reading f32, which takes twice as many bytes.
template <class T, Into into>
inline void stream_slab(int64_t rows, const Activations<T>& a, int64_t row, const Packed<T>& w, int64_t p, int64_t k0, int64_t depth,
                        float* c, int64_t ldc) {
  const auto step = [&](auto height) {
    constexpr int kRows = decltype(height)::value;
    for (; rows >= kRows; rows -= kRows, row += kRows, c += kRows * ldc) stream_rows<T, kRows, into>(a, row, w, p, k0, depth, c, ldc);
  };
  step(std::integral_constant<int, kTileRows>{});
  if constexpr (kTileRows > 5) step(std::integral_constant<int, 5>{});
  step(std::integral_constant<int, 4>{});
  step(std::integral_constant<int, 3>{});
  step(std::integral_constant<int, 2>{});
  step(std::integral_constant<int, 1>{});
}

// Columns of panel p of y [rows, outputs], rows [first, first + rows) of x wᵀ: the share of the slab from input k0 on, added to
// that of the slabs before it. With the last one `plus` is added, unless it is null.
template <class T>
inline void stream_panel(const Packed<T>& w, int64_t p, int64_t k0, const Activations<T>& x, int64_t first, int64_t rows, float* y,
                         int64_t outputs, const float* plus) {
  const int64_t size = std::min(w.slab(), w.depth - k0), n = std::min<int64_t>(kPanel, outputs - p * kPanel);
  const auto run = k0 == 0 ? stream_slab<T, Into::kOverwrite> : stream_slab<T, Into::kAdd>;
  const auto slab = [&](int64_t r, int64_t count, float* to, int64_t ld) {
    run(count, x, first + r, w, p, k0, size, to, ld);
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
          for (int64_t r = 0; r < columns; ++r)
            w.element(p, k0 + k, column + j + r) = static_cast<uint8_t>(static_cast<int8_t>(rounded[r]) + To::kBias);
        }
      } else if (columns < kColumns || (column + j) % kColumns != 0) {
        for (int64_t k = 0; k < count; ++k)
          for (int64_t r = 0; r < columns; ++r)
            w.element(p, k0 + k, column + j + r) = To::put_one(turned[r / kLanes][k][r % kLanes]);
      } else {
        for (int64_t k = 0; k < count; ++k) {
          typename To::Stored* to = w.at(p, k0 + k) + column + j;
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

// Sets what holds no weight to zero: the columns past the last output, and in int8 the inputs past the last one. A sum of the
// bytes then depends on the weights alone.
template <class T>
inline void clear_padding(const Packed<T>& w, int64_t outputs) {
  for (int64_t p = 0; p < panels(outputs); ++p)
    for (int64_t k = w.depth; k < w.room(); ++k)
      for (int64_t j = 0; j < kPanel; ++j) w.element(p, k, j) = 0;
  const int64_t p = panels(outputs) - 1;
  for (int64_t j = outputs - p * kPanel; j < kPanel; ++j)
    for (int64_t k = 0; k < w.depth; ++k) {
      w.element(p, k, j) = 0;
      if (T::kScaled) w.scales(p, k)[j] = 0;
    }
}
