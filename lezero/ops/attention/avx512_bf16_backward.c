/* Attention backward with AVX512-BF16 (FlashAttention-2, Dao 2023, algorithm 2): the probabilities are
 * computed again from the scores and the stored log-sum-exp; sums are fp32, P and dS are rounded to
 * bf16 for the products.
 */
#include "avx512_bf16_tiles.h"

enum { ROWS = 256, KEYS = 128 }; /* a block of P; a multiple of 8, of 32 */

/* k, v: summed over E. k_rows, q_rows, grad_rows: paired along rows. q, grad: plain rows.
 * p, s_T: P and dS as [KEYS / 16][ROWS / 2][16], pairs of rows: A of P^T dO and dS^T Q.
 * s: dS as plain rows, A of dS K. */
typedef struct {
  pair *k, *v, *k_rows, *q, *grad, *q_rows, *grad_rows, *p, *s_T, *s;
  float *lse, *delta, *grad_q, *grad_k, *grad_v;
} backward_scratch;

static size_t lay_out(const lezero_attention *a, char *base, backward_scratch *w) {
  const int64_t M = round_up(a->M, 8), N = round_up(a->N, 32), E = a->E;
  char *at = base;
  w->k = (pair *)at, at += N * E * 2;
  w->v = (pair *)at, at += N * E * 2;
  w->k_rows = (pair *)at, at += N * E * 2;
  w->q = (pair *)at, at += M * E * 2;
  w->grad = (pair *)at, at += M * E * 2;
  w->q_rows = (pair *)at, at += M * E * 2;
  w->grad_rows = (pair *)at, at += M * E * 2;
  w->p = (pair *)at, at += ROWS * KEYS * 2;
  w->s_T = (pair *)at, at += ROWS * KEYS * 2;
  w->s = (pair *)at, at += ROWS * KEYS * 2;
  w->lse = (float *)at, at += round_up(M * 4, 64);
  w->delta = (float *)at, at += round_up(M * 4, 64);
  w->grad_q = (float *)at, at += M * E * 4;
  w->grad_k = (float *)at, at += N * E * 4;
  w->grad_v = (float *)at, at += N * E * 4;
  return (size_t)(at - base);
}

size_t lezero_attention_backward_scratch(const lezero_attention *a) {
  backward_scratch w;
  return lay_out(a, (char *)0 + 64, &w);
}

INLINE __m512 widened(const bf16 *x) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)x)), 16);
}

/* lse in base 2 and delta = rowsum(dO * O); padding rows get P = 0. */
static void row_terms(const lezero_attention *a, const backward_scratch *w, int64_t b, int64_t h) {
  const float *lse = a->lse + (b * a->H + h) * a->M;
  const bf16 *out = a->out.data + b * a->out.batch + h * a->out.head;
  const bf16 *grad = a->grad_out.data + b * a->grad_out.batch + h * a->grad_out.head;
  for (int64_t m = 0; m < round_up(a->M, 8); m++) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t e = 0; m < a->M && e < a->E; e += 16)
      sum = _mm512_fmadd_ps(widened(grad + m * a->grad_out.row + e), widened(out + m * a->out.row + e),
                            sum);
    w->delta[m] = _mm512_reduce_add_ps(sum);
    w->lse[m] = m < a->M ? lse[m] * 0x1.715476p+0f : 1e30f;
  }
}

/* P and dS of 4 queries from m and 32 keys from n; r and c are their places in the block. */
INLINE void probabilities(const lezero_attention *a, const backward_scratch *w, int64_t m, int64_t r,
                          int64_t n, int64_t c) {
  const int64_t half = a->E / 2;
  const pair *q = w->q + m * half, *grad = w->grad + m * half;
  const pair *k = w->k + n * half, *v = w->v + n * half;
  __m512 x[4][2], y[4][2];
  UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 2; j++)
    x[i][j] = y[i][j] = _mm512_setzero_ps();
  for (int64_t e = 0; e < half; e++) {
    UNROLL for (int j = 0; j < 2; j++) {
      const __m512 kj = _mm512_load_ps(k + e * 32 + j * 16), vj = _mm512_load_ps(v + e * 32 + j * 16);
      UNROLL for (int i = 0; i < 4; i++) {
        x[i][j] = dot(x[i][j], pair_broadcast(q + i * half + e), kj);
        y[i][j] = dot(y[i][j], pair_broadcast(grad + i * half + e), vj);
      }
    }
  }
  const __m512 base2 = _mm512_set1_ps(a->scale * 0x1.715476p+0f);
  const int whole = n + 32 <= a->N && (!a->causal || n + 31 <= m);
  UNROLL for (int i = 0; i < 4; i++) {
    const __m512 lse = _mm512_set1_ps(w->lse[m + i]), delta = _mm512_set1_ps(w->delta[m + i]);
    UNROLL for (int j = 0; j < 2; j++) {
      x[i][j] = exp2_ps(_mm512_fmsub_ps(x[i][j], base2, lse));
      y[i][j] = _mm512_mul_ps(x[i][j], _mm512_sub_ps(y[i][j], delta));
    }
    if (!whole) {
      const int64_t seen = least(a->N, a->causal ? m + i + 1 : a->N) - n;
      UNROLL for (int j = 0; j < 2; j++) {
        const __mmask16 mask = first_lanes(seen - 16 * j);
        x[i][j] = _mm512_maskz_mov_ps(mask, x[i][j]);
        y[i][j] = _mm512_maskz_mov_ps(mask, y[i][j]);
      }
    }
  }
  const __m512i mix = interleaving();
  UNROLL for (int i = 0; i < 4; i += 2) UNROLL for (int j = 0; j < 2; j++) {
    const int64_t at = ((c / 16 + j) * (ROWS / 2) + (r + i) / 2) * 16;
    const __m512i dS = to_bf16(y[i][j], y[i + 1][j]);
    _mm512_store_si512(w->p + at, _mm512_permutexvar_epi16(mix, to_bf16(x[i][j], x[i + 1][j])));
    _mm512_store_si512(w->s_T + at, _mm512_permutexvar_epi16(mix, dS));
    pair *row = w->s + ((r + i) * KEYS + c) / 2 + j * 8;
    _mm256_store_si256((__m256i *)row, _mm512_castsi512_si256(dS));
    _mm256_store_si256((__m256i *)(row + KEYS / 2), _mm512_extracti64x4_epi64(dS, 1));
  }
}

