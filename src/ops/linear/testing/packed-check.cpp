// Packed weights beside the plain product, as a program of its own: for processors that this machine only emulates.
#include <cstdio>
#include <vector>

#include "../cpu.cpp"

namespace {

uint32_t state = 1;
float random_number() {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
}

// The product with weights and activations in int8, number by number.
void plain_int8(const Packed<Int8>& w, const float* x, float* y, int64_t rows, int64_t outputs) {
  const int64_t depth = w.depth;
  for (int64_t r = 0; r < rows; ++r, x += depth, y += outputs)
    for (int64_t j = 0; j < outputs; ++j)
      for (int64_t k0 = 0; k0 < depth; k0 += w.slab()) {
        const int64_t end = std::min(depth, k0 + w.slab());
        float total = 0;
        for (int64_t g = k0; g < end; g += kGroup) {
          float largest = 0;
          for (int64_t k = g; k < std::min(end, g + kGroup); ++k) largest = std::max(largest, std::fabs(x[k]));
          const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
          int32_t sum = 0;
          for (int64_t k = g; k < std::min(end, g + kGroup); ++k)
            sum += static_cast<int32_t>(std::nearbyint(x[k] * inverse)) * static_cast<int32_t>(Int8::widen_one(w.element(j / kPanel, k, j % kPanel)));
          const float scale = w.scales(j / kPanel, g)[j % kPanel] * (largest * (1.0f / 127.0f));
          total = multiply_add(static_cast<float>(sum), scale, total);
        }
        y[j] = k0 == 0 ? total : y[j] + total;
      }
}

// Returns the number of differences.
int check(int64_t type, int64_t outputs, int64_t inputs, int64_t rows) {
  std::vector<float> w(outputs * inputs), x(rows * inputs), ours(rows * outputs), theirs(rows * outputs);
  std::vector<uint16_t> narrow(w.size());
  for (size_t i = 0; i < w.size(); ++i) {
    w[i] = random_number();
    narrow[i] = type == 2 ? static_cast<uint16_t>(i * 40503 % 0x7c00 | (i % 2) << 15) : static_cast<uint16_t>(state >> 16);
    if (type == 1 && (narrow[i] & 0x7f80) == 0x7f80) narrow[i] = 0;
  }
  for (float& value : x) value = random_number();
  double bytes;
  packed_bytes(&bytes, type, outputs, inputs);
  std::vector<char> packed(static_cast<size_t>(bytes), char(0x55));
  const bool is_narrow = type == 1 || type == 2;
  const void* source = is_narrow ? static_cast<const void*>(narrow.data()) : w.data();
  int32_t failed = 0;
  linear_pack(source, -1, 0, is_narrow ? type : 0, packed.data(), type, outputs, inputs, 0, outputs, &failed);
  std::vector<int32_t> ids(outputs);
  for (int64_t i = 0; i < outputs; ++i) ids[i] = static_cast<int32_t>(i);
  std::vector<float> exact(w.size());
  int32_t bad;
  packed_rows(packed.data(), type, ids.data(), exact.data(), &bad, outputs, outputs, inputs);
  int differences = failed + (bad != -1);
  for (size_t i = 0; i < w.size(); ++i) {
    const float value = type == 1 ? Bf16::widen_one(narrow[i]) : type == 2 ? F16::widen_one(narrow[i]) : w[i];
    if (type != 3) differences += exact[i] != value;
    else differences += std::fabs(exact[i] - value) > 0.00395f;
  }
  linear_packed(x.data(), packed.data(), type, ours.data(), rows, outputs, inputs, nullptr);
  if (type == 3) plain_int8({packed.data(), inputs}, x.data(), theirs.data(), rows, outputs);
  else linear_forward(x.data(), exact.data(), theirs.data(), rows, outputs, inputs, 0, nullptr);
  return differences + (std::memcmp(ours.data(), theirs.data(), ours.size() * sizeof(float)) != 0);
}

}  // namespace

int main() {
  int cases = 0, wrong = 0;
  for (int64_t type = 0; type < 4; ++type)
    for (int64_t outputs : {1, 17, 64, 70, 130})
      for (int64_t inputs : {1, 33, 64, 600, 1100})
        for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 70}) {
          ++cases;
          if (check(type, outputs, inputs, rows) == 0) continue;
          ++wrong;
          std::printf("type %d, [%d, %d], %d rows\n", int(type), int(outputs), int(inputs), int(rows));
        }
  std::printf("%d lanes: %d cases, %d wrong\n", kLanes, cases, wrong);
  return wrong > 0;
}
