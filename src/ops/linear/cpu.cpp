// The three products of a linear layer, as one blocked product C (+)= A B with different readings of A and B; and the product
// with weights that are packed already (packed.h).
#include "gemm.h"
#include "packed.h"
#include "runtime.h"

#if !defined(__wasm__)
#include <unistd.h>
#endif

#include <algorithm>

namespace {

constexpr int64_t kRowBlock = 192;    // rows of C one task computes: 32 tiles, enough to fetch the next panel along
constexpr int64_t kPanelChunk = 6;    // panels of one task; twice as many where every task packs its rows of A first
constexpr int64_t kPackedRows = 32;   // rows of B one task packs
constexpr int64_t kSmallProduct = 1 << 24;  // multiplications of a product that one thread of several computes
constexpr int64_t kSetFloats = 512;   // of kDepthBlock rows so far apart, or a multiple, L2 holds no more than a part
constexpr int64_t kFewestTasks = 4;   // smaller chunks rather than fewer tasks, as far as there are panels
constexpr int64_t kStreamRows = 12;   // rows of a product that reads packed weights as a stream from memory
constexpr int64_t kRoundedNumbers = 1 << 14;  // of activations that one task rounds to int8
constexpr int64_t kStreamBytes = 1 << 15;  // of packed weights that one task of few rows reads at least

struct Operand {
  const float* data;
  int64_t row, col;  // element (i, k) of A, or (k, j) of B, lies at data[i*row + k*col] or data[k*row + j*col]
};

// Packs rows [0, rows) x [0, depth) of A, stored by columns (element (r, k) is a[k * ld + r]), into tiles
// [depth][kTileRows]; the last may be short. A few k at a time, so that a cache line serves several tiles.
void pack_rows(const float* a, int64_t ld, int64_t rows, int64_t depth, float* out) {
  constexpr int64_t kSteps = 8;
  for (int64_t k0 = 0; k0 < depth; k0 += kSteps) {
    const int64_t steps = std::min(kSteps, depth - k0);
    for (int64_t r0 = 0; r0 < rows; r0 += kTileRows) {
      const float* from = a + k0 * ld + r0;
      float* to = out + r0 * depth + k0 * kTileRows;
      const int64_t count = std::min<int64_t>(kTileRows, rows - r0);
      for (int64_t k = 0; k < steps; ++k, from += ld, to += kTileRows)
        if (count == kTileRows) std::memcpy(to, from, sizeof(float) * kTileRows);  // constant size: no call
        else std::memcpy(to, from, sizeof(float) * count);
    }
  }
}

// One slab of depth for one block of rows and one panel. Columns past n go through a buffer: C has no padding.
template <Into into>
void multiply_panel(int64_t rows, const float* a, int64_t row, int64_t col, bool packed, const float* b, float* c,
                    int64_t ldc, int64_t n, int64_t depth, Large size) {
  if (n == kPanel && !packed) return tile<kPanelVectors, into>(rows, a, row, col, b, kPanel, c, ldc, depth, size);
  const float* plus = size.plus;
  float buffer[kTileRows * kPanel];
  for (int64_t r = 0; r < rows; r += kTileRows, c += kTileRows * ldc, size.panel += ahead_of_tile(depth)) {
    const int64_t count = std::min<int64_t>(kTileRows, rows - r);
    const bool whole = n == kPanel;
    float* to = whole ? c : buffer;
    const int64_t ld = whole ? ldc : kPanel;
    if (!whole && into == Into::kAdd)
      for (int64_t i = 0; i < count; ++i) std::memcpy(buffer + i * kPanel, c + i * ldc, sizeof(float) * n);
    size.plus = whole && plus != nullptr ? plus + r * ldc : nullptr;
    if (packed) tile<kPanelVectors, into>(count, a + r * depth, 1, kTileRows, b, kPanel, to, ld, depth, size);
    else tile<kPanelVectors, into>(count, a + r * row, row, col, b, kPanel, to, ld, depth, size);
    if (whole) continue;
    for (int64_t i = 0; i < count; ++i) {
      if (plus != nullptr)
        for (int64_t j = 0; j < n; ++j) buffer[i * kPanel + j] += plus[(r + i) * ldc + j];
      std::memcpy(c + i * ldc, buffer + i * kPanel, sizeof(float) * n);
    }
  }
}

// Rows of one block: even blocks, an even number of them, so that threads end together.
int64_t block_rows(int64_t m) {
  const int64_t blocks = m <= kRowBlock ? 1 : (m + 2 * kRowBlock - 1) / (2 * kRowBlock) * 2;
  const int64_t rows = (m + blocks - 1) / blocks;
  return (rows + kTileRows - 1) / kTileRows * kTileRows;
}

// y += x, number by number.
void add(const float* x, float* y, int64_t count) {
  parallel_chunks(count, 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) y[i] += x[i];
  });
}

