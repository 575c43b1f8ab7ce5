/* What fitting groups of weights to their grid is asked. Formulas: reference.py. */
#ifndef LEZERO_GRID_FIT_H
#define LEZERO_GRID_FIT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(hidden)

enum { LEZERO_FP32, LEZERO_BF16, LEZERO_FP16 };

typedef struct {
  const float *weight; /* (groups, elements) */
  int64_t elements;
  float low, high; /* codes */
  int kept;        /* the type that scales and zero points are rounded to */
} lezero_groups;

/* Groups begin to end: `scale` (groups,), the largest to try, becomes the best of `steps`. `zero`: of
 * each group, or null for 0. */
void lezero_least_error(const lezero_groups *g, float *scale, const float *zero, int64_t steps,
                        int64_t begin, int64_t end);
/* Groups begin to end: `zero` (groups,) becomes the best found in `rounds`, and `codes` those of it. */
void lezero_half_quadratic(const lezero_groups *g, const float *scale, float *zero, uint8_t *codes,
                           int64_t rounds, int64_t begin, int64_t end);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
