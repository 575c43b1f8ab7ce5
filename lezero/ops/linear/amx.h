/* The multiplication by AMX, over the primitives of amx_tile.h and avx512.h.
 *
 * [Note: order of work]
 * A step multiplies two tiles of 16 rows of tokens with a pair of panels, 4 tiles of sums. Where a
 * token has two digits, the two tiles are its high and its low digits. A step goes over some lines
 * of inputs, at most stretch_of() and as many each time; then the next tokens take the same weights,
 * which stay in L1, past which tokens in bf16 stream (with whole numbers that is slower), and after
 * the last tokens the next pair of panels takes the same stretch of the tokens, which stays in L2.
 * So pairs_of() pairs of panels run through all inputs together, with their sums in memory, also in
 * L2; what the last inputs bring goes out at once. Where there are more than COLD bytes of outputs,
 * which no cache has, they go out after all, tokens by tokens, so that a row's outputs are written side
 * by side, each line fetched before: waiting for them took a tenth of the time, with blocks more.
 * Where a step completes its sums besides, some tokens take a few pairs of panels after each other.
 * Weights are read from memory once, each step fetching its part of the next pair's stretch. Those
 * that are multiplied in blocks become signed bytes once a stretch, so that their sums begin with 0,
 * not with `start`; or see [Note: rounded weights].
 */
enum { STRETCH = 18, TILE_BYTES = LINE * LINE_ROWS, ROW = 2 * LINE, COLD = 1 << 20 };
enum { SPREAD_PAIR = 2 * (STRETCH + 1) * TILE_BYTES };

typedef struct {
  found_tile *sums;                   /* [pair][tile of tokens]: so far, ints or floats */
  int32_t (*found)[2][LINE_ROWS][32]; /* [this block or the one before][tile][row][output] */
  uint8_t *spread;                    /* [panel][line of a step]: signed bytes, or rounded to bf16;
                                       * of outputs side by side for each pair */
  size_t bytes;
} own_space;

/* A step's work, and the weights that are to be fetched meanwhile: lines of each panel for every line
 * of inputs. */
typedef struct {
  const uint8_t *weight[2], *next[2];
  int64_t begin, lines, fetches;
} stretch;

static int64_t stretch_of(const workspace *w) { return w->parts ? STRETCH : STRETCH / 2; }
static int64_t lines_of(const workspace *w) { return w->padded / (w->parts ? LINE / 2 : LINE); }
/* Whether sums are complete after a step. */
static int at_once(const workspace *w) {
  return (w->parts || w->whole) && lines_of(w) <= stretch_of(w);
}
INLINE int64_t output_row(const lezero_linear *l) { return l->N * (l->x_type == LEZERO_FP32 ? 4 : 2); }
/* Whether no cache has the outputs. */
static int is_cold(const lezero_linear *l, const workspace *w) {
  return !l->gated && w->tokens * output_row(l) > COLD;
}
/* Whether they are written by multiply_side_by_side(), and of how many pairs together. */
static int side_by_side(const lezero_linear *l, const workspace *w) { return at_once(w) && is_cold(l, w); }
enum { SIDE_BY_SIDE = 4 };
static int64_t pairs_of(const lezero_linear *l, const workspace *w) {
  return side_by_side(l, w) ? SIDE_BY_SIDE : w->parts ? 12 : 8;
}

static own_space own_at(const lezero_linear *l, const workspace *w, char *base) {
  own_space own;
  char *at = base;
  const int64_t pairs = pairs_of(l, w), sums = at_once(w) ? 2 : pairs * w->tiles;
  own.sums = (found_tile *)at, at += sums * (int64_t)sizeof(found_tile);
  own.found = (int32_t(*)[2][LINE_ROWS][32])at, at += 2 * (int64_t)sizeof *own.found;
  own.spread = (uint8_t *)at, at += (side_by_side(l, w) ? pairs : 1) * SPREAD_PAIR;
  own.bytes = (size_t)(at - base);
  return own;
}

INLINE void fetch_next(stretch *s) {
  for (int64_t i = 0; i < s->fetches; i++, s->next[0] += LINE, s->next[1] += LINE) {
    _mm_prefetch((const char *)s->next[0], _MM_HINT_T1);
    _mm_prefetch((const char *)s->next[1], _MM_HINT_T1);
  }
}

/* Tiles 6 and 7: a line of inputs of a pair of panels. */
INLINE void load_weights(const uint8_t *w0, const uint8_t *w1) {
  tile_load(6, w0, LINE);
  tile_load(7, w1, LINE);
}

