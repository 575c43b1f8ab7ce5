/* Attention by AMX over a cache in bf16, included by attention.h; amx_tile.h has the instructions.
 *
 * [Note: blocks as tiles]
 * A block of keys is a tile of weights for each 32 of the head's inputs, and a panel of a block's values
 * is half of one: 16 tokens. So 16 rows meet 64 keys in eight products for a head of 64, and 16 for the
 * values, read where they lie in the cache. What a row finds does not depend on the others. Of the last
 * block, pairs of tokens that nobody has written are left out.
 */
enum { QUERY_ROWS = 16, VALUE_BYTES = LEZERO_BLOCK / 2 * LINE };

INLINE int by_tiles(const lezero_step *s) { return s->cache_bits == 16 && s->E % 32 == 0; }

/* Tiles 0 to 3: sums; 4: queries; 5: weights of 16 keys; 6: keys; 7: values. */
static tile_shapes attention_shapes(int rows) {
  tile_shapes shapes = shapes_of(LINE, rows);
  shapes.row_bytes[5] = LINE / 2, shapes.rows[7] = LEZERO_BLOCK / 2;
  return shapes;
}

/* Queries as tiles: [32 inputs][row][which of them]. */
static void lay_query_tiles(const lezero_step *s, query_tile *q, int8_t to[]) {
  const int64_t chunk = QUERY_ROWS * LINE;
  for (int r = 0; r < q->rows; r++)
    for (int64_t i = 0; i < s->E / 32; i++)
      memcpy(to + i * chunk + r * LINE, (const char *)q->query[r] + i * LINE, LINE);
  q->pairs = to;
}

/* Scores of all rows with four blocks of keys (of fewer, the last one again). Values are fetched
 * meanwhile, and with them the keys of the next round, see [Note: fetching before]; not where tiles of
 * the same chunk read them one after the other. */
static void score_tiles(const lezero_step *s, const query_tile *q, const key_round *k,
                        floats score[][TILE_BLOCKS]) {
  const char *key[TILE_BLOCKS], *fetched[2][TILE_BLOCKS];
  for (int i = 0; i < TILE_BLOCKS; i++) {
    const int64_t b = least_of(i, k->blocks - 1);
    key[i] = block_of(s, s->keys, q->layer, k->table[b], q->head);
    fetched[0][i] = block_of(s, s->values, q->layer, k->table[b], q->head);
    fetched[1][i] = block_of(s, s->keys, q->layer, k->next[b], q->head);
  }
  tile_zero(0);
  tile_zero(1);
  tile_zero(2);
  tile_zero(3);
  for (int64_t e = 0; e < s->E / 2 * LINE; e += QUERY_ROWS * LINE) {
    tile_load(4, q->pairs + e, LINE);
    for (int64_t at = e; at < e + QUERY_ROWS * LINE && q->only; at += LINE)
      for (int i = 0; i < TILE_BLOCKS; i++) prefetch(fetched[0][i] + at), prefetch_far(fetched[1][i] + at);
    fetch_some(q->ahead, 16);
    tile_load(6, key[0] + e, LINE);
    tile_dot_pairs(0, 4, 6);
    tile_load(6, key[1] + e, LINE);
    tile_dot_pairs(1, 4, 6);
    tile_load(6, key[2] + e, LINE);
    tile_dot_pairs(2, 4, 6);
    tile_load(6, key[3] + e, LINE);
    tile_dot_pairs(3, 4, 6);
  }
  const int64_t row = sizeof *score;
  tile_store(0, &score[0][0], row);
  tile_store(1, &score[0][1], row);
  tile_store(2, &score[0][2], row);
  tile_store(3, &score[0][3], row);
}

/* [Note: a late maximum]
 * Sums of a row are kept as they are until a score exceeds what was the largest one by LATE: weights are
 * then up to 2^LATE, in bf16 as exact as others, and few rounds shrink what came before them. */
enum { LATE = 8 };

/* Scores of the keys that row r sees, the others `other`. */
INLINE void hide(const lezero_step *s, const query_tile *q, int64_t base, int r,
                 floats score[TILE_BLOCKS], float other) {
  const sight v = sight_of(s, q, base, r);
  UNROLL for (int b = 0; b < TILE_BLOCKS; b++)
    score[b] = only_lanes(score[b], v.hidden - b * LEZERO_BLOCK, v.seen - b * LEZERO_BLOCK, other);
}

