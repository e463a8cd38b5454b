// Philox4x32-10 and what is made of its words: bit for bit what reference.ts computes. Every operation on doubles is
// written as the instruction that rounds once: the compiler would fuse a product and a sum, which gives other bits.
#include "elements.cuh"

struct Words {
  u32 w[4];
};

__device__ __forceinline__ Words philox(u64 seed, u64 stream, u64 index) {
  u32 c0 = (u32)index, c1 = (u32)(index >> 32), c2 = (u32)stream, c3 = (u32)(stream >> 32);
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
    c0 = (u32)(b >> 32) ^ c1 ^ k0;
    c2 = (u32)(a >> 32) ^ c3 ^ k1;
    c1 = (u32)b;
    c3 = (u32)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }

// log(x) = e log 2 + 2 artanh((m-1)/(m+1)) for x = m 2^e, m near 1. For normal numbers above 0.
__device__ __forceinline__ double logarithm(double x) {
  const u64 bits = (u64)__double_as_longlong(x);
  const double exponent = (double)((int)(bits >> 52) - 1023);
  const double m = __longlong_as_double((i64)((bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull));
  const bool high = m > 1.4142135623730951;
  const double mantissa = high ? multiply(m, 0.5) : m, e = high ? add(exponent, 1) : exponent;
  const double t = __ddiv_rn(add(mantissa, -1), add(mantissa, 1));
  const double t2 = multiply(t, t);
  double series = 1.0 / 23;
#pragma unroll
  for (int odd = 21; odd >= 1; odd -= 2) series = add(multiply(series, t2), 1.0 / odd);
  return add(multiply(e, 0.6931471805599453), multiply(multiply(2, t), series));
}

__device__ __forceinline__ double cosine(double x) {
  const double x2 = multiply(x, x);
  double series = 1;
#pragma unroll
  for (int even = 18; even >= 2; even -= 2)
    series = add(1, -multiply(multiply(series, x2), 1.0 / (even * (even - 1))));
  return series;
}

__device__ __forceinline__ double sine(double x) {
  const double x2 = multiply(x, x);
  double series = 1;
#pragma unroll
  for (int even = 18; even >= 2; even -= 2)
    series = add(1, -multiply(multiply(series, x2), 1.0 / (even * (even + 1))));
  return multiply(x, series);
}

// Values offset, offset + 1, ... into out[0, count), PER of a block of words; make(block, values) makes those.
template <int PER, class Value, class Make>
__device__ __forceinline__ void fill(Value* out, i64 count, i64 offset, const Make& make) {
  const i64 first = offset / PER, blocks = (offset + count + PER - 1) / PER - first;
  const i64 threads = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < blocks; i += threads) {
    Value values[PER];
    make((u64)(first + i), values);
    const i64 at = (first + i) * PER - offset;
#pragma unroll
    for (int k = 0; k < PER; k++)
      if (at + k >= 0 && at + k < count) out[at + k] = values[k];
  }
}

extern "C" __global__ void __launch_bounds__(256)
random_uniform(float* out, i64 count, i64 seed, i64 stream, i64 offset) {
  fill<4>(out, count, offset, [=](u64 block, float* values) {
    const Words words = philox(seed, stream, block);
#pragma unroll
    for (int k = 0; k < 4; k++) values[k] = __fmul_rn((float)(words.w[k] >> 8), 1.0f / 16777216.0f);
  });
}

extern "C" __global__ void __launch_bounds__(256)
random_normal(float* out, i64 count, i64 seed, i64 stream, i64 offset, double deviation) {
  fill<2>(out, count, offset, [=](u64 block, float* values) {
    const Words words = philox(seed, stream, block);
    const u64 unit_bits = ((u64)(words.w[0] >> 5) << 26) + (words.w[1] >> 6) + 1;  // at most 2^53: exact
    const double unit = multiply((double)unit_bits, 1.0 / 9007199254740992.0);
    const double radius = __dsqrt_rn(multiply(-2, logarithm(unit)));
    const u64 inside_bits = ((u64)(words.w[2] & 0x3FFFFFFFu) << 22) + (words.w[3] >> 10);
    const double inside = add(multiply((double)inside_bits, 1.0 / 4503599627370496.0), -0.5);
    const double angle = multiply(inside, 3.141592653589793 / 2);
    const double c = cosine(angle), s = sine(angle);
    const u32 quadrant = words.w[2] >> 30;
    const double first = quadrant & 1 ? s : c, second = quadrant & 1 ? c : s;
    const double x = multiply(radius, quadrant == 1 || quadrant == 2 ? -first : first);
    const double y = multiply(radius, quadrant >= 2 ? -second : second);
    values[0] = __double2float_rn(multiply(x, deviation));
    values[1] = __double2float_rn(multiply(y, deviation));
  });
}

// floor(r * limit / 2^64) for 64 random bits r, by halves: limit is at most 2^31, so nothing overflows.
extern "C" __global__ void __launch_bounds__(256)
random_integers(i32* out, i64 count, i64 seed, i64 stream, i64 offset, i64 limit) {
  const u64 n = (u64)limit;
  fill<2>(out, count, offset, [=](u64 block, i32* values) {
    const Words words = philox(seed, stream, block);
#pragma unroll
    for (int k = 0; k < 2; k++)
      values[k] = (i32)((words.w[2 * k] * n + ((words.w[2 * k + 1] * n) >> 32)) >> 32);
  });
}
