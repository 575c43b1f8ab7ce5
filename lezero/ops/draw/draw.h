/* Drawing a token from a row of scores, and naming the likeliest ones. Formulas: reference.py. */
#ifndef LEZERO_DRAW_H
#define LEZERO_DRAW_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(hidden)

/* What a row asks for, in the order of its five numbers. */
typedef struct {
  double temperature; /* 0: the likeliest token */
  double top_k;       /* a whole number, 1 to V; V keeps all */
  double top_p;       /* above 1 keeps all */
  double min_p;       /* 0 keeps all */
  double drawn;       /* in [0, 1) */
} lezero_asked;

/* A thread's memory to work in, kept from row to row; begins as zeros, and `top` is to be freed. */
typedef struct {
  void *top;
  size_t size;
} lezero_desk;

/* The token of one row of V scores, and its largest score; where that is no finite number, token 0.
 * Returns 0, or -1 where there is no memory. */
int lezero_draw(const float *scores, int64_t V, const lezero_asked *asked, lezero_desk *desk,
                int64_t *token, float *highest);
/* Of one row: the log-probability of `token`, and the `most` likeliest tokens, best first, with
 * theirs; NaN where the largest score is no finite number. Returns as above. */
int lezero_name(const float *scores, int64_t V, int64_t token, int64_t most, lezero_desk *desk,
                float *own, int64_t *likeliest, float *logprobs);
/* `lezero_draw` on a desk of the calling thread's own: how other kernels call it, by its address. */
typedef int lezero_drawer(const float *scores, int64_t V, const lezero_asked *asked, int64_t *token,
                          float *highest);

/* What a row's scores lose for tokens that its text has. */
typedef struct {
  double repetition; /* for each token of the text: scores above 0 are divided by it, others multiplied */
  double presence;   /* taken from each token of the answer */
  double frequency;  /* taken for each time that it is in the answer */
} lezero_penalties;

/* One row, after its penalties. tokens: the text, of which those from `answer` on are the answer. marks:
 * zeros, as they are afterwards again. Returns 0, -1 without memory, -2 for a token that is none of V. */
int lezero_penalize(const float *scores, int64_t V, const int64_t *tokens, int64_t answer, int64_t count,
                    const lezero_penalties *penalties, lezero_desk *marks, float *to);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
