/* softmax(q kᵀ / sqrt(E)) v within each text, over the primitives of one instruction set.
 *
 * A head of a text is worked on at a time: its keys are laid in panels of 16 with one input of each
 * side by side, its values as they are, both in fp32. ROWS queries at a time meet all keys, their
 * scores become weights, and these meet all values. A row's sums run along inputs and keys, in an
 * order that depends on its own text alone.
 */
#include <math.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 16")
#include "../decoder/power.h"

INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
  int64_t tokens, panels, E;
  float *keys;   /* [panel][input][16] */
  float *values; /* (tokens, E) */
  float *query;  /* (ROWS, E), scaled */
  float *score;  /* (ROWS, 16 · panels) */
} one_head;

static int64_t panels_of(int64_t tokens) { return (tokens + 15) / 16; }

static one_head lay_out(const lezero_texts *t, void *scratch) {
  const int64_t wide = 16 * panels_of(t->longest);
  one_head h = {.E = t->E, .keys = scratch};
  h.values = h.keys + wide * t->E, h.query = h.values + wide * t->E;
  h.score = h.query + ROWS * t->E;
  return h;
}

size_t lezero_texts_scratch(const lezero_texts *t) {
  const int64_t wide = 16 * panels_of(t->longest);
  return (size_t)(2 * wide * t->E + ROWS * t->E + ROWS * wide) * sizeof(float);
}

/* Keys and values of a head, from row `first` on; keys beyond the last one are 0. */
static void take(one_head *h, const lezero_texts *t, int64_t first, int64_t head) {
  const int64_t E = h->E;
  for (int64_t i = 0; i < h->tokens; i += 16) {
    for (int64_t e = 0; e < E; e += 16) {
      floats key[16];
      UNROLL for (int j = 0; j < 16; j++) {
        const int64_t row = first + i + j, at = head * E + e;
        key[j] = all_floats(0);
        if (i + j >= h->tokens) continue;
        key[j] = read16(t->k, t->type, row * t->k_row + at, 16);
        write16(h->values, LEZERO_FP32, (i + j) * E + e, 16,
                read16(t->v, t->type, row * t->v_row + at, 16));
      }
      transpose16(key);
      float *to = h->keys + i * E + e * 16;
      UNROLL for (int j = 0; j < 16; j++) write16(to, LEZERO_FP32, 16 * j, 16, key[j]);
    }
  }
}

/* Scores of ROWS queries with P panels of keys. */
INLINE void score_panels(const one_head *h, int64_t panel, const int P) {
  floats acc[ROWS][PANELS];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int p = 0; p < P; p++) acc[r][p] = all_floats(0);
  const float *keys = h->keys + panel * h->E * 16;
  for (int64_t e = 0; e < h->E; e++) {
    floats key[PANELS];
    UNROLL for (int p = 0; p < P; p++)
      key[p] = read16(keys + p * h->E * 16, LEZERO_FP32, 16 * e, 16);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const floats x = all_floats(h->query[r * h->E + e]);
      UNROLL for (int p = 0; p < P; p++) acc[r][p] = fused(x, key[p], acc[r][p]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int p = 0; p < P; p++)
    write16(h->score + r * 16 * h->panels, LEZERO_FP32, 16 * (panel + p), 16, acc[r][p]);
}

/* Scores become weights, not yet divided by their `total`. All rows take each step together: the
 * largest and the sum of a row are waited for, and other rows fill the time. */
