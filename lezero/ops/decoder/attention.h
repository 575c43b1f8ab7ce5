/* Attention over a cache of blocks, included by layers.h.
 *
 * [Note: blocks of keys and values]
 * Both lie as a packed bf16 weight does, so that one line of 64 bytes is what one instruction
 * multiplies: a block of keys as [pair of E][16 tokens][2], of values as [16 of E][pair of tokens]
 * [16][2]. The token after an odd number of tokens has values 0, so that pairs are whole; what lies
 * beyond is not read.
 */

INLINE uint16_t *block_of_keys(const lezero_step *s, uint16_t *cache, int64_t layer, int64_t block,
                               int64_t head) {
  return cache + ((layer * s->blocks + block) * s->K + head) * s->E * LEZERO_BLOCK;
}

/* Head of E numbers of `found`, normalised by `norm` (or null) and turned to `position`, in fp32. */
INLINE void turned(const lezero_step *s, const void *found, int type, int64_t first,
                   const float *norm, int64_t position, float to[WIDEST]) {
  const int64_t half = s->E / 2;
  const float *cos = s->cos + position * half, *sin = s->sin + position * half;
  float x[WIDEST];
  const floats factor =
      all_floats(norm ? inverse_rms(found, type, first, s->E, s->eps) : 1.0f);
  for (int64_t i = 0; i < s->E; i += 16) {
    floats v = read16(found, type, first + i, 16);
    if (norm) v = product(product(v, factor), read16(norm, LEZERO_FP32, i, 16));
    write16(x, LEZERO_FP32, i, 16, v);
  }
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = least_of(half - i, 16);
    const floats a = read16(x, LEZERO_FP32, i, n), b = read16(x, LEZERO_FP32, half + i, n);
    const floats c = read16(cos, LEZERO_FP32, i, n), d = read16(sin, LEZERO_FP32, i, n);
    write16(to, LEZERO_FP32, i, n, fused_less(b, d, product(a, c)));
    write16(to, LEZERO_FP32, half + i, n, fused(a, d, product(b, c)));
  }
}

/* Queries of one piece and key head to `queries`, its keys and values into the cache. */
static void store_piece(const worker *w, const lezero_layer *y, int64_t layer, const piece *p,
                        int64_t head, int type) {
  const lezero_step *s = w->s;
  const lezero_chunk *chunk = s->chunk + p->chunk;
  const int64_t E = s->E, G = s->H / s->K, wide = (s->H + 2 * s->K) * E;
  const float scale = 1.44269504f / sqrtf((float)E); /* powers of two, not of e */
  float x[WIDEST];
  uint16_t half[WIDEST];
  for (int64_t row = p->row; row < p->row + p->rows; row++) {
    const int64_t position = chunk->position + row, at = (chunk->first + row) * wide;
    for (int64_t g = 0; g < G; g++) {
      turned(s, w->a.found, type, at + (head * G + g) * E, y->q_norm, position, x);
      uint16_t *to = w->a.queries + ((chunk->first + row) * s->H + head * G + g) * E;
      for (int64_t i = 0; i < E; i += 16)
        write16(to, LEZERO_BF16, i, 16, product(read16(x, LEZERO_FP32, i, 16), all_floats(scale)));
    }
    const int64_t block = s->table[p->chunk * s->width + position / LEZERO_BLOCK];
    const int64_t slot = position % LEZERO_BLOCK;
    uint16_t *keys = block_of_keys(s, s->keys, layer, block, head);
    turned(s, w->a.found, type, at + (s->H + head) * E, y->k_norm, position, x);
    for (int64_t i = 0; i < E; i += 16)
      write16(half, LEZERO_BF16, i, 16, read16(x, LEZERO_FP32, i, 16));
    for (int64_t i = 0; i < E / 2; i++) memcpy(keys + (i * LEZERO_BLOCK + slot) * 2, half + 2 * i, 4);
    uint16_t *values = block_of_keys(s, s->values, layer, block, head);
    for (int64_t i = 0; i < E; i += 16) {
      write16(half, LEZERO_BF16, 0, 16,
              read16(w->a.found, type, at + (s->H + s->K + head) * E + i, 16));
      uint16_t *line = values + (i / 16 * (LEZERO_BLOCK / 2) + slot / 2) * 32 + slot % 2;
      for (int j = 0; j < 16; j++) {
        line[2 * j] = half[j];
        if (slot % 2 == 0) line[2 * j + 1] = 0;
      }
    }
  }
}

