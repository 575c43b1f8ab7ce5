/* Attention over the cache of blocks (cache.h), included by layers.h. */

/* Query heads of one key head that are worked on together. */
typedef struct {
  const int32_t *blocks; /* of the sequence */
  int64_t layer, head, last; /* last: position of the last row */
  int rows, filled; /* see [Note: rows of a tile] */
  int only;         /* whether the chunk has no other of this head */
  int64_t position[MOST_QUERIES];
  const uint16_t *query[MOST_QUERIES];
  const int8_t *pairs; /* of inputs of the queries: [pair][row] */
  lezero_ahead *ahead;
  float scale[MOST_QUERIES]; /* of the query, where the cache has codes */
  int64_t to[MOST_QUERIES]; /* where the row's head begins in `rows` */
} query_tile;

/* [Note: rows of a tile]
 * Each number of rows is a function of its own, and compiling them takes most of a build. So there are
 * few, and a tile is filled up to the next one with copies of its last row, of which nothing is kept. */
INLINE int filled_up(int rows) {
  const int up = rows <= 4 ? rows : rows <= 6 ? 6 : rows <= 8 ? 8 : 12;
  return up < MOST_BY_VECTORS ? up : MOST_BY_VECTORS;
}

/* The first key that a row's tiles hold: where the window may begin. */
static int64_t first_key(const lezero_step *s, int64_t position) {
  return s->window && position >= s->window ? (position - s->window + 1) / TILE * TILE : 0;
}

/* [Note: chains]
 * A product waits for the sum before it, some six cycles on processors that could begin two a cycle.
 * So with few rows, several blocks of keys or panels of values are summed side by side; with more rows
 * two, since each number of a query that is read then serves two products. Each sum by itself runs in
 * the same order as ever. */

/* [Note: pairs of inputs]
 * Queries and weights are multiplied in pairs: as bf16 or, where that has no instruction, as the same
 * numbers in fp32, which need not be taken apart for each line of the cache; beside codes as words. */
INLINE int pair_bytes(const int codes) { return codes ? 4 : PAIR_BYTES; }

INLINE int32_t word_pair(const int8_t *at) {
  int32_t x;
  memcpy(&x, at, 4);
  return x;
}

/* [Note: fetching before]
 * A head's part of a block is 2 KiB, too little for what a processor fetches by itself. So while keys of
 * a tile are read, its values are fetched, and while these are read, the keys of the next tile (`next`). */

/* Scores of R rows with B blocks of keys. codes: the cache is in int8. */
INLINE void score_blocks(const lezero_step *s, const query_tile *q, const int32_t *table, int64_t b,
                         floats score[][TILE_BLOCKS], const int codes, const int R, const int B) {
  const char *block[TILE_BLOCKS], *values[TILE_BLOCKS];
  floats acc[MOST_QUERIES][TILE_BLOCKS];
  ints count[MOST_QUERIES][TILE_BLOCKS], k[TILE_BLOCKS];
  UNROLL for (int i = 0; i < B; i++) {
    block[i] = block_of(s, s->keys, q->layer, table[b + i], q->head);
    values[i] = block_of(s, s->values, q->layer, table[b + i], q->head);
    UNROLL for (int r = 0; r < R; r++) acc[r][i] = all_floats(0), count[r][i] = all_ints(0);
  }
  for (int64_t e = 0; e < s->E / 2; e++) {
    fetch_some(q->ahead, 1);
    if (!codes || e % 2) UNROLL for (int i = 0; i < B; i++) prefetch(values[i] + (codes ? 32 : 64) * e);
    UNROLL for (int i = 0; i < B; i++)
      k[i] = codes ? load_words(block[i] + 32 * e) : load_line(block[i] + 64 * e);
    UNROLL for (int r = 0; r < R; r++) {
      const int8_t *x = q->pairs + (e * R + r) * pair_bytes(codes);
      UNROLL for (int i = 0; i < B; i++) {
        if (codes) count[r][i] = dot_words(count[r][i], k[i], word_pair(x));
        else acc[r][i] = dot_pair(acc[r][i], k[i], read_pair(x));
      }
    }
  }
  UNROLL for (int i = 0; i < B; i++) {
    floats scale = all_floats(1);
    if (codes) scale = read16(scales_of(s, (char *)block[i]), LEZERO_BF16, 0, 16);
    UNROLL for (int r = 0; r < R; r++) {
      if (codes) acc[r][i] = product(float_of(count[r][i]), product(all_floats(q->scale[r]), scale));
      score[r][b + i] = acc[r][i];
    }
  }
}

/* What a round of the softmax knows of its rows. */
typedef struct {
  float most[16], shrink[16], step[MOST_QUERIES]; /* shrink: how much is left of earlier sums */
  floats total[MOST_QUERIES];
} softmax_rows;