/* Tiles 0 to 3 (of one tile of tokens: 0 and 1) += tokens at a0 and a1 times tiles 6 and 7. */
#define ADD_PRODUCTS(load, dot, two, a0, a1) \
  do {                                       \
    load(4, a0, LINE);                       \
    dot(0, 4, 6);                            \
    dot(1, 4, 7);                            \
    if (two) {                               \
      load(5, a1, LINE);                     \
      dot(2, 5, 6);                          \
      dot(3, 5, 7);                          \
    }                                        \
  } while (0)

#define SUMS(move, two, at0, at1)                          \
  do {                                                     \
    move(0, at0, ROW);                                     \
    move(1, (char *)(at0) + LINE, ROW);                    \
    if (two) {                                             \
      move(2, at1, ROW);                                   \
      move(3, (char *)(at1) + LINE, ROW);                  \
    }                                                      \
  } while (0)
#define ZERO(t, at, step) tile_zero(t)

/* Forms with one sum over all inputs: bf16, and W8A8 with a scale a row. */
INLINE void sums_step(const workspace *w, stretch *s, const token_tile t[2], found_tile *f,
                      const int two, const int bf16) {
  const int64_t parts = bf16 ? w->parts : 1;
  const int64_t from = s->begin * parts * TILE_BYTES;
  const int8_t *a0 = t[0].codes + from, *a1 = t[two].codes + from;
  if (s->begin == 0) SUMS(ZERO, two, f, f + 1);
  else SUMS(tile_load, two, f, f + 1);
  for (int64_t i = 0; i < s->lines; i++) {
    fetch_next(s);
    load_weights(s->weight[0] + i * TILE_BYTES, s->weight[1] + i * TILE_BYTES);
    for (int64_t part = 0; part < parts; part++, a0 += TILE_BYTES, a1 += TILE_BYTES) {
      if (bf16) ADD_PRODUCTS(tile_stream, tile_dot_pairs, two, a0, a1);
      else ADD_PRODUCTS(tile_load, tile_dot_bytes, two, a0, a1);
    }
  }
  SUMS(tile_store, two, f, f + 1);
}

#include "amx_blocks.h"

#define STEP static void __attribute__((noinline))
#define GIVEN_STEP                                                                           \
  const lezero_linear *l, const workspace *w, stretch *s, const panel_pair *p,               \
      const token_tile t[2], const own_space *own, found_tile *f, int two

STEP bf16_step(GIVEN_STEP) {
  (void)l, (void)p, (void)own;
  if (two) sums_step(w, s, t, f, 1, 1);
  else sums_step(w, s, t, f, 0, 1);
}
STEP whole_step(GIVEN_STEP) {
  (void)l, (void)p, (void)own;
  if (two) sums_step(w, s, t, f, 1, 0);
  else sums_step(w, s, t, f, 0, 0);
}
STEP a8_step(GIVEN_STEP) {
  if (two) blocks_step(l, w, s, p, t, own, f, 1, 1, 0, 1);
  else blocks_step(l, w, s, p, t, own, f, 0, 1, 0, 1);
}
STEP a8_bytes_step(GIVEN_STEP) {
  if (two) blocks_step(l, w, s, p, t, own, f, 1, 1, 0, 0);
  else blocks_step(l, w, s, p, t, own, f, 0, 1, 0, 0);
}
STEP b8_step(GIVEN_STEP) {
  if (two) blocks_step(l, w, s, p, t, own, f, 1, 1, 1, 1);
  else blocks_step(l, w, s, p, t, own, f, 0, 1, 1, 1);
}
STEP b8_bytes_step(GIVEN_STEP) {
  if (two) blocks_step(l, w, s, p, t, own, f, 1, 1, 1, 0);
  else blocks_step(l, w, s, p, t, own, f, 0, 1, 1, 0);
}
STEP a16_step(GIVEN_STEP) {
  (void)two;
  blocks_step(l, w, s, p, t, own, f, 1, 2, 1, 1);
}
STEP a16_bytes_step(GIVEN_STEP) {
  (void)two;
  blocks_step(l, w, s, p, t, own, f, 1, 2, 1, 0);
}

typedef void step_function(GIVEN_STEP);

#include "amx_weights.h"

static step_function *step_of(const lezero_linear *l, const workspace *w) {
  if (w->parts) return bf16_step;
  if (w->whole) return whole_step;
  if (w->digits == 2) return in_bytes(l, w) ? a16_bytes_step : a16_step;
  if (w->fine) return in_bytes(l, w) ? b8_bytes_step : b8_step;
  return in_bytes(l, w) ? a8_bytes_step : a8_step;
}

