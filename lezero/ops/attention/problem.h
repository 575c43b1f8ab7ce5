/* What an attention kernel is asked, in plain C. Every kernel file defines the four functions below;
 * registration.cpp is linked with one of them, the one for this machine's instruction set.
 *
 * Letters: B batch, H query heads, G key/value heads (H % G == 0), M query rows, N key rows, E head
 * dim (a multiple of 32). Strides count elements; the last dim of every bf16 tensor is contiguous.
 */
#ifndef LEZERO_ATTENTION_PROBLEM_H
#define LEZERO_ATTENTION_PROBLEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef uint16_t bf16;

typedef struct {
  bf16 *data;
  int64_t batch, head, row; /* strides */
} lezero_heads;

typedef struct {
  int64_t B, H, G, M, N, E;
  int causal; /* key n is seen by query m if n <= m */
  float scale;
  lezero_heads q, k, v, out; /* out is written by the forward pass and read by the backward pass */
  float *lse;                /* (B, H, M): log of the sum of exp(scale * scores), natural */
  lezero_heads grad_out, grad_q, grad_k, grad_v;
} lezero_attention;

/* Bytes of scratch, aligned to 64, that one thread needs. */
size_t lezero_attention_forward_scratch(const lezero_attention *a);
size_t lezero_attention_backward_scratch(const lezero_attention *a);

/* Work through tasks begin to end of the B * G tasks: one is a key/value head with its queries. */
void lezero_attention_forward(const lezero_attention *a, int64_t begin, int64_t end, void *scratch);
void lezero_attention_backward(const lezero_attention *a, int64_t begin, int64_t end,
                               void *scratch);

#ifdef __cplusplus
}
#endif
#endif
