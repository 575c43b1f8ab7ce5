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
 * Weights are read from memory once, each step fetching its part of the next pair's stretch. Those
 * that are multiplied in blocks become signed bytes once a stretch, so that their sums begin with 0,
 * not with `start`; or see [Note: rounded weights].
 */
enum { STRETCH = 18, TILE_BYTES = LINE * LINE_ROWS, ROW = 2 * LINE, COLD = 1 << 20 };

typedef struct {
  found_tile *sums;                   /* [pair][tile of tokens]: so far, ints or floats */
  int32_t (*found)[2][LINE_ROWS][32]; /* [this block or the one before][tile][row][output] */
  uint8_t *spread;                    /* [panel][line of a step]: signed bytes, or rounded to bf16 */
  size_t bytes;
} own_space;

/* A step's work, and the weights that are to be fetched meanwhile: lines of each panel for every line
 * of inputs. */
typedef struct {
  const uint8_t *weight[2], *next[2];
  int64_t begin, lines, fetches;
} stretch;

static int64_t stretch_of(const workspace *w) { return w->parts ? STRETCH : STRETCH / 2; }
static int64_t pairs_of(const workspace *w) { return w->parts ? 12 : 8; }

static own_space own_at(const workspace *w, char *base) {
  own_space own;
  char *at = base;
  own.sums = (found_tile *)at, at += pairs_of(w) * w->tiles * (int64_t)sizeof(found_tile);
  own.found = (int32_t(*)[2][LINE_ROWS][32])at, at += 2 * (int64_t)sizeof *own.found;
  own.spread = (uint8_t *)at, at += 2 * (STRETCH + 1) * TILE_BYTES;
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

/* Whether codes of 8 bits are multiplied as they lie, from 0 to 255: less 128 takes a copy of them,
 * which pays from a few tiles on. */
static int in_bytes(const lezero_linear *l, const workspace *w) {
  return l->bits == 8 && (l->zero || w->tiles < 4);
}

static step_function *step_of(const lezero_linear *l, const workspace *w) {
  if (w->parts) return bf16_step;
  if (w->whole) return whole_step;
  if (w->digits == 2) return in_bytes(l, w) ? a16_bytes_step : a16_step;
  if (w->fine) return in_bytes(l, w) ? b8_bytes_step : b8_step;
  return in_bytes(l, w) ? a8_bytes_step : a8_step;
}

/* A byte for each weight of 4 bits less `middle`, in lines: two for each line that is read. */
static void spread_halves(uint8_t *to, const uint8_t *from, int64_t lines, int middle) {
  const ints less = _mm512_set1_epi8((char)middle);
  for (int64_t i = 0; i < lines * LINE_ROWS / 2; i++, to += 2 * LINE) {
    const ints line = load_line(from + i * LINE);
    _mm512_store_si512(to, _mm512_sub_epi8(low_halves(line), less));
    _mm512_store_si512(to + LINE, _mm512_sub_epi8(high_halves(line), less));
  }
}

static int64_t lines_of(const workspace *w) { return w->padded / (w->parts ? LINE / 2 : LINE); }

/* Codes of 8 bits less 128. */
static void spread_bytes(uint8_t *to, const uint8_t *from, int64_t lines) {
  const ints turn = _mm512_set1_epi8((char)128);
  for (int64_t i = 0; i < lines * LINE_ROWS; i++, to += LINE, from += LINE)
    _mm512_store_si512(to, _mm512_xor_si512(load_line(from), turn));
}

/* Lines of inputs that a step goes over: as many in each one, and whole blocks. */
static int64_t span_of(const workspace *w) {
  const int64_t lines = lines_of(w), steps = (lines + stretch_of(w) - 1) / stretch_of(w);
  return round_up((lines + steps - 1) / steps, !w->whole && !w->parts && w->block > LINE ? 2 : 1);
}

/* [Note: rounded weights]
 * A line of bf16 for each 32 inputs of a panel of 8 or 4 bits: (code - zero point) · scale, rounded
 * twice in fp32 and then to bf16, as dequantize_packed() and pack_bf16() do. Once a stretch, for all
 * tokens; a few take longer for that than for the products. */
INLINE ints rounded_pairs(floats first, floats second) {
  const ints order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                      7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (ints)_mm512_cvtne2ps_pbh(second, first));
}

