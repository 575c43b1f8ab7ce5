/* Who attends to what, and how it is joined; included by attention.h. */

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
  for (int r = 0; r < q->rows; r++) {
    const floats part = all_floats(1 / f->total[r]);
    for (int64_t i = 0; i < w->s->E; i += 16)
      write16(w->a.rows, type, q->to[r] + i, 16, product(read16(f->out[r], LEZERO_FP32, i, 16), part));
  }
}

/* Tiles of queries of a chunk and a key head. */
static int64_t query_tiles(const lezero_step *s, const lezero_chunk *chunk) {
  return (chunk->count * (s->H / s->K) + queries_at_once(s) - 1) / queries_at_once(s);
}

/* Whether one of its rows is among those that attend. */
static int asks(const worker *w, const lezero_chunk *chunk, int64_t tile) {
  const int64_t G = w->s->H / w->s->K, most = queries_at_once(w->s), first = tile * most;
  const int64_t last = least_of(first + most, chunk->count * G) - 1;
  return chunk->first + first / G < w->asking.end && chunk->first + last / G >= w->asking.first;
}

/* Filled in where it stays: a copy, made by wider loads than the stores before it, waits for all of
 * these to leave the core. */
static void find_tile(const worker *w, int64_t layer, int32_t c, int64_t head, int64_t tile,
                      query_tile *q) {
  const lezero_step *s = w->s;
  const lezero_chunk *chunk = s->chunk + c;
  const int64_t G = s->H / s->K, all = chunk->count * G;
  const int64_t most = queries_at_once(s), first = tile * most;
  q->blocks = s->table + c * s->width, q->layer = layer, q->head = head;
  q->ahead = w->ahead, q->only = query_tiles(s, chunk) == 1;
  q->rows = (int)least_of(all - first, most);
  q->filled = by_tiles(s) ? q->rows : filled_up(q->rows);
  for (int r = 0; r < q->filled; r++) {
    const int64_t at = first + least_of(r, q->rows - 1);
    const int64_t row = chunk->first + at / G, h = head * G + at % G;
    q->position[r] = q->last = chunk->position + at / G;
    q->query[r] = w->a.queries + (row * s->H + h) * s->E;
    q->scale[r] = w->a.query_scales[row * s->H + h];
    q->to[r] = (row * s->H + h) * s->E;
  }
}

/* Its queries side by side, as products with keys read them. */
static void lay_queries(const lezero_step *s, query_tile *q, int8_t pairs[]) {
#ifdef TILES
  if (by_tiles(s)) {
    lay_query_tiles(s, q, pairs);
    return;
  }
#endif
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
  const int64_t G = s->H / s->K, row = tile * queries_at_once(s);
  const int64_t last = least_of(row + queries_at_once(s), chunk->count * G) - 1;
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
  return s->T == s->chunks && s->H / s->K <= queries_at_once(s);
}

enum { WHOLE, BY_RANGE, JOINING };

/* Units are dealt in turns, so that long and short ones mix: heads and tiles, or their ranges; all of
 * a head before the next one, so that its keys and values stay in a core's cache.
 * stores: the worker stores what it attends to. */
static void attend_units(const worker *w, const lezero_layer *y, int64_t layer, int found_type,
                         int how, int stores) {
  const lezero_step *s = w->s;
  const int type = type_of(s, &y->out);
  int64_t turn = 0;
  range_sums *own = w->a.sums, one, next; /* own: of all ranges of a tile and head */
  int8_t pairs[WIDEST / 2 * MOST_QUERIES * 8] __attribute__((aligned(64)));
  for (int32_t c = 0; c < s->chunks; c++)
    for (int64_t head = 0; head < s->K; head++)
      for (int64_t tile = 0; tile < query_tiles(s, s->chunk + c); tile++) {
        if (!stores && !asks(w, s->chunk + c, tile)) continue;
        int64_t first, count;
        ranges_of(s, s->chunk + c, tile, &first, &count);
        for (int64_t unit = 0; unit < (how == BY_RANGE ? count : 1); unit++, turn++) {
          const int64_t mine = turn % s->crew;
          if (mine < w->begin || mine >= w->end) continue;
          if (stores) store_piece(w, y, layer, w->a.pieces + c, head, found_type);
          query_tile q;
          find_tile(w, layer, c, head, tile, &q);
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
