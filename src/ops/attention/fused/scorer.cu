// The scorer loss (train.scorer_loss, see scorer-loss/reference.ts) beside the fused kernels. Words such as list, item,
// slot and forced block: ../README.md, Vocabulary.
//
// The cost is that of the blocks that were chosen by score: products go along the lists of the tokens that chose each
// block, 16 rows (token, head) of a list a warp. Chosen blocks lie before block cur - 1, so a token sees all of their
// keys, and all compressed keys that overlap them: nothing is masked. Nothing is added atomically.
//
// With dI, the gradient of a block's importance, the score of a compressed key of probability p gets the gradient
// p * (g - mean): g is the sum of overlap * dI over the chosen blocks that the key overlaps, mean the sum of p * g over
// all keys. The term -p * mean, which every visible key has, goes through the compressed branch's own backward pass, in
// its delta (scorer_delta). The term p * g is computed here (scorer_gradients).
#include "matrix.cuh"
#include "plan.cuh"
#include "top-blocks.cuh"

constexpr float LEAST = 1e-20f;           // less importance, or a lower gate, counts as this much, without a gradient
constexpr int WIDTH = PER_BLOCK + CARRY;  // compressed keys that overlap a selection block
constexpr int KEY_TILES = (WIDTH + 15) / 16;  // of 16 compressed keys
constexpr int SLICES = DK / 16;
constexpr int ROWS = 16, WARPS = 4;
constexpr int ROW_PANEL = ROWS * 128;  // bytes of 64 columns of a tile of rows

// Entries of the list, keys of the block, compressed keys, and a tile of queries for each warp
constexpr int LIST_BYTES = SEL_CHUNK * 4, BLOCK_BYTES = PK * PANEL, CMP_BYTES = PK * KEY_TILES * ROW_PANEL;
constexpr int QUERY_BYTES = WARPS * PK * ROW_PANEL;
EXPORT(scorer_masses_shared, LIST_BYTES + CMP_BYTES + QUERY_BYTES + BLOCK_BYTES + 128)
// Beside these a tile of score gradients for each warp, and the sums of the keys' gradients
EXPORT(scorer_gradients_shared,
       LIST_BYTES + CMP_BYTES + QUERY_BYTES + WARPS * ROWS * 32 + KEY_TILES * ROWS * DK * 4 + 128)

// Tokens that compressed key `key` of the WIDTH ones shares with the block, in strides; 0 past the last key.
__device__ __forceinline__ float overlap(int key) {
  const int begin = (key - CARRY) * CMP_D, end = begin + CMP_L;
  return key < WIDTH ? (float)((min(end, SEL_L) - max(begin, 0)) / CMP_D) : 0.0f;
}

// The part of a list that a block works on: a work item of selected_backward, without the forced tokens it begins with.
struct Chosen {
  const u32* entries;  // position in the sequence * 64 + slot; in shared memory
  int sequence, block, group, first, rows;
  __device__ __forceinline__ u32 entry(int r) const { return entries[(u32)min(r, rows - 1) / HPG]; }
  __device__ __forceinline__ u32 token(int r) const { return first + entry(r) / 64; }
  // Index of a row in q; and, with its slot, in tensors [T, G, n, h]
  __device__ __forceinline__ i64 query(int r) const {
    return (i64)token(r) * HEADS + group * HPG + (u32)min(r, rows - 1) % HPG;
  }
  __device__ __forceinline__ i64 place(int r) const {
    return (((i64)token(r) * GROUPS + group) * SEL_N + entry(r) % 64) * HPG + (u32)min(r, rows - 1) % HPG;
  }
};

// False if the item has forced tokens alone. Loads the entries.
__device__ __forceinline__ bool load_chosen(Chosen& chosen, unsigned char* shared, const int* items, const int* offsets,
                                            const u32* lists, const int* cu_seqlens, const int* cu_blocks,
                                            int sequences) {
  const int blocks = cu_blocks[sequences];
  if (blockIdx.x >= offsets[2 * (blocks * GROUPS + 1) - 1]) return false;
  const int list = items[blockIdx.x * 2], from = items[blockIdx.x * 2 + 1] * SEL_CHUNK, at = list % blocks;
  chosen.sequence = sequence_of(cu_blocks, sequences, at);
  chosen.first = cu_seqlens[chosen.sequence];
  chosen.block = at - cu_blocks[chosen.sequence];
  chosen.group = list / blocks;
  if (chosen.block == 0) return false;
  const int length = cu_seqlens[chosen.sequence + 1] - chosen.first;
  const int forced = forced_tokens(chosen.block, length);
  const int begin = max(0, from - forced), end = min(offsets[list + 1] - offsets[list], from - forced + SEL_CHUNK);
  if (begin >= end) return false;
  chosen.rows = (end - begin) * HPG;
  chosen.entries = (const u32*)shared;
  for (int i = threadIdx.x; i < end - begin; i += WARPS * 32) ((u32*)shared)[i] = lists[offsets[list] + begin + i];
  return true;
}

