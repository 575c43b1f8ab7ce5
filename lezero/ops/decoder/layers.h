/* All layers of a decoder in one parallel region, over the primitives of one instruction set.
 *
 * [Note: a crew]
 * Starting a parallel region costs as much as multiplying a token with a small matrix, and a layer
 * has nine steps. So the region is opened once for all layers; its workers, which all run at once,
 * meet at a barrier between steps. Work is split by worker, the same way every time.
 *
 * [Note: rows by themselves]
 * Whatever a row of the step is computed from, it is computed by the same operations in the same
 * order alone or beside others, in a chunk or token by token: sums run along inputs, keys are taken
 * in tiles of 64 and ranges of 256 that begin at multiples of these in the sequence, and keys that
 * another row of the same tile sees have the weight 0.
 */
#include <math.h>
#include <sched.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 16")

#include "../linear/ahead.h"
#include "power.h"

enum {
  TILE = 64, /* keys that one round of the softmax takes */
  TILE_BLOCKS = TILE / LEZERO_BLOCK,
  TILE_PAIRS = TILE / 2 * PAIR_BYTES, /* bytes of a row's weights */
  MOST_BY_VECTORS = MOST_BF16 < 12 ? MOST_BF16 : 12,
#ifdef TILES
  MOST_QUERIES = 16,
#else
  MOST_QUERIES = MOST_BY_VECTORS,
#endif
  WIDEST = 256, /* width of a head */
  RANGE = 256,  /* keys, see [Note: ranges] */
  MOST_RANGES = 1024,
  BEST_BYTES = 16, /* of a best_logit */
  MOST_ALONE = 1 << 22, /* bytes of all workers, see [Note: alone] */
  MOST_AHEAD = 1 << 18, /* bytes, see [Note: fetching meanwhile] */
};
#define LOWEST (-1e30f)

typedef struct {
  int32_t chunk, row, rows; /* row: within the chunk */
} piece;

/* What rows of a tile found among the keys of a range: sums of values, and of weights. */
typedef struct {
  float most[MOST_QUERIES], total[MOST_QUERIES], out[MOST_QUERIES][WIDEST];
} range_sums;

typedef struct {
  struct shared_state *shared;
  piece *pieces;
  char *rows;     /* (T, max of D, H E, F) what is prepared next, in the type of its weight */
  char *normal;   /* (T, D) the same after a norm, apart where workers do not wait for each other */
  char *found;    /* (T, max of what comes out) */
  char *delta;    /* (T, D) what is added to the residual stream next */
  uint16_t *queries; /* (T, H, E) turned; bf16 and scaled, or int16 beside a cache of codes */
  float *query_scales; /* (T, H), beside a cache of codes */
  range_sums *sums;
  void *prepared;
  void *gated;    /* what the last product of a layer multiplies, where gates wrote it */
  struct best_logit *best; /* (crew, rows) */
  char *own;      /* of each worker, `each` bytes: for products, and [Note: alone] */
  size_t each, alone_x, alone_rows, alone_prepared, bytes;
  size_t prepared_each, gated_each; /* of a worker, see [Note: own tokens] */
  int alone, by_tokens;
} layout;

struct shared_state {
  int64_t meets;  /* barriers met so far, times the crew */
  int64_t pieces; /* of chunks, that lie in one cache block each */
  layout layout;
};

/* Of what goes into a product and comes out. */
static int type_of(const lezero_step *s, const lezero_weight *w) {
  return w->bits == 16 || s->rounded ? LEZERO_BF16 : LEZERO_FP32;
}
static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

static lezero_linear linear_of(const lezero_step *s, const lezero_weight *w, int64_t N, int64_t K) {
  lezero_linear l = {0};
  l.M = s->T, l.N = N, l.K = K, l.x_type = type_of(s, w);
  l.bits = (int)w->bits, l.x_bits = (int)w->x_bits, l.x_block = w->x_block;
  l.group = w->group;
  l.weight = w->weight, l.scale = w->scale, l.zero = w->zero, l.scale_type = (int)w->scale_type;
  l.panels = (int)s->panels;
  l.bias = w->bias, l.rounded = s->rounded && w->bits != 16;
  return l;
}

static lezero_linear qkv_of(const lezero_step *s, const lezero_layer *y) {
  return linear_of(s, &y->qkv, (s->H + 2 * s->K) * s->E, s->D);
}
static lezero_linear out_of(const lezero_step *s, const lezero_layer *y) {
  return linear_of(s, &y->out, s->D, s->H * s->E);
}
static lezero_linear gate_up_of(const lezero_step *s, const lezero_layer *y) {
  return linear_of(s, &y->gate_up, 2 * s->F, s->D);
}
static lezero_linear down_of(const lezero_step *s, const lezero_layer *y) {
  return linear_of(s, &y->down, s->D, s->F);
}

