// Host side of the standalone kernel harness: loads the cubins of one shape, owns the device buffers of
// one batch and launches each kernel. Used by check.cu (correctness) and time.cu (speed).
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#define CUDA(call)                                                                          \
  do {                                                                                      \
    cudaError_t e_ = (call);                                                                \
    if (e_ != cudaSuccess) {                                                                \
      fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
      exit(3);                                                                              \
    }                                                                                       \
  } while (0)

struct Shape {
  int H, G, Dk, Dv, l, d, ls, n, w;
  int h() const { return H / G; }
};

inline uint16_t to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

template <class T> struct Buffer {
  T* p = nullptr;
  size_t n = 0;
  void make(size_t count) {
    n = count;
    CUDA(cudaMalloc(&p, std::max<size_t>(1, count) * sizeof(T) + 256));
    poison();
  }
  void drop() {
    if (p) CUDA(cudaFree(p));
    p = nullptr;
  }
  void poison() { CUDA(cudaMemset(p, 0xff, n * sizeof(T))); }
  void zero(cudaStream_t stream = 0) { CUDA(cudaMemsetAsync(p, 0, n * sizeof(T), stream)); }
  void put(const std::vector<T>& v) { CUDA(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice)); }
  std::vector<T> get() const {
    std::vector<T> v(n);
    CUDA(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

struct Kernels {
  std::map<std::string, cudaLibrary_t> libraries;
  std::map<std::string, cudaKernel_t> kernels;
  cudaStream_t stream = 0;
  void load(const std::string& dir) {
    for (const char* op : {"compressed", "select", "selected", "window", "combine"})
      CUDA(cudaLibraryLoadFromFile(&libraries[op], (dir + "/" + op + ".cubin").c_str(), nullptr, nullptr, 0, nullptr,
                                   nullptr, 0));
    CUDA(cudaLibraryLoadFromFile(&libraries["joint"], (dir + "/joint.cubin").c_str(), nullptr, nullptr, 0, nullptr,
                                 nullptr, 0));
  }
  bool has(const char* op, const char* name) {
    cudaKernel_t k;
    const bool found = cudaLibraryGetKernel(&k, libraries[op], name) == cudaSuccess;
    cudaGetLastError();
    return found;
  }
  int number(const char* op, const char* name) {
    void* p;
    size_t bytes;
    int value;
    CUDA(cudaLibraryGetGlobal(&p, &bytes, libraries[op], name));
    CUDA(cudaMemcpy(&value, p, 4, cudaMemcpyDeviceToHost));
    return value;
  }
  cudaKernel_t get(const char* op, const char* name) {
    auto it = kernels.find(name);
    if (it != kernels.end()) return it->second;
    cudaKernel_t k;
    CUDA(cudaLibraryGetKernel(&k, libraries[op], name));
    CUDA(cudaFuncSetAttribute((const void*)k, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 - 1024));
    return kernels[name] = k;
  }
  template <class... A> void launch(const char* op, const char* name, dim3 grid, int threads, int shared, A... args) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    void* list[] = {(void*)&args...};
    cudaError_t e = cudaLaunchKernel((const void*)get(op, name), grid, dim3(threads), list, shared, stream);
    if (e != cudaSuccess) {
      fprintf(stderr, "launch %s: %s (grid %u %u %u, %d threads, %d bytes)\n", name, cudaGetErrorString(e), grid.x,
              grid.y, grid.z, threads, shared);
      exit(3);
    }
  }
};

// One batch: inputs, outputs and scratch on the device, and a launcher per kernel.
struct Batch {
  Shape s;
  Kernels* k;
  int B, T, Tc, NB, longest, blocks_longest;
  std::vector<int> cu, cu_cmp, cu_blocks;
  Buffer<int> d_cu, d_cmp, d_blocks, selected, counts, begins, totals, places, plan, served, largest, offsets, ranks,
      fitems, bitems;
  Buffer<uint16_t> q, kc, vc, ks, vs, kw, vw, d_out, oc, os, ow, out, partial, shares, dq16, dkc16, dvc16, dks16, dvs16,
      dkw, dvw;
  Buffer<float> gates, lc, ls, lw, partial_lse, d_gates, delta, shift, dkc, dvc, dks, dvs, dkc_parts, dvc_parts,
      dks_parts, dvs_parts;
  Buffer<float> sums;  // of dQ, where one kernel computes the gradients of two branches
  Buffer<uint32_t> lists;
  Buffer<unsigned char> pc, ps, pw;  // packed keys and values of the branches
  std::map<std::string, int> numbers;
  int forward_items_max, backward_items_max, stretch, stretches, multiprocessors;

  int number(const char* op, const char* name) {
    auto it = numbers.find(name);
    return it != numbers.end() ? it->second : numbers[name] = k->number(op, name);
  }
  void make(const Shape& shape, Kernels* kernels, const std::vector<int>& lengths) {
    s = shape;
    k = kernels;
    B = (int)lengths.size();
    cu = cu_cmp = cu_blocks = {0};
    longest = 0;
    for (int L : lengths) {
      cu.push_back(cu.back() + L);
      cu_cmp.push_back(cu_cmp.back() + (L < s.l ? 0 : (L - s.l) / s.d + 1));
      cu_blocks.push_back(cu_blocks.back() + (L + s.ls - 1) / s.ls);
      longest = std::max(longest, L);
    }
    T = cu.back();
    Tc = cu_cmp.back();
    NB = cu_blocks.back();
    blocks_longest = (longest + s.ls - 1) / s.ls;
    const size_t t = T, c = Tc;
    d_cu.make(B + 1), d_cmp.make(B + 1), d_blocks.make(B + 1);
    d_cu.put(cu), d_cmp.put(cu_cmp), d_blocks.put(cu_blocks);
    const int most = number("select", "select_max_stretches"),
              wish = getenv("STRETCH") ? atoi(getenv("STRETCH")) : stretch_for(longest);
    stretch = std::max(wish, ((T + most - 1) / most + 15) / 16 * 16);
    stretches = (T + stretch - 1) / stretch;
    CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    const size_t lists_ = (size_t)NB * s.G;
    selected.make(t * s.G * s.n), counts.make(lists_ * stretches), begins.make(lists_ * stretches),
        places.make(lists_ * stretches), totals.make(lists_);
    plan.make(number("select", "select_plan_words")), served.make(3), served.zero(), largest.make(NB * s.G);
    offsets.make(2 * (lists_ + 1)), ranks.make(t * s.G * s.n);
    forward_items_max =
        (int)(t * s.G * s.n / number("select", "select_forward_chunk") + std::min(lists_ * stretches, t * s.G * s.n));
    backward_items_max = (int)(t * s.G * s.n / number("select", "select_backward_chunk")) + NB * s.G;
    fitems.make((size_t)forward_items_max * 2), bitems.make((size_t)backward_items_max * 2);
    lists.make(t * s.G * s.n);
    q.make(t * s.H * s.Dk), kc.make(c * s.G * s.Dk), vc.make(c * s.G * s.Dv);
    ks.make(t * s.G * s.Dk), vs.make(t * s.G * s.Dv), kw.make(t * s.G * s.Dk), vw.make(t * s.G * s.Dv);
    for (auto* b : {&d_out, &oc, &os, &ow, &out}) b->make(t * s.H * s.Dv);
    const size_t ring =
        (size_t)number("selected", "selected_outer_ring") * stretch * s.H * number("selected", "selected_outer_chosen");
    partial.make(ring * s.Dv), partial_lse.make(ring), shares.make(t * s.H * s.n * s.Dk);
    gates.make(t * s.H * 3), d_gates.make(t * s.H * 3), delta.make(t * s.H * 3), shift.make(t * s.H * 3);
    for (auto* b : {&lc, &ls, &lw}) b->make(t * s.H);
    const size_t tile = (size_t)((s.Dk + 63) / 64 + (s.Dv + 63) / 64) * 8192 * s.G;
    pc.make(tile * cmp_tiles()), ps.make(tile * NB), pw.make(tile * token_tiles(64));
    dkc.make(kc.n), dvc.make(vc.n), dks.make(ks.n), dvs.make(vs.n);
    dq16.make(q.n), dkc16.make(kc.n), dvc16.make(vc.n), dks16.make(ks.n), dvs16.make(vs.n), dkw.make(kw.n),
        dvw.make(vw.n);
  }
  // Stretches are short only where a list still has enough tokens in one.
  static int stretch_for(int longest) { return longest <= 16384 ? 2048 : 8192; }
  void make_parts() {  // for the deterministic backward pass
    const size_t chunks = (longest + number("compressed", "compressed_backward_chunk") - 1) /
                          number("compressed", "compressed_backward_chunk");
    dkc_parts.make(chunks * kc.n), dvc_parts.make(chunks * vc.n);
    dks_parts.make((size_t)backward_items_max * s.ls * s.Dk), dvs_parts.make((size_t)backward_items_max * s.ls * s.Dv);
  }
  void drop() {
    for (auto* b : {&d_cu, &d_cmp, &d_blocks, &selected, &counts, &begins, &totals, &places, &plan, &served, &largest,
                    &offsets, &ranks, &fitems, &bitems})
      b->drop();
    for (auto* b : {&q,   &kc,      &vc,     &ks,   &vs,    &kw,    &vw,    &d_out, &oc,  &os, &ow,
                    &out, &partial, &shares, &dq16, &dkc16, &dvc16, &dks16, &dvs16, &dkw, &dvw})
      b->drop();
    for (auto* b : {&gates, &lc, &ls, &lw, &partial_lse, &d_gates, &delta, &shift, &dkc, &dvc, &dks, &dvs, &dkc_parts,
                    &dvc_parts, &dks_parts, &dvs_parts})
      b->drop();
    sums.drop(), lists.drop(), pc.drop(), ps.drop(), pw.drop();
  }
  int tiles(int per) const {  // upper bound of tiles of `per` packed rows
    int n = 0;
    for (int b = 0; b < B; b++) n += ((cu[b + 1] - cu[b]) * s.h() + per - 1) / per;
    return n;
  }
  int token_tiles(int per) const {
    int n = 0;
    for (int b = 0; b < B; b++) n += (cu[b + 1] - cu[b] + per - 1) / per;
    return n;
  }
  int cmp_tiles() const {
    int n = 0;
    for (int b = 0; b < B; b++) n += (cu_cmp[b + 1] - cu_cmp[b] + 63) / 64;
    return n;
  }
  int lanes() const { return s.Dv <= 32 ? 4 : s.Dv <= 64 ? 8 : s.Dv <= 128 ? 16 : 32; }
  unsigned row_blocks() const { return (unsigned)(((size_t)T * s.H * lanes() + 255) / 256); }

  void pack_compressed() {
    k->launch("compressed", "compressed_pack", dim3(cmp_tiles(), s.G), 256, 0, kc.p, vc.p, pc.p, d_cmp.p, B);
  }
  void pack_selected() {
    k->launch("selected", "selected_pack", dim3(NB, s.G), 256, 0, ks.p, vs.p, ps.p, largest.p, d_cu.p, B);
  }
  void pack_window() {
    k->launch("window", "window_pack", dim3(token_tiles(64), s.G), 256, 0, kw.p, vw.p, pw.p, d_cu.p, B);
  }
  void pack() { pack_compressed(), pack_selected(), pack_window(); }
  void compressed() {
    const int rows = number("compressed", "compressed_forward_rows"),
              per = number("compressed", "compressed_forward_tiles");
    k->launch("compressed", "compressed_forward", dim3((tiles(rows) + per - 1) / per, s.G), rows * 2,
              number("compressed", "compressed_forward_shared"), q.p, pc.p, oc.p, lc.p, d_cu.p, B, 0);
  }
  void select() {
    counts.zero(k->stream);
    k->launch("select", "select_blocks", dim3(token_tiles(number("select", "select_blocks_tokens")), s.G),
              number("select", "select_blocks_threads"), number("select", "select_blocks_shared"), q.p, kc.p, pc.p,
              lc.p, selected.p, counts.p, ranks.p, d_cu.p, d_cmp.p, d_blocks.p, B, stretch, stretches, 0);
  }
  void index(bool items = true) {
    const unsigned grid = (NB * s.G + 7) / 8;
    if (items) CUDA(cudaMemsetAsync(plan.p, 0, number("select", "select_max_stretches") * 4, k->stream));
    k->launch("select", "select_totals", dim3(grid), 256, 0, counts.p, begins.p, totals.p, places.p, plan.p, d_blocks.p,
              B, stretches);
    k->launch("select", "select_index", dim3(1), 1024, 0, totals.p, offsets.p, plan.p, d_cu.p, d_blocks.p, B,
              stretches);
    if (items) finish(0, 0, grid, 0);
  }
  // The parts of select_finish: blocks that choose, that write items, that write lists.
  void finish(int choice, int choosers, int itemizers, int listers, float limit = 36, float gather_limit = 150) {
    if (!has_gather()) limit = limit == 36 ? 50 : limit, gather_limit = 0;
    k->launch("select", "select_finish", dim3(choosers + itemizers + listers), 256, 8 * words() * 4, selected.p,
              ranks.p, offsets.p, begins.p, places.p, plan.p, fitems.p, bitems.p, lists.p, d_cu.p, d_blocks.p, B,
              words(), stretch, stretches, choice, limit, gather_limit, choosers, itemizers);
  }
  int choosers() { return (token_tiles(number("select", "select_union_tokens")) * s.G + 7) / 8; }
  int listers() const { return (int)(((size_t)T * s.G * s.n + 255) / 256); }
  void fill() { finish(0, 0, 0, listers()); }
  void list(int choice) {  // index, items, lists and choice as the product does it
    CUDA(cudaMemsetAsync(plan.p, 0, plan.n * 4, k->stream));
    index(false);
    finish(choice, choosers(), (NB * s.G + 7) / 8, listers());
  }
  void sort() {
    k->launch("select", "select_sort", dim3(NB, s.G), 256, (longest + 31) / 32 * 4, selected.p, offsets.p, lists.p,
              d_cu.p, d_blocks.p, B);
  }
  int words() const { return (blocks_longest + 31) / 32; }
  // 0 adaptive, 1 tile-union, 2 KV-outer, 3 tile-gather, 4 stretches in turn; limits: blocks of the mean union up to
  // which tile-union and tile-gather are faster
  void choose(int choice, float limit = 36, float gather_limit = 150) {
    const int from = number("select", "select_plan_unions");
    CUDA(cudaMemsetAsync(plan.p + from, 0, (plan.n - from) * 4, k->stream));
    finish(choice, choosers(), 0, 0, limit, gather_limit);
  }
  void union_(bool combined) {  // the window and the selected branch where tile-union works
    k->launch("selected", "selected_union", dim3(token_tiles(number("selected", "selected_union_tokens")), s.G),
              number("selected", "selected_union_threads"), number("selected", "selected_union_shared") + words() * 4,
              q.p, ps.p, pw.p, selected.p, oc.p, gates.p, os.p, ls.p, ow.p, lw.p, combined ? out.p : (uint16_t*)nullptr,
              plan.p, served.p, d_cu.p, B, words(), stretch, 0);
  }
  void dense() {  // the window and the forced blocks where KV-outer works
    const int rows = number("selected", "selected_dense_rows");
    k->launch("selected", "selected_dense", dim3(tiles(rows), s.G), rows * 2,
              number("selected", "selected_dense_shared"), q.p, ps.p, pw.p, os.p, ls.p, ow.p, lw.p, plan.p, d_cu.p, B,
              stretch);
  }
  void rewind() {  // before the KV-outer kernel runs a second time on one plan
    const int from = number("select", "select_plan_done");
    CUDA(cudaMemsetAsync(plan.p + from, 0, (plan.n - from) * 4, k->stream));
  }
  void outer(bool combined) {
    k->launch("selected", "selected_outer", dim3(multiprocessors * number("selected", "selected_outer_blocks")), 128,
              number("selected", "selected_outer_shared"), q.p, ps.p, fitems.p, offsets.p, begins.p, lists.p, partial.p,
              partial_lse.p, oc.p, ow.p, gates.p, os.p, ls.p, combined ? out.p : (uint16_t*)nullptr, plan.p, served.p,
              d_cu.p, d_blocks.p, B, stretch, stretches);
  }
  bool has_gather() { return k->has("selected", "selected_gather"); }
  void gather(bool combined) {  // the chosen blocks where tile-gather works
    if (!has_gather()) return;
    k->launch("selected", "selected_gather", dim3(NB, s.G), number("selected", "selected_gather_threads"),
              number("selected", "selected_gather_shared"), q.p, ps.p, selected.p, oc.p, ow.p, gates.p, largest.p, os.p,
              ls.p, combined ? out.p : (uint16_t*)nullptr, plan.p, served.p, d_cu.p, B, stretch);
  }
  void selected_all(bool combined) {
    dense(), union_(combined), outer(combined), gather(combined);
  }  // the selected branch as planned, and the window
  void window() {
    const int rows = number("window", "window_forward_rows");
    k->launch("window", "window_forward", dim3(tiles(rows), s.G), rows * 2, number("window", "window_forward_shared"),
              q.p, pw.p, ow.p, lw.p, d_cu.p, B, 0);
  }
  void combine() {
    k->launch("combine", "combine_forward", dim3(row_blocks()), 256, 0, oc.p, os.p, ow.p, gates.p, out.p, T);
  }
  void prepare() {
    k->launch("combine", "combine_backward", dim3(row_blocks()), 256, 0, d_out.p, oc.p, os.p, ow.p, gates.p, lc.p, ls.p,
              lw.p, d_gates.p, delta.p, shift.p, T);
  }
  void clear() { dkc.zero(k->stream), dvc.zero(k->stream), dks.zero(k->stream), dvs.zero(k->stream); }
  size_t rows() const { return (size_t)T * s.H; }
  // ordered: deterministic sums, by parts
  void compressed_backward(bool ordered = false) {
    const int chunk = number("compressed", "compressed_backward_chunk");
    k->launch("compressed", "compressed_backward", dim3(cmp_tiles(), (longest + chunk - 1) / chunk, s.G), 128,
              number("compressed", "compressed_backward_shared"), q.p, kc.p, vc.p, d_out.p, shift.p, delta.p,
              ordered ? dkc_parts.p : dkc.p, ordered ? dvc_parts.p : dvc.p, d_cu.p, d_cmp.p, B, (int)ordered);
  }
  void compressed_sum() {
    const size_t most = std::max(kc.n, vc.n);
    k->launch("compressed", "compressed_sum", dim3((unsigned)((most + 1023) / 1024), 2), 256, 0, dkc_parts.p,
              dvc_parts.p, dkc16.p, dvc16.p, d_cu.p, d_cmp.p, B);
  }
  void selected_backward(bool ordered = false) {
    k->launch("selected", "selected_backward", dim3(backward_items_max), 128,
              number("selected", "selected_backward_shared"), q.p, ks.p, vs.p, d_out.p, shift.p + rows(),
              delta.p + rows(), shares.p, ordered ? dks_parts.p : dks.p, ordered ? dvs_parts.p : dvs.p, bitems.p,
              offsets.p, lists.p, d_cu.p, d_blocks.p, B, (int)ordered);
  }
  void selected_sum() {
    k->launch("selected", "selected_sum", dim3(NB * s.G, (s.ls * std::max(s.Dk, s.Dv) + 1023) / 1024, 2), 256, 0,
              dks_parts.p, dvs_parts.p, dks16.p, dvs16.p, offsets.p, d_cu.p, d_blocks.p, B);
  }
  void window_backward() {
    k->launch("window", "window_backward", dim3(token_tiles(64), s.G), 128, number("window", "window_backward_shared"),
              q.p, kw.p, vw.p, d_out.p, shift.p + 2 * rows(), delta.p + 2 * rows(), dkw.p, dvw.p, d_cu.p, B);
  }
  void compressed_window_query() {
    const int rows_ = number("compressed", "compressed_window_query_gradient_rows");
    k->launch("compressed", "compressed_window_query_gradient", dim3(tiles(rows_), s.G), rows_ * 2,
              number("compressed", "compressed_window_query_gradient_shared"), q.p, pc.p, pw.p, d_out.p, shift.p,
              delta.p, dq16.p, d_cu.p, B);
  }
  // Gradients of the compressed and the window branch by one kernel, where the build has it
  bool has_joint() { return k->has("joint", "joint_gradients"); }
  void joint() {
    if (!sums.p) sums.make((size_t)NB * 64 * s.H * s.Dk);
    sums.zero(k->stream);
    const int keys = number("joint", "joint_gradients_keys"), chunk = number("joint", "joint_gradients_chunk"),
              chunks = (longest + chunk - 1) / chunk;
    int tiles_ = 0;
    for (int b = 0; b < B; b++) tiles_ += (cu_cmp[b + 1] - cu_cmp[b] + keys - 1) / keys;
    k->launch("joint", "joint_gradients", dim3((tiles_ * chunks + token_tiles(keys)) * s.G),
              number("joint", "joint_gradients_threads"), number("joint", "joint_gradients_shared"), q.p, d_out.p,
              shift.p, delta.p, kc.p, vc.p, dkc.p, dvc.p, kw.p, vw.p, dkw.p, dvw.p, sums.p, d_cu.p, d_cmp.p, d_blocks.p,
              B, tiles_, chunks);
  }
  void selected_query(bool joint = false) {
    const int lanes_ = s.Dk <= 32 ? 4 : s.Dk <= 64 ? 8 : s.Dk <= 128 ? 16 : 32;
    k->launch("selected", "selected_query_gradient", dim3((unsigned)((rows() * lanes_ + 255) / 256)), 256, 0, dq16.p,
              shares.p, selected.p, T, joint ? sums.p : (float*)nullptr, d_cu.p, d_blocks.p, B);
  }
  void round() {
    const size_t all = dkc.n + dvc.n + dks.n + dvs.n;
    k->launch("combine", "round_sums", dim3((unsigned)((all / 8 + 255) / 256)), 256, 0, dkc.p, dks.p, dvc.p, dvs.p,
              dkc16.p, dks16.p, dvc16.p, dvs16.p, (long long)Tc * s.G, (long long)T * s.G);
  }
};

inline std::vector<uint16_t> random_bf16(size_t n, std::mt19937& rng, float sigma) {
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<uint16_t> v(n);
  for (auto& x : v) x = to_bf16(normal(rng));
  return v;
}
