// compressed_forward, window_forward and compressed_window_query_gradient on the emulator against float64: outputs,
// log-sum-exps, that a token's bits do not depend on later tokens, and gradients, also by joint_gradients. run.py puts
// the kernels' sources in front of this.
#include <algorithm>
#include <random>

namespace {

std::mt19937 random_bits(7);
float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(random_bits);
}

struct Batch {
  std::vector<int> cu = {0}, cu_cmp = {0};
  std::vector<bf16> q, k, v, k_cmp, v_cmp;
  int sequences = 0;

  // `grows`: scores rise along the keys, so that the softmax reference must move again and again, also by far.
  Batch(const std::vector<int>& lengths, float size, bool grows) {
    for (int length : lengths) {
      cu.push_back(cu.back() + length);
      cu_cmp.push_back(cu_cmp.back() + count_compressed(length));
      sequences++;
    }
    const auto fill = [&](std::vector<bf16>& x, const std::vector<int>& starts, int width, bool scaled) {
      x.resize((size_t)starts.back() * width);
      for (int s = 0; s < sequences; s++)
        for (int i = starts[s]; i < starts[s + 1]; i++) {
          const float drift = grows ? 0.1f + 3.0f * (i - starts[s]) / (starts[s + 1] - starts[s]) : 1.0f;
          for (int c = 0; c < width; c++)
            x[(size_t)i * width + c] = emulator::to_bf16(scaled ? size * drift * normal() : normal());
        }
    };
    fill(q, cu, HEADS * DK, false);
    fill(k, cu, GROUPS * DK, true);
    fill(v, cu, GROUPS * DV, false);
    fill(k_cmp, cu_cmp, GROUPS * DK, true);
    fill(v_cmp, cu_cmp, GROUPS * DV, false);
  }
};

struct Result {
  std::vector<bf16> out;
  std::vector<float> lse;
};

template <class Pack, class Forward> Result run(const Batch& b, int tiles, int row_tiles, int threads, int shared,
                                                const Pack& pack, const Forward& forward) {
  std::vector<unsigned char> packed((size_t)std::max(1, tiles) * GROUPS * PACKED, 0xff);
  Result result{std::vector<bf16>((size_t)b.cu.back() * HEADS * DV, 0x7fc0),
                std::vector<float>((size_t)b.cu.back() * HEADS, NAN)};
  if (tiles > 0) emulator::launch({tiles, GROUPS, 1}, 256, 1, 0, [&] { pack(packed.data()); });
  emulator::launch({row_tiles, GROUPS, 1}, threads, 1, shared + 2048,
                   [&] { forward(packed.data(), result.out.data(), result.lse.data()); });
  return result;
}

int row_tiles(const Batch& b, int rows) {
  int count = 0;
  for (int s = 0; s < b.sequences; s++) count += ((b.cu[s + 1] - b.cu[s]) * HPG + rows - 1) / rows;
  return count;
}

Result compressed(const Batch& b, int skipped = 0) {
  int tiles = 0;
  for (int s = 0; s < b.sequences; s++) tiles += (b.cu_cmp[s + 1] - b.cu_cmp[s] + 63) / 64;
  return run(
      b, tiles,
      (row_tiles(b, compressed_forward_rows) - skipped + compressed_forward_tiles - 1) / compressed_forward_tiles,
      compressed_forward_threads, compressed_forward_shared,
      [&](unsigned char* to) { compressed_pack(b.k_cmp.data(), b.v_cmp.data(), to, b.cu_cmp.data(), b.sequences); },
      [&](const unsigned char* packed, bf16* out, float* lse) {
        compressed_forward(b.q.data(), packed, out, lse, b.cu.data(), b.sequences, skipped);
      });
}

Result window(const Batch& b, int skipped = 0) {
  int tiles = 0;
  for (int s = 0; s < b.sequences; s++) tiles += (b.cu[s + 1] - b.cu[s] + 63) / 64;
  return run(
      b, tiles, row_tiles(b, window_forward_rows) - skipped, window_forward_threads, window_forward_shared,
      [&](unsigned char* to) { window_pack(b.k.data(), b.v.data(), to, b.cu.data(), b.sequences); },
      [&](const unsigned char* packed, bf16* out, float* lse) {
        window_forward(b.q.data(), packed, out, lse, b.cu.data(), b.sequences, skipped);
      });
}

