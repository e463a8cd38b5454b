// The kernels' own functions number by number, for their test.
#include "../simd.h"

extern "C" void own_functions(const float* x, double* powers, double* natural, double* binary, double* vectors, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    powers[i] = power_of_2(x[i]);
    natural[i] = natural_log(x[i]);
    binary[i] = binary_log(x[i]);
    vectors[i] = exp(splat(x[i]))[kLanes - 1];
  }
}