/* Biases of 16 outputs from the first one on. */
INLINE floats bias_at(const lezero_linear *l, int64_t first) {
  return l->bias ? read16(l->bias, LEZERO_FP32, first, 16) : all_floats(0);
}

/* finish() of bf16 sums for bf16: a pair of panels is a line of a row. */
static void finish_line(const lezero_linear *l, const workspace *w, const token_tile *t,
                        const panel_pair *p, int64_t first, const found_tile *f) {
  const floats low = bias_at(l, p->first), high = bias_at(l, p->first + 16);
  const floats scale[2] = {row_scale(l, w, p->scale[0]), row_scale(l, w, p->scale[1])};
  uint16_t *to = (uint16_t *)l->out + (first + t->row) * l->N + p->first;
  for (int64_t r = 0; r < t->rows; r++, to += l->N) {
    const floats v = sum_of(product(f->sum[r][0], scale[0]), low);
    const floats u = sum_of(product(f->sum[r][1], scale[1]), high);
    _mm512_storeu_si512(to, (ints)_mm512_cvtne2ps_pbh(u, v));
  }
}

/* The same of whole-number sums, which lack what they begin with; `start` is what a sum of bytes does. */
static void finish_whole_line(const lezero_linear *l, const token_tile *t, const panel_pair *p,
                              int64_t first, const found_tile *f) {
  const floats bias[2] = {bias_at(l, p->first), bias_at(l, p->first + 16)};
  floats scale[2], v[2];
  for (int i = 0; i < 2; i++) scale[i] = read16(p->scale[i], l->scale_type, 0, 16);
  uint16_t *to = (uint16_t *)l->out + (first + t->row) * l->N + p->first;
  for (int64_t r = 0; r < t->rows; r++, to += l->N) {
    for (int i = 0; i < 2; i++) {
      const floats found = float_of(ints_sum(f->count[r][i], all_ints(t->start[r])));
      v[i] = sum_of(product(found, product(all_floats(t->scale[r]), scale[i])), bias[i]);
    }
    _mm512_storeu_si512(to, (ints)_mm512_cvtne2ps_pbh(v[1], v[0]));
  }
}

static void add_start(const token_tile *t, found_tile *f) {
  for (int64_t r = 0; r < t->rows; r++)
    for (int i = 0; i < 2; i++) f->count[r][i] = ints_sum(f->count[r][i], all_ints(t->start[r]));
}

/* [Note: gated outputs]
 * Gates and what they gate are multiplied as a pair of panels, and what comes of them goes where the next
 * product reads it as tile `tile` of its tokens: half a line of a row. */
static void finish_gated(const lezero_linear *l, const workspace *w, int64_t tile, const token_tile *t,
                         const panel_pair *p, const found_tile *f) {
  const int64_t F = l->N / 2;
  const floats scale[2] = {row_scale(l, w, p->scale[0]), row_scale(l, w, p->scale[1])};
  const floats low = bias_at(l, p->first), high = bias_at(l, F + p->first);
  char *to = (char *)l->out + tile * LINE_ROWS * F * 2 + p->first / 32 * TILE_BYTES + p->first % 32 * 2;
  for (int64_t r = 0; r < t->rows; r++, to += LINE) {
    const floats gate = sum_of(product(f->sum[r][0], scale[0]), low);
    const floats up = sum_of(product(f->sum[r][1], scale[1]), high);
    write16(to, LEZERO_BF16, 0, 16, product(silu(gate), up));
  }
}

static void finish_tile(const lezero_linear *l, const workspace *w, int64_t tile, const token_tile *t,
                        const panel_pair *p, int64_t first, found_tile *f) {
  const int line = l->x_type == LEZERO_BF16 && p->outputs[1] == 16;
  if (l->gated) finish_gated(l, w, tile, t, p, f);
  else if (w->parts && line) finish_line(l, w, t, p, first, f);
  else if (w->whole && line) finish_whole_line(l, t, p, first, f);
  else {
    if (w->whole) add_start(t, f);
    finish(l, w, t, p, first, f);
  }
}

