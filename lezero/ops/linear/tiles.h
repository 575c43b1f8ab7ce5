/* The multiplication by vectors, over the primitives of one instruction set (avx512.h says what they
 * are; a `floats` or `ints` holds one number for each output of a panel).
 *
 * A micro-kernel multiplies a tile of tokens with a pair of panels, 32 outputs, over all inputs,
 * P of the two at a time, with the sums of a block in registers. Weights are read once a tile, in order.
 * Its loops over tokens have constant bounds: `R` and P are literals in every copy of it.
 *
 * [Note: one panel after the other]
 * P is AT_ONCE(R), which computes fastest. A lone tile of few tokens waits for memory, and on some
 * processors memory gives one stream of lines faster than two: `panels` of the problem says whether such
 * a tile takes one panel after the other, and ALONE, where it does not. Sums are the same to the bit.
 */
#include <math.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 16")

#include "ahead.h"
#include "prepare.h"

enum { AHEAD = 8192, FAR = 1 << 18 }; /* bytes, see [Note: fetching ahead] */

typedef struct {
  const uint8_t *weight[2];
  const char *scale[2], *zero[2];
  int64_t outputs[2]; /* how many of the panel's outputs there are; 0: there is no such panel */
  int64_t first;      /* output */
} panel_pair;

static panel_pair pair_at(const lezero_linear *l, const workspace *w, int64_t index) {
  const int64_t panels = (l->N + 15) / 16;
  panel_pair p;
  p.first = (l->gated ? 16 : 32) * index;
  for (int i = 0; i < 2; i++) {
    const int64_t panel = l->gated ? index + i * (panels / 2) : least(2 * index + i, panels - 1);
    p.weight[i] = (const uint8_t *)l->weight + panel * (w->pair / 2);
    p.scale[i] = (const char *)l->scale + panel * (w->scales / 2);
    p.zero[i] = l->zero ? (const char *)l->zero + panel * (w->scales / 2) : 0;
    const int64_t left = l->N - p.first - 16 * i;
    p.outputs[i] = left < 0 ? 0 : least(left, 16);
  }
  return p;
}

/* What a micro-kernel found: [token][panel]; ints where there was one sum over all inputs. */
typedef struct {
  union {
    floats sum[MOST_ROWS][2];
    ints count[MOST_ROWS][2];
  };
} found_tile;

/* out = sum · factor + bias, each rounded. Apart from the micro-kernels, of which there are many. */
static void __attribute__((noinline)) finish(const lezero_linear *l, const workspace *w,
                                             const token_tile *t, const panel_pair *p,
                                             int64_t first, const found_tile *f) {
  const int token_scale = !in_bf16(l) && !w->fine;
  floats scale[2], bias[2];
  for (int i = 0; i < 2; i++) {
    scale[i] = row_scale(l, w, p->scale[i]);
    bias[i] = l->bias && p->outputs[i] ? read16(l->bias, LEZERO_FP32, p->first + 16 * i, p->outputs[i])
                                       : all_floats(0);
  }
  for (int64_t r = 0; r < t->rows; r++) {
    for (int i = 0; i < 2 && p->outputs[i]; i++) {
      floats v = w->whole ? float_of(f->count[r][i]) : f->sum[r][i];
      v = product(v, token_scale ? product(all_floats(t->scale[r]), scale[i]) : scale[i]);
      if (l->bias) v = sum_of(v, bias[i]);
      write16(l->out, l->x_type, (first + t->row + r) * l->N + p->first + 16 * i, p->outputs[i], v);
    }
  }
}

/* [Note: fetching ahead]
 * With few tokens memory is the limit: with each line of weights the one that lies a pair of panels
 * behind it is fetched, so that no panel begins unfetched; where a pair is larger than FAR, too much of
 * a second cache, the one AHEAD bytes behind it. It goes to that cache: the first one waits for few
 * lines at once, and would hold up all others. Where more than two tiles of tokens meet a pair,
 * or two of them a large one, the processor must not wait when the first of them does: each fetches its
 * part of the next pair, `step` bytes an iteration. The last pair, if it is not large, fetches what is
 * multiplied after this product, where that is known. */
typedef struct {
  int64_t ahead, scale, zero; /* bytes from what is read to what is fetched; ahead 0: many tiles */
  const uint8_t *next;
  int64_t step;
} fetching;

