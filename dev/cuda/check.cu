// Checks every kernel against a float64 reference on ragged and awkward batches.
//   check <cubin dir> H G Dk Dv l d l' n w [seed]
#include <thread>

#include "nsa.h"

typedef std::vector<double> Doubles;
static int failures = 0;
static double worst_gap = 0;
static long differing = 0, chosen_total = 0;
static std::vector<size_t> sample;  // when not empty only these tokens are computed: large batches

struct Reference {
  Doubles oc, os, ow, out, lc, ls, lw, dg, dq, dkc, dvc, dks, dvs, dkw, dvw;
};

struct Host {
  std::vector<uint16_t> q, kc, vc, ks, vs, kw, vw, d_out;
  std::vector<float> gates;
};

static double dot(const float* a, const float* b, int n) {
  double x = 0;
  for (int i = 0; i < n; i++) x += (double)a[i] * b[i];
  return x;
}
static std::vector<float> widen(const std::vector<uint16_t>& v) {
  std::vector<float> f(v.size());
  for (size_t i = 0; i < v.size(); i++) f[i] = from_bf16(v[i]);
  return f;
}

// The whole function in float64; selections are taken from `selected` after they were checked against
// the float64 importance.
static void reference(const Batch& b, const Host& in, const std::vector<int>& selected, Reference& r) {
  const Shape& s = b.s;
  const int H = s.H, G = s.G, h = s.h(), Dk = s.Dk, Dv = s.Dv;
  const auto q = widen(in.q), kc = widen(in.kc), vc = widen(in.vc), ks = widen(in.ks), vs = widen(in.vs),
             kw = widen(in.kw), vw = widen(in.vw), go = widen(in.d_out);
  const size_t T = b.T, Tc = b.Tc;
  for (auto* x : {&r.oc, &r.os, &r.ow, &r.out}) x->assign(T * H * Dv, 0);
  for (auto* x : {&r.lc, &r.ls, &r.lw}) x->assign(T * H, 0);
  r.dg.assign(T * H * 3, 0), r.dq.assign(T * H * Dk, 0);
  r.dkc.assign(Tc * G * Dk, 0), r.dvc.assign(Tc * G * Dv, 0);
  r.dks.assign(T * G * Dk, 0), r.dvs.assign(T * G * Dv, 0), r.dkw.assign(T * G * Dk, 0), r.dvw.assign(T * G * Dv, 0);
  const double scale = 1 / std::sqrt((double)Dk);
  const int workers = std::max(1u, std::min(16u, std::thread::hardware_concurrency()));
  std::vector<Reference> own(workers);
  std::vector<double> gaps(workers, 0);
  std::vector<long> differ(workers, 0), total(workers, 0);
  std::vector<int> bad(workers, 0);
  const auto work = [&](int me) {
    Reference& g = own[me];
    if (sample.empty())
      g.dkc.assign(r.dkc.size(), 0), g.dvc.assign(r.dvc.size(), 0), g.dks.assign(r.dks.size(), 0),
          g.dvs.assign(r.dvs.size(), 0), g.dkw.assign(r.dkw.size(), 0), g.dvw.assign(r.dvw.size(), 0);
    Doubles p, importance;
    std::vector<size_t> rows;
    for (size_t i = me; i < (sample.empty() ? T : sample.size()); i += workers) {
      const size_t token = sample.empty() ? i : sample[i];
      int seq = 0;
      while (b.cu[seq + 1] <= (int)token) seq++;
      const int first = b.cu[seq], t = (int)token - first, current = t / s.ls;
      for (int group = 0; group < G; group++) {
        importance.assign(current + 1, 0);
        const int* mine = &selected[(token * G + group) * s.n];
        for (int branch = 0; branch < 3; branch++) {
          for (int e = 0; e < h; e++) {
            const int head = group * h + e;
            const size_t row = token * H + head;
            rows.clear();
            if (branch == 0) {
              const int visible = t + 1 < s.l ? 0 : (t + 1 - s.l) / s.d + 1;
              for (int i = 0; i < visible; i++) rows.push_back((size_t)(b.cu_cmp[seq] + i) * G + group);
            } else if (branch == 1) {
              for (int i = 0; i < s.n; i++)
                if (mine[i] >= 0)
                  for (int j = mine[i] * s.ls; j < std::min((mine[i] + 1) * s.ls, t + 1); j++)
                    rows.push_back((size_t)(first + j) * G + group);
            } else {
              for (int j = std::max(0, t - s.w + 1); j <= t; j++) rows.push_back((size_t)(first + j) * G + group);
            }
            const float* keys = (branch == 0 ? kc : branch == 1 ? ks : kw).data();
            const float* values = (branch == 0 ? vc : branch == 1 ? vs : vw).data();
            Doubles& o = branch == 0 ? r.oc : branch == 1 ? r.os : r.ow;
            p.resize(rows.size());
            double top = -INFINITY, sum = 0;
            for (size_t i = 0; i < rows.size(); i++)
              top = std::max(top, p[i] = dot(&q[row * Dk], keys + rows[i] * Dk, Dk) * scale);
            for (auto& x : p) sum += x = std::exp(x - top);
            (branch == 0 ? r.lc : branch == 1 ? r.ls : r.lw)[row] = rows.empty() ? -INFINITY : top + std::log(sum);
            for (size_t i = 0; i < rows.size(); i++) {
              p[i] /= sum;
              for (int c = 0; c < Dv; c++) o[row * Dv + c] += p[i] * values[rows[i] * Dv + c];
            }
            if (branch == 0)
              for (size_t i = 0; i < rows.size(); i++)
                for (int j = (int)i * s.d / s.ls; j <= ((int)i * s.d + s.l - 1) / s.ls && j <= current; j++)
                  importance[j] +=
                      p[i] * (std::min((int)i * s.d + s.l, (j + 1) * s.ls) - std::max((int)i * s.d, j * s.ls)) / s.d;
            double delta = 0;
            const float* up = &go[row * Dv];
            for (int c = 0; c < Dv; c++) delta += up[c] * o[row * Dv + c];
            const double gate = in.gates[row * 3 + branch];
            r.dg[row * 3 + branch] = delta;
            for (int c = 0; c < Dv; c++) r.out[row * Dv + c] += gate * o[row * Dv + c];
            Doubles& dk = branch == 0 ? g.dkc : branch == 1 ? g.dks : g.dkw;
            Doubles& dv = branch == 0 ? g.dvc : branch == 1 ? g.dvs : g.dvw;
            for (size_t i = 0; i < rows.size(); i++) {
              const double ds = gate * p[i] * (dot(up, values + rows[i] * Dv, Dv) - delta) * scale;
              for (int c = 0; c < Dk; c++) {
                r.dq[row * Dk + c] += ds * keys[rows[i] * Dk + c];
                if (sample.empty()) dk[rows[i] * Dk + c] += ds * q[row * Dk + c];
              }
              for (int c = 0; sample.empty() && c < Dv; c++) dv[rows[i] * Dv + c] += gate * p[i] * up[c];
            }
          }
          if (branch == 0) {  // the selection that belongs to this importance
            std::vector<int> want = {0};
            std::vector<int> order;
            for (int j = 1; j < current - 1; j++) order.push_back(j);
            std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return importance[x] > importance[y]; });
            for (int i = 0; i < (int)order.size() && i < s.n - 3; i++) want.push_back(order[i]);
            if (current >= 2) want.push_back(current - 1);
            if (current >= 1) want.push_back(current);
            std::sort(want.begin(), want.end());
            want.resize(s.n, -1);
            total[me] += s.n;
            std::vector<int> missing, extra;
            bool sane = true;
            for (int i = 0; i < s.n; i++) {
              if (mine[i] > current || mine[i] < -1) sane = false;
              if (i > 0 && mine[i] >= 0 && mine[i] <= mine[i - 1]) sane = false;
              if ((mine[i] < 0) != (want[i] < 0)) sane = false;
              if (std::find(mine, mine + s.n, want[i]) == mine + s.n) missing.push_back(want[i]);
              if (std::find(want.begin(), want.end(), mine[i]) == want.end()) extra.push_back(mine[i]);
            }
            if (!sane || missing.size() != extra.size()) {
              if (!bad[me]++) {
                printf("  bad selection t=%d group=%d:", t, group);
                for (int i = 0; i < s.n; i++) printf(" %d/%d", mine[i], want[i]);
                printf("\n");
              }
            } else if (!missing.empty()) {
              differ[me] += missing.size();
              double least = INFINITY, most = 0;
              for (int j : extra) least = std::min(least, j > 0 ? importance[j] : 0.0);
              for (int j : missing) most = std::max(most, j > 0 ? importance[j] : INFINITY);
              gaps[me] = std::max(gaps[me], (most - least) / most);
            }
            if (bad[me]) break;
          }
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < workers; i++) threads.emplace_back(work, i);
  for (auto& t : threads) t.join();
  for (int i = 0; i < workers; i++) {
    worst_gap = std::max(worst_gap, gaps[i]);
    differing += differ[i], chosen_total += total[i];
    if (bad[i]) failures++;
    const auto add = [](Doubles& to, const Doubles& from) {
      for (size_t j = 0; j < from.size(); j++) to[j] += from[j];
    };
    add(r.dkc, own[i].dkc), add(r.dvc, own[i].dvc), add(r.dks, own[i].dks), add(r.dvs, own[i].dvs),
        add(r.dkw, own[i].dkw), add(r.dvw, own[i].dvw);
  }
}

static size_t sample_tokens = 1;  // tokens of the batch, when sampling
static std::map<std::string, double> worst;
static double compare(const char* name, const Doubles& want, const std::vector<float>& got, double limit) {
  double num = 0, den = 0;
  for (size_t i = 0; i < want.size(); i++) {
    if (!sample.empty() && !std::binary_search(sample.begin(), sample.end(), i / (want.size() / sample_tokens))) {
      i += want.size() / sample_tokens - 1;  // the rest of a token that was not computed
      continue;
    }
    if (std::isinf(want[i])) {
      if (got[i] != (float)want[i]) num = NAN;
      continue;
    }
    num += (got[i] - want[i]) * (got[i] - want[i]);
    den += want[i] * want[i];
  }
  // where the true value is zero (one visible key: no gradient) only rounding may remain, 1e-5 a value
  const double error =
      den > 1e-12 * want.size() ? std::sqrt(num / den) : std::sqrt(num / std::max<size_t>(1, want.size())) * 1e3;
  worst[name] = std::isnan(error) || error > worst[name] ? error : worst[name];
  if (!(error <= limit)) {
    printf("  FAIL %s error %.3g\n", name, error);
    failures++;
  }
  return error;
}

int main(int argc, char** argv) {
  if (argc < 11) return 2;
  setvbuf(stdout, nullptr, _IONBF, 0);
  Shape s;
  int* fields[] = {&s.H, &s.G, &s.Dk, &s.Dv, &s.l, &s.d, &s.ls, &s.n, &s.w};
  for (int i = 0; i < 9; i++) *fields[i] = atoi(argv[2 + i]);
  const bool small = getenv("SMALL") != nullptr;  // for compute-sanitizer
  Kernels kernels;
  kernels.load(argv[1]);
  std::mt19937 rng(argc > 11 ? atoi(argv[11]) : 1);
  std::vector<std::vector<int>> batches = {
      {1}, {31}, {32}, {65}, {511}, {512}, {513}, {1, 31, 32, 33, 64, 65, 127, 128, 129, 300}, {1300, 7, 577}, {2048}};
  if (small) batches = {{1, 33, 65, 200}};
  if (getenv("LARGE")) batches = {{65536}, {30000, 1, 35535}};  // 48 tokens of each, per-token results only
  for (const auto& lengths : batches) {
    Batch b;
    b.make(s, &kernels, lengths);
    Host in;
    in.q = random_bf16(b.q.n, rng, 1.5f), in.kc = random_bf16(b.kc.n, rng, 1), in.vc = random_bf16(b.vc.n, rng, 1);
    in.ks = random_bf16(b.ks.n, rng, 1), in.vs = random_bf16(b.vs.n, rng, 1), in.kw = random_bf16(b.kw.n, rng, 1),
    in.vw = random_bf16(b.vw.n, rng, 1);
    in.d_out = random_bf16(b.d_out.n, rng, 1);
    std::uniform_real_distribution<float> uniform(0.01f, 1.0f);
    in.gates.resize(b.gates.n);
    for (auto& x : in.gates) x = uniform(rng);
    b.q.put(in.q), b.kc.put(in.kc), b.vc.put(in.vc), b.ks.put(in.ks), b.vs.put(in.vs), b.kw.put(in.kw), b.vw.put(in.vw),
        b.d_out.put(in.d_out), b.gates.put(in.gates);
    const auto sync = [&](const char* what) {
      const cudaError_t e = cudaDeviceSynchronize();
      if (e != cudaSuccess) {
        printf("  %s: %s\n", what, cudaGetErrorString(e));
        exit(3);
      }
    };
    b.pack(), sync("pack");
    b.compressed(), sync("compressed");
    b.select(), sync("select");
    b.index(), sync("index");
    b.fill(), sync("lists");
    b.sort(), sync("sort");
    b.window(), sync("window");
    const auto ow_alone = b.ow.get();
    const auto lw_alone = b.lw.get();
    const auto poison = [&] {
      b.os.poison(), b.ls.poison(), b.ow.poison(), b.lw.poison(), b.out.poison(), b.partial.poison(),
          b.partial_lse.poison();
    };
    poison();
    b.choose(1), b.selected_all(true), sync("union");
    const auto os_union = b.os.get(), fused_union = b.out.get();
    const auto ls_union = b.ls.get();
    if (b.ow.get() != ow_alone)
      printf("  FAIL the window beside tile-union differs from the window alone\n"), failures++;
    poison();
    b.choose(2), b.selected_all(true), sync("outer");
    const auto fused = b.out.get(), os_outer = b.os.get(), ow_outer = b.ow.get();
    for (int i = 0; i < 3; i++) {  // the same bits every time
      poison();
      b.choose(2), b.selected_all(false), sync("outer again");
      if (b.os.get() != os_outer || b.ow.get() != ow_outer)
        printf("  FAIL KV-outer differs from run to run\n"), failures++;
    }
    poison();
    b.lists.poison(), b.offsets.poison(), b.begins.poison(), b.plan.poison(), b.fitems.poison(), b.bitems.poison();
    b.list(2), b.selected_all(false), sync("items, lists and choice in one launch");
    if (b.os.get() != os_outer)
      printf("  FAIL items, lists and choice in one launch differ from one after the other\n"), failures++;
    b.sort(), sync("sort");
    const auto adaptive = [&](float limit, float gather_limit, int want) {
      const auto before = b.served.get();
      b.choose(0, limit, gather_limit), b.selected_all(false), sync("adaptive");
      const auto after = b.served.get();
      for (int i = 0; i < 3; i++)
        if (after[i] != before[i] + (i == want)) printf("  FAIL adaptive choice\n"), failures++;
    };
    adaptive(1e9f, 0, 0), adaptive(0.5f, 0, 1);
    std::vector<uint16_t> os_gather, fused_gather;
    std::vector<float> ls_gather;
    if (b.has_gather()) {
      adaptive(0.5f, 1e9f, 2);
      for (int i = 0; i < 4; i++) {  // the same bits every time
        poison();
        b.choose(3), b.selected_all(true), sync("gather");
        if (i > 0 && b.os.get() != os_gather) printf("  FAIL tile-gather differs from run to run\n"), failures++;
        os_gather = b.os.get(), fused_gather = b.out.get(), ls_gather = b.ls.get();
      }
    }
    poison();
    b.choose(4), b.selected_all(true), sync("mixed");
    const auto os_mixed = b.os.get(), fused_mixed = b.out.get(), ow_mixed = b.ow.get();
    const auto ls_mixed = b.ls.get(), lw_mixed = b.lw.get();
    poison();
    b.choose(2), b.selected_all(false), sync("outer last");
    b.out.poison(), b.combine(), sync("combine");
    b.prepare(), sync("prepare");
    b.clear();
    b.compressed_backward(), sync("compressed_backward");
    b.selected_backward(), sync("selected_backward");
    b.window_backward(), sync("window_backward");
    b.compressed_window_query(), sync("compressed_window_query");
    b.selected_query(), sync("selected_query");
    b.round(), sync("round");
    // The ordered sums: the same bits every time, and close to the others.
    const auto dkc16 = b.dkc16.get(), dvc16 = b.dvc16.get(), dks16 = b.dks16.get(), dvs16 = b.dvs16.get();
    b.make_parts();
    std::vector<std::vector<uint16_t>> ordered;
    for (int i = 0; i < 2; i++) {
      for (auto* x : {&b.dkc16, &b.dvc16, &b.dks16, &b.dvs16}) x->poison();
      for (auto* x : {&b.dkc_parts, &b.dvc_parts, &b.dks_parts, &b.dvs_parts}) x->poison();
      b.compressed_backward(true), b.compressed_sum(), b.selected_backward(true), b.selected_sum(), sync("ordered");
      const std::vector<std::vector<uint16_t>> now = {b.dkc16.get(), b.dvc16.get(), b.dks16.get(), b.dvs16.get()};
      if (i > 0 && now != ordered) printf("  FAIL ordered gradients differ from run to run\n"), failures++;
      ordered = now;
    }
    const auto agree = [&](const char* name, const std::vector<uint16_t>& a, const std::vector<uint16_t>& c) {
      double num = 0, den = 0;
      for (size_t i = 0; i < a.size(); i++)
        num += std::pow(from_bf16(a[i]) - from_bf16(c[i]), 2), den += std::pow(from_bf16(a[i]), 2);
      const double error = std::sqrt(num / std::max(den, 1e-12 * a.size() + 1e-30));
      worst[name] = std::max(worst[name], error);
      if (!(error <= 3e-3) && den > 1e-6 * a.size()) printf("  FAIL %s %.3g\n", name, error), failures++;
    };
    const auto dq_apart = b.dq16.get();
    if (b.has_joint()) {  // what is compared with float64 below is then the result of joint_gradients
      const auto dkw = b.dkw.get(), dvw = b.dvw.get();
      for (auto* x : {&b.dq16, &b.dkw, &b.dvw, &b.dkc16, &b.dvc16}) x->poison();
      b.clear(), b.joint(), b.selected_backward(), b.selected_query(true), b.round(), sync("joint");
      agree("joint dk_win", dkw, b.dkw.get()), agree("joint dv_win", dvw, b.dvw.get());
      agree("joint dk_cmp", dkc16, b.dkc16.get()), agree("joint dv_cmp", dvc16, b.dvc16.get());
    }
    agree("ordered dk_cmp", dkc16, ordered[0]), agree("ordered dv_cmp", dvc16, ordered[1]),
        agree("ordered dk_sel", dks16, ordered[2]), agree("ordered dv_sel", dvs16, ordered[3]);
    if (getenv("LARGE")) {
      sample.clear(), sample_tokens = b.T;
      for (int i = 0; i < 46; i++) sample.push_back(rng() % b.T);
      sample.push_back(0), sample.push_back(b.T - 1);
      std::sort(sample.begin(), sample.end());
      sample.erase(std::unique(sample.begin(), sample.end()), sample.end());
    }
    Reference r;
    const auto selected = b.selected.get();
    reference(b, in, selected, r);
    double most = 0;
    const auto check16 = [&](const char* name, const Doubles& want, const std::vector<uint16_t>& got) {
      most = std::max(most, compare(name, want, widen(got), 1e-2));
    };
    check16("o_cmp", r.oc, b.oc.get());
    check16("o_sel union", r.os, os_union);
    if (b.has_gather()) {
      check16("o_sel gather", r.os, os_gather), check16("out gather", r.out, fused_gather);
      compare("lse_sel gather", r.ls, ls_gather, 1e-5);
    }
    check16("o_sel outer", r.os, os_outer);
    check16("o_sel mixed", r.os, os_mixed), check16("out mixed", r.out, fused_mixed);
    compare("lse_sel mixed", r.ls, ls_mixed, 1e-5);
    check16("o_win", r.ow, ow_alone), check16("o_win outer", r.ow, b.ow.get()), check16("o_win mixed", r.ow, ow_mixed);
    compare("lse_win alone", r.lw, lw_alone, 1e-5), compare("lse_win mixed", r.lw, lw_mixed, 1e-5);
    check16("out", r.out, b.out.get());
    check16("out fused", r.out, fused), check16("out fused union", r.out, fused_union);
    compare("lse_cmp", r.lc, b.lc.get(), 1e-5), compare("lse_sel union", r.ls, ls_union, 1e-5),
        compare("lse_sel outer", r.ls, b.ls.get(), 1e-5), compare("lse_win", r.lw, b.lw.get(), 1e-5);
    compare("d_gates", r.dg, b.d_gates.get(), 1e-2);
    check16("dq", r.dq, b.dq16.get()), check16("dq apart", r.dq, dq_apart);
    if (sample.empty()) {
      check16("dk_cmp", r.dkc, b.dkc16.get()), check16("dv_cmp", r.dvc, b.dvc16.get());
      check16("dk_sel", r.dks, b.dks16.get()), check16("dv_sel", r.dvs, b.dvs16.get());
      check16("dk_win", r.dkw, b.dkw.get()), check16("dv_win", r.dvw, b.dvw.get());
    }
    printf("  batch of %zu (%d tokens): worst error %.2e, failures so far %d\n", lengths.size(), b.T, most, failures);
    b.drop();
  }
  printf(
      "%s H=%d G=%d Dk=%d Dv=%d l=%d d=%d l'=%d n=%d w=%d: %s, %ld of %ld choices differ, widest score gap of a "
      "differing choice %.2e\n",
      argv[1], s.H, s.G, s.Dk, s.Dv, s.l, s.d, s.ls, s.n, s.w, failures ? "FAILED" : "ok", differing, chosen_total,
      worst_gap);
  for (auto& w : worst) printf("   %s %.2e", w.first.c_str(), w.second);
  printf("\n");
  return failures != 0;
}