INLINE floats code_at(ints line, const int at, const int bits) {
  if (bits == 4) /* looked up by the lowest four bits of a lane */
    return _mm512_permutexvar_ps(_mm512_srli_epi32(line, at),
                                 _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  const ints code = _mm512_and_si512(_mm512_srli_epi32(line, at), all_ints((1 << bits) - 1));
  return float_of(code);
}

INLINE void round_line(uint8_t *to, const uint8_t *from, floats scale, floats zero, const int bits) {
  for (int i = 0; i < bits; i++) { /* lines that are read */
    const ints line = load_line(from + i * LINE);
    for (int half = 0; half < 8; half += bits)
      for (int at = half; at < 32; at += 16, to += LINE) {
        const floats first = difference(code_at(line, at, bits), zero);
        const floats second = difference(code_at(line, at + 8, bits), zero);
        _mm512_store_si512(to, rounded_pairs(product(first, scale), product(second, scale)));
      }
  }
}

static void round_lines(const lezero_linear *l, const panel_pair *p, int panel, uint8_t *to,
                        const uint8_t *from, int64_t line, int64_t lines) {
  const int64_t last = l->group ? (l->K - 1) / l->group : 0; /* padding has no scale of its own */
  for (int64_t i = line; i < line + lines; i++, to += TILE_BYTES, from += 64 * l->bits) {
    const int64_t group = l->group ? least(i * (LINE / 2) / l->group, last) : 0;
    const floats scale = read16(p->scale[panel], l->scale_type, 16 * group, 16);
    const floats zero = l->zero ? read16(p->zero[panel], l->scale_type, 16 * group, 16)
                                : all_floats(l->bits == 8 ? 128 : 8);
    if (l->bits == 8) round_line(to, from, scale, zero, 8);
    else round_line(to, from, scale, zero, 4);
  }
}

/* Pair i of n from `pair` on, from the line `at` of `lines` on. */
static stretch stretch_at(const lezero_linear *l, const workspace *w, const own_space *own,
                          const panel_pair *p, int64_t pair, int64_t i, int64_t n, int64_t at,
                          int64_t lines) {
  /* Bytes of a line in a panel. */
  const int64_t line = l->rounded ? 64 * l->bits : l->bits == 4 ? TILE_BYTES / 2 : TILE_BYTES;
  const int64_t span = span_of(w);
  const int64_t steps = w->digits == 2 && !w->parts ? w->tiles : (w->tiles + 1) / 2;
  stretch s = {.begin = at, .lines = least(span, lines - at)};
  int64_t next = pair, next_at = at;
  if (i + 1 < n) next += i + 1;
  else if (at + span < lines) next_at += span;
  else next += n, next_at = 0;
  const panel_pair q = pair_at(l, w, next);
  for (int j = 0; j < 2; j++) {
    s.weight[j] = p->weight[j] + at * line, s.next[j] = q.weight[j] + next_at * line;
    if (!l->rounded && (l->bits == 16 || w->whole || in_bytes(l, w))) continue;
    uint8_t *spread = own->spread + j * (STRETCH + 1) * TILE_BYTES;
    if (l->rounded) round_lines(l, p, j, spread, s.weight[j], at, s.lines);
    else if (l->bits == 8) spread_bytes(spread, s.weight[j], s.lines);
    else spread_halves(spread, s.weight[j], s.lines, l->zero ? 0 : 8);
    s.weight[j] = spread;
  }
  s.fetches = (s.lines * line / LINE + steps * s.lines - 1) / (steps * s.lines);
  return s;
}

/* Biases of 16 outputs from the first one on. */
INLINE floats bias_at(const lezero_linear *l, int64_t first) {
  return l->bias ? read16(l->bias, LEZERO_FP32, first, 16) : all_floats(0);
}

/* finish() of bf16 sums for bf16: a pair of panels is a line of a row. */
static void finish_line(const lezero_linear *l, const token_tile *t, const panel_pair *p, int64_t first,
                        const found_tile *f) {
  const floats low = bias_at(l, p->first), high = bias_at(l, p->first + 16);
  uint16_t *to = (uint16_t *)l->out + (first + t->row) * l->N + p->first;
  for (int64_t r = 0; r < t->rows; r++, to += l->N) {
    const floats v = sum_of(f->sum[r][0], low), u = sum_of(f->sum[r][1], high);
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
static void finish_gated(const lezero_linear *l, int64_t tile, const token_tile *t, const panel_pair *p,
                         const found_tile *f) {
  const int64_t F = l->N / 2;
  const floats low = bias_at(l, p->first), high = bias_at(l, F + p->first);
  char *to = (char *)l->out + tile * LINE_ROWS * F * 2 + p->first / 32 * TILE_BYTES + p->first % 32 * 2;
  for (int64_t r = 0; r < t->rows; r++, to += LINE) {
    const floats gate = sum_of(f->sum[r][0], low), up = sum_of(f->sum[r][1], high);
    write16(to, LEZERO_BF16, 0, 16, product(silu(gate), up));
  }
}

static void finish_tile(const lezero_linear *l, const workspace *w, int64_t tile, const token_tile *t,
                        const panel_pair *p, int64_t first, found_tile *f) {
  const int line = l->x_type == LEZERO_BF16 && p->outputs[1] == 16;
  if (l->gated) finish_gated(l, tile, t, p, f);
  else if (w->parts && line) finish_line(l, t, p, first, f);
  else if (w->whole && line) finish_whole_line(l, t, p, first, f);
  else {
    if (w->whole) add_start(t, f);
    finish(l, w, t, p, first, f);
  }
}

INLINE int64_t output_row(const lezero_linear *l) { return l->N * (l->x_type == LEZERO_FP32 ? 4 : 2); }

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

/* All tokens times n pairs of panels from `pair` on. */
static void multiply_pairs(const lezero_linear *l, const workspace *w, const own_space *own,
                           int64_t first, int64_t pair, int64_t n) {
  const int64_t lines = lines_of(w);
  const int digits = !w->parts && w->digits == 2;
  const int apart = !w->parts && !w->whole; /* blocks, whose sums leave the tiles */
  const int once = !apart && span_of(w) == lines; /* sums that are complete at once */
  const int late = !once && !l->gated && w->tokens * output_row(l) > COLD;
  step_function *const step = step_of(l, w);
  if (apart) memset(own->sums, 0, (size_t)(n * w->tiles) * sizeof(found_tile));
  for (int64_t at = 0; at < lines; at += span_of(w)) {
    for (int64_t i = 0; i < n; i++) {
      const panel_pair p = pair_at(l, w, pair + i);
      stretch s = stretch_at(l, w, own, &p, pair, i, n, at, lines);
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

size_t lezero_linear_own_scratch(const lezero_linear *l, int64_t count) {
  const workspace w = lay_out(l, count, (char *)64);
  return w.lines ? own_at(&w, (char *)64).bytes : 0;
}

void lezero_linear_multiply(const lezero_linear *l, int64_t first, int64_t count,
                            const void *scratch, void *own, int64_t begin, int64_t end) {
  const workspace w = lay_out(l, count, (char *)scratch);
  if (!w.lines) {
    multiply_vectors(l, first, count, scratch, begin, end);
    return;
  }
  const own_space space = own_at(&w, own);
  const int depth = w.parts || w.whole ? LINE : (int)least(w.block, LINE);
  tiles_configure(shapes_of(depth, (int)w.rows + (w.longer > 0)));
  for (int64_t pair = begin; pair < end; pair += pairs_of(&w))
    multiply_pairs(l, &w, &space, first, pair, least(pairs_of(&w), end - pair));
  tiles_release();
}