// Panels that one task computes.
int64_t panel_chunk(int64_t row_blocks, int64_t panel_count, int64_t most) {
  return std::clamp<int64_t>(row_blocks * panel_count / kFewestTasks, 1, most);
}

// C [m, n] (+)= A B, then `plus` [m, n] is added unless null. `panel(p, k)` is panel p of B from row k on.
template <class Panel>
void multiply_blocks(const Operand& a, const Panel& panel, float* c, int64_t m, int64_t n, int64_t depth, bool accumulate,
                     const float* plus) {
  const int64_t slab = slab_of(depth);
  const int64_t panel_count = panels(n);
  const int64_t height = block_rows(m);
  const int64_t row_blocks = (m + height - 1) / height;
  // A stored by columns, a weight gradient's, is packed if its rows would compete for the same few sets of L2, and where vectors
  // are short: panels are narrow there and A is read more often.
  const bool pack_a = a.col != 1 && (kLanes < 16 || a.col % kSetFloats == 0);
  const int64_t chunk = panel_chunk(row_blocks, panel_count, pack_a ? 2 * kPanelChunk : kPanelChunk);
  const int64_t chunks = (panel_count + chunk - 1) / chunk;
  parallel(row_blocks * chunks, [&](int64_t index) {
    const int64_t r0 = index / chunks * height, rows = std::min(height, m - r0);
    const int64_t p0 = index % chunks * chunk, p1 = std::min(panel_count, p0 + chunk);
    for (int64_t k0 = 0; k0 < depth; k0 += slab) {
      const int64_t size = std::min(slab, depth - k0);
      const float* rows_of_a = a.data + r0 * a.row + k0 * a.col;
      if (pack_a) {
        float* out = scratch<float>(1, (rows + kTileRows) * size);
        pack_rows(rows_of_a, a.col, rows, size, out);
        rows_of_a = out;
      }
      for (int64_t p = p0; p < p1; ++p) {
        const bool is_last = k0 + size == depth;
        const float* next = p + 1 < p1 ? panel(p + 1, k0) : panel(p0, is_last ? 0 : k0 + size);
        float* out = c + r0 * n + p * kPanel;
        const float* added = plus != nullptr && is_last ? plus + (out - c) : nullptr;
        const int64_t count = std::min<int64_t>(kPanel, n - p * kPanel);
        const auto run = k0 == 0 && !accumulate ? multiply_panel<Into::kOverwrite> : multiply_panel<Into::kAdd>;
        run(rows, rows_of_a, a.row, a.col, pack_a, panel(p, k0), out, n, count, size,
            {next, p == p0 && a.col == 1, added});
      }
    }
  });
}

// C [m, n] (+)= A B, then `plus` [m, n] is added unless null.
void product(const Operand& a, const Operand& b, float* c, int64_t m, int64_t n, int64_t depth, bool accumulate,
             const float* plus = nullptr) {
  if (m == 0 || n == 0) return;
  if (depth == 0) {
    if (!accumulate) std::memset(c, 0, sizeof(float) * m * n);
    if (plus != nullptr) add(plus, c, m * n);
    return;
  }
  const int64_t panel_count = panels(n);
  float* packed = scratch<float>(0, panel_count * kPanel * depth);
  // B is read along its rows, whatever that is for the panels: down a column every line would lie in a page of its own.
  if (b.col == 1)
    parallel_chunks(depth, kPackedRows, [&](int64_t k0, int64_t k1) {
      for (int64_t k = k0; k < k1; ++k)
        for (int64_t p = 0; p < panel_count; ++p)
          pack_panel(b.data + k * b.row + p * kPanel, b.row, std::min<int64_t>(kPanel, n - p * kPanel), 1, packed + (p * depth + k) * kPanel);
    });
  else
    parallel(panel_count, [&](int64_t p) {
      pack_panel_transposed(b.data + p * kPanel * b.col, b.col, std::min<int64_t>(kPanel, n - p * kPanel), depth, packed + p * depth * kPanel);
    });
  const auto panel = [&](int64_t p, int64_t k) { return packed + (p * depth + k) * kPanel; };
  multiply_blocks(a, panel, c, m, n, depth, accumulate, plus);
}

