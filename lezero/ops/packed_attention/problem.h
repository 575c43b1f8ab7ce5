/* What the attention kernel is asked, in plain C; registration.cpp is linked with one of them. */
#ifndef LEZERO_PACKED_ATTENTION_H
#define LEZERO_PACKED_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

/* The types of numbers, which the vectors of linear layers know. */
#include "../linear/problem.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(hidden)

typedef struct {
  int64_t texts, heads, E; /* E: width of a head, a multiple of 16 */
  int64_t longest;         /* tokens of a text */
  const int64_t *begin;    /* (texts + 1) rows */
  const void *q, *k, *v;   /* (N, heads · E) */
  int64_t q_row, k_row, v_row; /* numbers from a row to the next */
  void *out;               /* (N, heads · E), contiguous */
  int type;
} lezero_texts;

/* Bytes of scratch that each thread needs, aligned to 64. */
size_t lezero_texts_scratch(const lezero_texts *t);
/* What all heads of all texts cost, in units that are dealt to threads. */
int64_t lezero_texts_cost(const lezero_texts *t);
/* The heads of texts that begin within begin to end of that cost. */
void lezero_texts_attend(const lezero_texts *t, void *scratch, int64_t begin, int64_t end);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
