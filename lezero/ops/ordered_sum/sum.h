/* The sum of vectors in a fixed order, each addition in fp32, rounded once (reference.py). */
#ifndef LEZERO_ORDERED_SUM_H
#define LEZERO_ORDERED_SUM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  void *data;
  int is_bf16; /* else fp32 */
} lezero_vector;

/* Elements begin to end of out = ((parts[0] + parts[1]) + parts[2]) + ...; out may be a part. */
void lezero_ordered_sum(const lezero_vector *parts, int64_t count, lezero_vector out, int64_t begin,
                        int64_t end);

#ifdef __cplusplus
}
#endif
#endif