// Rounds x [rows, inputs] in scratch memory of the calling thread.
Activations<Int8> rounded(const float* x, int64_t rows, int64_t inputs) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup, width = groups * kGroup;
  Rounded* q = scratch<Rounded>(0, rows * width);
  float* scales = scratch<float>(1, rows * groups);
  Offset* offsets = scratch<Offset>(2, rows * groups);
  parallel_chunks(rows, std::max<int64_t>(1, kRoundedNumbers / std::max<int64_t>(1, inputs)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) round_row(x + r * inputs, inputs, q + r * width, scales + r * groups, offsets + r * groups);
  });
  return {q, scales, offsets, width, groups};
}

// y [rows, outputs] = x [rows, inputs] wᵀ, then `plus` is added unless null.
template <class T>
void product_packed(const float* x, const Packed<T>& w, float* y, int64_t rows, int64_t outputs, const float* plus) {
  const int64_t panel_count = panels(outputs), slab = w.slab();
  Activations<T> from;
  if constexpr (T::kScaled) from = rounded(x, rows, w.depth);
  else from = {x, w.depth};
  if (rows <= kStreamRows) {  // every weight is read once, as it lies in memory
    parallel_chunks(panel_count, std::max<int64_t>(1, kStreamBytes / w.panel_bytes()), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p)
        for (int64_t k0 = 0; k0 < w.depth; k0 += slab) stream_panel(w, p, k0, from, 0, rows, y, outputs, plus);
    });
    return;
  }
  if constexpr (std::is_same_v<T, F32>) {
    const auto panel = [&](int64_t p, int64_t k) -> const float* { return w.at(p, k); };
    multiply_blocks({x, w.depth, 1}, panel, y, rows, outputs, w.depth, false, plus);
  } else {  // a slab of some rows of x, and of one panel, stay in L2
    const int64_t height = block_rows(rows), row_blocks = (rows + height - 1) / height;
    const int64_t chunk = panel_chunk(row_blocks, panel_count, kPanelChunk), chunks = (panel_count + chunk - 1) / chunk;
    parallel(row_blocks * chunks, [&](int64_t index) {
      const int64_t r0 = index / chunks * height, count = std::min(height, rows - r0);
      const int64_t p0 = index % chunks * chunk, p1 = std::min(panel_count, p0 + chunk);
      const float* added = plus == nullptr ? nullptr : plus + r0 * outputs;
      for (int64_t k0 = 0; k0 < w.depth; k0 += slab)
        for (int64_t p = p0; p < p1; ++p) stream_panel(w, p, k0, from, r0, count, y + r0 * outputs, outputs, added);
    });
  }
}

// Fills `out` with bytes of a file. False if there are fewer, or it cannot be read.
#if defined(__wasm__)
extern "C" __attribute__((import_module("env"), import_name("read_file"))) int32_t trefoil_read_file(double descriptor, double offset,
                                                                                                char* out, double bytes);
bool read_file(int64_t descriptor, int64_t offset, char* out, int64_t bytes) {
  return trefoil_read_file(static_cast<double>(descriptor), static_cast<double>(offset), out, static_cast<double>(bytes)) != 0;
}
#else
bool read_file(int64_t descriptor, int64_t offset, char* out, int64_t bytes) {
  for (int64_t at = 0; at < bytes;) {
    const ssize_t count = pread(static_cast<int>(descriptor), out + at, static_cast<size_t>(bytes - at), offset + at);
    if (count <= 0) return false;
    at += count;
  }
  return true;
}
#endif

// Few rows of weights that are not packed (a model in training that writes a sample): packing them would cost several times the
// product, so they are read where they lie, once. The sums run in the order of `product`, slab by slab: a token's result is the same alone and in a batch, bit for bit.
constexpr int64_t kFewRows = 4;

