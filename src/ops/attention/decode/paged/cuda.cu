// Attention of new tokens over cached keys and values in pages: any shape, f32 or bf16 in memory and float arithmetic.
//
// A page holds one block of keys of every layer: per group the keys as rows [size][dk], then per group the values as
// columns [dv][size], the layout that tensor cores read (decode/step reads the same pages). A block of threads takes
// one (token, group) after another; where they stand is read on the device, so a launch does not depend on lengths.
#include "elements.cuh"

typedef DTYPE T;

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int CHUNK = 64;            // keys seen at a time
constexpr int PROBABILITIES = 4096;  // of compressed keys held at a time by paged_select (cuda.ts gives the memory)

// Keys and values of one layer. tables[s] is the address of sequence s's table of pages; 0 in it is no page.
struct Pages {
  const i64* tables;
  i64 place, size;  // of the layer in a page, in numbers; keys of a page

  __device__ T* page(int sequence, i64 index) const {
    T* base = ((T* const*)tables[sequence])[index];
    return base == nullptr ? nullptr : base + place;
  }
};

struct Tokens {
  const i32 *offsets, *starts;
  i64 sequences;
  __device__ i64 count() const { return offsets[sequences]; }
};

struct Heads {
  int heads, groups, dk, dv;
  __device__ int per_group() const { return heads / groups; }
  __device__ T* keys(T* page, i64 size, int g) const { return page + g * size * dk; }
  __device__ T* values(T* page, i64 size, int g) const { return page + groups * size * dk + g * size * dv; }
};

// Position of one (token, group).
struct Place {
  i64 t, position;
  int g, s;
};

#define TOKENS const i32 *offsets, const i32 *starts, i64 sequences
#define PAGES const i64 *tables, i64 place, i64 size
#define HEADS int heads, int groups, int dk, int dv

// The last tokens see most: they come first.
template <class Body> __device__ __forceinline__ void each_row(const Tokens& tokens, int groups, const Body& body) {
  const i64 count = tokens.count();
  for (i64 item = blockIdx.x; item < count * groups; item += gridDim.x) {
    Place at;
    at.t = count - 1 - item / groups, at.g = (int)(item % groups);
    at.s = sequence_of(tokens.offsets, tokens.sequences, at.t);
    at.position = tokens.starts[at.s] + at.t - tokens.offsets[at.s];
    body(at);
    __syncthreads();
  }
}

extern __shared__ float4 shared_memory[];

// The rows of one (token, group) while they see keys, all in shared memory: queries times the scale, running maxima and
// sums, the factor of the last rescaling, results, and the scores of the keys at hand. Exponents are powers of two.
struct Rows {
  Heads shape;
  int h;
  float *query, *most, *total, *factor, *result, *score;
  i64 seen;

  __device__ Rows(const Heads& shape, const T* q, const Place& at) : shape(shape), h(shape.per_group()), seen(0) {
    query = (float*)shared_memory;
    most = query + h * shape.dk, total = most + h, factor = total + h;
    result = factor + h, score = result + h * shape.dv;
    const float scale = LOG2_E / sqrtf((float)shape.dk);
    const T* from = q + (at.t * shape.heads + at.g * h) * shape.dk;
    for (int i = threadIdx.x; i < h * shape.dk; i += THREADS) query[i] = read_one(from + i) * scale;
    for (int i = threadIdx.x; i < h * shape.dv; i += THREADS) result[i] = 0.0f;
    for (int i = threadIdx.x; i < h; i += THREADS) most[i] = -positive_infinity(), total[i] = 0.0f;
    __syncthreads();
  }

  __device__ float dot(int row, const T* key) const {
    const float* x = query + row * shape.dk;
    float sum = 0.0f;
    for (int c = 0; c < shape.dk; c++) sum = fmaf(x[c], read_one(key + c), sum);
    return sum;
  }

