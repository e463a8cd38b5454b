// The matrix products of a training step (12 layers of 768, MLP of 3072, 65,536 tokens) by cuBLASLt: its first answer,
// the best of its eight answers (what src/device/cuda/cublaslt.ts takes) and the best of a search around them, with
// what each would save in a step. The gate's 36 rows below the projection's 1536 (1576 with what fills up) stand beside
// 1536 alone.
//   g++ -std=c++17 -O2 -o products dev/cuda/products.cpp -ldl -I$CUDA/include -L$CUDA/lib64 -lcudart; products [json
//   file]
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define CUDA(x)                                                                   \
  do {                                                                            \
    const cudaError_t e = (x);                                                    \
    if (e != cudaSuccess) printf("%s: %s\n", #x, cudaGetErrorString(e)), exit(1); \
  } while (0)

typedef void* Handle;
struct Algorithm {
  uint64_t data[8];
};
struct Answer {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Answer) == 96, "as cublasLt.h has it");

enum { COMPUTE_32F = 68, F32 = 0, BF16 = 14, TRANSPOSE_A = 3, TRANSPOSE_B = 4, MAX_WORKSPACE = 1 };
enum { ID, TILE, SPLIT_K, REDUCTION, SWIZZLE, CUSTOM, STAGES, INNER, CLUSTER };  // of an algorithm's configuration
const char* const NAMES[] = {"id", "tile", "split", "reduction", "swizzle", "custom", "stages", "inner", "cluster"};

static void* library;
template <class F> static F* bind(const char* name) {
  void* f = dlsym(library, name);
  if (!f) printf("no %s\n", name), exit(1);
  return (F*)f;
}
static void check(const char* what, int status) {
  if (status) printf("%s: status %d\n", what, status), exit(1);
}

typedef int Create(Handle*);
typedef int DescCreate(Handle*, int, int);
typedef int SetAttribute(Handle, int, const void*, size_t);
typedef int LayoutCreate(Handle*, int, uint64_t, uint64_t, int64_t);
typedef int Heuristic(Handle, Handle, Handle, Handle, Handle, Handle, Handle, int, Answer*, int*);
typedef int Matmul(Handle, Handle, const void*, const void*, Handle, const void*, Handle, const void*, const void*,
                   Handle, void*, Handle, const Algorithm*, void*, size_t, cudaStream_t);
typedef int ConfigSet(Algorithm*, int, const void*, size_t);
typedef int ConfigGet(const Algorithm*, int, void*, size_t, size_t*);
typedef int Check(Handle, Handle, Handle, Handle, Handle, Handle, const Algorithm*, Answer*);

struct Product {
  const char* name;
  long m, n, k;
  bool transpose_a, transpose_b;  // of row-major A [m,k] and B [k,n]
  int out;                        // BF16, or F32 for weights' gradients
  bool residual;                  // C is added
};

static const size_t WORKSPACE = 64u << 20;
static char *a, *b, *c, *d, *workspace;
static Handle handle, preference;
static Heuristic* heuristic;
static Matmul* matmul;
static ConfigSet* config_set;
static ConfigGet* config_get;
static Check* algorithm_check;

struct Plan {
  Handle desc, la, lb, ld;
  const Product* p;
};

static int run(const Plan& plan, const Algorithm& algorithm) {
  const float one = 1, beta = plan.p->residual ? 1 : 0;
  return matmul(handle, plan.desc, &one, b, plan.la, a, plan.lb, &beta, plan.p->residual ? c : d, plan.ld, d, plan.ld,
                &algorithm, workspace, WORKSPACE, 0);
}

