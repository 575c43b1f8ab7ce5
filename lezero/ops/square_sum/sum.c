/* Plain loops that the compiler vectorises; built once for each instruction set. Bits do not depend on
 * it: the square of a number in fp32 is exact in fp64, and additions are made in one order.
 */
#include "sum.h"

#include <string.h>

enum { LANES = 64 };

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline void add_floats(double *restrict sum, const float *restrict x, int64_t n) {
  for (int64_t i = 0; i < n; i++) sum[i] += (double)x[i] * x[i];
}

static inline void add_halves(double *restrict sum, const uint16_t *restrict x, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const double value = bits_to_float((uint32_t)x[i] << 16);
    sum[i] += value * value;
  }
}

double lezero_square_sum(const void *x, int is_bf16, int64_t n) {
  double sum[LANES] = {0};
  const int64_t rows = n / LANES, rest = n % LANES;
  if (is_bf16) {
    const uint16_t *from = (const uint16_t *)x;
    for (int64_t i = 0; i < rows; i++) add_halves(sum, from + i * LANES, LANES);
    add_halves(sum, from + rows * LANES, rest);
  } else {
    const float *from = (const float *)x;
    for (int64_t i = 0; i < rows; i++) add_floats(sum, from + i * LANES, LANES);
    add_floats(sum, from + rows * LANES, rest);
  }
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) sum[i] += sum[i + half];
  return sum[0];
}
