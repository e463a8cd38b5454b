// Times every kernel alone and the whole forward and backward pass, 65,536 tokens.
//   time <cubin dir> H G Dk Dv l d l' n w <label> [only: comma list of kernel names]
#include <functional>

#include "nsa.h"

__global__ void spread(const uint16_t* from, size_t period, uint16_t* to, size_t n) {
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    to[i] = from[i % period] ^ (uint16_t)((i * 2654435761u >> 20 & 1) << 15);
}

static double measure(const std::function<void()>& f) {
  cudaEvent_t a, b;
  CUDA(cudaEventCreate(&a));
  CUDA(cudaEventCreate(&b));
  for (int i = 0; i < 2; i++) f();
  std::vector<float> times;
  for (int i = 0; i < 9; i++) {
    CUDA(cudaEventRecord(a));
    f();
    CUDA(cudaEventRecord(b));
    CUDA(cudaEventSynchronize(b));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, a, b));
    times.push_back(ms);
  }
  CUDA(cudaGetLastError());
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Selections with a given share of blocks renewed from token to token: 13 random ones, each token replaces
// `renew` of them on average. renew >= 13 is a fresh random draw for every token.
static std::vector<int> synthetic(const Batch& b, double renew, std::mt19937& rng) {
  const Shape& s = b.s;
  std::vector<int> out((size_t)b.T * s.G * s.n, -1);
  std::uniform_real_distribution<double> chance(0, 1);
  for (int q = 0; q < b.B; q++)
    for (int g = 0; g < s.G; g++) {
      std::vector<int> mine;
      for (int t = 0; t < b.cu[q + 1] - b.cu[q]; t++) {
        const int current = t / s.ls, pool = std::max(0, current - 2), want = std::min(s.n - 3, pool);
        for (size_t i = 0; i < mine.size();)
          if (chance(rng) < renew / (s.n - 3)) mine.erase(mine.begin() + i);
          else i++;
        while ((int)mine.size() < want) {
          const int j = 1 + (int)(rng() % pool);
          if (std::find(mine.begin(), mine.end(), j) == mine.end()) mine.push_back(j);
        }
        std::vector<int> all = mine;
        all.push_back(0);
        if (current >= 2) all.push_back(current - 1);
        if (current >= 1) all.push_back(current);
        std::sort(all.begin(), all.end());
        std::copy(all.begin(), all.end(), out.begin() + ((size_t)(b.cu[q] + t) * s.G + g) * s.n);
      }
    }
  return out;
}

static void put_selection(Batch& b, const std::vector<int>& sel) {
  b.selected.put(sel);
  std::vector<int> counts((size_t)b.NB * b.s.G * b.stretches, 0), ranks(sel.size(), 0);
  for (int q = 0; q < b.B; q++)
    for (int t = 0; t < b.cu[q + 1] - b.cu[q]; t++)
      for (int g = 0; g < b.s.G; g++)
        for (int i = 0; i < b.s.n; i++) {
          const size_t at = ((size_t)(b.cu[q] + t) * b.s.G + g) * b.s.n + i;
          const int j = sel[at];
          if (j > 0 && j < t / b.s.ls - 1)
            ranks[at] = counts[((size_t)g * b.NB + b.cu_blocks[q] + j) * b.stretches + (b.cu[q] + t) / b.stretch]++;
        }
  b.counts.put(counts);
  b.ranks.put(ranks);
}

static void union_sizes(const Batch& b, const std::vector<int>& sel, const char* name) {
  printf("union %s S=%d:", name, b.longest);
  for (int tile : {1, 8, 10, 16, 21, 32, 64}) {
    double sum = 0;
    long n = 0;
    std::vector<int> stamp(b.blocks_longest, -1);
    for (int t = 0; t + tile <= b.longest; t += tile * 7) {
      int count = 0;
      for (int e = 0; e < tile; e++)
        for (int i = 0; i < b.s.n; i++) {
          const int j = sel[((size_t)(t + e) * b.s.G) * b.s.n + i];
          if (j >= 0 && stamp[j] != t) stamp[j] = t, count++;
        }
      sum += count, n++;
    }
    printf(" %d:%.1f", tile, sum / n);
  }
  printf("\n");
}