// Milliseconds of each algorithm, the least of `rounds` by turns; infinite where it fails.
static std::vector<float> times(const Plan& plan, const std::vector<Algorithm>& algorithms, int rounds) {
  cudaEvent_t from, to;
  CUDA(cudaEventCreate(&from));
  CUDA(cudaEventCreate(&to));
  std::vector<float> least(algorithms.size(), INFINITY);
  std::vector<bool> able(algorithms.size());
  for (size_t i = 0; i < algorithms.size(); i++) able[i] = run(plan, algorithms[i]) == 0;
  if (cudaDeviceSynchronize() != cudaSuccess)
    printf("an algorithm failed: %s\n", cudaGetErrorString(cudaGetLastError())), exit(1);
  for (int round = 0; round < rounds; round++)
    for (size_t i = 0; i < algorithms.size(); i++) {
      if (!able[i]) continue;
      CUDA(cudaEventRecord(from));
      run(plan, algorithms[i]);
      CUDA(cudaEventRecord(to));
      CUDA(cudaEventSynchronize(to));
      float ms;
      CUDA(cudaEventElapsedTime(&ms, from, to));
      least[i] = std::min(least[i], ms);
    }
  return least;
}

static int get(const Algorithm& algorithm, int what) {
  uint32_t value = 0;
  size_t written = 0;
  const size_t size = what == INNER || what == CLUSTER ? 2 : 4;
  return config_get(&algorithm, what, &value, size, &written) == 0 ? (int)value : -1;
}
static bool set(Algorithm& algorithm, int what, uint32_t value) {
  return config_set(&algorithm, what, &value, what == INNER || what == CLUSTER ? 2 : 4) == 0;
}
static std::string describe(const Algorithm& algorithm) {
  std::string text;
  for (int i = 0; i <= CLUSTER; i++)
    text += std::string(i ? " " : "") + NAMES[i] + " " + std::to_string(get(algorithm, i));
  return text;
}

static std::vector<float> sample(const Product& p) {
  CUDA(cudaDeviceSynchronize());
  std::vector<float> values;
  const long all = p.m * p.n, step = std::max(1L, all / 5000) | 1;
  std::vector<char> bytes(all * (p.out == F32 ? 4 : 2));
  CUDA(cudaMemcpy(bytes.data(), d, bytes.size(), cudaMemcpyDeviceToHost));
  for (long i = 0; i < all; i += step) {
    uint32_t word;
    if (p.out == F32) memcpy(&word, &bytes[i * 4], 4);
    else word = (uint32_t)((uint16_t*)bytes.data())[i] << 16;
    float x;
    memcpy(&x, &word, 4);
    values.push_back(x);
  }
  return values;
}

