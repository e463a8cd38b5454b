// Splits a fused projection into heads and rotates them; the backward merges the gradients with the inverse rotation.
//
// A block takes a few tokens at a time: it computes their cosines and sines once, in shared memory, and uses them for
// all heads of all parts. VECTOR numbers are moved at a time: 16 bytes, or one where the layout does not allow that. A
// thread has the same columns of every token it takes, so that what belongs to the columns is found once, and it asks for
// those of BATCH tokens before it waits for the first.
#include "angle.cuh"
#include "elements.cuh"

typedef DTYPE T;

constexpr int PARTS = 8, N = VECTOR, BLOCK = 256, BATCH = 4;
// Blocks of a multiprocessor (cuda.ts has the same): the registers must do for them.
constexpr int RESIDENT = 3;

// A part's tensor [tokens][heads][size], or null; its first column; and how many pieces of work a token has in it: N
// numbers, or N pairs of a rotated head. All rotated heads have one size.
struct Part {
  T* data;
  int heads, size, rotate, column, units;
};

// heads + size * 2^20 + rotate * 2^40
__device__ __forceinline__ void describe(Part& part, const void* data, i64 shape) {
  part.data = (T*)data;
  part.heads = (int)(shape & 0xfffff);
  part.size = (int)(shape >> 20 & 0xfffff);
  part.rotate = (int)(shape >> 40);
  part.units = part.heads * (part.rotate ? part.size / 2 : part.size) / N;
}

#define PART_PARAMETERS                                                                                            \
  void *p0, void *p1, void *p2, void *p3, void *p4, void *p5, void *p6, void *p7, i64 s0, i64 s1, i64 s2, i64 s3, \
      i64 s4, i64 s5, i64 s6, i64 s7
#define POSITION_PARAMETERS                                                                                        \
  int column, i64 sequences, i64 tokens, i64 width, const float *frequencies, float scale, float amplitude,        \
      i64 stride, i64 start, int halves, int tile

// N numbers as they lie in memory.
template <bool wide> struct PieceOf {
  typedef uint4 Type;
};
template <> struct PieceOf<false> {
  typedef T Type;
};
typedef PieceOf<(N > 1)>::Type Piece;

// x, y = the pair turned by the angle, or back by it.
template <bool back> __device__ __forceinline__ void turn(float& x, float& y, float cosine, float sine) {
  const float s = back ? -sine : sine, a = x, b = y;
  x = a * cosine - b * s;
  y = b * cosine + a * s;
}