template <int Rows>
void multiply_few(const float* x, const float* w, float* y, int64_t outputs, int64_t inputs, int64_t slab, int64_t j) {
  vec total[Rows] = {};
  for (int64_t k0 = 0; k0 < inputs; k0 += slab) {
    vec acc[Rows] = {};
    for (int64_t k = k0; k < std::min(k0 + slab, inputs); ++k) {
      const vec column = load_column(w + j * inputs + k, inputs);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) acc[r] = multiply_add(splat(x[r * inputs + k]), column, acc[r]);
    }
    for (int r = 0; r < Rows; ++r) total[r] = k0 == 0 ? acc[r] : total[r] + acc[r];
  }
  for (int r = 0; r < Rows; ++r) store(y + r * outputs + j, total[r]);
}

void product_few(const float* x, const float* w, float* y, int64_t rows, int64_t outputs, int64_t inputs) {
  const int64_t slab = slab_of(inputs);
  const auto run = rows == 1 ? multiply_few<1> : rows == 2 ? multiply_few<2> : rows == 3 ? multiply_few<3> : multiply_few<4>;
  parallel_chunks(outputs / kLanes, 8, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) run(x, w, y, outputs, inputs, slab, v * kLanes);
  });
}

}  // namespace

extern "C" {

// y [rows, outputs] (+)= x [rows, inputs] w [outputs, inputs]ᵀ, and the residual on top unless it is null. It is added to
// the finished sum, not the start of it: a small update would lose digits if every term were added to a large number.
void linear_forward(const float* x, const float* w, float* y, int64_t rows, int64_t outputs, int64_t inputs,
                    int64_t accumulate, const float* residual) {
  const bool few = rows > 0 && rows <= kFewRows && inputs > 0 && outputs % kLanes == 0 && accumulate == 0;
  if (!few) return product({x, inputs, 1}, {w, 1, inputs}, y, rows, outputs, inputs, accumulate != 0, residual);
  product_few(x, w, y, rows, outputs, inputs);
  if (residual != nullptr) add(residual, y, rows * outputs);
}

// dx [rows, inputs] (+)= dy [rows, outputs] w [outputs, inputs]
void linear_backward_input(const float* dy, const float* w, float* dx, int64_t rows, int64_t outputs, int64_t inputs,
                           int64_t accumulate) {
  product({dy, outputs, 1}, {w, inputs, 1}, dx, rows, inputs, outputs, accumulate != 0);
}

// d_weight [outputs, inputs] (+)= dy [rows, outputs]ᵀ x [rows, inputs]
void linear_backward_weight(const float* dy, const float* x, float* d_weight, int64_t rows, int64_t outputs,
                            int64_t inputs, int64_t accumulate) {
  product({dy, 1, outputs}, {x, inputs, 1}, d_weight, outputs, inputs, rows, accumulate != 0);
}

// d [m, n] = alpha a b + beta c for `count` matrices, one after another in each operand. a is [m, k], or [k, m] if
// transposed; b is [k, n] or [n, k]. c is null or another matrix than d.
void matrix_products(const float* a, const float* b, const float* c, float* d, int64_t count, int64_t m, int64_t n,
                     int64_t k, int64_t transpose_a, int64_t transpose_b, float alpha, float beta) {
  const auto one = [&](int64_t i) {
    const float *left = a + i * m * k, *right = b + i * k * n;
    float* out = d + i * m * n;
    product(transpose_a ? Operand{left, 1, m} : Operand{left, k, 1},
            transpose_b ? Operand{right, 1, k} : Operand{right, n, 1}, out, m, n, k, false);
    if (c == nullptr && alpha == 1.0f) return;
    const float* added = c == nullptr ? nullptr : c + i * m * n;
    parallel_chunks(m * n, 1 << 15, [&](int64_t begin, int64_t end) {
      each_vector(begin, end, [&](int64_t j, auto get, auto put) {
        put(out + j, multiply_add(splat(alpha), get(out + j), added == nullptr ? vec{} : splat(beta) * get(added + j)));
      });
    });
  };
  // Threads share out small products, and the rows of large ones.
  if (m * n * k <= kSmallProduct) parallel(count, one);
  else
    for (int64_t i = 0; i < count; ++i) one(i);
}

// y [rows, outputs] += bias [outputs]
void bias_forward(float* y, const float* bias, int64_t rows, int64_t outputs) {
  parallel_chunks(rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t i = 0; i < outputs; ++i) y[r * outputs + i] += bias[i];
  });
}

