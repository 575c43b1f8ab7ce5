/* Plain loops that the compiler vectorises; built once for each instruction set. Bits do not depend on
 * it: only fp32 additions and one rounding to nearest even, which every processor does alike.
 */
#include "sum.h"

#include <string.h>

enum { BLOCK = 2048 }; /* fp32 sums under way: 8 KiB, which stay in the first cache */

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)(value != value ? 0x7fc0 : rounded);
}

static void load(lezero_vector x, int64_t at, int64_t n, float *restrict sum) {
  if (x.is_bf16) {
    const uint16_t *from = (const uint16_t *)x.data + at;
    for (int64_t i = 0; i < n; i++) sum[i] = bits_to_float((uint32_t)from[i] << 16);
  } else {
    memcpy(sum, (const float *)x.data + at, n * sizeof *sum);
  }
}

static void add(lezero_vector x, int64_t at, int64_t n, float *restrict sum) {
  if (x.is_bf16) {
    const uint16_t *from = (const uint16_t *)x.data + at;
    for (int64_t i = 0; i < n; i++) sum[i] += bits_to_float((uint32_t)from[i] << 16);
  } else {
    const float *from = (const float *)x.data + at;
    for (int64_t i = 0; i < n; i++) sum[i] += from[i];
  }
}

static void store(lezero_vector out, int64_t at, int64_t n, const float *restrict sum) {
  if (out.is_bf16) {
    uint16_t *to = (uint16_t *)out.data + at;
    for (int64_t i = 0; i < n; i++) to[i] = to_bf16(sum[i]);
  } else {
    memcpy((float *)out.data + at, sum, n * sizeof *sum);
  }
}

void lezero_ordered_sum(const lezero_vector *parts, int64_t count, lezero_vector out, int64_t begin,
                        int64_t end) {
  float sum[BLOCK];
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int64_t n = end - at < BLOCK ? end - at : BLOCK;
    load(parts[0], at, n, sum);
    for (int64_t part = 1; part < count; part++) add(parts[part], at, n, sum);
    store(out, at, n, sum);
  }
}