/* Of the wanted rows; whatever the weight is, what goes in and comes out is fp32. */
static lezero_linear head_of(const lezero_step *s) {
  lezero_linear l = linear_of(s, s->head, s->V, s->D);
  l.M = s->rows, l.x_type = LEZERO_FP32, l.rounded = 0;
  return l;
}

static size_t whole_lines(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

static void *carve(char **at, size_t bytes) {
  char *found = *at;
  *at += whole_lines(bytes);
  return found;
}

static size_t larger_size(size_t a, size_t b) { return a > b ? a : b; }

static void make_room(const lezero_linear *l, int64_t count, size_t *prepared, size_t *own,
                      int64_t *tiles) {
  *prepared = larger_size(*prepared, lezero_linear_scratch(l, count));
  *own = (size_t)larger_of((int64_t)*own, (int64_t)lezero_linear_own_scratch(l, l->M));
  *tiles = larger_of(*tiles, lezero_linear_tiles(l, l->M));
}

/* See [Note: own tokens]. */
enum { OWN_TOKENS = 160 }; /* of a worker, at least */

static int by_tokens(const lezero_step *s) {
  if (s->crew < 2 || s->T < OWN_TOKENS * s->crew) return 0;
  for (int64_t i = 0; i < s->layers; i++) {
    const lezero_layer *y = s->layer + i;
    const lezero_linear gate_up = gate_up_of(s, y), down = down_of(s, y);
    if (!lezero_linear_gates(&gate_up, &down)) return 0;
    /* Rows of one type lie apart in every buffer, those of two types would lie across. */
    if (type_of(s, &y->qkv) != LEZERO_BF16 || type_of(s, &y->out) != LEZERO_BF16) return 0;
  }
  return 1;
}

/* The first of a worker's own tokens; whole tiles of them. */
static int64_t own_row(const lezero_step *s, int64_t worker) {
  return worker == s->crew ? s->T : s->T * worker / s->crew / 16 * 16;
}

static layout lay_out_step(const lezero_step *s, char *base) {
  layout a;
  char *at = base;
  const int64_t wide = larger_of(larger_of(s->D, s->H * s->E), s->F);
  const int64_t out = larger_of((s->H + 2 * s->K) * s->E, larger_of(2 * s->F, s->D));
  size_t prepared = 0, own = 0, gated = 0;
  int64_t tiles = 0;
  a.by_tokens = by_tokens(s);
  const int64_t parts = a.by_tokens ? s->crew : 1;
  const int64_t count = a.by_tokens ? s->T / s->crew + 32 : s->T; /* own_row() rounds */
  for (int64_t i = 0; i < s->layers; i++) {
    const lezero_layer *y = s->layer + i;
    const lezero_linear all[] = {qkv_of(s, y), out_of(s, y), gate_up_of(s, y), down_of(s, y)};
    for (int j = 0; j < 4; j++) make_room(all + j, count, &prepared, &own, &tiles);
    if (lezero_linear_gates(all + 2, all + 3))
      gated = larger_size(gated, lezero_linear_scratch(all + 3, count));
  }
  if (s->rows) {
    const lezero_linear head = head_of(s);
    make_room(&head, head.M, &prepared, &own, &tiles);
  }
  const size_t x = whole_lines((size_t)(s->T * s->D) * 4);
  const size_t rows = whole_lines((size_t)(s->T * wide) * 4);
  a.alone = tiles <= 1 && (size_t)s->crew * (x + rows + prepared) <= MOST_ALONE;
  a.alone_x = whole_lines(own), a.alone_rows = a.alone_x + x;
  a.alone_prepared = a.alone_rows + rows;
  a.each = a.alone ? a.alone_prepared + whole_lines(prepared) : whole_lines(own);
  a.shared = carve(&at, sizeof(struct shared_state));
  a.pieces = carve(&at, (size_t)s->T * sizeof(piece));
  a.rows = carve(&at, (size_t)(s->T * wide) * 4);
  a.normal = a.by_tokens ? carve(&at, x) : a.rows;
  a.found = carve(&at, (size_t)(s->T * out) * 4);
  a.delta = carve(&at, (size_t)(s->T * s->D) * 4);
  a.queries = carve(&at, (size_t)(s->T * s->H * s->E) * 2);
  a.query_scales = carve(&at, (size_t)(s->T * s->H) * 4);
  a.sums = carve(&at, MOST_RANGES * sizeof(range_sums)); /* memory is taken as it is used */
  a.prepared_each = whole_lines(prepared), a.gated_each = whole_lines(gated);
  a.prepared = carve(&at, a.prepared_each * (size_t)parts);
  a.gated = carve(&at, a.gated_each * (size_t)parts);
  a.best = carve(&at, (size_t)(s->crew * s->rows) * BEST_BYTES);
  a.own = carve(&at, a.each * (size_t)s->crew);
  a.bytes = (size_t)(at - base);
  return a;
}

size_t lezero_decoder_scratch(const lezero_step *s) { return lay_out_step(s, (char *)64).bytes; }

void lezero_decoder_begin(const lezero_step *s) {
  const layout a = lay_out_step(s, s->scratch);
  int64_t n = 0;
  for (int32_t c = 0; c < s->chunks; c++) {
    const lezero_chunk *chunk = s->chunk + c;
    for (int32_t row = 0; row < chunk->count;) {
      const int32_t left = LEZERO_BLOCK - (chunk->position + row) % LEZERO_BLOCK;
      const int32_t rows = left < chunk->count - row ? left : chunk->count - row;
      a.pieces[n++] = (piece){c, row, rows};
      row += rows;
    }
  }
  *a.shared = (struct shared_state){0, n, a};
}

#include "workers.h"

/* 1 / sqrt(mean of squares + eps) of n numbers. */
INLINE float inverse_rms(const void *x, int type, int64_t first, int64_t n, float eps) {
  floats sum = all_floats(0);
  for (int64_t i = 0; i < n; i += 16) {
    const floats v = read16(x, type, first + i, least_of(n - i, 16));
    sum = fused(v, v, sum);
  }
  return 1 / sqrtf(lanes_total(sum) / (float)n + eps);
}

/* x += delta for one row, then its norm to row `to` of `rows`, in `type`; weight 0: no norm. */
static void normalise(const worker *w, int64_t row, int64_t to, const float *weight, int type,
                      int delta_type) {
  const lezero_step *s = w->s;
  float *x = w->x + row * s->D;
  if (delta_type >= 0)
    for (int64_t i = 0; i < s->D; i += 16) {
      const int64_t n = least_of(s->D - i, 16);
      const floats v = read16(w->a.delta, delta_type, row * s->D + i, n);
      write16(x, LEZERO_FP32, i, n, sum_of(read16(x, LEZERO_FP32, i, n), v));
    }
  if (!weight) return;
  const floats factor = all_floats(inverse_rms(x, LEZERO_FP32, 0, s->D, s->eps));
  for (int64_t i = 0; i < s->D; i += 16) {
    fetch_some(w->ahead, 1);
    const int64_t n = least_of(s->D - i, 16);
    const floats v = product(read16(x, LEZERO_FP32, i, n), factor);
    write16(w->rows, type, to * s->D + i, n, product(v, read16(weight, LEZERO_FP32, i, n)));
  }
}

/* silu(gate) · up to `rows`, for one row. */
static void activate(const worker *w, int64_t row, int found_type, const lezero_weight *next) {
  const int64_t F = w->s->F, at = row * 2 * F;
  for (int64_t i = 0; i < F; i += 16) {
    fetch_some(w->ahead, 1);
    const int64_t n = least_of(F - i, 16);
    const floats gate = read16(w->a.found, found_type, at + i, n);
    const floats up = read16(w->a.found, found_type, at + F + i, n);
    write16(w->rows, type_of(w->s, next), row * F + i, n, product(silu(gate), up));
  }
}

/* Prepares the rows of a product, tile by tile, after `fill` wrote them (or null). */
typedef void filler(const worker *w, int64_t row, const void *how);

static void prepare(worker *w, lezero_linear *l, filler *fill, const void *how) {
  const int all = w->a.alone || w->by_tokens;
  l->ahead = w->ahead;
  l->x = fill ? w->rows : w->a.rows;
  const int64_t begin = w->first, count = w->count;
  const int64_t tiles = lezero_linear_tiles(l, count);
  const int64_t first = all ? 0 : from(w, tiles), end = all ? tiles : upto(w, tiles);
  const int64_t rows = count / tiles, longer = count % tiles; /* as the tiles are split */
  const int64_t last = end * rows + least_of(end, longer);
  if (fill)
    for (int64_t row = first * rows + least_of(first, longer); row < last; row++)
      fill(w, begin + row, how);
  lezero_linear_prepare(l, begin, count, w->prepared, first, end);
  if (!all) meet(w);
}

static void multiply_own(const worker *w, lezero_linear *l, const void *prepared, void *out) {
  l->out = out;
  const int64_t pairs = lezero_linear_pairs(l);
  char *own = w->a.own + w->begin * (int64_t)w->a.each;
  const int64_t begin = w->by_tokens ? 0 : from(w, pairs);
  const int64_t end = w->by_tokens ? pairs : upto(w, pairs);
  lezero_linear_multiply(l, w->first, w->count, prepared, own, begin, end);
}

static void multiply_prepared(worker *w, lezero_linear *l, const void *prepared, void *out,
                              const lezero_linear *next) {
  look_ahead(w, next);
  multiply_own(w, l, prepared, out);
  if (!w->by_tokens) meet(w);
}

static void multiply(worker *w, lezero_linear *l, void *out, const lezero_linear *next) {
  multiply_prepared(w, l, w->prepared, out, next);
}

#include "cache.h"
#include "attention.h"
#include "best.h"

typedef struct {
  const float *weight;
  const lezero_weight *next;
  int type; /* of what was found, or of delta: -1, there is none */
} filled_by;

static void fill_normalised(const worker *w, int64_t row, const void *how) {
  const filled_by *f = how;
  normalise(w, row, row, f->weight, type_of(w->s, f->next), f->type);
}

static void fill_wanted(const worker *w, int64_t row, const void *how) {
  const filled_by *f = how;
  normalise(w, w->s->row[row], row, f->weight, LEZERO_FP32, f->type);
}

static void fill_activated(const worker *w, int64_t row, const void *how) {
  const filled_by *f = how;
  activate(w, row, f->type, f->next);
}

void lezero_decoder_run(const lezero_step *s, int64_t begin, int64_t end) {
  lezero_ahead ahead = {0};
  worker state = worker_of(s, begin, end, &ahead), *w = &state;
  const lezero_linear head = s->rows ? head_of(s) : (lezero_linear){0};
  int delta = -1;
  for (int64_t i = 0; i < s->layers; i++) {
    const lezero_layer *y = s->layer + i;
    lezero_linear qkv = qkv_of(s, y), out = out_of(s, y), gate_up = gate_up_of(s, y),
                  down = down_of(s, y), next = i + 1 < s->layers ? qkv_of(s, y + 1) : head;
    gate_up.gated = lezero_linear_gates(&gate_up, &down);
    prepare(w, &qkv, fill_normalised, &(filled_by){y->norm1, &y->qkv, delta});
    multiply(w, &qkv, w->a.found, &out);
    if (w->by_tokens) meet(w); /* for the rows of blocks that two workers share */
    const int narrows = i + 1 == s->layers && few_wanted(s);
    if (narrows) w->asking = wanted_rows(s);
    attention(w, y, i, qkv.x_type);
    if (narrows) share(w, w->asking);
    if (narrows && !s->rows) return;
    prepare(w, &out, 0, 0);
    multiply(w, &out, w->a.delta, &gate_up);
    prepare(w, &gate_up, fill_normalised, &(filled_by){y->norm2, &y->gate_up, out.x_type});
    if (gate_up.gated) {
      multiply(w, &gate_up, w->gated, &down);
      multiply_prepared(w, &down, w->gated, w->a.delta, &next);
    } else {
      multiply(w, &gate_up, w->a.found, &down);
      prepare(w, &down, fill_activated, &(filled_by){0, &y->down, gate_up.x_type});
      multiply(w, &down, w->a.delta, &next);
    }
    delta = down.x_type;
  }
  if (s->rows) {
    if (w->by_tokens) meet(w);
    share(w, (row_range){0, s->rows});
    lezero_linear last = head;
    prepare(w, &last, fill_wanted, &(filled_by){s->norm, 0, delta});
    last.ahead = 0;
    multiply_own(w, &last, w->prepared, s->logits);
    if (!s->best) return;
    find_best(w, &last);
    meet(w);
    if (w->begin == 0) join_best(w);
    return;
  }
  const int64_t last = w->by_tokens ? w->first + w->count : upto(w, s->T);
  for (int64_t row = w->by_tokens ? w->first : from(w, s->T); row < last; row++) {
    normalise(w, row, row, 0, 0, delta);
    if (w->x != s->x) memcpy(s->x + row * s->D, w->x + row * s->D, (size_t)s->D * 4);
  }
}