static void weigh(const one_head *h, float total[ROWS]) {
  const int64_t wide = 16 * h->panels, last = h->panels - 1, real = h->tokens - 16 * last;
  floats most[ROWS], sum[ROWS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    float *score = h->score + r * wide;
    most[r] = only_lanes(read16(score, LEZERO_FP32, 16 * last, 16), 0, real, -INFINITY);
    for (int64_t p = 0; p < last; p++)
      most[r] = most_of(read16(score, LEZERO_FP32, 16 * p, 16), most[r]);
  }
  UNROLL for (int r = 0; r < ROWS; r++) most[r] = all_floats(lanes_most(most[r])), sum[r] = all_floats(0);
  for (int64_t p = 0; p <= last; p++) {
    UNROLL for (int r = 0; r < ROWS; r++) {
      float *score = h->score + r * wide;
      const floats above = fused_less(all_floats(1), most[r], read16(score, LEZERO_FP32, 16 * p, 16));
      /* The least power is 2^-126: without it, what should weigh nothing does. */
      floats weight = sum_of(power_of_two(above), all_floats(-0x1p-126f));
      if (p == last) weight = only_lanes(weight, 0, real, 0);
      write16(score, LEZERO_FP32, 16 * p, 16, weight);
      sum[r] = sum_of(sum[r], weight);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) total[r] = lanes_total(sum[r]);
}

/* P panels of 16 outputs of ROWS queries, of which the first `rows` are written from row `first` on. */
INLINE void mix_panels(const one_head *h, const lezero_texts *t, const float total[ROWS],
                       int64_t first, int64_t rows, int64_t head, int64_t panel, const int P) {
  floats acc[ROWS][PANELS];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int p = 0; p < P; p++) acc[r][p] = all_floats(0);
  const int64_t wide = 16 * h->panels;
  const float *values = h->values + 16 * panel;
  for (int64_t i = 0; i < h->tokens; i++) {
    floats value[PANELS];
    UNROLL for (int p = 0; p < P; p++)
      value[p] = read16(values + i * h->E, LEZERO_FP32, 16 * p, 16);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const floats x = all_floats(h->score[r * wide + i]);
      UNROLL for (int p = 0; p < P; p++) acc[r][p] = fused(x, value[p], acc[r][p]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    if (r == rows) break;
    const int64_t at = ((first + r) * t->heads + head) * h->E + 16 * panel;
    UNROLL for (int p = 0; p < P; p++)
      write16(t->out, t->type, at + 16 * p, 16, quotient(acc[r][p], all_floats(total[r])));
  }
}

/* Up to ROWS queries from row `first` on; where there are fewer, the last one stands for the others. */
static void attend_rows(const one_head *h, const lezero_texts *t, int64_t first, int64_t rows,
                        int64_t head) {
  const float scale = 1.44269504f / sqrtf((float)h->E); /* weights are powers of two */
  for (int r = 0; r < ROWS; r++) {
    const int64_t at = (first + least_of(r, rows - 1)) * t->q_row + head * h->E;
    for (int64_t e = 0; e < h->E; e += 16)
      write16(h->query, LEZERO_FP32, r * h->E + e, 16,
              product(read16(t->q, t->type, at + e, 16), all_floats(scale)));
  }
  int64_t p = 0;
  for (; p + PANELS <= h->panels; p += PANELS) score_panels(h, p, PANELS);
  for (; p < h->panels; p++) score_panels(h, p, 1);
  float total[ROWS];
  weigh(h, total);
  const int64_t outputs = h->E / 16;
  for (p = 0; p + PANELS <= outputs; p += PANELS)
    mix_panels(h, t, total, first, rows, head, p, PANELS);
  for (; p < outputs; p++) mix_panels(h, t, total, first, rows, head, p, 1);
}

/* What a head of a text costs: scores and sums, and what is read and written beside them. */
static int64_t cost_of(const lezero_texts *t, int64_t text) {
  const int64_t tokens = t->begin[text + 1] - t->begin[text];
  return tokens * (tokens + 64);
}

int64_t lezero_texts_cost(const lezero_texts *t) {
  int64_t all = 0;
  for (int64_t text = 0; text < t->texts; text++) all += t->heads * cost_of(t, text);
  return all;
}

void lezero_texts_attend(const lezero_texts *t, void *scratch, int64_t begin, int64_t end) {
  one_head h = lay_out(t, scratch);
  int64_t at = 0;
  for (int64_t text = 0; text < t->texts; text++) {
    const int64_t first = t->begin[text], last = t->begin[text + 1], each = cost_of(t, text);
    h.tokens = last - first, h.panels = panels_of(h.tokens);
    for (int64_t head = 0; head < t->heads; head++, at += each) {
      if (at < begin || at >= end) continue;
      take(&h, t, first, head);
      for (int64_t row = first; row < last; row += ROWS)
        attend_rows(&h, t, row, least_of(last - row, ROWS), head);
    }
  }
}