bool compare(const char* name, const Batch& b, bool is_window, const Result& result) {
  double error = 0, norm = 0, lse_error = 0;
  bool right = true;
  const std::vector<bf16>&keys = is_window ? b.k : b.k_cmp, &values = is_window ? b.v : b.v_cmp;
  for (int s = 0; s < b.sequences; s++)
    for (int t = 0; t < b.cu[s + 1] - b.cu[s]; t++)
      for (int h = 0; h < HEADS; h++) {
        const size_t row = (size_t)(b.cu[s] + t) * HEADS + h;
        const int g = h / HPG, from = is_window ? std::max(0, t + 1 - WINDOW) : 0,
                  to = is_window ? t + 1 : count_compressed(t + 1);
        const int first = is_window ? b.cu[s] : b.cu_cmp[s];
        std::vector<double> score;
        double top = -INFINITY, total = 0, out[DV] = {};
        for (int j = from; j < to; j++) {
          double dot = 0;
          for (int c = 0; c < DK; c++)
            dot += (double)emulator::from_bf16(b.q[row * DK + c]) *
                   emulator::from_bf16(keys[((size_t)(first + j) * GROUPS + g) * DK + c]);
          score.push_back(dot / std::sqrt((double)DK));
          top = std::max(top, score.back());
        }
        for (int j = from; j < to; j++) {
          const double p = std::exp(score[j - from] - top);
          total += p;
          for (int c = 0; c < DV; c++)
            out[c] += p * emulator::from_bf16(values[((size_t)(first + j) * GROUPS + g) * DV + c]);
        }
        if (from == to) {
          right = right && result.lse[row] == -INFINITY;
        } else {
          const double lse = top + std::log(total);
          lse_error = std::max(lse_error, std::fabs(result.lse[row] - lse) / std::max(1.0, std::fabs(lse)));
        }
        for (int c = 0; c < DV; c++) {
          const double expected = from == to ? 0 : out[c] / total,
                       actual = emulator::from_bf16(result.out[row * DV + c]);
          if (!(std::fabs(actual) < 1e30)) right = false;
          error += (actual - expected) * (actual - expected);
          norm += expected * expected;
        }
      }
  error = std::sqrt(error / norm);
  right = right && error < 5e-3 && lse_error < 1e-5;
  printf("%-10s %-28s error %.2e, lse %.2e %s\n", is_window ? "window" : "compressed", name, error, lse_error,
         right ? "" : "WRONG");
  return right;
}

// Without the first tiles the others have the same bits.
bool continued(const char* name, const Batch& b, bool is_window, const Result& before) {
  const int rows = is_window ? window_forward_rows : compressed_forward_rows;
  const int skipped = b.cu[1] * HPG / rows / 2;
  const Result after = is_window ? window(b, skipped) : compressed(b, skipped);
  const size_t first = (size_t)((skipped * rows + HPG - 1) / HPG) * HEADS;  // of the first token with all of its heads
  const bool same = std::equal(before.out.begin() + first * DV, before.out.end(), after.out.begin() + first * DV) &&
                    std::equal(before.lse.begin() + first, before.lse.end(), after.lse.begin() + first);
  if (!same) printf("%-10s %s: differs without its first tiles\n", is_window ? "window" : "compressed", name);
  return same;
}

// Tokens before the change have the same bits.
bool independent(const char* name, Batch b, bool is_window, const Result& before) {
  const int from = b.cu[1] - 40;
  for (int t = from; t < b.cu[1]; t++) {
    for (int c = 0; c < HEADS * DK; c++) b.q[(size_t)t * HEADS * DK + c] = emulator::to_bf16(30 * normal());
    for (int c = 0; c < GROUPS * DK; c++) b.k[(size_t)t * GROUPS * DK + c] = emulator::to_bf16(30 * normal());
  }
  for (int j = count_compressed(from); j < b.cu_cmp[1]; j++)
    for (int c = 0; c < GROUPS * DK; c++) b.k_cmp[(size_t)j * GROUPS * DK + c] = emulator::to_bf16(30 * normal());
  const Result after = is_window ? window(b) : compressed(b);
  const bool same = memcmp(before.out.data(), after.out.data(), (size_t)from * HEADS * DV * 2) == 0 &&
                    memcmp(before.lse.data(), after.lse.data(), (size_t)from * HEADS * 4) == 0;
  if (!same) printf("%-10s %s: depends on later tokens\n", is_window ? "window" : "compressed", name);
  return same;
}