/* Query heads of one key head that are worked on together. */
typedef struct {
  const int32_t *blocks; /* of the sequence */
  int64_t layer, head, last; /* last: position of the last row */
  int64_t position[MOST_QUERIES];
  const uint16_t *query[MOST_QUERIES];
  int64_t to[MOST_QUERIES]; /* where the row's head begins in `rows` */
} query_tile;

/* [Note: chains]
 * A product waits for the sum before it, some six cycles on processors that could begin two a cycle.
 * So with few rows, several blocks of keys or panels of values are summed side by side; each sum
 * by itself runs in the same order as ever. */

/* Scores of R rows with B blocks of keys. */
INLINE void score_blocks(const lezero_step *s, const query_tile *q, const int32_t *table, int64_t b,
                         floats score[][TILE_BLOCKS], const int R, const int B) {
  const uint16_t *line[TILE_BLOCKS];
  floats acc[MOST_QUERIES][TILE_BLOCKS];
  UNROLL for (int i = 0; i < B; i++) {
    line[i] = block_of_keys(s, s->keys, q->layer, table[b + i], q->head);
    UNROLL for (int r = 0; r < R; r++) acc[r][i] = all_floats(0);
  }
  for (int64_t e = 0; e < s->E / 2; e++)
    UNROLL for (int i = 0; i < B; i++) {
      const ints k = load_line(line[i] + 32 * e);
      UNROLL for (int r = 0; r < R; r++) {
        int32_t x;
        memcpy(&x, q->query[r] + 2 * e, 4);
        acc[r][i] = dot_pairs(acc[r][i], k, x);
      }
    }
  UNROLL for (int i = 0; i < B; i++) UNROLL for (int r = 0; r < R; r++)
    score[r][b + i] = acc[r][i];
}

/* out = out · shrink + weights · values for R rows and P panels of 16 channels, over `keys` keys. */
INLINE void gather_panels(const lezero_step *s, const query_tile *q, const int32_t *table,
                          int64_t keys, int64_t panel, uint16_t weight[][TILE],
                          const floats shrink[], float out[][WIDEST], const int R, const int P) {
  floats acc[MOST_QUERIES][TILE_BLOCKS];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < P; i++)
    acc[r][i] = product(read16(out[r], LEZERO_FP32, (panel + i) * 16, 16), shrink[r]);
  for (int64_t at = 0; at < keys; at += LEZERO_BLOCK) {
    const uint16_t *values =
        block_of_keys(s, s->values, q->layer, table[at / LEZERO_BLOCK], q->head) +
        panel * LEZERO_BLOCK * 16;
    const int64_t pairs = least_of(LEZERO_BLOCK, keys - at + 1) / 2;
    for (int64_t pair = 0; pair < pairs; pair++)
      UNROLL for (int i = 0; i < P; i++) {
        const ints v = load_line(values + i * LEZERO_BLOCK * 16 + 32 * pair);
        UNROLL for (int r = 0; r < R; r++) {
          int32_t x;
          memcpy(&x, weight[r] + at + 2 * pair, 4);
          acc[r][i] = dot_pairs(acc[r][i], v, x);
        }
      }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < P; i++)
    write16(out[r], LEZERO_FP32, (panel + i) * 16, 16, acc[r][i]);
}

/* One round of the softmax for row r: its scores become weights; how much is left of earlier sums. */
INLINE void weigh(const lezero_step *s, const query_tile *q, int64_t base, int64_t blocks, int r,
                  floats score[TILE_BLOCKS], uint16_t weight[TILE], float *most, floats *total,
                  floats *shrink) {
  const int64_t seen = q->position[r] + 1 - base; /* keys of this tile up to its own */
  const int64_t hidden = s->window ? q->position[r] + 1 - s->window - base : 0;
  floats high = all_floats(LOWEST);
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t at = b * LEZERO_BLOCK;
    if (seen < at + 16 || hidden > at)
      score[b] = only_lanes(score[b], hidden - at, seen - at, LOWEST);
    high = most_of(score[b], high);
  }
  const float found = lanes_most(high), now = found > *most ? found : *most;
  *shrink = power_of_two(all_floats(*most - now)), *most = now;
  *total = product(*total, *shrink);
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t at = b * LEZERO_BLOCK;
    floats p = power_of_two(sum_of(score[b], all_floats(-now)));
    if (seen < at + 16 || hidden > at) p = only_lanes(p, hidden - at, seen - at, 0);
    store_bf16(weight + at, p);
    *total = sum_of(*total, read16(weight, LEZERO_BF16, at, 16)); /* as it is used */
  }
}

