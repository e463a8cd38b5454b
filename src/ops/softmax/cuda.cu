// Softmax of rows, forward and backward, a block for each row; the backward reads the result of the forward.
#include "elements.cuh"

typedef DTYPE T;

extern "C" __global__ void __launch_bounds__(256) softmax_forward(const T* x, T* y, i64 rows, i64 width) {
  __shared__ float room[8];
  for (i64 r = blockIdx.x; r < rows; r += gridDim.x) {
    const T* from = x + r * width;
    float top = -positive_infinity(), total = 0.0f;
    for (i64 i = threadIdx.x; i < width; i += blockDim.x) top = fmaxf(top, read_one(from + i));
    top = block_max(top, room);
    for (i64 i = threadIdx.x; i < width; i += blockDim.x) total += exp2_approximate(LOG2_E * (read_one(from + i) - top));
    const float inverse = 1.0f / block_sum(total, room);
    for (i64 i = threadIdx.x; i < width; i += blockDim.x)
      write_one(y + r * width + i, exp2_approximate(LOG2_E * (read_one(from + i) - top)) * inverse);
  }
}

extern "C" __global__ void __launch_bounds__(256)
softmax_backward(const T* y, const T* dy, T* dx, i64 rows, i64 width, int accumulate) {
  __shared__ float room[8];
  for (i64 r = blockIdx.x; r < rows; r += gridDim.x) {
    const i64 end = (r + 1) * width;
    float inner = 0.0f;
    for (i64 i = r * width + threadIdx.x; i < end; i += blockDim.x) inner += read_one(y + i) * read_one(dy + i);
    inner = block_sum(inner, room);
    for (i64 i = r * width + threadIdx.x; i < end; i += blockDim.x) {
      const float slope = read_one(y + i) * (read_one(dy + i) - inner);
      write_one(dx + i, accumulate ? read_one(dx + i) + slope : slope);
    }
  }
}