  // Keys [low, high) of a page.
  __device__ void see(T* page, i64 size, int g, i64 low, i64 high) {
    const T* const keys = shape.keys(page, size, g);
    const T* const values = shape.values(page, size, g);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (; low < high; low += CHUNK) {
      const int count = (int)(high - low < CHUNK ? high - low : CHUNK);
      for (int i = threadIdx.x; i < h * count; i += THREADS) {
        const int row = i / count, k = i - row * count;
        score[row * CHUNK + k] = dot(row, keys + (low + k) * shape.dk);
      }
      __syncthreads();
      for (int row = warp; row < h; row += WARPS) {
        float* x = score + row * CHUNK;
        float top = most[row];
        for (int k = lane; k < count; k += 32) top = fmaxf(top, x[k]);
        top = warp_max(top);
        float sum = 0.0f;
        for (int k = lane; k < count; k += 32) sum += x[k] = exp2_approximate(x[k] - top);
        sum = warp_sum(sum);
        __syncwarp();
        if (lane == 0) {
          const float shrink = exp2_approximate(most[row] - top);
          factor[row] = shrink, most[row] = top, total[row] = total[row] * shrink + sum;
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < h * shape.dv; i += THREADS) {
        const int row = i / shape.dv, c = i - row * shape.dv;
        const T* column = values + c * size + low;
        float sum = result[i] * factor[row];
        for (int k = 0; k < count; k++) sum = fmaf(score[row * CHUNK + k], read_one(column + k), sum);
        result[i] = sum;
      }
      seen += count;
      __syncthreads();
    }
  }

  __device__ void finish(const Place& at, T* out, float* lse, i32* reads) const {
    const i64 first = at.t * shape.heads + at.g * h;
    for (int i = threadIdx.x; i < h * shape.dv; i += THREADS) {
      const float sum = total[i / shape.dv];
      write_one(out + first * shape.dv + i, sum > 0.0f ? result[i] / sum : sum);  // NaN stays NaN
    }
    for (int i = threadIdx.x; i < h; i += THREADS)
      lse[first + i] = total[i] == 0.0f ? -positive_infinity() : most[i] / LOG2_E + logf(total[i]);
    if (reads != nullptr && threadIdx.x == 0) reads[at.t * shape.groups + at.g] = (i32)seen;
  }
};

// A token sees the keys [low, high) of its sequence.
template <class Visible> __device__ __forceinline__ void banded(const T* q, const Pages& pages, const Tokens& tokens,
                                                                const Heads& shape, const Visible& visible, T* out,
                                                                float* lse, i32* reads) {
  each_row(tokens, shape.groups, [&](const Place& at) {
    Rows rows(shape, q, at);
    const i64 low = visible.low(at.position), high = visible.high(at.position);
    for (i64 j = low / pages.size; j * pages.size < high; j++) {
      const i64 k0 = j * pages.size;
      rows.see(pages.page(at.s, j), pages.size, at.g, low > k0 ? low - k0 : 0,
               high - k0 < pages.size ? high - k0 : pages.size);
    }
    rows.finish(at, out, lse, reads);
  });
}

struct Window {
  i64 w;
  __device__ i64 low(i64 t) const { return t - w + 1 > 0 ? t - w + 1 : 0; }
  __device__ i64 high(i64 t) const { return t + 1; }
};

struct Finished {
  i64 l, d;
  __device__ i64 low(i64) const { return 0; }
  __device__ i64 high(i64 t) const { return t + 1 < l ? 0 : (t + 1 - l) / d + 1; }
};

extern "C" __global__ void __launch_bounds__(THREADS) paged_window(const T* q, T* out, float* lse, i32* reads, PAGES,
                                                                   TOKENS, HEADS, i64 w) {
  banded(q, {tables, place, size}, {offsets, starts, sequences}, {heads, groups, dk, dv}, Window{w}, out, lse, reads);
}

extern "C" __global__ void __launch_bounds__(THREADS) paged_compressed(const T* q, T* out, float* lse, i32* reads,
                                                                       PAGES, TOKENS, HEADS, i64 l, i64 d) {
  banded(q, {tables, place, size}, {offsets, starts, sequences}, {heads, groups, dk, dv}, Finished{l, d}, out, lse,
         reads);
}

extern "C" __global__ void __launch_bounds__(THREADS) paged_selected(const T* q, const i32* selected, T* out,
                                                                     float* lse, i32* reads, PAGES, TOKENS, HEADS,
                                                                     i64 count) {
  const Pages pages = {tables, place, size};
  const Heads shape = {heads, groups, dk, dv};
  each_row({offsets, starts, sequences}, groups, [&](const Place& at) {
    Rows rows(shape, q, at);
    const i32* chosen = selected + (at.t * groups + at.g) * count;
    for (i64 n = 0; n < count && chosen[n] >= 0; n++) {
      const i64 end = at.position + 1 - chosen[n] * size;
      rows.see(pages.page(at.s, chosen[n]), size, at.g, 0, end < size ? end : size);
    }
    rows.finish(at, out, lse, reads);
  });
}

// Importance of the selection blocks before the local ones, a stretch of them at a time, and the best so far in falling
// order; among equals the lower index stays ahead. Probabilities come from q, the keys and the LSE again. With
// `chunked` there are two lists: half of the slots for the blocks before the token's chunk, the others for the chunk.
extern "C" __global__ void __launch_bounds__(THREADS) paged_select(const T* q, const float* lse, i32* selected, PAGES,
                                                                   TOKENS, HEADS, i64 l, i64 d, i64 block, i64 count,
                                                                   i64 init, i64 local, i64 largest, i64 chunked) {
  const Pages pages = {tables, place, size};
  const Heads shape = {heads, groups, dk, dv};
  each_row({offsets, starts, sequences}, groups, [&](const Place& at) {
    i32* const to = selected + (at.t * groups + at.g) * count;
    const i64 current = at.position / block;
    if (current + 1 <= count) {  // fewer blocks than slots: all
      for (i64 n = threadIdx.x; n < count; n += THREADS) to[n] = n <= current ? (i32)n : -1;
      return;
    }
    Rows rows(shape, q, at);
    const int h = rows.h;
    float* const probability = rows.score;
    float* const importance = probability + PROBABILITIES;
    float* const best = importance + PROBABILITIES;
    i32* const index = (i32*)(best + count);
    const float* row_lse = lse + at.t * heads + at.g * h;
    const int stride = (int)(block / d), lead = (int)(l / d) - 1, weights = lead + stride;
    const int room = (int)(count - init - local);
    const i64 visible = (at.position + 1 - l) / d + 1, end = current - local + 1;  // position >= block >= l
    const int most = (PROBABILITIES - lead) / stride;  // selection blocks of a stretch
    const i64 chunk = chunked ? current / count * count : end;  // blocks from here on have a list of their own
    const int half = chunked ? (int)(count / 2) : room;
    int held[2] = {0, 0};                              // entries of the two lists, thread 0's
    for (i64 first = init; room > 0 && first < end; first += most) {
      const int blocks = (int)(end - first < most ? end - first : most);
      const i64 begin = first * stride - lead;
      for (int i = threadIdx.x; i < blocks * stride + lead; i += THREADS) {
        const i64 k = begin + i;
        if (k < 0 || k >= visible) {
          probability[i] = 0.0f;
          continue;
        }
        const T* key = shape.keys(pages.page(at.s, k / size), size, at.g) + k % size * dk;
        float sum = 0.0f;
        for (int r = 0; r < h; r++) sum += exp2_approximate(rows.dot(r, key) - row_lse[r] * LOG2_E);
        probability[i] = sum;
      }
      __syncthreads();
      for (int j = threadIdx.x; j < blocks; j += THREADS) {
        float sum = 0.0f;
        for (int i = 0; i < weights; i++) {
          const i64 from = (i - lead) * d, end = from + l;
          const i64 shared = (end < block ? end : block) - (from > 0 ? from : 0);
          const float p = probability[j * stride + i];
          if (!largest) sum += (float)shared / (float)d * p;
          else if (!(p <= sum)) sum = p;  // NaN wins, as in a sum
        }
        importance[j] = sum == sum ? sum : -1.0f;  // NaN ranks last
      }
      __syncthreads();
      if (threadIdx.x == 0)
        for (int j = 0; j < blocks; j++) {
          const float value = importance[j];
          const int part = first + j >= chunk, from = part * half, slots = part ? room - half : half;
          int& count_held = held[part];
          if (count_held == slots && (slots == 0 || !(value > best[from + slots - 1]))) continue;
          int slot = from + (count_held < slots ? count_held++ : slots - 1);
          for (; slot > from && value > best[slot - 1]; slot--)
            best[slot] = best[slot - 1], index[slot] = index[slot - 1];
          best[slot] = value, index[slot] = (i32)(first + j);
        }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      i64 n = 0;
      for (; n < init; n++) to[n] = (i32)n;
      for (int part = 0; part < 2; part++) {
        i32* const list = index + part * half;
        for (int i = 1; i < held[part]; i++) {  // ascending
          const i32 value = list[i];
          int slot = i;
          for (; slot > 0 && value < list[slot - 1]; slot--) list[slot] = list[slot - 1];
          list[slot] = value;
        }
        for (int i = 0; i < held[part]; i++) to[n++] = list[i];
      }
      for (i64 j = end; j <= current; j++) to[n++] = (i32)j;
      for (; n < count; n++) to[n] = -1;
    }
  });
}

// Writes k [T][groups][dk] and v [T][groups][dv] to where they belong; tokens without a page are passed over.
extern "C" __global__ void __launch_bounds__(THREADS) paged_store(const T* k, const T* v, PAGES, TOKENS, HEADS) {
  const Pages pages = {tables, place, size};
  const Heads shape = {heads, groups, dk, dv};
  const Tokens tokens = {offsets, starts, sequences};
  for (i64 t = blockIdx.x; t < tokens.count(); t += gridDim.x) {
    const int s = sequence_of(offsets, sequences, t);
    const i64 position = starts[s] + t - offsets[s], i = position % size;
    T* page = pages.page(s, position / size);
    if (page == nullptr) continue;
    for (int x = threadIdx.x; x < groups * dk; x += THREADS)
      shape.keys(page, size, x / dk)[i * dk + x % dk] = k[t * groups * dk + x];
    for (int x = threadIdx.x; x < groups * dv; x += THREADS)
      shape.values(page, size, x / dv)[x % dv * size + i] = v[t * groups * dv + x];
  }
}

// k [T][groups][dk] and v [T][groups][dv] out of the pages; zeros for tokens without a page.
extern "C" __global__ void __launch_bounds__(THREADS) paged_load(T* k, T* v, PAGES, TOKENS, HEADS) {
  const Pages pages = {tables, place, size};
  const Heads shape = {heads, groups, dk, dv};
  const Tokens tokens = {offsets, starts, sequences};
  for (i64 t = blockIdx.x; t < tokens.count(); t += gridDim.x) {
    const int s = sequence_of(offsets, sequences, t);
    const i64 position = starts[s] + t - offsets[s], i = position % size;
    T* page = pages.page(s, position / size);
    for (int x = threadIdx.x; x < groups * dk; x += THREADS)
      k[t * groups * dk + x] = page == nullptr ? T(0.0f) : shape.keys(page, size, x / dk)[i * dk + x % dk];
    for (int x = threadIdx.x; x < groups * dv; x += THREADS)
      v[t * groups * dv + x] = page == nullptr ? T(0.0f) : shape.values(page, size, x / dv)[x % dv * size + i];
  }
}

// joined = the raw rows kept of a sequence, then its new rows x [T][width].
extern "C" __global__ void __launch_bounds__(THREADS) paged_join(const T* x, T* joined, const i32* joined_offsets,
                                                                 PAGES, TOKENS, i64 width) {
  const Pages tails = {tables, place, size};
  for (i64 r = blockIdx.x; r < joined_offsets[sequences]; r += gridDim.x) {
    const int s = sequence_of(joined_offsets, sequences, r);
    const i64 i = r - joined_offsets[s];
    const i64 kept = joined_offsets[s + 1] - joined_offsets[s] - (offsets[s + 1] - offsets[s]);
    const T* from = i < kept ? tails.page(s, 0) + i * width : x + (offsets[s] + i - kept) * width;
    for (i64 c = threadIdx.x; c < width; c += THREADS) joined[r * width + c] = from[c];
  }
}

// Keeps the rows of `joined` from done[s] on: those that blocks to come still need.
extern "C" __global__ void __launch_bounds__(THREADS) paged_keep(const T* joined, const i32* joined_offsets,
                                                                 const i32* done, PAGES, TOKENS, i64 width) {
  const Pages tails = {tables, place, size};
  for (i64 r = blockIdx.x; r < joined_offsets[sequences]; r += gridDim.x) {
    const int s = sequence_of(joined_offsets, sequences, r);
    const i64 i = r - joined_offsets[s] - done[s];
    if (i < 0) continue;
    T* to = tails.page(s, 0) + i * width;
    for (i64 c = threadIdx.x; c < width; c += THREADS) to[c] = joined[r * width + c];
  }
}