// Starts the copy of `count` rows of DK columns by `THREADS` threads into panels `panel` bytes apart; row(r) < 0:
// zeros.
template <int THREADS, class Row>
__device__ __forceinline__ void copy_rows(u32 to, int panel, int count, int thread, const bf16* from, Row row) {
  constexpr int CHUNKS = PK * 8;
  for (int c = thread; c < count * CHUNKS; c += THREADS) {
    const int r = c / CHUNKS, chunk = c % CHUNKS;
    const i64 index = row(r);
    const bool present = index >= 0 && chunk * 8 < DK;
    copy16(to + chunk / 8 * panel + swizzle(r, chunk & 7), from + (present ? index * DK + chunk * 8 : 0), present);
  }
}

__device__ __forceinline__ void copy_compressed(u32 to, const Chosen& chosen, const bf16* k_cmp, const int* cu_cmp) {
  const i64 first = (i64)cu_cmp[chosen.sequence] + chosen.block * PER_BLOCK - CARRY;
  copy_rows<WARPS * 32>(to, KEY_TILES * ROW_PANEL, KEY_TILES * ROWS, threadIdx.x, k_cmp,
                        [&](int r) { return r < WIDTH ? (first + r) * GROUPS + chosen.group : -1; });
}

// The queries of rows `row0` ... row0 + 15 by one warp; absent rows repeat the last one.
__device__ __forceinline__ void load_tile(u32 (&a)[SLICES][4], u32 to, const Chosen& chosen, int row0, const bf16* q) {
  const int lane = threadIdx.x & 31;
  __syncwarp();  // every lane has read the tile before
  copy_rows<32>(to, ROW_PANEL, ROWS, lane, q, [&](int r) { return chosen.query(row0 + r); });
  copies_commit();
  copies_wait<0>();
  __syncwarp();
#pragma unroll
  for (int s = 0; s < SLICES; s++)
    load_fragment<false>(a[s], to + s / 4 * ROW_PANEL + swizzle(lane & 15, s % 4 * 2 + (lane >> 4)));
}

// d [16 rows, 16 keys] = Q * K^T for the keys from row `key0` of the panels on. Of a lane: element e belongs to row
// lane / 4 + 8 * (e / 2 % 2) and key e / 4 * 8 + lane % 4 * 2 + e % 2.
__device__ __forceinline__ void scores(float (&d)[8], const u32 (&a)[SLICES][4], u32 keys, int panel, int key0) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int e = 0; e < 8; e++) d[e] = 0.0f;
#pragma unroll
  for (int s = 0; s < SLICES; s++) {
    u32 b[4];
    load_fragment<false>(
        b, keys + s / 4 * panel + swizzle(key0 + (lane >> 4) * 8 + (lane & 7), s % 4 * 2 + ((lane >> 3) & 1)));
    mma_bf16(d, a[s][0], a[s][1], a[s][2], a[s][3], b[0], b[1]);
    mma_bf16(d + 4, a[s][0], a[s][1], a[s][2], a[s][3], b[2], b[3]);
  }
}
__device__ __forceinline__ int key_of(int e) { return e / 4 * 8 + (threadIdx.x & 3) * 2 + (e & 1); }

