// For the tests of the device: one kernel that sees every kind of argument.
extern "C" __device__ int answer = 42;

extern "C" __global__ void every_argument(float* to, const float* from, int small, long long large, float single, double twice) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < small) to[i] = from[i] * single + (float)twice + (float)(large >> 32) + OFFSET;
}

extern "C" __global__ void shared_sum(float* to, int count) {
  extern __shared__ float values[];
  for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = (float)i;
  __syncthreads();
  if (threadIdx.x == 0) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += values[i];
    to[0] = (float)sum;
  }
}
