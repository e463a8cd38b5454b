// src/ops/step/attend.cu on the emulator against float64: the selection, the reads and the sum of the branches. run.py
// puts the kernel's source in front of this.
#include <algorithm>
#include <random>

namespace {

constexpr int SPLITS = 8;
std::mt19937 random_bits(7);
float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(random_bits);
}
std::vector<bf16> halves(size_t count) {
  std::vector<bf16> x(count);
  for (bf16& y : x) y = emulator::to_bf16(normal());
  return x;
}

// Pages of one kind with random keys and values, and the table of their addresses.
struct Kind {
  int size;
  std::vector<bf16> numbers;
  std::vector<i64> table;
  i64 address;
  Kind(int size, int tokens) : size(size) {
    const int pages = tokens / size + 1, per_page = GROUPS * size * (DK + DV);
    numbers = halves((size_t)pages * per_page);
    for (int i = 0; i < pages; i++) table.push_back((i64)(numbers.data() + (size_t)i * per_page));
    address = (i64)table.data();
  }
  double key(int g, int s, int c) const { return read_one((bf16*)table[s / size] + g * size * DK + s % size * DK + c); }
  double value(int g, int s, int c) const {
    return read_one((bf16*)table[s / size] + GROUPS * size * DK + g * size * DV + c * size + s % size);
  }
};

// Softmax attention of one head over `keys`.
std::vector<double> attend(const Kind& kind, const double* q, int g, const std::vector<int>& keys) {
  std::vector<double> weights, out(DV, 0.0);
  double total = 0;
  for (int s : keys) {
    double dot = 0;
    for (int c = 0; c < DK; c++) dot += q[c] * kind.key(g, s, c);
    weights.push_back(std::exp(dot / std::sqrt((double)DK)));
    total += weights.back();
  }
  for (size_t i = 0; i < keys.size(); i++)
    for (int c = 0; c < DV; c++) out[c] += weights[i] / total * kind.value(g, keys[i], c);
  return out;
}

bool check(int position, bool tied) {
  const Kind sel(SEL_L, position), win(PAGE, position);
  const std::vector<bf16> projection = halves(WIDTH);
  std::vector<float> logits(3 * HEADS), bias(3 * HEADS), partial((size_t)GROUPS * (SPLITS + 1) * RECORD);
  for (float& x : logits) x = normal();
  for (float& x : bias) x = normal();
  for (float& x : partial) x = std::fabs(normal()) + 0.1f;
  std::vector<float2> rotations(DK);
  for (float2& x : rotations) {
    const float turn = normal();
    x = {std::cos(turn), std::sin(turn)};
  }
  const i64 capacity = (position / CMP_D + 2 * UNIT) / UNIT * UNIT;
  std::vector<float> scores((size_t)HEADS * capacity);
  for (float& x : scores) x = tied ? 0.5f : normal();
  std::vector<int> chosen(GROUPS * SEL_N), reads(GROUPS * 3);
  std::vector<bf16> out(HEADS * DV);
  const size_t shared = sizeof(Shared) + sizeof(float) * (position / SEL_L + 2);
  emulator::launch({CLUSTER, GROUPS, 1}, THREADS, CLUSTER, shared, [&] {
    step_attend(projection.data(), logits.data(), bias.data(), &position, rotations.data(), &sel.address, 0, &win.address, 0,
                partial.data(), scores.data(), capacity, SPLITS, 1, 1.3f, 0, 0, 0, chosen.data(), reads.data(), out.data(), 7);
  });
  double error = 0, norm = 0;
  bool right = true;
  const int current = position / SEL_L;
  for (int g = 0; g < GROUPS; g++) {
    const float* records = partial.data() + (size_t)g * (SPLITS + 1) * RECORD;
    std::vector<double> lse(HPG), importance(current + 1, 0.0);
    for (int r = 0; r < HPG; r++) {
      double sum = 0;
      for (int i = 0; i <= SPLITS; i++) sum += std::exp2((double)records[i * RECORD + r]) * records[i * RECORD + HPG + r];
      lse[r] = std::log2(sum);
    }
    for (int j = 1; j < current - 1; j++)
      for (int i = j * STRIDE - LEAD; i < (j + 1) * STRIDE; i++) {
        const int overlap = std::min(i * CMP_D + CMP_L, (j + 1) * SEL_L) - std::max(i * CMP_D, j * SEL_L);
        for (int r = 0; r < HPG; r++)
          importance[j] += (double)overlap / CMP_D * std::exp2(scores[((size_t)g * HPG + r) * capacity + i] - lse[r]);
      }
    std::vector<int> blocks;
    for (int j = 0; j <= current; j++) blocks.push_back(j);
    if (current + 1 > SEL_N) {
      std::stable_sort(blocks.begin() + 1, blocks.end() - 2, [&](int a, int b) { return importance[a] > importance[b]; });
      blocks.erase(blocks.begin() + SEL_N - 2, blocks.end() - 2);
      std::sort(blocks.begin(), blocks.end());
    }
    blocks.resize(SEL_N, -1);
    right = right && std::equal(blocks.begin(), blocks.end(), chosen.begin() + g * SEL_N);
    std::vector<int> selected, window;
    for (int j : blocks)
      for (int s = j * SEL_L; j >= 0 && s < std::min(position + 1, (j + 1) * SEL_L); s++) selected.push_back(s);
    for (int s = std::max(0, position + 1 - WINDOW); s <= position; s++) window.push_back(s);
    right = right && reads[g * 3 + 1] == (int)selected.size() && reads[g * 3 + 2] == (int)window.size();
    for (int r = 0; r < HPG; r++) {
      const int head = g * HPG + r;
      double q[DK], gates[3], total = 0;
      for (int c = 0; c < DK; c++) {
        const int j = c % (DK / 2);
        const float a = read_one(&projection[head * DK + j]), b = read_one(&projection[head * DK + j + DK / 2]);
        const float2 turn = rotations[j];
        q[c] = emulator::from_bf16(emulator::to_bf16(c < DK / 2 ? a * turn.x - b * turn.y : b * turn.x + a * turn.y));
      }
      for (int i = 0; i < 3; i++) total += gates[i] = std::exp((logits[3 * head + i] + bias[3 * head + i]) / 1.3);
      const std::vector<double> by_sel = attend(sel, q, g, selected), by_win = attend(win, q, g, window);
      for (int c = 0; c < DV; c++) {
        double cmp = 0;
        for (int i = 0; i <= SPLITS; i++)
          cmp += std::exp2(records[i * RECORD + r] - lse[r]) * records[i * RECORD + 2 * HPG + r * DV + c];
        const double expected = (gates[0] * cmp + gates[1] * by_sel[c] + gates[2] * by_win[c]) / total;
        error += std::pow(read_one(&out[head * DV + c]) - expected, 2), norm += expected * expected;
      }
    }
  }
  error = std::sqrt(error / norm);
  right = right && error < 1e-2;
  printf("%5d tokens before%s: %s, error %.1e\n", position, tied ? ", all scores equal" : "", right ? "right" : "WRONG", error);
  return right;
}

}  // namespace

int main() {
  bool right = true;
  for (bool tied : {false, true})
    for (int position : {0, 31, 500, 1023, 1024, 1087, 1100, 3000, 20001}) right = check(position, tied) && right;
  return right ? 0 : 1;
}