// Writes two numbers for each chosen block of a row: its mass, the sum of the selected branch's probabilities of its
// keys, and its importance, the sum of overlap * p. masses: [T, G, n, h] pairs. grid (upper bound of items)
extern "C" __global__ void __launch_bounds__(WARPS * 32) scorer_masses(
    const bf16* q, const bf16* k_sel, const bf16* k_cmp, const float* lse_sel, const float* lse_cmp, float2* masses,
    const int* items, const int* offsets, const u32* lists, const int* cu_seqlens, const int* cu_cmp,
    const int* cu_blocks, int sequences) {
  extern __shared__ unsigned char shared[];
  Chosen chosen;
  if (!load_chosen(chosen, shared, items, offsets, lists, cu_seqlens, cu_blocks, sequences)) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const u32 base = (shared_address(shared) + LIST_BYTES + 127) & ~127u;
  const u32 compressed = base, keys = base + CMP_BYTES, queries = keys + BLOCK_BYTES + warp * PK * ROW_PANEL;
  const i64 key0 = chosen.first + chosen.block * SEL_L;
  copy_compressed(compressed, chosen, k_cmp, cu_cmp);
  copy_rows<WARPS * 32>(keys, PANEL, 64, threadIdx.x, k_sel,
                        [&](int r) { return r < SEL_L ? (key0 + r) * GROUPS + chosen.group : -1; });
  copies_commit();
  copies_wait<0>();
  __syncthreads();
  const float c = scale_log2();
  for (int row0 = warp * ROWS; row0 < chosen.rows; row0 += WARPS * ROWS) {
    u32 a[SLICES][4];
    load_tile(a, queries, chosen, row0, q);
    const int row = row0 + lane / 4;
    const i64 at[2] = {chosen.query(row), chosen.query(row + 8)};
    float mass[2] = {0.0f, 0.0f}, importance[2] = {0.0f, 0.0f}, d[8];
    const float sel[2] = {lse_sel[at[0]] * LOG2_E, lse_sel[at[1]] * LOG2_E};
#pragma unroll
    for (int n = 0; n < (SEL_L + 15) / 16; n++) {
      scores(d, a, keys, PANEL, n * 16);
#pragma unroll
      for (int e = 0; e < 8; e++)
        if (n * 16 + key_of(e) < SEL_L) mass[e / 2 & 1] += exp2_approximate(fmaf(d[e], c, -sel[e / 2 & 1]));
    }
    const float cmp[2] = {lse_cmp[at[0]] * LOG2_E, lse_cmp[at[1]] * LOG2_E};
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
      scores(d, a, compressed, KEY_TILES * ROW_PANEL, n * 16);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const int key = n * 16 + key_of(e);
        if (key < WIDTH) importance[e / 2 & 1] += overlap(key) * exp2_approximate(fmaf(d[e], c, -cmp[e / 2 & 1]));
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float2 pair = make_float2(quad_sum(mass[i]), quad_sum(importance[i]));
      if ((lane & 3) == 0 && row + i * 8 < chosen.rows) masses[chosen.place(row + i * 8)] = pair;
    }
  }
}

// A warp per (token, group): the loss, the gradient of the importance of each slot [T, G, n], and for each head the
// mean of its gradients [T, H].
extern "C" __global__ void __launch_bounds__(256) scorer_losses(const int* selected, const float2* masses,
                                                                float* d_importance, float* mean, float* losses,
                                                                const int* cu_seqlens, int sequences) {
  constexpr int SLOTS = (SEL_N + 31) / 32;  // of a lane
  const i64 item = ((i64)blockIdx.x * 256 + threadIdx.x) / 32;
  if (item >= (i64)cu_seqlens[sequences] * GROUPS) return;
  const int lane = threadIdx.x & 31, token = (int)(item / GROUPS), group = (int)(item % GROUPS);
  const int t = token - cu_seqlens[sequence_of(cu_seqlens, sequences, token)];
  float mass[SLOTS], importance[SLOTS], of_head[SLOTS][HPG], gradient[SLOTS];
  float blocks = 0.0f, all_mass = 0.0f, all = 0.0f, loss = 0.0f;
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    const int slot = i * 32 + lane, block = slot < SEL_N ? selected[item * SEL_N + slot] : -1;
    const bool chosen = is_chosen(block, t);
    mass[i] = importance[i] = gradient[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < HPG; r++) {
      const float2 x = chosen ? masses[(item * SEL_N + slot) * HPG + r] : make_float2(0.0f, 0.0f);
      mass[i] += x.x;
      importance[i] += x.y;
      of_head[i][r] = x.y;
    }
    blocks += chosen;
    all_mass += mass[i];
    if (chosen) all += fmaxf(importance[i], LEAST);
    else importance[i] = -1.0f;
  }
  blocks = warp_sum(blocks);
  all_mass = warp_sum(all_mass);
  all = warp_sum(all);
  const bool counts = blocks >= 2.0f && all_mass > 0.0f;
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    const float target = mass[i] / all_mass;
    if (counts && importance[i] >= 0.0f) {
      if (target > 0.0f) loss += target * logf(target * all / fmaxf(importance[i], LEAST));
      if (importance[i] > LEAST) gradient[i] = 1.0f / all - target / importance[i];
    }
    if (i * 32 + lane < SEL_N) d_importance[item * SEL_N + i * 32 + lane] = gradient[i];
  }
  loss = warp_sum(loss);
  if (lane == 0) losses[item] = loss;