/* What queries m0 .. m0 + rows - 1 and keys n0 .. n0 + cols - 1 add to the three gradients. */
static void block(const lezero_attention *a, const backward_scratch *w, int64_t m0, int64_t rows,
                  int64_t n0, int64_t cols) {
  const int64_t E = a->E, M = round_up(a->M, 8), N = round_up(a->N, 32);
  for (int64_t c = 0; c < cols; c += 32)
    for (int64_t r = 0; r < rows; r += 4)
      if (!a->causal || n0 + c <= m0 + r + 3) probabilities(a, w, m0 + r, r, n0 + c, c);
  for (int64_t e = 0; e < E; e += 32)
    for (int64_t c = 0; c < cols; c += 8) {
      const int64_t r = a->causal && n0 + c > m0 ? n0 + c - m0 : 0;
      if (r >= rows) break;
      const int64_t from = (c / 16 * ROWS + r) / 2 * 16 + c % 16, B = e * M / 2 + (m0 + r) / 2 * 32;
      const int64_t C = (n0 + c) * E + e, pairs = (rows - r) / 2;
      tile(w->p + from, 1, 16, w->grad_rows + B, pairs, w->grad_v + C, E, 0, 0);
      tile(w->s_T + from, 1, 16, w->q_rows + B, pairs, w->grad_k + C, E, 0, 0);
    }
  for (int64_t e = 0; e < E; e += 32)
    for (int64_t r = 0; r < rows; r += 8) {
      const int64_t seen = a->causal ? least(cols, m0 + r + 8 - n0) : cols;
      if (seen > 0)
        tile(w->s + r * KEYS / 2, KEYS / 2, 1, w->k_rows + e * N / 2 + n0 / 2 * 32, (seen + 1) / 2,
             w->grad_q + (m0 + r) * E + e, E, 0, 0);
    }
}

static void head(const lezero_attention *a, const backward_scratch *w, int64_t b, int64_t h) {
  const int64_t E = a->E, M = round_up(a->M, 8);
  const bf16 *q = a->q.data + b * a->q.batch + h * a->q.head;
  const bf16 *grad = a->grad_out.data + b * a->grad_out.batch + h * a->grad_out.head;
  pack_rows(q, a->q.row, a->M, M, E, w->q);
  pack_rows(grad, a->grad_out.row, a->M, M, E, w->grad);
  pack_summed_over_rows(q, a->q.row, a->M, M, E, w->q_rows);
  pack_summed_over_rows(grad, a->grad_out.row, a->M, M, E, w->grad_rows);
  row_terms(a, w, b, h);
  memset(w->grad_q, 0, M * E * 4);
  for (int64_t n0 = 0; n0 < a->N; n0 += KEYS)
    for (int64_t m0 = a->causal ? n0 : 0; m0 < M; m0 += ROWS)
      block(a, w, m0, least(ROWS, M - m0), n0, round_up(least(KEYS, a->N - n0), 8));
  unpack_rows(w->grad_q, a->M, E, a->scale,
              a->grad_q.data + b * a->grad_q.batch + h * a->grad_q.head, a->grad_q.row);
}

void lezero_attention_backward(const lezero_attention *a, int64_t begin, int64_t end, void *scratch) {
  backward_scratch w;
  lay_out(a, scratch, &w);
  const int64_t N = round_up(a->N, 32), E = a->E, group = a->H / a->G;
  for (int64_t task = begin; task < end; task++) {
    const int64_t b = task / a->G, g = task % a->G;
    const bf16 *k = a->k.data + b * a->k.batch + g * a->k.head;
    pack_summed_over_E(k, a->k.row, a->N, E, w.k);
    pack_summed_over_E(a->v.data + b * a->v.batch + g * a->v.head, a->v.row, a->N, E, w.v);
    pack_summed_over_rows(k, a->k.row, a->N, N, E, w.k_rows);
    memset(w.grad_k, 0, N * E * 4);
    memset(w.grad_v, 0, N * E * 4);
    for (int64_t h = g * group; h < (g + 1) * group; h++) head(a, &w, b, h);
    unpack_rows(w.grad_k, a->N, E, a->scale,
                a->grad_k.data + b * a->grad_k.batch + g * a->grad_k.head, a->grad_k.row);
    unpack_rows(w.grad_v, a->N, E, 1.0f, a->grad_v.data + b * a->grad_v.batch + g * a->grad_v.head,
                a->grad_v.row);
  }
}
