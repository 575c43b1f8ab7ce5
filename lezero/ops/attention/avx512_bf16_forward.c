/* Attention forward with AVX512-BF16: softmax over blocks of keys (FlashAttention-2, Dao 2023,
 * algorithm 1). Scores, softmax and sums are fp32; probabilities are rounded to bf16 for P V.
 */
#include <math.h>

#include "avx512_bf16_tiles.h"

enum { ROWS = 32, KEYS = 128 }; /* a block of scores; ROWS divides KEYS */

typedef struct {
  pair *k, *v, *q, *p;
  float *s, *out, *top, *sum, *shrink;
} forward_scratch;

static size_t lay_out(const lezero_attention *a, char *base, forward_scratch *w) {
  const int64_t packed = round_up(a->N, 32) * a->E * 2;
  char *at = base;
  w->k = (pair *)at, at += packed;
  w->v = (pair *)at, at += packed;
  w->q = (pair *)at, at += ROWS * a->E * 2;
  w->p = (pair *)at, at += ROWS * KEYS * 2;
  w->s = (float *)at, at += ROWS * KEYS * 4;
  w->out = (float *)at, at += ROWS * a->E * 4;
  w->top = (float *)at, at += ROWS * 4;
  w->sum = (float *)at, at += ROWS * 4;
  w->shrink = (float *)at, at += ROWS * 4;
  return (size_t)(at - base);
}

size_t lezero_attention_forward_scratch(const lezero_attention *a) {
  forward_scratch w;
  return lay_out(a, (char *)0 + 64, &w);
}

/* One row of scores to probabilities relative to the highest score so far: `seen` keys count, and P is
 * written up to `width` keys. `base2` turns a score into an exponent of 2. */
INLINE void soften(const float *s, bf16 *p, int64_t seen, int64_t width, float base2, int first,
                   float *top, float *sum, float *shrink) {
  const __m512 lowest = _mm512_set1_ps(-INFINITY);
  __m512 highest = lowest;
  int64_t n = 0;
  for (; n + 16 <= seen; n += 16) highest = _mm512_max_ps(highest, _mm512_load_ps(s + n));
  if (n < seen)
    highest = _mm512_max_ps(highest, _mm512_mask_load_ps(lowest, first_lanes(seen - n), s + n));
  const float here = _mm512_reduce_max_ps(highest) * base2;
  const float now = first || here > *top ? here : *top;
  const __m512 scale = _mm512_set1_ps(base2), shift = _mm512_set1_ps(now);
  __m512 total = _mm512_setzero_ps();
  for (n = 0; n < width; n += 32) {
    const __m512 x0 = _mm512_fmsub_ps(_mm512_load_ps(s + n), scale, shift);
    const __m512 x1 = _mm512_fmsub_ps(_mm512_load_ps(s + n + 16), scale, shift);
    const __m512 p0 = _mm512_maskz_mov_ps(first_lanes(seen - n), exp2_ps(x0));
    const __m512 p1 = _mm512_maskz_mov_ps(first_lanes(seen - n - 16), exp2_ps(x1));
    total = _mm512_add_ps(total, _mm512_add_ps(p0, p1));
    _mm512_store_si512(p + n, to_bf16(p0, p1));
  }
  const float added = _mm512_reduce_add_ps(total);
  *shrink = first ? 0.0f : _mm512_cvtss_f32(exp2_ps(_mm512_set1_ps(*top - now)));
  *sum = first ? added : *sum * *shrink + added;
  *top = now;
}

/* Queries m0 .. m0 + rows - 1 of one head against keys n0 .. n0 + cols - 1. */
static void block(const lezero_attention *a, const forward_scratch *w, int64_t m0, int64_t rows,
                  int64_t n0, int64_t cols) {
  const int64_t E = a->E, padded = round_up(a->N, 32), reach = a->causal ? m0 - n0 : KEYS;
  const float base2 = a->scale * 0x1.715476p+0f;
  for (int64_t c = 0; c < cols; c += 32)
    for (int64_t g = 0; g < rows; g += 8)
      if (c <= reach + g + 7)
        tile(w->q + g * E / 2, E / 2, 1, w->k + (n0 + c) / 32 * 16 * E, E / 2, w->s + g * KEYS + c,
             KEYS, 1, 0);
  for (int64_t r = 0; r < rows; r++)
    soften(w->s + r * KEYS, (bf16 *)w->p + r * KEYS, least(cols, reach + r + 1),
           least(cols, reach + (r | 7) + 1), base2, n0 == 0, w->top + r, w->sum + r, w->shrink + r);
  for (int64_t e = 0; e < E; e += 32)
    for (int64_t g = 0; g < rows; g += 8)
      tile(w->p + g * KEYS / 2, KEYS / 2, 1, w->v + e * padded / 2 + n0 / 2 * 32,
           (least(cols, reach + g + 8) + 1) / 2, w->out + g * E + e, E, n0 == 0, w->shrink + g);
}

static void finish(const lezero_attention *a, const forward_scratch *w, int64_t rows, bf16 *out,
                   float *lse) {
  for (int64_t r = 0; r < rows; r++) {
    unpack_rows(w->out + r * a->E, 1, a->E, 1.0f / w->sum[r], out + r * a->out.row, 0);
    lse[r] = w->top[r] * 0x1.62e430p-1f + logf(w->sum[r]);
  }
}

void lezero_attention_forward(const lezero_attention *a, int64_t begin, int64_t end, void *scratch) {
  forward_scratch w;
  lay_out(a, scratch, &w);
  for (int64_t task = begin; task < end; task++) {
    const int64_t b = task / a->G, g = task % a->G, group = a->H / a->G;
    const int64_t padded = round_up(a->N, 32);
    pack_summed_over_E(a->k.data + b * a->k.batch + g * a->k.head, a->k.row, a->N, a->E, w.k);
    pack_summed_over_rows(a->v.data + b * a->v.batch + g * a->v.head, a->v.row, a->N, padded, a->E,
                          w.v);
    for (int64_t h = g * group; h < (g + 1) * group; h++) {
      const bf16 *q = a->q.data + b * a->q.batch + h * a->q.head;
      bf16 *out = a->out.data + b * a->out.batch + h * a->out.head;
      for (int64_t m0 = 0; m0 < a->M; m0 += ROWS) {
        const int64_t rows = least(ROWS, a->M - m0), rows8 = round_up(rows, 8);
        const int64_t keys = a->causal ? least(a->N, m0 + rows) : a->N;
        pack_rows(q + m0 * a->q.row, a->q.row, rows, rows8, a->E, w.q);
        for (int64_t n0 = 0; n0 < keys; n0 += KEYS)
          block(a, &w, m0, rows8, n0, least(KEYS, keys - n0));
        finish(a, &w, rows, out + m0 * a->out.row, a->lse + (b * a->H + h) * a->M + m0);
      }
    }
  }
}
