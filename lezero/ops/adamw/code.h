/* The 8-bit code of the moments, see eight_bit.py: numbers to magnitudes and back. Both ways are exact
 * in fp32 or rounded alike by every instruction set, whatever way they find an element's decade. */
#ifndef LEZERO_ADAMW_CODE_H
#define LEZERO_ADAMW_CODE_H

#include "lanes.h"
#include "problem.h"

#if defined(__AVX512F__)

/* An octave (a power of two) meets at most one threshold, so the decade of x is that of its octave's
 * beginning, or one more. Octaves 2^-31 .. 2^0; decade 0 is zero, decade d + 1 the code's decade d. */
typedef struct {
  __m512 threshold[2], up, up_from, down, down_from;
  __m512i before[2];
} code;

static code of_code(const lezero_adamw_code *c) {
  float threshold[32], up[16] = {0}, up_from[16] = {0}, down[16] = {0}, down_from[16] = {0};
  int32_t before[32];
  for (int octave = 0; octave < 32; octave++) {
    const float begin = ldexpf(1.0f, octave - 31);
    threshold[octave] = INFINITY;
    before[octave] = 0;
    for (int d = 0; d < 8; d++) {
      if (c->threshold[d] <= begin) before[octave]++;
      else if (c->threshold[d] < 2 * begin) threshold[octave] = c->threshold[d];
    }
  }
  for (int d = 0; d < 8; d++) {
    up[d + 1] = c->up[d], up_from[d + 1] = c->up_from[d];
    down[15 - d] = c->down[d], down_from[15 - d] = c->down_from[d]; /* by leading zeros mod 16 */
  }
  const code made = {{_mm512_loadu_ps(threshold), _mm512_loadu_ps(threshold + 16)},
                     _mm512_loadu_ps(up), _mm512_loadu_ps(up_from), _mm512_loadu_ps(down),
                     _mm512_loadu_ps(down_from),
                     {_mm512_loadu_si512(before), _mm512_loadu_si512(before + 16)}};
  return made;
}

INLINE vf decoded(const code *c, vi n) {
  const __m512i zeros = _mm512_lzcnt_epi32(n);
  return fused(to_float(n), _mm512_permutexvar_ps(zeros, c->down),
               _mm512_permutexvar_ps(zeros, c->down_from));
}

INLINE vi encoded(const code *c, vf x) {
  const __m512i octave = right(bits(_mm512_max_ps(x, allf(0x1p-31f))), 23);
  const vf threshold = _mm512_permutex2var_ps(c->threshold[0], octave, c->threshold[1]);
  const vi before = _mm512_permutex2var_epi32(c->before[0], octave, c->before[1]);
  const vi decade = plus_one_if_reached(before, x, threshold);
  return nearest(add(mul(x, _mm512_permutexvar_ps(decade, c->up)),
                     _mm512_permutexvar_ps(decade, c->up_from)));
}

#else

typedef struct {
  table up, up_from, down, down_from;
  float threshold[8];
} code;

static code of_code(const lezero_adamw_code *c) {
  code made = {of_eight(c->up), of_eight(c->up_from), of_eight(c->down), of_eight(c->down_from), {0}};
  memcpy(made.threshold, c->threshold, sizeof made.threshold);
  return made;
}

INLINE vf decoded(const code *c, vi n) {
  const vf x = to_float(n);
  const vi decade = addi(right(bits(x), 23), alli(-127));
  const vf value = add(mul(x, look_up(c->down, decade)), look_up(c->down_from, decade));
  return number(if_greater(n, alli(0), bits(value), alli(0)));
}

INLINE vi encoded(const code *c, vf x) {
  vi decade = alli(0);
#pragma GCC unroll 8
  for (int i = 1; i < 8; i++) decade = plus_one_if_reached(decade, x, allf(c->threshold[i]));
  const vi n = nearest(add(mul(x, look_up(c->up, decade)), look_up(c->up_from, decade)));
  const vi some = plus_one_if_reached(alli(0), x, allf(c->threshold[0]));
  return if_greater(some, alli(0), n, alli(0));
}

#endif
#endif