// Error of gradients relative to their norm
double distance(const std::vector<double>& actual, const std::vector<double>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); i++) {
    if (!(std::fabs(actual[i]) < 1e30)) return INFINITY;
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

// All gradients of both branches by joint_gradients: dQ, dK and dV of compressed, dK and dV of window.
bool joint(const char* name, const Batch& b, const std::vector<bf16>& d_out, const std::vector<float>& shift,
           const std::vector<float>& delta, const std::vector<double> (&expected)[5]) {
  const int n = b.sequences;
  std::vector<int> blocks = {0};
  int cmp_tiles = 0, win_tiles = 0, longest = 0;
  for (int s = 0; s < n; s++) {
    const int length = b.cu[s + 1] - b.cu[s];
    blocks.push_back(blocks.back() + (length + 63) / 64);
    cmp_tiles += (b.cu_cmp[s + 1] - b.cu_cmp[s] + JOINT_KEYS - 1) / JOINT_KEYS;
    win_tiles += (length + JOINT_KEYS - 1) / JOINT_KEYS;
    longest = std::max(longest, length);
  }
  const int chunks = (longest + JOINT_CHUNK - 1) / JOINT_CHUNK;
  std::vector<float> dk(b.k_cmp.size()), dv(b.v_cmp.size()), sums((size_t)blocks.back() * HEADS * 64 * 64);
  std::vector<bf16> dk_win(b.k.size(), 0x7fc0), dv_win(b.v.size(), 0x7fc0);
  const int grid = (cmp_tiles * chunks + win_tiles) * GROUPS;
  if (!emulator::launch({grid, 1, 1}, joint_gradients_threads, 1, joint_gradients_shared + 2048, [&] {
        joint_gradients(b.q.data(), d_out.data(), shift.data(), delta.data(), b.k_cmp.data(), b.v_cmp.data(), dk.data(),
                        dv.data(), b.k.data(), b.v.data(), dk_win.data(), dv_win.data(), sums.data(), b.cu.data(),
                        b.cu_cmp.data(), blocks.data(), n, cmp_tiles, chunks);
      }))
    return false;
  std::vector<double> actual[5];
  for (int s = 0; s < n; s++)
    for (int t = 0; t < b.cu[s + 1] - b.cu[s]; t++)
      for (int h = 0; h < HEADS; h++) {
        const int r = t * HPG + h % HPG;
        const float* tile = sums.data() + (((size_t)blocks[s] * HPG + r / 64) * GROUPS + h / HPG) * 4096;
        for (int c = 0; c < DK; c++)
          actual[0].push_back(tile[query_sum(r % 64, c - c % 2) + c % 2] / std::sqrt((double)DK));
      }
  actual[1].assign(dk.begin(), dk.end());
  actual[2].assign(dv.begin(), dv.end());
  for (bf16 x : dk_win) actual[3].push_back(emulator::from_bf16(x));
  for (bf16 x : dv_win) actual[4].push_back(emulator::from_bf16(x));
  bool right = true;
  printf("%-10s %-28s error", "joint", name);
  for (int i = 0; i < 5; i++) {
    const double error = distance(actual[i], expected[i]);
    right = right && error < 8e-3;
    printf(" %.2e", error);
  }
  puts(right ? "" : " WRONG");
  return right;
}

// dQ of both branches for random gradients, deltas and log-sum-exps near the true ones (they need not be consistent).
bool gradients(const char* name, const Batch& b, const Result& cmp, const Result& win) {
  const size_t rows = (size_t)b.cu.back() * HEADS;
  std::vector<bf16> d_out(rows * DV), dq(rows * DK, 0x7fc0);
  std::vector<float> shift(3 * rows, NAN), delta(3 * rows, NAN);
  for (bf16& x : d_out) x = emulator::to_bf16(normal());
  for (size_t r = 0; r < rows; r++) {
    shift[r] = cmp.lse[r] == -INFINITY ? INFINITY : cmp.lse[r] * LOG2_E + 1.0f + 0.1f * normal();
    shift[2 * rows + r] = win.lse[r] * LOG2_E + 1.0f + 0.1f * normal();
    delta[r] = normal(), delta[2 * rows + r] = normal();
  }
  int cmp_tiles = 0, win_tiles = 0;
  for (int s = 0; s < b.sequences; s++) {
    cmp_tiles += (b.cu_cmp[s + 1] - b.cu_cmp[s] + 63) / 64;
    win_tiles += (b.cu[s + 1] - b.cu[s] + 63) / 64;
  }
  std::vector<unsigned char> pc((size_t)std::max(1, cmp_tiles) * GROUPS * PACKED, 0xff);
  std::vector<unsigned char> pw((size_t)win_tiles * GROUPS * PACKED, 0xff);
  const int n = b.sequences;
  if (cmp_tiles > 0)
    emulator::launch({cmp_tiles, GROUPS, 1}, 256, 1, 0,
                     [&] { compressed_pack(b.k_cmp.data(), b.v_cmp.data(), pc.data(), b.cu_cmp.data(), n); });
  emulator::launch({win_tiles, GROUPS, 1}, 256, 1, 0,
                   [&] { window_pack(b.k.data(), b.v.data(), pw.data(), b.cu.data(), n); });
  emulator::launch({row_tiles(b, compressed_window_query_gradient_rows), GROUPS, 1},
                   compressed_window_query_gradient_threads, 1, compressed_window_query_gradient_shared + 2048, [&] {
                     compressed_window_query_gradient(b.q.data(), pc.data(), pw.data(), d_out.data(), shift.data(),
                                                      delta.data(), dq.data(), b.cu.data(), n);
                   });
  // dQ, and dK and dV of the compressed and of the window branch
  std::vector<double> all[5] = {std::vector<double>(rows * DK), std::vector<double>(b.k_cmp.size()),
                                std::vector<double>(b.v_cmp.size()), std::vector<double>(b.k.size()),
                                std::vector<double>(b.v.size())};
  for (int s = 0; s < n; s++)
    for (int t = 0; t < b.cu[s + 1] - b.cu[s]; t++)
      for (int h = 0; h < HEADS; h++) {
        const size_t row = (size_t)(b.cu[s] + t) * HEADS + h;
        const int g = h / HPG;
        for (int branch = 0; branch < 2; branch++) {
          const std::vector<bf16>&keys = branch ? b.k : b.k_cmp, &values = branch ? b.v : b.v_cmp;
          const int first = branch ? b.cu[s] : b.cu_cmp[s], from = branch ? std::max(0, t + 1 - WINDOW) : 0,
                    to = branch ? t + 1 : count_compressed(t + 1);
          for (int j = from; j < to; j++) {
            const size_t key = (size_t)(first + j) * GROUPS + g;
            double dot = 0, slope = 0;
            for (int c = 0; c < DK; c++)
              dot += (double)emulator::from_bf16(b.q[row * DK + c]) * emulator::from_bf16(keys[key * DK + c]);
            for (int c = 0; c < DV; c++)
              slope += (double)emulator::from_bf16(d_out[row * DV + c]) * emulator::from_bf16(values[key * DV + c]);
            const double p = std::exp2(dot / std::sqrt((double)DK) * LOG2_E - shift[2 * branch * rows + row]);
            const double ds = p * (slope - delta[2 * branch * rows + row]) / std::sqrt((double)DK);
            for (int c = 0; c < DK; c++) {
              all[0][row * DK + c] += ds * emulator::from_bf16(keys[key * DK + c]);
              all[1 + 2 * branch][key * DK + c] += ds * emulator::from_bf16(b.q[row * DK + c]);
            }
            for (int c = 0; c < DV; c++)
              all[2 + 2 * branch][key * DV + c] += p * emulator::from_bf16(d_out[row * DV + c]);
          }
        }
      }
  std::vector<double> actual;
  for (bf16 x : dq) actual.push_back(emulator::from_bf16(x));
  const double error = distance(actual, all[0]);
  const bool right = error < 5e-3;
  printf("%-10s %-28s error %.2e %s\n", "dQ", name, error, right ? "" : "WRONG");
  return joint(name, b, d_out, shift, delta, all) && right;
}

}  // namespace

int main() {
  const std::tuple<const char*, std::vector<int>, float, bool> cases[] = {
      {"plain", {500, 1, 70}, 1.0f, false},
      {"large scores", {400}, 6.0f, false},
      {"rising", {430, 33}, 2.0f, true},
      {"rising by more than 2^127", {400}, 30.0f, true},
  };
  bool right = true;
  for (const auto& [name, lengths, size, grows] : cases) {
    const Batch b(lengths, size, grows);
    const Result both[] = {compressed(b), window(b)};
    right = gradients(name, b, both[0], both[1]) && right;
    for (bool is_window : {false, true}) {
      const Result& result = both[is_window];
      right = compare(name, b, is_window, result) && right;
      right = continued(name, b, is_window, result) && right;
      right = independent(name, b, is_window, result) && right;
    }
  }
  puts(right ? "right" : "WRONG");
  return !right;
}