/* What to fetch with the last pair, or null. */
static lezero_ahead *after(const lezero_linear *l, const workspace *w) {
  return l->ahead && l->ahead->left > 0 && w->pair <= FAR ? l->ahead : 0;
}

static fetching fetching_of(const workspace *w, const panel_pair *p, const lezero_ahead *after) {
  fetching f = {w->pair > FAR ? AHEAD : w->pair, w->scales, w->scales, p->weight[0] + w->pair, w->step};
  if (after) {
    f.next = (const uint8_t *)after->at, f.ahead = f.next - p->weight[0];
    if (after->scale && p->scale[0]) f.scale = after->scale - p->scale[0];
    if (after->zero && p->zero[0]) f.zero = after->zero - p->zero[0];
  }
  if (w->tiles > (w->pair > FAR ? 1 : 2)) f.ahead = 0;
  return f;
}

INLINE void fetch(const int P, const uint8_t *w0, const uint8_t *w1,
                  const fetching *f, const uint8_t **next) {
  if (f->ahead) {
    prefetch_far(w0 + f->ahead);
    if (P == 2) prefetch_far(w1 + f->ahead);
  } else {
    prefetch(*next), *next += f->step;
  }
}

/* Where the scales and zero points of P panels' current group are; without zero points they are null. */
typedef struct {
  const char *scale[2], *zero[2];
} group_place;

/* The same for what lies there. */
INLINE void fetch_scales(const group_place *g, const int P, const fetching *f) {
  UNROLL for (int i = 0; i < P; i++) prefetch_far(g->scale[i] + f->scale);
  if (g->zero[0]) UNROLL for (int i = 0; i < P; i++) prefetch_far(g->zero[i] + f->zero);
}

/* Bytes of four inputs of a token. */
#define FOUR_BYTES(words) ((words) ? 8 : 4)

/* acc[row][panel] += a · w for four inputs of each of R tokens and P panels. */
INLINE void dot_fours(const int R, const int P, const int words, ints b0, ints b1, const int8_t *a,
                      ints acc[][2]) {
  UNROLL for (int r = 0; r < R; r++) {
    const token_codes x = read_codes(a + FOUR_BYTES(words) * r, words);
    acc[r][0] = dot_codes(acc[r][0], b0, x, words);
    if (P == 2) acc[r][1] = dot_codes(acc[r][1], b1, x, words);
  }
}

/* What meets: the weights of two panels, and codes of a tile's tokens. Sums move it behind what they took. */
typedef struct {
  const uint8_t *w0, *w1;
  const int8_t *a;
} meeting;

/* Sums of whole numbers over `fours` of inputs, 8 bits a code. */
INLINE void sum_bytes(const int R, const int P, const int words, meeting *at, int64_t fours,
                      const fetching *m, const uint8_t **next, ints acc[][2]) {
  for (; fours; fours--, at->w0 += LINE, at->w1 += LINE, at->a += FOUR_BYTES(words) * R) {
    fetch(P, at->w0, at->w1, m, next);
    const ints b1 = P == 2 ? load_bytes(at->w1) : all_ints(0);
    dot_fours(R, P, words, load_bytes(at->w0), b1, at->a, acc);
  }
}

/* The same for 4 bits a code: a line holds eight inputs of each output. */
INLINE void sum_halves(const int R, const int P, const int words, meeting *at, int64_t eights,
                       const fetching *m, const uint8_t **next, ints acc[][2]) {
  const int four = FOUR_BYTES(words) * R;
  for (; eights; eights--, at->w0 += LINE, at->w1 += LINE, at->a += 2 * four) {
    fetch(P, at->w0, at->w1, m, next);
    const ints l0 = load_line(at->w0), l1 = P == 2 ? load_line(at->w1) : all_ints(0);
    dot_fours(R, P, words, low_halves(l0), low_halves(l1), at->a, acc);
    dot_fours(R, P, words, high_halves(l0), high_halves(l1), at->a + four, acc);
  }
}

#ifdef SHORT_SUMS
/* pairs[row][panel] = (begun ? pairs[row][panel] : 0) + a · w for four inputs of each of R tokens, as
 * bytes. */
INLINE void short_fours(const int R, const int P, const int begun, ints b0, ints b1,
                        const int8_t *a, ints pairs[][2]) {
  UNROLL for (int r = 0; r < R; r++) {
    const token_codes x = read_codes(a + FOUR_BYTES(0) * r, 0);
    pairs[r][0] = begun ? dot_short(pairs[r][0], b0, x) : first_short(b0, x);
    if (P == 2) pairs[r][1] = begun ? dot_short(pairs[r][1], b1, x) : first_short(b1, x);
  }
}

