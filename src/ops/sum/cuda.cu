// Sums of rows times a factor, and the gradient that every number of a row gets. T is the type of what is summed, U that of
// the sums.
#include "elements.cuh"

typedef DTYPE T;
typedef DTYPE_SUM U;

// y[r] = factor * sum of row r; the last row may be shorter. A block for each row.
extern "C" __global__ void __launch_bounds__(256) sum_rows(const T* x, U* y, i64 count, i64 width, float factor) {
  __shared__ float room[8];
  const i64 rows = (count + width - 1) / width;
  for (i64 r = blockIdx.x; r < rows; r += gridDim.x) {
    const i64 end = (r + 1) * width < count ? (r + 1) * width : count;
    float sum = 0.0f;
    for (i64 i = r * width + threadIdx.x; i < end; i += blockDim.x) sum += read_one(x + i);
    sum = block_sum(sum, room);
    if (threadIdx.x == 0) write_one(y + r, factor * sum);
  }
}

// dx[i] (+)= factor * dy[row of i].
extern "C" __global__ void __launch_bounds__(256)
sum_spread(const U* dy, T* dx, i64 count, i64 width, float factor, int accumulate) {
  each<1>(count, false, [=](i64 i, auto) {
    const float slope = factor * read_one(dy + i / width);
    write_one(dx + i, accumulate ? read_one(dx + i) + slope : slope);
  });
}
