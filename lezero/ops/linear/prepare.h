/* Tokens as the multiplication reads them. Included by tiles.h.
 *
 * [Note: tiles of tokens]
 * The tokens are split evenly into tiles of at most `most` rows. In a tile of R tokens with D digits
 * each, what is multiplied lies as [four inputs][R][D][which of the four], so that one 4-byte
 * broadcast after the other is read in order, whatever K is. bf16 lies as [high, low part][pair of
 * inputs][R][which of the pair]. Where WORDS is set a token's codes lie as words, of 16 bits
 * whatever they count, as [four inputs][R][first, third, second, fourth of them]: a kernel multiplies
 * the even and the odd ones apart, and one sum does for both digits. Where FLOATS is
 * set a token lies beside bf16 weights as [pair of inputs][R][which of the pair] in fp32, in one part.
 * Beside it, for each block of inputs: `start`, what the whole-number sum of each digit begins with,
 * -middle · its sum (0 where there are zero points); `total`, the sum of each token as a float; and the
 * scale of each token, or of each of its blocks.
 *
 * [Note: tokens in lines]
 * Matrix units take a token's inputs in lines of 64 bytes, 64 inputs of 8 bits or 32 of bf16: a tile
 * of tokens then lies as [line][digit, or part of bf16][16 rows][64 bytes], whatever rows it has.
 */

/* Whether this problem's tokens are laid out in lines; a kernel with a matrix unit defines it. */
#ifndef IN_LINES
#define IN_LINES(l) 0
#endif
/* Whether a kernel multiplies 8-bit weights less 128, since its bytes are signed. */
#ifndef SIGNED_BYTES
#define SIGNED_BYTES 0
#define load_bytes load_line
#endif
enum { LINE_ROWS = 16 }; /* of a tile in lines */

typedef struct {
  int64_t tokens, padded, block, blocks;
  int64_t in_group;             /* blocks of a group */
  int64_t pair, scales;         /* bytes of a pair of panels, and of its scales */
  int64_t part, step;           /* bytes of the next pair that a tile, and an iteration fetches */
  int64_t digits, width; /* sums of whole numbers a token; bytes of an input */
  int words;             /* whether a token's codes lie as words */
  int whole, parts; /* whole: one sum over all inputs; parts: of bf16, high only or high and low */
  int fine;         /* a token has a scale for each block: 16 bits, or 8 that say so */
  int lines;        /* [Note: tokens in lines] */
  int64_t tiles, rows, longer; /* rows of a tile, and how many tiles have one more */
  int8_t *codes;
  int32_t *start;
  float *total, *scale;
  size_t bytes;
} workspace;

typedef struct {
  int64_t row, rows; /* the first token, among those prepared, and how many */
  int8_t *codes;
  int32_t *start;
  float *total, *scale;
} token_tile;

/* Whether products are those of bf16. */
INLINE int in_bf16(const lezero_linear *l) { return l->bits == 16 || l->rounded; }
/* Inputs that share a scale, of the token or of the weight; at most 128. */
INLINE int64_t block_of(const lezero_linear *l) {
  return l->x_block ? l->x_block : l->group % 128 == 0 ? 128 : l->group % 64 == 0 ? 64 : 32;
}
#ifdef FEW_TOKENS /* with AMX */
/* How many tokens vectors multiply at least as fast as tiles; measured, see lab-notes.md. */
INLINE int64_t few_tokens(const lezero_linear *l) {
  if (l->x_block ? l->x_block < 64 : l->group % 64 != 0) return 12;
  return l->bits == 8 && l->x_bits == 16 ? 4 : 6;
}

/* How many tokens bf16 multiplies at least as fast as whole numbers, whose sums leave the tiles at each
 * block; measured too. */
INLINE int64_t many_tokens(const lezero_linear *l) {
  const int64_t block = block_of(l);
  if (l->x_bits == 16 || l->x_block) return block < 128 ? 64 : 128;
  return block == 128 ? INT64_MAX : block == 64 ? 192 : 64;
}
#endif
/* What is left of a row's scale in [Note: rounded weights]; a kernel with a matrix unit defines it. */
#ifndef LEFT_OF_SCALE
#define LEFT_OF_SCALE(scale) (scale)
#endif
/* What the sums of a panel are multiplied with as they go out: of the scales of its rows, at `scale`, what
 * is no part of what was summed. */