/* The outputs of n pairs of panels from `pair` on, fetching where the next pair writes. */
static void finish_pairs(const lezero_linear *l, const workspace *w, int64_t first, int64_t pair,
                         int64_t n, found_tile *sums) {
  const int64_t row = output_row(l), line = 32 * row / l->N; /* of a row, a pair writes */
  for (int64_t j = 0; j < w->tiles; j++) {
    const token_tile t = tile_at(w, j);
    const char *to = (const char *)l->out + (first + t.row) * row + pair * line;
    for (int64_t i = 0; i < n; i++) {
      const panel_pair p = pair_at(l, w, pair + i);
      const char *next = to + (i + 1) * line;
      for (int64_t r = 0; r < t.rows; r++, next += row) __builtin_prefetch(next, 1, 3);
      finish_tile(l, w, j, &t, &p, first, sums + i * w->tiles + j);
    }
  }
}

/* All tokens times n pairs of panels from `pair` on, stretch by stretch. */
static void multiply_pairs(const lezero_linear *l, const workspace *w, const own_space *own,
                           int64_t first, int64_t pair, int64_t n) {
  const int64_t lines = lines_of(w), span = span_of(w);
  const int digits = !w->parts && w->digits == 2;
  const int once = at_once(w), late = !once && is_cold(l, w);
  step_function *const step = step_of(l, w);
  if (!w->parts && !w->whole) memset(own->sums, 0, (size_t)(n * w->tiles) * sizeof(found_tile));
  for (int64_t at = 0; at < lines; at += span) {
    for (int64_t i = 0; i < n; i++) {
      const panel_pair p = pair_at(l, w, pair + i);
      int64_t next = pair, next_at = at;
      if (i + 1 < n) next += i + 1;
      else if (at + span < lines) next_at += span;
      else next += n, next_at = 0;
      stretch s = stretch_at(l, w, own->spread, &p, at, next, next_at);
      for (int64_t j = 0; j < w->tiles; j += 2 - digits) {
        const int two = !digits && j + 1 < w->tiles;
        const token_tile t[2] = {tile_at(w, j), tile_at(w, j + two)};
        found_tile *f = own->sums + (once ? 0 : i * w->tiles + j);
        step(l, w, &s, &p, t, own, f, two);
        if (late || at + s.lines < lines) continue;
        finish_tile(l, w, j, t, &p, first, f); /* the last of its inputs, and still in L1 */
        if (two) finish_tile(l, w, j + 1, t + 1, &p, first, f + 1);
      }
    }
  }
  if (late) finish_pairs(l, w, first, pair, n, own->sums);
}

/* The same where a step completes its sums and no cache has the outputs: some tokens times all of these
 * pairs after each other, so that a row's outputs are written side by side. Where they are cached, this
 * is 5 to 10% slower. */
static void multiply_side_by_side(const lezero_linear *l, const workspace *w, const own_space *own,
                                  int64_t first, int64_t pair, int64_t n) {
  step_function *const step = step_of(l, w);
  panel_pair p[SIDE_BY_SIDE];
  stretch s[SIDE_BY_SIDE];
  for (int64_t i = 0; i < n; i++) {
    p[i] = pair_at(l, w, pair + i);
    s[i] = stretch_at(l, w, own->spread + i * SPREAD_PAIR, p + i, 0, pair + n + i, 0);
  }
  for (int64_t j = 0; j < w->tiles; j += 2) {
    const int two = j + 1 < w->tiles;
    const token_tile t[2] = {tile_at(w, j), tile_at(w, j + two)};
    for (int64_t i = 0; i < n; i++) {
      step(l, w, s + i, p + i, t, own, own->sums, two);
      finish_tile(l, w, j, t, p + i, first, own->sums);
      if (two) finish_tile(l, w, j + 1, t + 1, p + i, first, own->sums + 1);
    }
  }
}

size_t lezero_linear_own_scratch(const lezero_linear *l, int64_t count) {
  const workspace w = lay_out(l, count, (char *)64);
  return w.lines ? own_at(l, &w, (char *)64).bytes : 0;
}

void lezero_linear_multiply(const lezero_linear *l, int64_t first, int64_t count,
                            const void *scratch, void *own, int64_t begin, int64_t end) {
  const workspace w = lay_out(l, count, (char *)scratch);
  if (!w.lines) {
    multiply_vectors(l, first, count, scratch, begin, end);
    return;
  }
  const own_space space = own_at(l, &w, own);
  const int depth = w.parts || w.whole ? LINE : (int)least(w.block, LINE);
  tiles_configure(shapes_of(depth, (int)w.rows + (w.longer > 0)));
  for (int64_t pair = begin, n; pair < end; pair += n) {
    n = least(pairs_of(l, &w), end - pair);
    if (side_by_side(l, &w)) multiply_side_by_side(l, &w, &space, first, pair, n);
    else multiply_pairs(l, &w, &space, first, pair, n);
  }
  tiles_release();
}