template <bool merge>
__device__ __forceinline__ void rope(T* fused, const i32* offsets, const i32* starts, PART_PARAMETERS,
                                     POSITION_PARAMETERS, bool accumulate, float* largest) {
  extern __shared__ float4 turns4[];
  float2* const turns = (float2*)turns4;  // [tile][halves]
  __shared__ Part parts[PARTS];
  __shared__ int units;
  if (threadIdx.x == 0) {
    describe(parts[0], p0, s0), describe(parts[1], p1, s1), describe(parts[2], p2, s2), describe(parts[3], p3, s3);
    describe(parts[4], p4, s4), describe(parts[5], p5, s5), describe(parts[6], p6, s6), describe(parts[7], p7, s7);
    units = 0;
    for (int p = 0; p < PARTS; p++) {
      parts[p].column = column;
      column += parts[p].heads * parts[p].size;
      units += parts[p].units;
    }
  }
  __syncthreads();
  if (units == 0) return;
  u32 top = 0;
  // Columns in groups of equal width that a block has threads for; usually there is one, and several tokens side by side.
  const int groups = (units + BLOCK - 1) / BLOCK, most = (units + groups - 1) / groups;
  for (int begin = 0; begin < units; begin += most) {
    const int lanes = units - begin < most ? units - begin : most, teams = BLOCK / lanes;
    const int team = (int)threadIdx.x / lanes;
    int u = begin + (int)threadIdx.x - team * lanes, p = 0;
    while (u >= parts[p].units) u -= parts[p].units, p++;
    const Part part = parts[p];
    const int half = part.size / 2, pairs = part.rotate ? half / N : part.size / N;
    const int head = u / pairs, j = (u - head * pairs) * N, at = head * part.size + j;
    const bool rotated = part.rotate != 0, missing = merge && part.data == nullptr;  // a gradient of zero
    const bool idle = team >= teams || (missing && accumulate);
    const i64 own_width = (i64)part.heads * part.size;
    T* const whole = fused + part.column + at;
    T* const own = part.data + at;
    const float2* const angles = turns + j;
    for (i64 first = (i64)blockIdx.x * tile; first < tokens; first += (i64)gridDim.x * tile) {
      const int count = (int)(tokens - first < tile ? tokens - first : tile);
      __syncthreads();
      for (int i = threadIdx.x; i < count * halves; i += BLOCK) {
        const i64 t = first + i / halves;
        const int s = sequence_of(offsets, sequences, t);
        const i64 position = (t - offsets[s]) * stride + (starts != nullptr ? starts[s] : start);
        const float2 turn = cosine_sine(__fmul_rn(__fdiv_rn((float)position, scale), frequencies[i % halves]));
        turns[i] = make_float2(amplitude * turn.x, amplitude * turn.y);
      }
      __syncthreads();
      if (idle) continue;
      for (int token = team; token < count; token += BATCH * teams) {
        Piece x[BATCH], y[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          const int now = token + b * teams;
          if (now >= count || missing) continue;
          const T* from = merge ? own + (first + now) * own_width : whole + (first + now) * width;
          x[b] = *(const Piece*)from;
          if (rotated) y[b] = *(const Piece*)(from + half);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          const int now = token + b * teams;
          if (now >= count) break;
          T* const to = merge ? whole + (first + now) * width : own + (first + now) * own_width;
          float a[N] = {}, c[N] = {};
          if (!missing) load(a, (const T*)&x[b]);
          if (rotated) {
            if (!missing) load(c, (const T*)&y[b]);
            if constexpr (N > 1) {
              const float4* two = (const float4*)(angles + now * halves);
#pragma unroll
              for (int k = 0; k < N; k += 2) {
                const float4 angle = two[k / 2];
                turn<merge>(a[k], c[k], angle.x, angle.y);
                turn<merge>(a[k + 1], c[k + 1], angle.z, angle.w);
              }
            } else {
              const float2 angle = angles[now * halves];
              turn<merge>(a[0], c[0], angle.x, angle.y);
            }
            store(to + half, c, merge && accumulate);
            if (merge && largest != nullptr) top = magnitude(c, top);
          }
          store(to, a, merge && accumulate);
          if (merge && largest != nullptr) top = magnitude(a, top);
        }
      }
    }
  }
  if (merge && largest != nullptr) add_largest(largest, top);
}

#define PART_ARGUMENTS p0, p1, p2, p3, p4, p5, p6, p7, s0, s1, s2, s3, s4, s5, s6, s7
#define POSITION_ARGUMENTS column, sequences, tokens, width, frequencies, scale, amplitude, stride, start, halves, tile

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
rope_split(const T* fused, const i32* offsets, const i32* starts, PART_PARAMETERS, POSITION_PARAMETERS) {
  rope<false>((T*)fused, offsets, starts, PART_ARGUMENTS, POSITION_ARGUMENTS, false, nullptr);
}

// `largest`, unless null: the largest magnitude written, if nothing is accumulated.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
rope_merge(T* d_fused, const i32* offsets, const i32* starts, PART_PARAMETERS, POSITION_PARAMETERS, int accumulate,
           float* largest) {
  rope<true>(d_fused, offsets, starts, PART_ARGUMENTS, POSITION_ARGUMENTS, accumulate, largest);
}