INLINE floats row_scale(const lezero_linear *l, const workspace *w, const char *scale) {
  if (w->whole) return read16(scale, l->scale_type, 0, 16);
  return l->rounded && !l->group ? LEFT_OF_SCALE(read16(scale, l->scale_type, 0, 16)) : all_floats(1);
}

/* From how many tokens on a problem is solved faster if it is rounded; a kernel with a matrix unit
 * defines it. */
#ifndef MANY_TOKENS
#define MANY_TOKENS(l) INT64_MAX
#endif
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Bytes of a panel's codes, and of its scales. */
INLINE int64_t panel_bytes(const lezero_linear *l) {
  return round_up(l->K, l->bits == 16 ? 32 : 64) * 2 * l->bits;
}
INLINE int64_t scale_bytes(const lezero_linear *l) {
  const int64_t groups = l->group ? (l->K + l->group - 1) / l->group : 1;
  return groups * 16 * (l->scale_type == LEZERO_FP32 ? 4 : 2);
}

static workspace lay_out(const lezero_linear *l, int64_t tokens, char *base) {
  workspace w = {0};
  w.tokens = tokens, w.lines = IN_LINES(l);
  int64_t most = MOST_BF16;
  if (in_bf16(l)) {
    w.padded = round_up(l->K, l->bits == 16 ? 32 : 64);
    w.parts = l->x_type == LEZERO_BF16 || FLOATS ? 1 : 2;
    w.digits = 1, w.width = FLOATS ? 4 : 2 * w.parts, w.block = w.padded;
  } else {
    w.padded = round_up(l->K, 64), w.fine = l->x_bits == 16 || l->x_block;
    w.words = WORDS(l->bits, l->x_bits / 8), w.digits = l->x_bits == 16 && !w.words ? 2 : 1;
    w.width = l->x_bits == 16 || w.words ? 2 : 1;
    w.whole = !w.fine && l->bits == 8 && !l->group && !l->zero;
    w.block = w.whole ? w.padded : block_of(l);
    most = l->bits == 4 ? MOST_HALVES : MOST_BLOCKS;
    most = w.whole ? MOST_WHOLE : w.digits == 2 ? MOST_DIGITS : most;
  }
  w.blocks = (l->K + w.block - 1) / w.block; /* padding beyond the last one is not read */
  w.in_group = l->group ? l->group / w.block : w.blocks;
  w.pair = 2 * w.padded * 2 * l->bits, w.scales = 2 * scale_bytes(l);
  if (w.lines) most = LINE_ROWS;
  w.tiles = (tokens + most - 1) / most;
  if (w.tiles) {
    w.rows = tokens / w.tiles, w.longer = tokens % w.tiles;
    w.part = w.pair / w.tiles, w.step = (AT_ONCE(MOST_ROWS) * LINE + w.tiles - 1) / w.tiles;
  }
  const int64_t rows = w.lines ? w.tiles * LINE_ROWS : tokens;
  char *at = base;
  w.codes = (int8_t *)at, at += round_up(rows * w.padded * w.width, 64);
  w.start = (int32_t *)at, at += round_up(tokens * w.blocks * w.digits * 4, 64);
  w.total = (float *)at, at += round_up(tokens * w.blocks * 4, 64);
  w.scale = (float *)at, at += round_up(tokens * w.blocks * 4, 64);
  w.bytes = (size_t)(at - base);
  return w;
}

static token_tile tile_at(const workspace *w, int64_t index) {
  token_tile t;
  t.row = index * w->rows + least(index, w->longer), t.rows = w->rows + (index < w->longer);
  t.codes = w->codes + (w->lines ? index * LINE_ROWS : t.row) * w->padded * w->width;
  t.start = w->start + t.row * w->blocks * w->digits;
  t.total = w->total + t.row * w->blocks, t.scale = w->scale + t.row * w->blocks;
  return t;
}

/* Bytes from a token of a tile to the next, from a digit or part to the next, from four inputs (bf16:
 * a pair) to the next, and from a line's worth of inputs to the next. */
typedef struct {
  int64_t row, digit, four, line;
} token_steps;

