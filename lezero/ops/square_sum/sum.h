/* Sums of squares in fp64, in a fixed order (reference.py). */
#ifndef LEZERO_SQUARE_SUM_H
#define LEZERO_SQUARE_SUM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { LEZERO_SQUARE_SUM_BLOCK = 1 << 14 };

/* Of n elements, at most a block. */
double lezero_square_sum(const void *x, int is_bf16, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