int main(int argc, char** argv) {
  for (const char* name :
       {"libcublasLt.so.13", "libcublasLt.so", "libcublasLt.so.12", "/usr/local/cuda/lib64/libcublasLt.so"})
    if ((library = dlopen(name, RTLD_NOW))) break;
  if (!library && getenv("CUBLASLT")) library = dlopen(getenv("CUBLASLT"), RTLD_NOW);
  if (!library) return printf("no cuBLASLt: set CUBLASLT to the library's path\n"), 1;
  heuristic = bind<Heuristic>("cublasLtMatmulAlgoGetHeuristic");
  matmul = bind<Matmul>("cublasLtMatmul");
  config_set = bind<ConfigSet>("cublasLtMatmulAlgoConfigSetAttribute");
  config_get = bind<ConfigGet>("cublasLtMatmulAlgoConfigGetAttribute");
  algorithm_check = bind<Check>("cublasLtMatmulAlgoCheck");
  check("create", bind<Create>("cublasLtCreate")(&handle));
  check("preference", bind<Create>("cublasLtMatmulPreferenceCreate")(&preference));
  check("workspace",
        bind<SetAttribute>("cublasLtMatmulPreferenceSetAttribute")(preference, MAX_WORKSPACE, &WORKSPACE, 8));

  const long T = getenv("TOKENS") ? atol(getenv("TOKENS")) : 65536;
  const std::vector<Product> products = {
      {"qkv forward, 1536", T, 1536, 768, false, true, BF16, false},
      {"qkv forward, 1576", T, 1576, 768, false, true, BF16, false},
      {"out forward", T, 768, 768, false, true, BF16, true},
      {"up forward", T, 3072, 768, false, true, BF16, false},
      {"down forward", T, 768, 3072, false, true, BF16, true},
      {"qkv dx, 1536", T, 768, 1536, false, false, BF16, false},
      {"qkv dx, 1576", T, 768, 1576, false, false, BF16, false},
      {"out dx", T, 768, 768, false, false, BF16, false},
      {"up dx", T, 768, 3072, false, false, BF16, false},
      {"down dx", T, 3072, 768, false, false, BF16, false},
      {"qkv dw, 1536", 1536, 768, T, true, false, F32, false},
      {"qkv dw, 1576", 1576, 768, T, true, false, F32, false},
      {"out dw", 768, 768, T, true, false, F32, false},
      {"up dw", 3072, 768, T, true, false, F32, false},
      {"down dw", 768, 3072, T, true, false, F32, false},
  };
  const size_t most = (size_t)T * 3072 * 2;
  for (char** p : {&a, &b, &c, &d}) CUDA(cudaMalloc(p, most));
  CUDA(cudaMalloc(&workspace, WORKSPACE));
  {  // random numbers in [-1, 1): zeros would run faster than what a model multiplies
    std::vector<uint16_t> noise(1 << 24);
    uint32_t state = 1;
    for (uint16_t& x : noise) {
      state = state * 1664525 + 1013904223;
      const float value = (float)(int32_t)state / 2147483648.0f;
      uint32_t word;
      memcpy(&word, &value, 4);
      x = word >> 16;
    }
    for (char* p : {a, b, c})
      for (size_t at = 0; at < most; at += noise.size() * 2)
        CUDA(cudaMemcpy(p + at, noise.data(), std::min(noise.size() * 2, most - at), cudaMemcpyHostToDevice));
  }
  FILE* json = argc > 1 ? fopen(argv[1], "w") : nullptr;
  double saved = 0, fold = 0;
  printf("%-20s %9s %9s %9s %9s  %s\n", "product", "first ms", "of eight", "search", "TFLOP/s", "best of the search");
  if (json) fprintf(json, "[\n");
  for (const Product& p : products) {
    Plan plan;
    plan.p = &p;
    check("desc", bind<DescCreate>("cublasLtMatmulDescCreate")(&plan.desc, COMPUTE_32F, F32));
    // Column-major: the first operand is Bᵀ [n,k], the second Aᵀ [k,m]. A transposed operand here is not there.
    const int ta = p.transpose_b, tb = p.transpose_a;
    auto set_desc = bind<SetAttribute>("cublasLtMatmulDescSetAttribute");
    check("transpose", set_desc(plan.desc, TRANSPOSE_A, &ta, 4));
    check("transpose", set_desc(plan.desc, TRANSPOSE_B, &tb, 4));
    const auto layout = [&](Handle* to, int type, long rows, long columns) {
      check("layout", bind<LayoutCreate>("cublasLtMatrixLayoutCreate")(to, type, rows, columns, rows));
    };
    layout(&plan.la, BF16, p.transpose_b ? p.k : p.n, p.transpose_b ? p.n : p.k);
    layout(&plan.lb, BF16, p.transpose_a ? p.m : p.k, p.transpose_a ? p.k : p.m);
    layout(&plan.ld, p.out, p.n, p.m);
    Answer answers[8];
    int found = 0;
    check("heuristic",
          heuristic(handle, plan.desc, plan.la, plan.lb, plan.ld, plan.ld, preference, 8, answers, &found));
    std::vector<Algorithm> eight, all;
    for (int i = 0; i < found; i++)
      if (answers[i].state == 0) eight.push_back(answers[i].algorithm);
    const std::vector<float> own = times(plan, eight, 5);
    std::vector<size_t> order(eight.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    std::sort(order.begin(), order.end(), [&](size_t x, size_t y) { return own[x] < own[y]; });
    // Around the three fastest: clusters, order of tiles, and for weights' gradients the parts of the long sum.
    for (size_t o = 0; o < std::min<size_t>(3, order.size()); o++) {
      const Algorithm& start = eight[order[o]];
      const std::vector<uint32_t> splits =
          p.k == T ? std::vector<uint32_t>{1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 16} : std::vector<uint32_t>{1};
      for (uint32_t split : splits)
        for (uint32_t scheme : split > 1 ? std::vector<uint32_t>{1, 2} : std::vector<uint32_t>{0})
          for (uint32_t swizzle : {0u, 1u})
            for (int cluster : {-1, 0, 2, 3, 4, 5, 6, 8, 11,
                                12}) {  // as it is; the library's choice; 1x1, 2x1, 4x1, 1x2, 2x2, 1x4, 8x1, 1x8
              Algorithm variant = start;
              if (!set(variant, SPLIT_K, split) || !set(variant, REDUCTION, scheme) || !set(variant, SWIZZLE, swizzle))
                continue;
              if (cluster >= 0 && !set(variant, CLUSTER, cluster)) continue;
              Answer result;
              if (algorithm_check(handle, plan.desc, plan.la, plan.lb, plan.ld, plan.ld, &variant, &result) != 0)
                continue;
              if (result.workspace > WORKSPACE) continue;
              all.push_back(variant);
            }
    }
    if (all.size() > 1500) all.resize(1500);
    size_t best = order[0], best_of_all = 0;
    float searched = own[best];
    Algorithm winner = eight[best];
    if (!all.empty()) {
      const std::vector<float> quick = times(plan, all, 2);
      std::vector<size_t> ranked(all.size());
      for (size_t i = 0; i < ranked.size(); i++) ranked[i] = i;
      std::sort(ranked.begin(), ranked.end(), [&](size_t x, size_t y) { return quick[x] < quick[y]; });
      // The finalists and the best of eight once more, by turns.
      std::vector<Algorithm> finalists = {eight[best]};
      for (size_t i = 0; i < std::min<size_t>(6, ranked.size()); i++) finalists.push_back(all[ranked[i]]);
      const std::vector<float> last = times(plan, finalists, 9);
      best_of_all = std::min_element(last.begin(), last.end()) - last.begin();
      searched = last[best_of_all] * own[best] / last[0];  // on the scale of the first measurement
      winner = finalists[best_of_all];
    }
    run(plan, eight[0]);
    const std::vector<float> expected = sample(p);
    CUDA(cudaMemset(d, 0xff, (size_t)p.m * p.n * (p.out == F32 ? 4 : 2)));
    run(plan, winner);
    const std::vector<float> actual = sample(p);
    double error = 0, norm = 0;
    for (size_t i = 0; i < actual.size(); i++)
      error += std::pow((double)actual[i] - expected[i], 2), norm += std::pow((double)expected[i], 2);
    const bool right = std::sqrt(error / norm) < 1e-2;
    const double flops = 2.0 * p.m * p.n * p.k;
    printf("%-20s %9.4f %9.4f %9.4f %9.1f  %s%s\n", p.name, own[0], own[best], searched, flops / searched / 1e9,
           describe(winner).c_str(), right ? "" : "  WRONG");
    if (json)
      fprintf(json,
              "%s {\"product\": \"%s\", \"first_ms\": %.5f, \"of_eight_ms\": %.5f, \"search_ms\": %.5f, \"tried\": "
              "%zu, \"best\": \"%s\", \"right\": %s}",
              &p == &products[0] ? "" : ",\n", p.name, own[0], own[best], searched, all.size(),
              describe(winner).c_str(), right ? "true" : "false");
    const bool is_wide = strstr(p.name, "1576"), is_plain = strstr(p.name, "1536");
    if (!is_plain) saved += 12 * (own[best] - searched);
    fold += is_wide ? 12 * own[best] : is_plain ? -12 * own[best] : 0;
  }
  printf(
      "a step: the search saves %.2f ms; 40 more columns of the projection cost %.2f ms (the gate's own products took "
      "2.0)\n",
      saved, fold);
  if (json) fprintf(json, "\n]\n"), fclose(json);
}