static token_steps steps_of(const workspace *w, int64_t rows) {
  if (w->lines) {
    const int64_t digits = w->parts ? w->parts : w->digits;
    return (token_steps){LINE, LINE * LINE_ROWS, 4, LINE * LINE_ROWS * digits};
  }
  if (w->parts)
    return (token_steps){PAIR_BYTES, w->padded * 2 * rows, PAIR_BYTES * rows, 16 * PAIR_BYTES * rows};
  return (token_steps){4 * w->width, 4, 4 * rows * w->width, 64 * rows * w->width};
}

/* Calls `inner` with the type of x as a literal. */
#define BY_TYPE(type, inner, ...)                                \
  (type == LEZERO_BF16   ? inner(__VA_ARGS__, LEZERO_BF16)       \
   : type == LEZERO_FP32 ? inner(__VA_ARGS__, LEZERO_FP32)       \
                         : inner(__VA_ARGS__, LEZERO_FP16))

#include "codes.h"

static void prepare_bf16(const lezero_linear *l, const workspace *w, const token_tile *t, int64_t r,
                         const void *x) {
  const token_steps step = steps_of(w, t->rows);
  int8_t pairs[8 * PAIR_BYTES];
  if (w->lines && l->x_type == LEZERO_BF16) { /* as it is, line by line */
    int8_t *to = t->codes + r * step.row;
    const char *from = x;
    int64_t left = 2 * l->K;
    for (; left >= LINE; left -= LINE, from += LINE, to += step.line) memcpy(to, from, LINE);
    for (const int8_t *end = t->codes + r * step.row + w->padded / 32 * step.line; to < end;
         to += step.line, left = 0) {
      memset(to, 0, LINE);
      memcpy(to, from, (size_t)left);
    }
    return;
  }
  for (int part = 0; part < w->parts; part++) {
    int8_t *to = t->codes + part * step.digit + r * step.row;
    for (int64_t i = 0; i < w->padded; i += 16) {
      const floats v = i < l->K ? read16(x, l->x_type, i, l->K - i) : all_floats(0);
      int8_t *at = to + (i >> 5) * step.line + (i & 31) / 2 * step.four;
      store_pairs(pairs, v, part), scatter(at, pairs, 8, PAIR_BYTES, step.four);
    }
  }
}

int lezero_linear_rounds(const lezero_linear *l) {
  return l->bits < 16 && l->x_type == LEZERO_BF16 && !l->x_scale && l->M >= MANY_TOKENS(l);
}

size_t lezero_linear_scratch(const lezero_linear *l, int64_t count) {
  return lay_out(l, count, (char *)64).bytes;
}

int64_t lezero_linear_tiles(const lezero_linear *l, int64_t count) {
  return lay_out(l, count, (char *)64).tiles;
}

int64_t lezero_linear_pairs(const lezero_linear *l) { return (l->N + 31) / 32; }

int lezero_linear_gates(const lezero_linear *l, const lezero_linear *next) {
  const int halves = l->N == 2 * next->K && next->K % LINE == 0 && l->M == next->M;
  return halves && IN_LINES(l) && in_bf16(l) && l->x_type == LEZERO_BF16 && IN_LINES(next) &&
         in_bf16(next) && next->x_type == LEZERO_BF16;
}

lezero_ahead lezero_linear_part(const lezero_linear *l, int64_t begin, int64_t end) {
  const int64_t panels = l->gated ? 1 : 2; /* that follow each other */
  const int64_t panel = panel_bytes(l), scales = panels * begin * scale_bytes(l);
  lezero_ahead a = {(const char *)l->weight + panels * begin * panel, 0, 0, 0};
  if (l->scale) a.scale = (const char *)l->scale + scales;
  if (l->zero) a.zero = (const char *)l->zero + scales;
  a.left = least(panels * end, (l->N + 15) / 16) * panel - panels * begin * panel;
  return a;
}

void lezero_linear_prepare(const lezero_linear *l, int64_t first, int64_t count, void *scratch,
                           int64_t begin, int64_t end) {
  const workspace w = lay_out(l, count, scratch);
  const int64_t size = l->x_type == LEZERO_FP32 ? 4 : 2;
  for (int64_t index = begin; index < end; index++) {
    const token_tile t = tile_at(&w, index);
    const char *x = (const char *)l->x + (first + t.row) * l->K * size;
    if (!in_bf16(l)) prepare_codes(l, &w, &t, x);
    else
      for (int64_t r = 0; r < t.rows; r++) prepare_bf16(l, &w, &t, r, x + r * l->K * size);
  }
}