INLINE void attend(const worker *w, const query_tile *q, int type, const int R) {
  const lezero_step *s = w->s;
  const int64_t panels = s->E / 16;
  const int wide = MOST_QUERIES >= 4 * R ? 4 : 1; /* chains beside each other, a row */
  float out[MOST_QUERIES][WIDEST], most[MOST_QUERIES];
  uint16_t weight[MOST_QUERIES][TILE];
  floats total[MOST_QUERIES], shrink[MOST_QUERIES], score[MOST_QUERIES][TILE_BLOCKS];
  for (int r = 0; r < R; r++) {
    most[r] = LOWEST, total[r] = all_floats(0);
    memset(out[r], 0, (size_t)s->E * 4);
  }
  int64_t begin = 0;
  if (s->window && q->position[0] >= s->window) begin = (q->position[0] - s->window + 1) / TILE * TILE;
  for (int64_t base = begin; base <= q->last; base += TILE) {
    const int64_t keys = least_of(q->last + 1 - base, TILE);
    const int64_t blocks = (keys + LEZERO_BLOCK - 1) / LEZERO_BLOCK;
    const int32_t *table = q->blocks + base / LEZERO_BLOCK;
    int64_t b = 0, panel = 0;
    for (; wide > 1 && b + 4 <= blocks; b += 4) score_blocks(s, q, table, b, score, R, wide);
    for (; b < blocks; b++) score_blocks(s, q, table, b, score, R, 1);
    for (int r = 0; r < R; r++)
      weigh(s, q, base, blocks, r, score[r], weight[r], most + r, total + r, shrink + r);
    for (; wide > 1 && panel + 4 <= panels; panel += 4)
      gather_panels(s, q, table, keys, panel, weight, shrink, out, R, wide);
    for (; panel < panels; panel++)
      gather_panels(s, q, table, keys, panel, weight, shrink, out, R, 1);
  }
  for (int r = 0; r < R; r++) {
    const floats all = all_floats(lanes_total(total[r]));
    for (int64_t i = 0; i < s->E; i += 16)
      write16(w->a.rows, type, q->to[r] + i, 16, quotient(read16(out[r], LEZERO_FP32, i, 16), all));
  }
}

#define ATTEND(R) \
  case R:         \
    if (R <= MOST_QUERIES) attend(w, q, type, R <= MOST_QUERIES ? R : 1); \
    break;

static void __attribute__((noinline)) attend_any(const worker *w, const query_tile *q, int type,
                                                 int rows) {
  switch (rows) {
    ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) ATTEND(5) ATTEND(6)
    ATTEND(7) ATTEND(8) ATTEND(9) ATTEND(10) ATTEND(11) ATTEND(12)
  }
}

/* Tiles of queries of a chunk and a key head. */
static int64_t query_tiles(const lezero_step *s, const lezero_chunk *chunk) {
  return (chunk->count * (s->H / s->K) + MOST_QUERIES - 1) / MOST_QUERIES;
}

static void attend_tile(const worker *w, int64_t layer, int32_t c, int64_t head, int64_t tile,
                        int type) {
  const lezero_step *s = w->s;
  const lezero_chunk *chunk = s->chunk + c;
  const int64_t G = s->H / s->K, all = chunk->count * G, first = tile * MOST_QUERIES;
  query_tile q = {.blocks = s->table + c * s->width, .layer = layer, .head = head};
  const int rows = (int)least_of(all - first, MOST_QUERIES);
  for (int r = 0; r < rows; r++) {
    const int64_t row = chunk->first + (first + r) / G, h = head * G + (first + r) % G;
    q.position[r] = q.last = chunk->position + (first + r) / G;
    q.query[r] = w->a.queries + (row * s->H + h) * s->E;
    q.to[r] = (row * s->H + h) * s->E;
  }
  attend_any(w, &q, type, rows);
}

/* Units of attention are dealt in turns, so that long and short ones mix. */
static void attention(worker *w, const lezero_layer *y, int64_t layer, int found_type) {
  const lezero_step *s = w->s;
  const int64_t units = w->a.shared->pieces * s->K;
  for (int64_t i = from(w, units); i < upto(w, units); i++)
    store_piece(w, y, layer, w->a.pieces + i / s->K, i % s->K, found_type);
  meet(w);
  int64_t turn = 0;
  for (int32_t c = 0; c < s->chunks; c++)
    for (int64_t tile = 0; tile < query_tiles(s, s->chunk + c); tile++)
      for (int64_t head = 0; head < s->K; head++, turn++) {
        const int64_t mine = turn % s->crew;
        if (mine >= w->begin && mine < w->end) attend_tile(w, layer, c, head, tile, type_of(&y->out));
      }
  meet(w);
}
