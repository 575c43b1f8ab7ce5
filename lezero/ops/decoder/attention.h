/* Attention over the cache of blocks (cache.h), included by layers.h. */

/* Query heads of one key head that are worked on together. */
typedef struct {
  const int32_t *blocks; /* of the sequence */
  int64_t layer, head, last; /* last: position of the last row */
  int rows, filled; /* see [Note: rows of a tile] */
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
  return up < MOST_QUERIES ? up : MOST_QUERIES;
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
    if (codes) scale = read16(scales_of(s, block[i]), LEZERO_BF16, 0, 16);
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
  write16(m->shrink, LEZERO_FP32, 0, 16, power_of_two(fused_less(all_floats(1), highest, before)));
  write16(m->most, LEZERO_FP32, 0, 16, highest);
  for (int r = 0; r < R; r++) {
    const sight v = sight_of(s, q, base, r);
    floats total = product(m->total[r], all_floats(m->shrink[r]));
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t at = b * LEZERO_BLOCK;
      floats p = power_of_two(sum_of(score[r][b], all_floats(-now[r])));
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
    const int64_t keys = least_of(end - base, TILE);
    const int64_t blocks = (keys + LEZERO_BLOCK - 1) / LEZERO_BLOCK;
    const int32_t *table = q->blocks + base / LEZERO_BLOCK;
    const int32_t *next = base + TILE + keys <= q->last + 1 ? table + TILE_BLOCKS : table;
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

#define ATTEND(R)                                                                \
  if (R <= MOST_QUERIES && q->filled == R) {                                     \
    if (s->cache_bits == 8) attend(s, q, range, f, 1, R <= MOST_QUERIES ? R : 1); \
    else attend(s, q, range, f, 0, R <= MOST_QUERIES ? R : 1);                    \
    return;                                                                      \
  }

static void __attribute__((noinline)) attend_any(const lezero_step *s, const query_tile *q,
                                                 int64_t range, range_sums *f) {
  ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) ATTEND(6) ATTEND(8) ATTEND(12)
}

/* Joins what the next range found to `all`. */
static void join(const lezero_step *s, int rows, range_sums *all, const range_sums *next) {
  for (int r = 0; r < rows; r++) {
    const float now = next->most[r] > all->most[r] ? next->most[r] : all->most[r];
    const floats a = power_of_two(all_floats(all->most[r] - now));
    const floats b = power_of_two(all_floats(next->most[r] - now));
    for (int64_t i = 0; i < s->E; i += 16) {
      const floats sum = product(read16(all->out[r], LEZERO_FP32, i, 16), a);
      write16(all->out[r], LEZERO_FP32, i, 16,
              fused(read16(next->out[r], LEZERO_FP32, i, 16), b, sum));
    }
    const floats total = product(all_floats(all->total[r]), a);
    float joined[16];
    write16(joined, LEZERO_FP32, 0, 16, fused(all_floats(next->total[r]), b, total));
    all->most[r] = now, all->total[r] = joined[0];
  }
}

static void write_rows(const worker *w, const query_tile *q, int type, const range_sums *f) {
  for (int r = 0; r < q->rows; r++)
    for (int64_t i = 0; i < w->s->E; i += 16) {
      const floats v = read16(f->out[r], LEZERO_FP32, i, 16);
      write16(w->a.rows, type, q->to[r] + i, 16, quotient(v, all_floats(f->total[r])));
    }
}

/* Tiles of queries of a chunk and a key head. */
static int64_t query_tiles(const lezero_step *s, const lezero_chunk *chunk) {
  return (chunk->count * (s->H / s->K) + MOST_QUERIES - 1) / MOST_QUERIES;
}

static query_tile tile_of(const worker *w, int64_t layer, int32_t c, int64_t head, int64_t tile) {
  const lezero_step *s = w->s;
  const lezero_chunk *chunk = s->chunk + c;
  const int64_t G = s->H / s->K, all = chunk->count * G, first = tile * MOST_QUERIES;
  query_tile q = {.blocks = s->table + c * s->width, .layer = layer, .head = head};
  q.ahead = w->ahead;
  q.rows = (int)least_of(all - first, MOST_QUERIES), q.filled = filled_up(q.rows);
  for (int r = 0; r < q.filled; r++) {
    const int64_t at = first + least_of(r, q.rows - 1);
    const int64_t row = chunk->first + at / G, h = head * G + at % G;
    q.position[r] = q.last = chunk->position + at / G;
    q.query[r] = w->a.queries + (row * s->H + h) * s->E;
    q.scale[r] = w->a.query_scales[row * s->H + h];
    q.to[r] = (row * s->H + h) * s->E;
  }
  return q;
}

/* Its queries side by side, as products with keys read them. */
static void lay_queries(const lezero_step *s, query_tile *q, int8_t pairs[]) {
  const int64_t size = pair_bytes(s->cache_bits == 8);
  for (int r = 0; r < q->filled; r++)
    for (int64_t e = 0; e < s->E / 2; e++) {
      int8_t *to = pairs + (e * q->filled + r) * size;
      const uint16_t *from = q->query[r] + 2 * e;
      const uint32_t wide[2] = {(uint32_t)from[0] << 16, (uint32_t)from[1] << 16};
      memcpy(to, size == 4 ? (const void *)from : wide, (size_t)size);
    }
  q->pairs = pairs;
}

/* The ranges of keys that a tile sees, of any head. */
static void ranges_of(const lezero_step *s, const lezero_chunk *chunk, int64_t tile, int64_t *first,
                      int64_t *count) {
  const int64_t G = s->H / s->K, row = tile * MOST_QUERIES;
  const int64_t last = least_of(row + MOST_QUERIES, chunk->count * G) - 1;
  *first = first_key(s, chunk->position + row / G) / RANGE;
  *count = (chunk->position + last / G) / RANGE + 1 - *first;
}

/* Whether workers share the ranges of a tile: where there are few tiles, and room for the sums. */
static int shares_ranges(const lezero_step *s) {
  int64_t tiles = 0, ranges = 0;
  for (int32_t c = 0; c < s->chunks; c++) {
    const lezero_chunk *chunk = s->chunk + c;
    const int64_t own = query_tiles(s, chunk) * s->K;
    tiles += own, ranges += own * ((chunk->position + chunk->count - 1) / RANGE + 1);
    if (tiles >= 8 * s->crew) return 0;
  }
  const int even = s->chunks == 1 && tiles % s->crew == 0;
  return !even && ranges > tiles && ranges <= MOST_RANGES;
}

/* [Note: one row a chunk]
 * Where every chunk is one row and no ranges are shared, one worker does all that concerns a row and a
 * key head: it stores the row's key and value and attends to them, and nobody has to wait between. */
static int one_row_a_chunk(const lezero_step *s) {
  return s->T == s->chunks && s->H / s->K <= MOST_QUERIES;
}

enum { WHOLE, BY_RANGE, JOINING };

/* Units are dealt in turns, so that long and short ones mix: heads and tiles, or their ranges; all of
 * a head before the next one, so that its keys and values stay in a core's cache.
 * stores: the worker stores what it attends to. */
static void attend_units(const worker *w, const lezero_layer *y, int64_t layer, int found_type,
                         int how, int stores) {
  const lezero_step *s = w->s;
  const int type = type_of(&y->out);
  int64_t turn = 0;
  range_sums *own = w->a.sums, one, next; /* own: of all ranges of a tile and head */
  int8_t pairs[WIDEST / 2 * MOST_QUERIES * 8] __attribute__((aligned(64)));
  for (int32_t c = 0; c < s->chunks; c++)
    for (int64_t head = 0; head < s->K; head++)
      for (int64_t tile = 0; tile < query_tiles(s, s->chunk + c); tile++) {
        int64_t first, count;
        ranges_of(s, s->chunk + c, tile, &first, &count);
        for (int64_t unit = 0; unit < (how == BY_RANGE ? count : 1); unit++, turn++) {
          const int64_t mine = turn % s->crew;
          if (mine < w->begin || mine >= w->end) continue;
          if (stores) store_piece(w, y, layer, w->a.pieces + c, head, found_type);
          query_tile q = tile_of(w, layer, c, head, tile);
          if (how != JOINING) lay_queries(s, &q, pairs);
          if (how == BY_RANGE) {
            attend_any(s, &q, first + unit, own + unit);
            continue;
          }
          range_sums *all = how == WHOLE ? &one : own;
          if (how == WHOLE) attend_any(s, &q, first, all);
          for (int64_t i = 1; i < count; i++) {
            if (how == WHOLE) attend_any(s, &q, first + i, &next);
            join(s, q.rows, all, how == WHOLE ? &next : own + i);
          }
          write_rows(w, &q, type, all);
        }
        if (how != WHOLE) own += count;
      }
}

static void attention(worker *w, const lezero_layer *y, int64_t layer, int found_type) {
  const lezero_step *s = w->s;
  const int shared = shares_ranges(s), stores = !shared && one_row_a_chunk(s);
  if (!stores) {
    const int64_t units = w->a.shared->pieces * s->K;
    for (int64_t i = from(w, units); i < upto(w, units); i++)
      store_piece(w, y, layer, w->a.pieces + i / s->K, i % s->K, found_type);
    meet(w);
  }
  attend_units(w, y, layer, found_type, shared ? BY_RANGE : WHOLE, stores);
  meet(w);
  if (!shared) return;
  attend_units(w, y, layer, found_type, JOINING, 0);
  meet(w);
}
