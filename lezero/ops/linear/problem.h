/* What a linear kernel is asked, in plain C. Every kernel file defines the functions below, through
 * vectors.h or amx.h; registration.cpp is linked with one of them, that of one instruction set.
 *
 * Letters: M tokens, N outputs, K inputs. Layout of packed weights: layout.py; formulas: reference.py.
 */
#ifndef LEZERO_LINEAR_PROBLEM_H
#define LEZERO_LINEAR_PROBLEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(hidden)

enum { LEZERO_FP32, LEZERO_BF16, LEZERO_FP16 };
enum { LEZERO_TOKENS = 256 }; /* tokens that are prepared and multiplied at a time */

/* Parts of a weight that is multiplied later, to be fetched meanwhile: the next line of its codes and how
 * many bytes are left, and where its scales and zero points begin. */
typedef struct {
  const char *at, *scale, *zero;
  int64_t left;
} lezero_ahead;

typedef struct {
  int64_t M, N, K;
  const void *x; /* (M, K), contiguous */
  void *out;     /* (M, N), of x's type */
  int x_type;
  int bits; /* of the weight: 16 (bf16), 8, 4 */
  int x_bits; /* 16 or 8; 16-bit weights: not read */
  int64_t x_block; /* 8 bits: inputs that share a scale, 0: all of a token; it divides `group` */
  int64_t group; /* inputs that share a scale, 0: all */
  const void *weight;
  const void *scale, *zero; /* (panels, groups, 16); zero may be null */
  int scale_type;
  const float *bias;    /* (N,) or null */
  const float *x_scale; /* one for all tokens, or null */
  int rounded; /* 8 or 4 bits: multiplied in bf16, see [Note: rounded weights]; with AMX only */
  int panels; /* that a lone tile takes at a time, 1 or 2; 0: as the kernel likes it, see tiles.h */
  int gated;            /* see lezero_linear_gates */
  lezero_ahead *ahead;  /* what comes after this product, or null; it moves on as it is fetched */
} lezero_linear;

/* Whether the problem would be solved faster if it were `rounded`; M and x_type as they are. */
int lezero_linear_rounds(const lezero_linear *l);
/* Bytes of scratch, aligned to 64, for tokens first … first + count - 1. */
size_t lezero_linear_scratch(const lezero_linear *l, int64_t count);
/* How many tiles of tokens there are, and pairs of panels. */
int64_t lezero_linear_tiles(const lezero_linear *l, int64_t count);
int64_t lezero_linear_pairs(const lezero_linear *l);
/* Writes tiles begin to end of those tokens into scratch, as the multiplication reads them. */
void lezero_linear_prepare(const lezero_linear *l, int64_t first, int64_t count, void *scratch,
                           int64_t begin, int64_t end);
/* Whether `l`, of N = 2 F outputs, can be `gated`: silu of the first F times the others comes out, and
 * `out` is the scratch of `next`, a product with these F inputs, prepared. */
int lezero_linear_gates(const lezero_linear *l, const lezero_linear *next);
/* What there is to fetch of pairs begin to end. */
lezero_ahead lezero_linear_part(const lezero_linear *l, int64_t begin, int64_t end);
/* Bytes of scratch that each thread needs of its own for the multiplication; 0: none. */
size_t lezero_linear_own_scratch(const lezero_linear *l, int64_t count);
/* Multiplies all of those tokens with pairs of panels begin to end, and writes `out`. */
void lezero_linear_multiply(const lezero_linear *l, int64_t first, int64_t count,
                            const void *scratch, void *own, int64_t begin, int64_t end);

/* Writes rows begin to end of (ids, K), of x's type, to `out`: those of the weight, dequantized. */
void lezero_embedding(const lezero_linear *l, const int64_t *ids, int64_t begin, int64_t end);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
