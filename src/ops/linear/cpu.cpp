// The three products of a linear layer, as one blocked product C (+)= A B with different readings of A and B.
#include "gemm.h"
#include "runtime.h"

#include <algorithm>

namespace {

constexpr int64_t kRowBlock = 96;    // rows of C one task computes: A's block stays in L2
constexpr int64_t kDepthBlock = 512; // k runs in slabs of at most this: a packed panel of B stays in L2
constexpr int64_t kPanelChunk = 12;  // panels of one task

struct Operand {
  const float* data;
  int64_t row, col;  // element (i, k) of A, or (k, j) of B, lies at data[i*row + k*col] or data[k*row + j*col]
};

// Packs rows [0, rows) x [0, depth) of A into tiles [depth][kTileRows]; the last tile may be short.
void pack_rows(const Operand& a, int64_t rows, int64_t depth, float* out) {
  for (int64_t r0 = 0; r0 < rows; r0 += kTileRows, out += depth * kTileRows) {
    const int64_t count = std::min<int64_t>(kTileRows, rows - r0);
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t r = 0; r < count; ++r) out[k * kTileRows + r] = a.data[(r0 + r) * a.row + k * a.col];
  }
}

// One slab of depth for one block of rows and one panel. Columns past n go through a buffer: C has no padding.
template <Into into>
void multiply_panel(int64_t rows, const float* a, int64_t row, int64_t col, bool packed, const float* b, float* c, int64_t ldc,
              int64_t n, int64_t depth) {
  if (n == kPanel) {
    if (!packed) return tile<kPanelVectors, into>(rows, a, row, col, b, kPanel, c, ldc, depth);
    for (int64_t r = 0; r < rows; r += kTileRows)
      tile<kPanelVectors, into>(std::min<int64_t>(kTileRows, rows - r), a + r * depth, 1, kTileRows, b, kPanel, c + r * ldc, ldc, depth);
    return;
  }
  float buffer[kTileRows * kPanel];
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t count = std::min<int64_t>(kTileRows, rows - r);
    if (into == Into::kAdd)
      for (int64_t i = 0; i < count; ++i) std::memcpy(buffer + i * kPanel, c + (r + i) * ldc, sizeof(float) * n);
    if (packed) tile<kPanelVectors, into>(count, a + r * depth, 1, kTileRows, b, kPanel, buffer, kPanel, depth);
    else tile<kPanelVectors, into>(count, a + r * row, row, col, b, kPanel, buffer, kPanel, depth);
    for (int64_t i = 0; i < count; ++i) std::memcpy(c + (r + i) * ldc, buffer + i * kPanel, sizeof(float) * n);
  }
}

void product(const Operand& a, const Operand& b, float* c, int64_t m, int64_t n, int64_t depth, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (depth == 0) {
    if (!accumulate) std::memset(c, 0, sizeof(float) * m * n);
    return;
  }
  const int64_t slabs = (depth + kDepthBlock - 1) / kDepthBlock;
  const int64_t slab = (depth + slabs - 1) / slabs;
  const int64_t panel_count = panels(n);
  float* packed = scratch<float>(0, panel_count * kPanel * depth);
  parallel(panel_count * slabs, [&](int64_t index) {
    const int64_t p = index / slabs, k0 = index % slabs * slab;
    const int64_t count = std::min<int64_t>(kPanel, n - p * kPanel), size = std::min(slab, depth - k0);
    if (size <= 0) return;
    const float* source = b.data + k0 * b.row + p * kPanel * b.col;
    float* out = packed + (p * depth + k0) * kPanel;
    if (b.col == 1) pack_panel(source, b.row, count, size, out);
    else pack_panel_transposed(source, b.col, count, size, out);
  });
  const int64_t row_blocks = (m + kRowBlock - 1) / kRowBlock;
  const int64_t chunks = (panel_count + kPanelChunk - 1) / kPanelChunk;
  const bool pack_a = a.col != 1;
  parallel(row_blocks * chunks, [&](int64_t index) {
    const int64_t r0 = index / chunks * kRowBlock, rows = std::min(kRowBlock, m - r0);
    const int64_t p0 = index % chunks * kPanelChunk, p1 = std::min(panel_count, p0 + kPanelChunk);
    for (int64_t k0 = 0; k0 < depth; k0 += slab) {
      const int64_t size = std::min(slab, depth - k0);
      const Operand block = {a.data + r0 * a.row + k0 * a.col, a.row, a.col};
      const float* rows_of_a = block.data;
      if (pack_a) {
        float* out = scratch<float>(1, (rows + kTileRows) * size);
        pack_rows(block, rows, size, out);
        rows_of_a = out;
      }
      for (int64_t p = p0; p < p1; ++p) {
        const float* panel = packed + (p * depth + k0) * kPanel;
        float* out = c + r0 * n + p * kPanel;
        const int64_t count = std::min<int64_t>(kPanel, n - p * kPanel);
        if (k0 == 0 && !accumulate) multiply_panel<Into::kOverwrite>(rows, rows_of_a, a.row, a.col, pack_a, panel, out, n, count, size);
        else multiply_panel<Into::kAdd>(rows, rows_of_a, a.row, a.col, pack_a, panel, out, n, count, size);
      }
    }
  });
}

}  // namespace

extern "C" {

// y [rows, outputs] (+)= x [rows, inputs] w [outputs, inputs]ᵀ
void linear_forward(const float* x, const float* w, float* y, int64_t rows, int64_t outputs, int64_t inputs,
                    int64_t accumulate) {
  product({x, inputs, 1}, {w, 1, inputs}, y, rows, outputs, inputs, accumulate != 0);
}

// dx [rows, inputs] (+)= dy [rows, outputs] w [outputs, inputs]
void linear_backward_input(const float* dy, const float* w, float* dx, int64_t rows, int64_t outputs, int64_t inputs,
                           int64_t accumulate) {
  product({dy, outputs, 1}, {w, inputs, 1}, dx, rows, inputs, outputs, accumulate != 0);
}

// dw [outputs, inputs] (+)= dy [rows, outputs]ᵀ x [rows, inputs]
void linear_backward_weight(const float* dy, const float* x, float* dw, int64_t rows, int64_t outputs, int64_t inputs,
                            int64_t accumulate) {
  product({dy, 1, outputs}, {x, inputs, 1}, dw, outputs, inputs, rows, accumulate != 0);
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
}