/* One round of the softmax, as weigh(). cut: a row may not see all keys of the round. */
INLINE void weigh_tiles(const lezero_step *s, const query_tile *q, int64_t base,
                        floats score[][TILE_BLOCKS], int8_t weight[][TILE_PAIRS], softmax_rows *m,
                        const int cut) {
  floats high[QUERY_ROWS];
  for (int r = 0; r < q->rows && cut; r++) hide(s, q, base, r, score[r], LOWEST);
  UNROLL for (int r = 0; r < QUERY_ROWS; r++)
    high[r] = r >= q->rows ? all_floats(LOWEST)
                           : most_of(most_of(score[r][3], score[r][2]), most_of(score[r][1], score[r][0]));
  const floats before = read16(m->most, LEZERO_FP32, 0, 16);
  const floats now = larger_by(lanes_most_of(high), before, LATE);
  write16(m->shrink, LEZERO_FP32, 0, 16, power_of_two(difference(before, now)));
  write16(m->most, LEZERO_FP32, 0, 16, now);
  for (int r = 0; r < q->rows; r++) {
    floats p[TILE_BLOCKS], total = product(m->total[r], all_floats(m->shrink[r]));
    UNROLL for (int b = 0; b < TILE_BLOCKS; b++)
      p[b] = power_of_two(difference(score[r][b], all_floats(m->most[r])));
    if (cut) hide(s, q, base, r, p, 0);
    UNROLL for (int b = 0; b < TILE_BLOCKS; b++)
      total = sum_of(total, store_weights(weight[r] + b * LEZERO_BLOCK / 2 * PAIR_BYTES, p[b]));
    m->total[r] = total;
  }
}

/* Where the values of a panel lie: in the cache, or, of a block that is not full, copied to `spare`. */
INLINE const char *values_of(const char *values, int64_t pairs, char spare[VALUE_BYTES]) {
  if (pairs == LEZERO_BLOCK / 2) return values;
  memset(spare, 0, VALUE_BYTES);
  memcpy(spare, values, (size_t)(pairs * LINE));
  return spare;
}

/* out += weights · values for four panels of 16 channels, or two. */
INLINE void gather_tiles(const lezero_step *s, const query_tile *q, const key_round *k, int64_t panel,
                         int8_t weight[][TILE_PAIRS], float out[][WIDEST], const int four) {
  char spare[4][VALUE_BYTES] __attribute__((aligned(64)));
  float *to = &out[0][panel * 16];
  tile_load(0, to, sizeof *out);
  tile_load(1, to + 16, sizeof *out);
  if (four) {
    tile_load(2, to + 32, sizeof *out);
    tile_load(3, to + 48, sizeof *out);
  }
  for (int64_t at = 0; at < k->keys; at += LEZERO_BLOCK) {
    const int64_t pairs = least_of(LEZERO_BLOCK, k->keys - at + 1) / 2;
    const char *values = block_of(s, s->values, q->layer, k->table[at / LEZERO_BLOCK], q->head) +
                         panel * VALUE_BYTES;
    tile_load(5, weight[0] + at * 2, TILE_PAIRS);
    tile_load(7, values_of(values, pairs, spare[0]), LINE);
    tile_dot_pairs(0, 5, 7);
    tile_load(7, values_of(values + VALUE_BYTES, pairs, spare[1]), LINE);
    tile_dot_pairs(1, 5, 7);
    if (!four) continue;
    tile_load(7, values_of(values + 2 * VALUE_BYTES, pairs, spare[2]), LINE);
    tile_dot_pairs(2, 5, 7);
    tile_load(7, values_of(values + 3 * VALUE_BYTES, pairs, spare[3]), LINE);
    tile_dot_pairs(3, 5, 7);
  }
  tile_store(0, to, sizeof *out);
  tile_store(1, to + 16, sizeof *out);
  if (four) {
    tile_store(2, to + 32, sizeof *out);
    tile_store(3, to + 48, sizeof *out);
  }
}

/* attend() by tiles: what the rows find among the keys of a range. */
static void attend_tiles(const lezero_step *s, const query_tile *q, int64_t range, range_sums *f) {
  const int64_t panels = s->E / 16, end = least_of((range + 1) * RANGE, q->last + 1);
  int8_t weight[QUERY_ROWS][TILE_PAIRS] __attribute__((aligned(64)));
  floats score[QUERY_ROWS][TILE_BLOCKS];
  softmax_rows m = {0};
  for (int r = 0; r < QUERY_ROWS; r++) m.most[r] = LOWEST;
  for (int r = 0; r < q->rows; r++) {
    m.total[r] = all_floats(0);
    memset(f->out[r], 0, (size_t)s->E * 4);
  }
  tiles_configure(attention_shapes(q->rows));
  for (int64_t base = larger_of(range * RANGE, first_key(s, q->position[0])); base < end;
       base += TILE) {
    const key_round k = round_at(q, base, end);
    score_tiles(s, q, &k, score);
    if (base + TILE <= q->position[0] + 1 && !s->window)
      weigh_tiles(s, q, base, score, weight, &m, 0);
    else weigh_tiles(s, q, base, score, weight, &m, 1);
    for (int r = 0; r < q->rows; r++)
      for (int64_t i = 0; i < s->E && m.shrink[r] != 1; i += 16)
        write16(f->out[r], LEZERO_FP32, i, 16,
                product(read16(f->out[r], LEZERO_FP32, i, 16), all_floats(m.shrink[r])));
    int64_t panel = 0;
    for (; panel + 4 <= panels; panel += 4)
      gather_tiles(s, q, &k, panel, weight, f->out, 1);
    if (panel < panels) gather_tiles(s, q, &k, panel, weight, f->out, 0);
  }
  tiles_release();
  for (int r = 0; r < q->rows; r++) f->most[r] = m.most[r], f->total[r] = lanes_total(m.total[r]);
}