// d_bias (+)= column sums of dy, in row order.
void bias_backward(const float* dy, float* d_bias, int64_t rows, int64_t outputs, int64_t accumulate) {
  parallel_chunks(outputs, 64, [&](int64_t begin, int64_t end) {
    float total[64];
    for (int64_t i = begin; i < end; ++i) total[i - begin] = accumulate ? d_bias[i] : 0.0f;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = begin; i < end; ++i) total[i - begin] += dy[r * outputs + i];
    for (int64_t i = begin; i < end; ++i) d_bias[i] = total[i - begin];
  });
}

// Bytes [1] of a packed matrix.
void packed_bytes(double* bytes, int64_t type, int64_t outputs, int64_t inputs) {
  with_type(type, [&](auto held) {
    bytes[0] = static_cast<double>(panels(outputs) * Packed<decltype(held)>{nullptr, inputs}.panel_bytes());
  });
}

// Packs rows [first, first + rows) of a matrix [outputs, inputs] from memory (`source`), or if that is null from a file at byte
// `offset`. failed[0] becomes 1 if the file has too few bytes. `to` is `from` or int8 (3).
void linear_pack(const void* source, int64_t descriptor, int64_t offset, int64_t from, char* packed, int64_t to,
                 int64_t outputs, int64_t inputs, int64_t first, int64_t rows, int32_t* failed) {
  if (rows == 0) return;
  const auto pack = [&](auto have, auto held) {
    using From = decltype(have);
    const Packed<decltype(held)> w{packed, inputs};
    const int64_t row_bytes = inputs * static_cast<int64_t>(sizeof(typename From::Stored));
    const int64_t panel = first / kPanel;
    parallel((first + rows - 1) / kPanel + 1 - panel, [&](int64_t i) {
      const int64_t p = panel + i;
      const int64_t r0 = std::max(first, p * kPanel), r1 = std::min(first + rows, (p + 1) * kPanel);
      const int64_t skipped = (r0 - first) * row_bytes, bytes = (r1 - r0) * row_bytes;
      const char* data = static_cast<const char*>(source) + skipped;
      if (source == nullptr) {
        char* read = scratch<char>(3, bytes);
        if (!read_file(descriptor, offset + skipped, read, bytes)) {
          __atomic_store_n(failed, 1, __ATOMIC_RELAXED);
          return;
        }
        data = read;
      }
      pack_columns<From>(reinterpret_cast<const typename From::Stored*>(data), r1 - r0, w, p, r0 - p * kPanel);
    });
    if (first + rows == outputs) clear_padding(w, outputs);
  };
  if (to == 3) {
    if (from == 0) pack(F32{}, Int8{});
    else if (from == 1) pack(Bf16{}, Int8{});
    else pack(F16{}, Int8{});
  } else if (from == 0) pack(F32{}, F32{});
  else if (from == 1) pack(Bf16{}, Bf16{});
  else pack(F16{}, F16{});
}

// y [rows, outputs] = x [rows, inputs] wᵀ with packed weights, and the residual on top unless it is null.
void linear_packed(const float* x, char* packed, int64_t type, float* y, int64_t rows, int64_t outputs, int64_t inputs,
                   const float* residual) {
  if (rows == 0 || outputs == 0) return;
  with_type(type, [&](auto held) { product_packed(x, Packed<decltype(held)>{packed, inputs}, y, rows, outputs, residual); });
}

// y [count, inputs] = the rows `ids` of a packed matrix. first_bad[0] = the first id that is not one of them, or -1; then
// nothing is copied.
void packed_rows(char* packed, int64_t type, const int32_t* ids, float* y, int32_t* first_bad, int64_t count,
                 int64_t outputs, int64_t inputs) {
  first_bad[0] = -1;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= outputs) {
      first_bad[0] = static_cast<int32_t>(i);
      return;
    }
  with_type(type, [&](auto held) {
    using T = decltype(held);
    const Packed<T> w{packed, inputs};
    parallel_chunks(count, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t p = ids[i] / kPanel, j = ids[i] % kPanel;
        for (int64_t k = 0; k < inputs; ++k) {
          const float x = T::widen_one(w.element(p, k, j));
          y[i * inputs + k] = T::kScaled ? x * w.scales(p, k)[j] : x;
        }
      }
    });
  });
}
}