/* out = out · shrink + weights · values for R rows and P panels of 16 channels, over `keys` keys. */
INLINE void gather_panels(const lezero_step *s, const query_tile *q, const int32_t *table,
                          int64_t keys, int64_t panel, int8_t weight[][TILE_PAIRS],
                          const softmax_rows *m, float out[][WIDEST], const int32_t *next,
                          const int codes, const int R, const int P) {
  const int64_t line = codes ? 32 : 64;
  floats acc[MOST_QUERIES][TILE_BLOCKS];
  ints count[MOST_QUERIES][TILE_BLOCKS], v[TILE_BLOCKS];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < P; i++) {
    acc[r][i] = product(read16(out[r], LEZERO_FP32, (panel + i) * 16, 16), all_floats(m->shrink[r]));
    count[r][i] = all_ints(0);
  }
  for (int64_t at = 0; at < keys; at += LEZERO_BLOCK) {
    const char *values = block_of(s, s->values, q->layer, table[at / LEZERO_BLOCK], q->head) +
                         panel * (LEZERO_BLOCK / 2) * line;
    const int64_t pairs = least_of(LEZERO_BLOCK, keys - at + 1) / 2;
    const char *after = block_of(s, s->keys, q->layer, next[at / LEZERO_BLOCK], q->head) +
                        panel * (LEZERO_BLOCK / 2) * line;
    for (int64_t pair = 0; pair < pairs; pair++) {
      fetch_some(q->ahead, 1);
      UNROLL for (int i = 0; i < P; i++) prefetch(after + (i * (LEZERO_BLOCK / 2) + pair) * line);
      UNROLL for (int i = 0; i < P; i++) {
        const char *place = values + (i * (LEZERO_BLOCK / 2) + pair) * line;
        v[i] = codes ? load_words(place) : load_line(place);
      }
      UNROLL for (int r = 0; r < R; r++) {
        const int8_t *x = weight[r] + (at / 2 + pair) * pair_bytes(codes);
        UNROLL for (int i = 0; i < P; i++) {
          if (codes) count[r][i] = dot_words(count[r][i], v[i], word_pair(x));
          else acc[r][i] = dot_pair(acc[r][i], v[i], read_pair(x));
        }
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < P; i++) {
    if (codes) acc[r][i] = fused(float_of(count[r][i]), all_floats(m->step[r]), acc[r][i]);
    write16(out[r], LEZERO_FP32, (panel + i) * 16, 16, acc[r][i]);
  }
}

/* Weights times the scales of their values as whole numbers; what 1 of them stands for. */
INLINE float whole_weights(const floats scaled[TILE_BLOCKS], int64_t blocks, int8_t weight[TILE_PAIRS]) {
  ints most = magnitude(all_floats(1e-30f)); /* so that 1 / step is finite */
  for (int64_t b = 0; b < blocks; b++) most = larger(most, magnitude(scaled[b]));
  const int32_t bits = largest_lane(most);
  float high;
  memcpy(&high, &bits, 4);
  const float step = high / 32767;
  for (int64_t b = 0; b < blocks; b++)
    store_words((uint16_t *)weight + b * LEZERO_BLOCK, rounded(quotient(scaled[b], all_floats(step))));
  return step;
}

/* Keys of row r that it does not see: those from `seen` on, and those before `hidden`. */
typedef struct {
  int64_t hidden, seen;
} sight;

INLINE sight sight_of(const lezero_step *s, const query_tile *q, int64_t base, int r) {
  const int64_t end = q->position[r] + 1 - base;
  return (sight){s->window ? end - s->window : 0, end};
}

INLINE int is_cut(const sight *v, int64_t at) { return v->seen < at + 16 || v->hidden > at; }

/* One round of the softmax: scores of the rows become weights. `only_lanes` of a weight comes last:
 * what another request left in the cache may be NaN. */
INLINE void weigh(const lezero_step *s, const query_tile *q, const int32_t *table, int64_t base,
                  int64_t blocks, floats score[][TILE_BLOCKS], int8_t weight[][TILE_PAIRS],
                  softmax_rows *m, const int codes, const int R) {
  float now[16] = {0};
  for (int r = 0; r < R; r++) {
    const sight v = sight_of(s, q, base, r);
    floats high = all_floats(LOWEST);
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t at = b * LEZERO_BLOCK;
      if (is_cut(&v, at)) score[r][b] = only_lanes(score[r][b], v.hidden - at, v.seen - at, LOWEST);
      high = most_of(score[r][b], high);
    }
    const float found = lanes_most(high);
    now[r] = found > m->most[r] ? found : m->most[r];
  }
  const floats highest = read16(now, LEZERO_FP32, 0, 16);
  const floats before = read16(m->most, LEZERO_FP32, 0, 16);
  write16(m->shrink, LEZERO_FP32, 0, 16, power_of_two(difference(before, highest)));
  write16(m->most, LEZERO_FP32, 0, 16, highest);
  for (int r = 0; r < R; r++) {
    const sight v = sight_of(s, q, base, r);
    floats total = product(m->total[r], all_floats(m->shrink[r]));
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t at = b * LEZERO_BLOCK;
      floats p = power_of_two(difference(score[r][b], all_floats(now[r])));
      if (codes) {
        char *values = block_of(s, s->values, q->layer, table[b], q->head);
        score[r][b] = product(p, read16(scales_of(s, values), LEZERO_BF16, 0, 16));
      }
      if (is_cut(&v, at)) {
        p = only_lanes(p, v.hidden - at, v.seen - at, 0);
        score[r][b] = only_lanes(score[r][b], v.hidden - at, v.seen - at, 0);
      }
      total = sum_of(total, codes ? p : store_weights(weight[r] + at / 2 * PAIR_BYTES, p));
    }
    m->total[r] = total;
    if (codes) m->step[r] = whole_weights(score[r], blocks, weight[r]);
  }
}

