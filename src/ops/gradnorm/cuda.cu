// Sums of squares in float64, and counts of what is not finite, of many tensors: one block for each piece of 2^14
// numbers, then one block for all of them. Both add in an order that depends on the sizes alone.
#include "elements.cuh"

constexpr int PIECE = 1 << 14, BLOCK = 256, FINAL = 1024;

struct Record {
  i64 size, first_piece;
  const float* values;
};
struct Sum {
  double squares, non_finite;
};

extern "C" __global__ void __launch_bounds__(BLOCK)
gradnorm_pieces(const Record* records, const int2* pieces, Sum* partials) {
  __shared__ double room[BLOCK / 32];
  const int2 piece = pieces[blockIdx.x];
  const i64 begin = (i64)piece.y * PIECE, left = records[piece.x].size - begin;
  const float* values = records[piece.x].values + begin;
  const int count = (int)(left < PIECE ? left : PIECE), vectors = aligned(values) ? count / 4 : 0;
  double squares[4] = {};
  int non_finite = 0;
  const auto take = [&](float x, int k) {
    squares[k] += (double)x * (double)x;
    non_finite += (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
  };
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += BLOCK) {
    const float4 x = ((const float4*)values)[i];
    take(x.x, 0), take(x.y, 1), take(x.z, 2), take(x.w, 3);
  }
  for (int i = vectors * 4 + threadIdx.x; i < count; i += BLOCK) take(values[i], 0);
  const double sum = block_sum((squares[0] + squares[1]) + (squares[2] + squares[3]), room);
  const double bad = block_sum((double)non_finite, room);
  if (threadIdx.x == 0) partials[blockIdx.x] = {sum, bad};
}

// sums[tensor] for all of them, a warp for each, and their total in sums[tensors].
extern "C" __global__ void __launch_bounds__(FINAL)
gradnorm_sums(const Record* records, const Sum* partials, Sum* sums, i64 tensors) {
  __shared__ double room[FINAL / 32];
  const int lane = threadIdx.x % 32;
  for (i64 t = threadIdx.x / 32; t < tensors; t += FINAL / 32) {
    const i64 first = records[t].first_piece, count = (records[t].size + PIECE - 1) / PIECE;
    Sum own = {0, 0};
    for (i64 p = lane; p < count; p += 32) {
      own.squares += partials[first + p].squares;
      own.non_finite += partials[first + p].non_finite;
    }
    own = {warp_sum(own.squares), warp_sum(own.non_finite)};
    if (lane == 0) sums[t] = own;
  }
  __threadfence_block();
  __syncthreads();
  Sum all = {0, 0};
  for (i64 t = threadIdx.x; t < tensors; t += FINAL) {
    all.squares += sums[t].squares;
    all.non_finite += sums[t].non_finite;
  }
  all = {block_sum(all.squares, room), block_sum(all.non_finite, room)};
  if (threadIdx.x == 0) sums[tensors] = all;
}