/* sum_halves for 32 inputs of tokens of bytes, which sums of 16 bits hold; acc begins with `start`, or
 * null. */
INLINE void sum_short(const int R, const int P, meeting *at, const fetching *m, const uint8_t **next,
                      const int32_t *start, ints acc[][2]) {
  const int four = FOUR_BYTES(0) * R;
  ints pairs[MOST_HALVES][2];
  UNROLL for (int k = 0; k < 4; k++) {
    fetch(P, at->w0 + LINE * k, at->w1 + LINE * k, m, next);
    const ints l0 = load_line(at->w0 + LINE * k);
    const ints l1 = P == 2 ? load_line(at->w1 + LINE * k) : all_ints(0);
    const int8_t *a = at->a + 2 * four * k;
    short_fours(R, P, k, low_halves(l0), low_halves(l1), a, pairs);
    short_fours(R, P, 1, high_halves(l0), high_halves(l1), a + four, pairs);
  }
  at->w0 += 4 * LINE, at->w1 += 4 * LINE, at->a += 8 * four;
  UNROLL for (int r = 0; r < R; r++) {
    const ints begin = start ? all_ints(start[r]) : all_ints(0);
    UNROLL for (int i = 0; i < P; i++)
      acc[r][i] = add_short(start ? begin : acc[r][i], pairs[r][i]);
  }
}
#endif

INLINE void whole_tile(const lezero_linear *l, const workspace *w, const token_tile *t,
                       const panel_pair *p, found_tile *f, const fetching *m, const int R,
                       const int P) {
  (void)l;
  const uint8_t *next = m->next;
  UNROLL for (int i = 0; i < 2; i += P) {
    ints acc[MOST_WHOLE][2];
    UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = all_ints(t->start[r]);
    meeting at = {p->weight[i], p->weight[1], t->codes};
    sum_bytes(R, P, WORDS(8, 1), &at, w->padded / 4, m, &next, acc);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < P; j++)
      f->count[r][i + j] = settled(acc[r][j]);
  }
}

/* sum += what a block of inputs adds, R tokens and one panel of it: (found - zero · total) · step.
 * zeros, and fine: as literals, so that nothing is asked and nothing read a token. */
INLINE void add_block(const int R, const int D, const int zeros, const int fine, const int panel,
                      floats scale, floats zero, const float *total, const float *x_scale,
                      ints acc[][2], floats sum[][2]) {
  UNROLL for (int r = 0; r < R; r++) {
    const ints count =
        D == 2 ? digits_joined(acc[D * r][panel], acc[D * r + D - 1][panel]) : acc[r][panel];
    floats found = float_of(count);
    if (zeros) found = fused_less(zero, all_floats(total[r]), found);
    const floats step = fine ? product(scale, all_floats(x_scale[r])) : scale;
    sum[r][panel] = fused(step, found, sum[r][panel]);
  }
}

