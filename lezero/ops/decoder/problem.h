/* What the layers of a decoder are asked, in plain C. Each kernel file defines the two functions
 * below through layers.h; registration.cpp is linked with one of them.
 *
 * Letters: T tokens (rows of a step), D width of the residual stream, H query heads, K key-value
 * heads, G = H / K, E width of a head, F width inside SwiGLU. Formulas: reference.py.
 */
#ifndef LEZERO_DECODER_PROBLEM_H
#define LEZERO_DECODER_PROBLEM_H

#include <stddef.h>
#include <stdint.h>

#include "../linear/problem.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(hidden)

enum { LEZERO_BLOCK = 16 }; /* tokens of a cache block */

/* Addresses and kinds of a packed weight, as `stack.py` writes them: all 64 bits wide. */
typedef struct {
  const void *weight, *scale, *zero;
  const float *bias;
  int64_t bits, group, x_bits, x_block, scale_type;
} lezero_weight;

typedef struct {
  lezero_weight qkv, out, gate_up, down;
  const float *norm1, *norm2, *q_norm, *k_norm; /* the last two may be null */
} lezero_layer;

/* Tokens of one sequence that follow each other: rows first … first + count - 1. */
typedef struct {
  int32_t first, count, position; /* position of the first one in its sequence */
} lezero_chunk;

typedef struct {
  int64_t T, D, H, K, E, F, layers, chunks;
  int64_t blocks;    /* of the cache */
  int64_t width;     /* of a row of `table` */
  int64_t window;    /* tokens that a token sees, itself included; 0: all before it */
  int64_t rounded;   /* layers of 8 and 4 bits multiply as bf16, see lezero_linear; the head does not */
  int64_t panels;    /* of lezero_linear */
  float eps;
  float *x;          /* (T, D), in and out */
  const lezero_layer *layer;
  const float *cos, *sin; /* (positions, E / 2) */
  const lezero_chunk *chunk;
  const int32_t *table; /* (chunks, width): the cache blocks of each sequence, in order */
  int64_t cache_bits;  /* of a key or value: 16 (bf16) or 8 */
  char *keys, *values; /* (layers, blocks, K, as cache.h says) */
  const int32_t *row; /* (rows,): of which rows logits are wanted; V 0: x is what comes out */
  int64_t rows, V;
  const float *norm;
  const lezero_weight *head; /* (V, D) */
  float *logits;      /* (rows, V) */
  int64_t *best;      /* (rows,): the largest logit's place, best.h; or null */
  void *scratch;    /* aligned to 64 */
  int64_t crew;     /* workers, which all run at once */
} lezero_step;

/* Bytes of scratch. */
size_t lezero_decoder_scratch(const lezero_step *s);
/* To be called once, before the workers run. */
void lezero_decoder_begin(const lezero_step *s);
/* The part of workers begin … end - 1, to which one thread answers; returns when all is done. */
void lezero_decoder_run(const lezero_step *s, int64_t begin, int64_t end);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