#pragma unroll
  for (int r = 0; r < HPG; r++) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) sum += gradient[i] * of_head[i][r];
    sum = warp_sum(sum);
    if (lane == 0) mean[(i64)token * HEADS + group * HPG + r] = sum;
  }
}

// The compressed branch's dS = gate * p * (dP - delta) gets the term -p * mean * factor. delta: of that branch [T, H].
extern "C" __global__ void __launch_bounds__(256) scorer_delta(float* delta, const float* mean, const float* gates,
                                                               float factor, i64 rows) {
  const i64 row = (i64)blockIdx.x * 256 + threadIdx.x;
  if (row >= rows) return;
  const float gate = gates[row * 3];
  if (gate > LEAST) delta[row] += mean[row] * factor / gate;
}

// The gradient that chosen blocks alone have: dS = p * overlap * dI. Adds dS * K to the selected branch's shares of dQ
// [T, G, n, h, Dk], and writes dS^T * Q, the keys' gradient, as a part of its own for every item: parts [items, WIDTH,
// Dk]. grid (upper bound of items), after selected_backward
extern "C" __global__ void __launch_bounds__(WARPS * 32) scorer_gradients(
    const bf16* q, const bf16* k_cmp, const float* lse_cmp, const float* d_importance, const float* gates, float factor,
    bf16* shares, float* parts, const int* items, const int* offsets, const u32* lists, const int* cu_seqlens,
    const int* cu_cmp, const int* cu_blocks, int sequences) {
  extern __shared__ unsigned char shared[];
  Chosen chosen;
  if (!load_chosen(chosen, shared, items, offsets, lists, cu_seqlens, cu_blocks, sequences)) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const u32 origin = shared_address(shared), base = (origin + LIST_BYTES + 127) & ~127u;
  const u32 compressed = base, queries = base + CMP_BYTES + warp * PK * ROW_PANEL,
            turned = base + CMP_BYTES + QUERY_BYTES + warp * ROWS * 32;
  float* const sums = (float*)(shared + (base - origin) + CMP_BYTES + QUERY_BYTES + WARPS * ROWS * 32);
  copy_compressed(compressed, chosen, k_cmp, cu_cmp);
  copies_commit();
  copies_wait<0>();
  __syncthreads();
  const float c = scale_log2();
  float d_key[KEY_TILES][DK / 8][4];
#pragma unroll
  for (int k = 0; k < KEY_TILES; k++)
#pragma unroll
    for (int n = 0; n < DK / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) d_key[k][n][e] = 0.0f;
  for (int row0 = warp * ROWS; row0 < chosen.rows; row0 += WARPS * ROWS) {
    u32 a[SLICES][4];
    load_tile(a, queries, chosen, row0, q);
    float shift[2], weight[2], d_query[DK / 8][4];
    bf16* share[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = row0 + lane / 4 + i * 8;
      const i64 at = chosen.query(row), place = chosen.place(row);
      shift[i] = lse_cmp[at] * LOG2_E;
      weight[i] = row < chosen.rows && gates[at * 3] > LEAST ? d_importance[place / HPG] * factor : 0.0f;
      share[i] = row < chosen.rows ? shares + place * DK : nullptr;
    }
#pragma unroll
    for (int n = 0; n < DK / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) d_query[n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < KEY_TILES; k++) {
      float d[8];
      u32 ds[4], transposed[4], b[4];
      scores(d, a, compressed, KEY_TILES * ROW_PANEL, k * ROWS);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const int key = k * ROWS + key_of(e);
        d[e] =
            key < WIDTH ? weight[e / 2 & 1] * overlap(key) * exp2_approximate(fmaf(d[e], c, -shift[e / 2 & 1])) : 0.0f;
      }
      // dS as the left operand of dQ [rows, Dk] = dS * K, and its transpose as that of dK [keys, Dk] = dS^T * Q
#pragma unroll
      for (int i = 0; i < 4; i++) {
        ds[i] = pack_bf16(d[i * 2], d[i * 2 + 1]);
        *(u32*)(shared + (turned - origin) + (lane / 4 + (i & 1) * 8) * 32 + i / 2 * 16 + (lane & 3) * 4) = ds[i];
      }
      __syncwarp();
      load_fragment<true>(transposed, turned + ((lane >> 4) * 8 + (lane & 7)) * 32 + ((lane >> 3) & 1) * 16);
      __syncwarp();
#pragma unroll
      for (int n = 0; n < DK / 16; n++) {
        const int panel = n / 4, chunk = n % 4 * 2 + (lane >> 4);
        load_fragment<true>(b, queries + panel * ROW_PANEL + swizzle(lane & 15, chunk));
        mma_bf16(d_key[k][n * 2], transposed[0], transposed[1], transposed[2], transposed[3], b[0], b[1]);
        mma_bf16(d_key[k][n * 2 + 1], transposed[0], transposed[1], transposed[2], transposed[3], b[2], b[3]);
        load_fragment<true>(b, compressed + panel * KEY_TILES * ROW_PANEL + swizzle(k * ROWS + (lane & 15), chunk));
        mma_bf16(d_query[n * 2], ds[0], ds[1], ds[2], ds[3], b[0], b[1]);
        mma_bf16(d_query[n * 2 + 1], ds[0], ds[1], ds[2], ds[3], b[2], b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (share[i] != nullptr)
#pragma unroll
        for (int n = 0; n < DK / 8; n++) {
          u32* const two = (u32*)(share[i] + n * 8 + (lane & 3) * 2);
          *two = pack_bf16(low_bf16(*two) + d_query[n][i * 2], high_bf16(*two) + d_query[n][i * 2 + 1]);
        }
  }
  // The sums of the warps, one after the other
  for (int w = 0; w < WARPS; w++) {
    if (w == warp)
#pragma unroll
      for (int k = 0; k < KEY_TILES; k++)
#pragma unroll
        for (int n = 0; n < DK / 8; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            float* const sum = sums + (k * ROWS + lane / 4 + e / 2 * 8) * DK + n * 8 + (lane & 3) * 2 + (e & 1);
            *sum = (w > 0 ? *sum : 0.0f) + d_key[k][n][e];
          }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < WIDTH * DK; i += WARPS * 32)
    parts[(i64)blockIdx.x * WIDTH * DK + i] = sums[i] * scale();
}

// Adds the parts of the blocks that a compressed key overlaps, in order, to the gradient of the key: to fp32 sums, or
// where these are null to bf16. A thread per column. grid (keys * G * Dk / 256)
extern "C" __global__ void __launch_bounds__(256) scorer_key_sums(const float* parts, float* sums, bf16* dk,
                                                                  const int* offsets, const int* cu_seqlens,
                                                                  const int* cu_cmp, const int* cu_blocks,
                                                                  int sequences) {
  const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
  if (i >= (i64)cu_cmp[sequences] * GROUPS * DK) return;
  const int column = (int)(i % DK), group = (int)(i / DK % GROUPS), key = (int)(i / DK / GROUPS);
  const int s = sequence_of(cu_cmp, sequences, key), at = key - cu_cmp[s], length = cu_seqlens[s + 1] - cu_seqlens[s];
  const int blocks = cu_blocks[sequences], last = min((at + CARRY) / PER_BLOCK, cu_blocks[s + 1] - cu_blocks[s] - 1);
  float sum = 0.0f;
  for (int block = max(1, at / PER_BLOCK); block <= last; block++) {
    const int list = group * blocks + cu_blocks[s] + block, begin = offsets[blocks * GROUPS + 1 + list];
    if (offsets[list + 1] == offsets[list]) continue;
    const int forced = forced_tokens(block, length);
    for (int item = begin + forced / SEL_CHUNK; item < offsets[blocks * GROUPS + 2 + list]; item++)
      sum += parts[((i64)item * WIDTH + at - block * PER_BLOCK + CARRY) * DK + column];
  }
  if (sums != nullptr) sums[i] += sum;
  else write_one(dk + i, read_one(dk + i) + sum);
}
