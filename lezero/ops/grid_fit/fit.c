/* Vectors as the compiler makes them; one source, built once for each instruction set. A group goes
 * through all of its candidates while it lies in the first cache. Sums are taken in SUMS lanes and
 * joined in one order, so that bits do not depend on how wide a vector is. */
#include "fit.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined __AVX512F__
enum { LANES = 16 };
#elif defined __AVX__
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { SUMS = 16, PARTS = SUMS / LANES };
#define EACH_PART _Pragma("GCC unroll 4") for (int h = 0; h < PARTS; h++)
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

INLINE floats all(float x) { return x + (floats){0}; }
INLINE floats either(ints which, floats x, floats y) {
  return (floats)((which & (ints)x) | (~which & (ints)y));
}
/* To whole numbers, halves to even, where |x| < 2^22; what is larger stays about as large. */
INLINE floats rounded(floats x) { return (x + 12582912.0f) - 12582912.0f; }
INLINE floats magnitude(floats x) { return (floats)((ints)x & 0x7fffffff); }
INLINE floats larger(floats x, floats y) { return either(x > y, x, y); }
typedef struct {
  floats part[PARTS];
} lanes;

typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

INLINE float total(lanes x) {
  eight low, high;
  memcpy(&low, &x, sizeof low), memcpy(&high, (const char *)&x + sizeof low, sizeof high);
  low += high;
  four first, second;
  memcpy(&first, &low, sizeof first), memcpy(&second, (const char *)&low + sizeof first, sizeof second);
  first += second;
  return (first[0] + first[2]) + (first[1] + first[3]);
}
INLINE float largest(lanes x) {
  float all[SUMS], most = 0;
  memcpy(all, &x, sizeof all);
  for (int i = 0; i < SUMS; i++) most = all[i] > most ? all[i] : most;
  return most;
}
/* Lanes from `count` on become 0. */
INLINE floats first_lanes(floats x, int64_t count) {
  for (int64_t i = count < 0 ? 0 : count; i < LANES; i++) x[i] = 0;
  return x;
}

INLINE floats codes_of(const lezero_groups *g, floats scaled, float zero) {
  floats code = rounded(scaled + zero);
  code = either(code < g->low, all(g->low), code);
  return either(code > g->high, all(g->high), code);
}

INLINE floats load(const float *from) {
  floats x;
  memcpy(&x, from, sizeof x);
  return x;
}

INLINE floats read(const float *from, int64_t count) {
  if (count >= LANES) return load(from);
  floats x = {0};
  for (int64_t i = 0; i < count; i++) x[i] = from[i];
  return x;
}

/* To fp16 and back, by bits: gcc before 12 and clang before 15 have no type for it on x86. */
static float as_half(float x) {
  uint32_t bits, size;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits & 0x80000000u;
  size = bits & 0x7fffffff;
  if (size < 0x38800000) { /* below the normal ones: adding 1/2 rounds to multiples of 2^-24 */
    float small;
    memcpy(&small, &size, 4), small = (small + 0.5f) - 0.5f, memcpy(&size, &small, 4);
  } else if (size <= 0x7f800000) {
    size = (size + 0xfff + (size >> 13 & 1)) & ~0x1fffu;
    if (size >= 0x47800000) size = 0x7f800000;
  }
  bits = sign | size;
  memcpy(&x, &bits, 4);
  return x;
}

static float kept_as(float x, int type) {
  if (type == LEZERO_FP16) return as_half(x);
  if (type == LEZERO_FP32 || x != x) return x;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  memcpy(&x, &bits, 4);
  return x;
}

static float inverse_of(float scale) { return scale > 0 ? 1 / scale : 0; }

INLINE floats error_of(const lezero_groups *g, floats x, float inverse, float scale, float zero) {
  return (codes_of(g, x * inverse, zero) - zero) * scale - x;
}

INLINE float squared_error(const lezero_groups *g, const float *w, float scale, float zero) {
  const float inverse = inverse_of(scale);
  const int64_t whole = g->elements / SUMS * SUMS;
  lanes sum = {0};
  for (int64_t i = 0; i < whole; i += SUMS) EACH_PART {
    const floats wrong = error_of(g, load(w + i + h * LANES), inverse, scale, zero);
    sum.part[h] += wrong * wrong;
  }
  if (whole < g->elements) EACH_PART {
    const int64_t at = whole + h * LANES, left = g->elements - at;
    floats wrong = error_of(g, read(w + at, left), inverse, scale, zero);
    if (left < LANES) wrong = first_lanes(wrong, left);
    sum.part[h] += wrong * wrong;
  }
  return total(sum);
}