int main(int argc, char** argv) {
  if (argc < 12) return 2;
  setvbuf(stdout, nullptr, _IONBF, 0);
  Shape s;
  int* fields[] = {&s.H, &s.G, &s.Dk, &s.Dv, &s.l, &s.d, &s.ls, &s.n, &s.w};
  for (int i = 0; i < 9; i++) *fields[i] = atoi(argv[2 + i]);
  const std::string label = argv[11], only = argc > 12 ? std::string(",") + argv[12] + "," : "";
  Kernels kernels;
  kernels.load(argv[1]);
  std::mt19937 rng(5);
  const int all_tokens = getenv("TOKENS") ? atoi(getenv("TOKENS")) : 65536;
  std::vector<int> batches = {1, 8};
  if (getenv("BATCHES")) {
    batches.clear();
    for (char* c = strtok(getenv("BATCHES"), ","); c; c = strtok(nullptr, ",")) batches.push_back(atoi(c));
  }
  for (int sequences : batches) {
    if (getenv("PROFILE") && sequences != atoi(getenv("PROFILE"))) continue;
    Batch b;
    b.make(s, &kernels, std::vector<int>(sequences, all_tokens / sequences));
    for (auto* x : {&b.q, &b.kc, &b.vc, &b.ks, &b.vs, &b.kw, &b.vw, &b.d_out}) {
      const auto v = random_bf16(1 << 20, rng, 1);  // a random megabyte, tiled with a drifting sign
      Buffer<uint16_t> one;
      one.make(v.size()), one.put(v);
      spread<<<1024, 256>>>(one.p, v.size() - 7, x->p, x->n);
      CUDA(cudaDeviceSynchronize());
      one.drop();
    }
    b.gates.put(std::vector<float>(b.gates.n, 1.0f / 3));
    const auto show = [&](const char* name, const std::function<void()>& f) {
      if (!only.empty() && only.find(std::string(",") + name + ",") == std::string::npos) return 0.0;
      const double ms = measure(f);
      printf("%-14s S=%-6d %-22s %8.3f ms\n", label.c_str(), b.longest, name, ms);
      return ms;
    };
    b.pack(), b.compressed(), b.select(), b.index(), b.fill(), b.sort(), b.window(), b.choose(2), b.selected_all(true),
        b.combine(), b.prepare();
    CUDA(cudaDeviceSynchronize());
    if (getenv("PROFILE")) {  // each kernel once, for a profiler
      b.choose(1), b.union_(true), b.clear(), b.compressed_backward(), b.selected_backward(), b.window_backward(),
          b.compressed_window_query(), b.selected_query(), b.round();
      CUDA(cudaDeviceSynchronize());
      return 0;
    }
    show("pack", [&] { b.pack(); });
    show("compressed", [&] { b.compressed(); });
    show("select", [&] { b.select(); });
    if (only.empty()) union_sizes(b, b.selected.get(), "from random q,k");
    show("index", [&] { b.index(); });
    show("lists", [&] { b.fill(); });
    show("sort", [&] { b.sort(); });
    show("choose", [&] { b.choose(2); });
    show("index to choice", [&] { b.list(2); });
    show("dense", [&] { b.dense(); });
    show("outer", [&] { b.rewind(), b.outer(false); });
    show("outer+combine", [&] { b.rewind(), b.outer(true); });
    b.choose(3);
    show("gather+combine", [&] { b.gather(true); });
    b.choose(0);
    show("adaptive union", [&] { b.union_(true); });
    show("adaptive dense", [&] { b.dense(); });
    show("adaptive outer", [&] { b.rewind(), b.outer(true); });
    show("adaptive gather", [&] { b.gather(true); });
    b.choose(1);
    show("union", [&] { b.union_(false); });
    show("union+combine", [&] { b.union_(true); });
    show("idle outer", [&] { b.outer(true); });
    b.choose(2);
    show("idle union", [&] { b.union_(true); });
    show("window", [&] { b.window(); });
    show("combine", [&] { b.combine(); });
    const auto forward = [&](int choice) {
      b.pack(), b.compressed(), b.select(), b.list(choice), b.selected_all(true);
    };
    show("forward adaptive", [&] { forward(0); });
    show("forward union", [&] { forward(1); });
    show("forward", [&] { forward(2); });
    show("forward gather", [&] { forward(3); });
    // Two streams: the window branch fills what the memory-bound kernels leave idle.
    static cudaStream_t main_stream, side_stream;
    static cudaEvent_t fork, join;
    if (!main_stream) {
      CUDA(cudaStreamCreate(&main_stream));
      CUDA(cudaStreamCreate(&side_stream));
      CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
      CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    }
    const auto beside = [&](const std::function<void()>& first, const std::function<void()>& one,
                            const std::function<void()>& other, const std::function<void()>& last) {
      kernels.stream = main_stream;
      first();
      CUDA(cudaEventRecord(fork, main_stream));
      CUDA(cudaStreamWaitEvent(side_stream, fork, 0));
      one();
      kernels.stream = side_stream;
      other();
      CUDA(cudaEventRecord(join, side_stream));
      CUDA(cudaStreamWaitEvent(main_stream, join, 0));
      kernels.stream = main_stream;
      last();
      kernels.stream = 0;
    };
    show("prepare", [&] { b.prepare(); });
    show("clear", [&] { b.clear(); });
    show("cmp_backward", [&] { b.compressed_backward(); });
    show("sel_backward", [&] { b.selected_backward(); });
    show("win_backward", [&] { b.window_backward(); });
    show("cmp_win_dq", [&] { b.compressed_window_query(); });
    show("sel_dq", [&] { b.selected_query(); });
    show("round", [&] { b.round(); });
    show("backward", [&] {
      b.prepare(), b.clear(), b.compressed_backward(), b.selected_backward(), b.window_backward(),
          b.compressed_window_query(), b.selected_query(), b.round();
    });
    b.make_parts();
    if (b.has_joint()) {
      show("joint", [&] { b.joint(); });
      show("backward joint",
           [&] { b.prepare(), b.clear(), b.joint(), b.selected_backward(), b.selected_query(true), b.round(); });
    }
    show("ordered cmp", [&] { b.compressed_backward(true); });
    show("ordered cmp sum", [&] { b.compressed_sum(); });
    show("ordered sel", [&] { b.selected_backward(true); });
    show("ordered sel sum", [&] { b.selected_sum(); });
    show("backward ordered", [&] {
      b.sort(), b.prepare(), b.compressed_backward(true), b.compressed_sum(), b.selected_backward(true),
          b.selected_sum(), b.window_backward(), b.compressed_window_query(), b.selected_query();
    });
    show("backward 2 streams", [&] {
      beside([&] { b.prepare(), b.clear(); }, [&] { b.selected_backward(); },
             [&] { b.compressed_backward(), b.window_backward(), b.compressed_window_query(); },
             [&] { b.selected_query(), b.round(); });
    });
    if (only.empty() || only.find("local") != std::string::npos)
      for (double renew : {13.0, 2.0, 0.85, 0.2}) {
        const auto sel = synthetic(b, renew, rng);
        const std::string name = renew > 10    ? "random"
                                 : renew > 1   ? "local(0.75)"
                                 : renew > 0.5 ? "local(0.9)"
                                               : "local(0.975)";
        union_sizes(b, sel, name.c_str());
        put_selection(b, sel);
        b.index(), b.fill();
        b.choose(1);
        const double u = measure([&] { b.union_(false); });
        b.choose(2);
        const double d = measure([&] { b.dense(); }), o = measure([&] { b.rewind(), b.outer(false); });
        const double back = measure([&] { b.selected_backward(); });
        b.choose(3);
        const double gathered = measure([&] { b.gather(false); });
        const auto selected = [&](int choice) {
          return measure(
              [&] { b.pack(), b.compressed(), b.index(), b.fill(), b.choose(choice), b.selected_all(true); });
        };
        const double all1 = selected(1), all2 = selected(2), all3 = selected(3);
        b.served.zero();
        const double all0 = selected(0);
        const auto served = b.served.get();
        const auto plan = b.plan.get();
        printf(
            "%-14s S=%-6d %-12s union %.3f  window and forced %.3f + outer %.3f (gather %.3f)  backward %.3f; forward "
            "without "
            "scoring: union %.3f outer %.3f gather %.3f adaptive %.3f (mean union %.1f, served %d/%d/%d)\n",
            label.c_str(), b.longest, name.c_str(), u, d, o, gathered, back, all1, all2, all3, all0,
            [&] {
              double sum = 0;
              for (int i = 0; i < b.stretches; i++) sum += plan[b.number("select", "select_plan_unions") + i];
              return sum / std::max(1, b.token_tiles(b.number("select", "select_union_tokens")) * s.G);
            }(),
            served[0], served[1], served[2]);
      }
    b.drop();
  }
}