/* [Note: ranges]
 * The keys of a row are taken in ranges of 256, each with a softmax of its own, and what ranges found
 * is joined in their order. So it is the same whether one worker takes all ranges of a row or several
 * share them, which they do where there are too few tiles to be dealt evenly. A range that a row does
 * not see at all changes nothing. */

/* Keys that one round of the softmax takes, and where the next one's lie (or its own again). */
typedef struct {
  int64_t keys, blocks;
  const int32_t *table, *next;
} key_round;

INLINE key_round round_at(const query_tile *q, int64_t base, int64_t end) {
  const int64_t keys = least_of(end - base, TILE);
  const int32_t *table = q->blocks + base / LEZERO_BLOCK;
  const int more = base + TILE + keys <= q->last + 1;
  return (key_round){keys, (keys + LEZERO_BLOCK - 1) / LEZERO_BLOCK, table,
                     more ? table + TILE_BLOCKS : table};
}

/* What R rows find among the keys of a range. */
INLINE void attend(const lezero_step *s, const query_tile *q, int64_t range, range_sums *f,
                   const int codes, const int R) {
  const int64_t panels = s->E / 16, end = least_of((range + 1) * RANGE, q->last + 1);
  const int wide = MOST_SUMS >= 4 * R ? 4 : MOST_SUMS >= 2 * R ? 2 : 1; /* see [Note: chains] */
  int8_t weight[MOST_QUERIES][TILE_PAIRS] __attribute__((aligned(64)));
  float out[MOST_QUERIES][WIDEST];
  floats score[MOST_QUERIES][TILE_BLOCKS];
  softmax_rows m = {0};
  for (int r = 0; r < R; r++) {
    m.most[r] = LOWEST, m.total[r] = all_floats(0);
    memset(out[r], 0, (size_t)s->E * 4);
  }
  for (int64_t base = larger_of(range * RANGE, first_key(s, q->position[0])); base < end;
       base += TILE) {
    const key_round k = round_at(q, base, end);
    const int64_t keys = k.keys, blocks = k.blocks;
    const int32_t *table = k.table, *next = k.next;
    int64_t b = 0, panel = 0;
    for (; wide > 1 && b + wide <= blocks; b += wide)
      score_blocks(s, q, table, b, score, codes, R, wide);
    for (; b < blocks; b++) score_blocks(s, q, table, b, score, codes, R, 1);
    weigh(s, q, table, base, blocks, score, weight, &m, codes, R);
    for (; wide > 1 && panel + wide <= panels; panel += wide)
      gather_panels(s, q, table, keys, panel, weight, &m, out, next, codes, R, wide);
    for (; panel < panels; panel++)
      gather_panels(s, q, table, keys, panel, weight, &m, out, next, codes, R, 1);
  }
  for (int r = 0; r < R; r++) {
    f->most[r] = m.most[r], f->total[r] = lanes_total(m.total[r]);
    memcpy(f->out[r], out[r], (size_t)s->E * 4);
  }
}

#ifdef TILES
#include "attention_tiles.h"
#else
INLINE int by_tiles(const lezero_step *s) { return (void)s, 0; }
#endif

INLINE int64_t queries_at_once(const lezero_step *s) {
  return by_tiles(s) ? MOST_QUERIES : MOST_BY_VECTORS;
}

#define ATTEND(R)                                                                       \
  if (R <= MOST_BY_VECTORS && q->filled == R) {                                         \
    if (s->cache_bits == 8) attend(s, q, range, f, 1, R <= MOST_BY_VECTORS ? R : 1);    \
    else attend(s, q, range, f, 0, R <= MOST_BY_VECTORS ? R : 1);                       \
    return;                                                                             \
  }

static void __attribute__((noinline)) attend_any(const lezero_step *s, const query_tile *q,
                                                 int64_t range, range_sums *f) {
#ifdef TILES
  if (by_tiles(s)) {
    attend_tiles(s, q, range, f);
    return;
  }
#endif
  ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) ATTEND(6) ATTEND(8) ATTEND(12)
}

#include "attention_units.h"