/* R tokens of D digits, block by block; `fine`: with a scale of their own for each block. */
INLINE void blocks_panels(const lezero_linear *l, const workspace *w, const token_tile *t,
                          const panel_pair *p, found_tile *f, const fetching *m, const int R,
                          const int P, const int D, const int words, const int fine,
                          const int bits, const int first, const uint8_t **next) {
  floats sum[MOST_HALVES][2];
  UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = all_floats(0);
  meeting at = {p->weight[first], p->weight[1], t->codes};
  group_place g = {{p->scale[first], p->scale[1]}, {p->zero[first], p->zero[1]}};
  const int32_t *start = t->start;
  const float *total = t->total, *x_scale = t->scale;
  const int64_t group = l->scale_type == LEZERO_FP32 ? 64 : 32; /* bytes */
  int64_t left = w->in_group, rest = w->padded; /* of the group's blocks, and of inputs */
  for (int64_t blocks = w->blocks; blocks; blocks--) {
    const int64_t inputs = least(w->block, rest);
    ints acc[MOST_HALVES > 2 * MOST_DIGITS ? MOST_HALVES : 2 * MOST_DIGITS][2];
#ifdef SHORT_SUMS
    if (bits == 4 && !words) {
      sum_short(R * D, P, &at, m, next, start, acc);
      for (int64_t i = 32; i < inputs; i += 32) sum_short(R * D, P, &at, m, next, 0, acc);
    } else
#endif
    {
      UNROLL for (int i = 0; i < R * D; i++) acc[i][0] = acc[i][1] = all_ints(start[i]);
      if (bits == 8) sum_bytes(R * D, P, words, &at, inputs / 4, m, next, acc);
      else sum_halves(R * D, P, words, &at, inputs / 8, m, next, acc);
    }
    if (m->ahead && left == w->in_group) fetch_scales(&g, P, m);
    UNROLL for (int i = 0; i < P; i++) {
      const floats scale = read16(g.scale[i], l->scale_type, 0, 16);
      if (l->zero) {
        const floats zero = read16(g.zero[i], l->scale_type, 0, 16);
        add_block(R, D, 1, fine, i, scale, zero, total, x_scale, acc, sum);
      } else {
        add_block(R, D, 0, fine, i, scale, scale, total, x_scale, acc, sum);
      }
    }
    start += R * D, total += R, x_scale += R, rest -= inputs;
    if (--left == 0) {
      left = w->in_group;
      UNROLL for (int i = 0; i < P; i++) g.scale[i] += group;
      if (l->zero) UNROLL for (int i = 0; i < P; i++) g.zero[i] += group;
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < P; i++)
    f->sum[r][first + i] = sum[r][i];
}

INLINE void blocks_tile(const lezero_linear *l, const workspace *w, const token_tile *t,
                        const panel_pair *p, found_tile *f, const fetching *m, const int R,
                        const int P, const int D, const int fine, const int bits) {
  const uint8_t *next = m->next;
  const int words = WORDS(bits, D); /* which hold both digits */
  UNROLL for (int first = 0; first < 2; first += P)
    blocks_panels(l, w, t, p, f, m, R, P, words ? 1 : D, words, fine, bits, first, &next);
}

/* R tokens of one part, or of a high and a low one; both meet a line of weights while it is there. */
INLINE void bf16_tile(const workspace *w, const token_tile *t, const panel_pair *p, found_tile *f,
                      const fetching *m, const int R, const int P, const int parts) {
  const uint8_t *next = m->next;
  const int64_t low = w->padded * 2 * R; /* bytes from a token's high part to its low one */
  UNROLL for (int first = 0; first < 2; first += P) {
    floats acc[MOST_BF16][2];
    UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = all_floats(0);
    const int8_t *a = t->codes;
    const uint8_t *w0 = p->weight[first], *w1 = p->weight[1];
    for (int64_t k = 0; k < w->padded / 2; k++, w0 += LINE, w1 += LINE, a += PAIR_BYTES * R) {
      fetch(P, w0, w1, m, &next);
      const ints b0 = load_line(w0), b1 = P == 2 ? load_line(w1) : b0;
      UNROLL for (int part = 0; part < parts; part++) {
        UNROLL for (int r = 0; r < R; r++) {
          const token_pair x = read_pair(a + part * low + PAIR_BYTES * r);
          acc[r][0] = dot_pair(acc[r][0], b0, x);
          if (P == 2) acc[r][1] = dot_pair(acc[r][1], b1, x);
        }
      }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < P; i++)
      f->sum[r][first + i] = acc[r][i];
  }
}

/* See [Note: one panel after the other]. */
INLINE int one_panel(const lezero_linear *l, const workspace *w) {
  return w->tiles == 1 && (l->panels ? l->panels : ALONE) == 1;
}

#define CASE(most, R, tile, ...)                                                                  \
  case R:                                                                                         \
    if (R <= most && R <= 6 && AT_ONCE(R) == 2 && one_panel(l, w))                                \
      tile(l, w, t, p, f, m, R, 1 __VA_ARGS__);                                                   \
    else if (R <= most) tile(l, w, t, p, f, m, R, AT_ONCE(R) __VA_ARGS__);                        \
    break;
#define FEW(most, tile, ...)         \
  CASE(most, 1, tile, __VA_ARGS__) \
  CASE(most, 2, tile, __VA_ARGS__) \
  CASE(most, 3, tile, __VA_ARGS__) \
  CASE(most, 4, tile, __VA_ARGS__) \
  CASE(most, 5, tile, __VA_ARGS__) \
  CASE(most, 6, tile, __VA_ARGS__)
#define SOME(most, tile, ...)      \
  FEW(most, tile, __VA_ARGS__)     \
  CASE(most, 7, tile, __VA_ARGS__) \
  CASE(most, 8, tile, __VA_ARGS__)
#define MANY(most, tile) \
  SOME(most, tile)       \
  CASE(most, 9, tile)    \
  CASE(most, 10, tile)   \
  CASE(most, 11, tile)   \
  CASE(most, 12, tile)   \
  CASE(most, 13, tile)   \
  CASE(most, 14, tile)

INLINE void bf16_one(const lezero_linear *l, const workspace *w, const token_tile *t,
                     const panel_pair *p, found_tile *f, const fetching *m, const int R,
                     const int P) {
  (void)l, bf16_tile(w, t, p, f, m, R, P, 1);
}
INLINE void bf16_two(const lezero_linear *l, const workspace *w, const token_tile *t,
                     const panel_pair *p, found_tile *f, const fetching *m, const int R,
                     const int P) {
  (void)l, bf16_tile(w, t, p, f, m, R, P, 2);
}

#define TILE static void __attribute__((noinline))
#define GIVEN \
  const lezero_linear *l, const workspace *w, const token_tile *t, const panel_pair *p, \
      found_tile *f, const fetching *m

TILE any_whole(GIVEN) { switch (t->rows) { MANY(MOST_WHOLE, whole_tile) } }
TILE any_bf16(GIVEN) { switch (t->rows) { MANY(MOST_BF16, bf16_one) } }
TILE any_bf16_parts(GIVEN) { switch (t->rows) { MANY(MOST_BF16, bf16_two) } }
#define COMMA ,
/* Tokens of 8 bits with a scale each, of 8 bits in blocks, and of 16 bits: digits and `fine`. */
TILE any_a8w8(GIVEN) { switch (t->rows) { FEW(MOST_BLOCKS, blocks_tile, COMMA 1 COMMA 0 COMMA 8) } }
TILE any_a8w4(GIVEN) { switch (t->rows) { SOME(MOST_HALVES, blocks_tile, COMMA 1 COMMA 0 COMMA 4) } }
TILE any_b8w8(GIVEN) { switch (t->rows) { FEW(MOST_BLOCKS, blocks_tile, COMMA 1 COMMA 1 COMMA 8) } }
TILE any_b8w4(GIVEN) { switch (t->rows) { SOME(MOST_HALVES, blocks_tile, COMMA 1 COMMA 1 COMMA 4) } }
#define MOST_16(bits, most) (WORDS(bits, 2) ? (most) : MOST_DIGITS)
TILE any_a16w8(GIVEN) {
  switch (t->rows) { FEW(MOST_16(8, MOST_BLOCKS), blocks_tile, COMMA 2 COMMA 1 COMMA 8) }
}
TILE any_a16w4(GIVEN) {
  switch (t->rows) { FEW(MOST_16(4, MOST_HALVES), blocks_tile, COMMA 2 COMMA 1 COMMA 4) }
}

static void multiply_vectors(const lezero_linear *l, int64_t first, int64_t count,
                             const void *scratch, int64_t begin, int64_t end) {
  const workspace w = lay_out(l, count, (char *)scratch);
  lezero_ahead *next = after(l, &w);
  for (int64_t index = begin; index < end; index++) {
    const panel_pair p = pair_at(l, &w, index);
    fetching m = fetching_of(&w, &p, index == end - 1 ? next : 0);
    for (int64_t i = 0; i < w.tiles; i++, m.next += w.part) {
      const token_tile t = tile_at(&w, i);
      found_tile f;
      if (l->bits == 16) (FLOATS || w.parts == 1 ? any_bf16 : any_bf16_parts)(l, &w, &t, &p, &f, &m);
      else if (w.whole) any_whole(l, &w, &t, &p, &f, &m);
      else if (!w.fine) (l->bits == 8 ? any_a8w8 : any_a8w4)(l, &w, &t, &p, &f, &m);
      else if (l->x_bits == 8) (l->bits == 8 ? any_b8w8 : any_b8w4)(l, &w, &t, &p, &f, &m);
      else (l->bits == 8 ? any_a16w8 : any_a16w4)(l, &w, &t, &p, &f, &m);
      finish(l, &w, &t, &p, first, &f);
    }
  }
  if (next && begin < end) next->at += w.pair, next->left -= w.pair;
}

#include "embedding.h"