void lezero_least_error(const lezero_groups *g, float *scale, const float *zero, int64_t steps,
                        int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const float *w = g->weight + i * g->elements, full = scale[i], z = zero ? zero[i] : 0;
    float best = squared_error(g, w, full, z);
    for (int64_t step = 1; step < steps; step++) {
      const float share = (float)(1 - 0.5 * (double)step / (double)steps);
      const float tried = kept_as(full * share, g->kept);
      const float error = squared_error(g, w, tried, z);
      if (error < best) best = error, scale[i] = tried;
    }
  }
}

static const float NORM = 0.7f, BETA = 10, GROWTH = 1.01f;

typedef struct {
  float error, largest, shift; /* mean, most, and the mean of code - w / s */
} found;

typedef struct {
  lanes size, most, shift;
} sums;

/* One more vector in part h, of which the lanes from `left` on do not count. */
INLINE void add_zero(const lezero_groups *g, sums *to, int h, floats x, float inverse, float scale,
                     float zero, int64_t left) {
  const floats scaled = x * inverse, code = codes_of(g, scaled, zero);
  floats size = magnitude(x - (code - zero) * scale), moved = code - scaled;
  if (left < LANES) size = first_lanes(size, left), moved = first_lanes(moved, left);
  to->size.part[h] += size, to->most.part[h] = larger(size, to->most.part[h]);
  to->shift.part[h] += moved;
}

INLINE found with_zero(const lezero_groups *g, const float *w, float scale, float zero) {
  const float inverse = inverse_of(scale), n = (float)g->elements;
  const int64_t whole = g->elements / SUMS * SUMS;
  sums seen = {0};
  for (int64_t i = 0; i < whole; i += SUMS) EACH_PART {
    add_zero(g, &seen, h, load(w + i + h * LANES), inverse, scale, zero, LANES);
  }
  if (whole < g->elements) EACH_PART {
    const int64_t at = whole + h * LANES, left = g->elements - at;
    add_zero(g, &seen, h, read(w + at, left), inverse, scale, zero, left);
  }
  return (found){total(seen.size) / n, largest(seen.most), total(seen.shift) / n};
}

/* The mean of code - (w - outlier) / s, where errors beyond a size that β gives are outliers. */
static float shift_without_outliers(const lezero_groups *g, const float *w, float scale, float zero,
                                    float beta) {
  const float inverse = inverse_of(scale);
  float sum = 0;
  for (int64_t i = 0; i < g->elements; i++) {
    float code = rintf(w[i] * inverse + zero);
    code = code < g->low ? g->low : code > g->high ? g->high : code;
    const float wrong = w[i] - (code - zero) * scale, size = fabsf(wrong);
    const float left = size - powf(size > 1e-12f ? size : 1e-12f, NORM - 1) / beta;
    const float outlier = left > 0 ? copysignf(left, wrong) : 0;
    sum += code - (w[i] - outlier) * inverse;
  }
  return sum / (float)g->elements;
}

void lezero_half_quadratic(const lezero_groups *g, const float *scale, float *zero, uint8_t *codes,
                           int64_t rounds, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const float *w = g->weight + i * g->elements, s = scale[i];
    float best = INFINITY, tried = zero[i], beta = BETA;
    for (int64_t round = 0; round <= rounds; round++, beta *= GROWTH) {
      const found f = with_zero(g, w, s, tried);
      if (!(f.error < best)) break;
      best = f.error, zero[i] = tried;
      float next = f.shift;
      if (f.largest >= 0.99f * powf(beta, 1 / (NORM - 2)))
        next = shift_without_outliers(g, w, s, tried, beta);
      next = next < g->low ? g->low : next > g->high ? g->high : next;
      tried = kept_as(next, g->kept);
    }
    const float inverse = inverse_of(s);
    uint8_t *to = codes + i * g->elements;
    for (int64_t k = 0; k < g->elements; k += LANES) {
      const int64_t left = g->elements - k < LANES ? g->elements - k : LANES;
      const floats code = codes_of(g, read(w + k, left) * inverse, zero[i]);
      for (int64_t j = 0; j < left; j++) to[k + j] = code[j] == code[j] ? (uint8_t)code[j] : 0;
    }
  }
}
