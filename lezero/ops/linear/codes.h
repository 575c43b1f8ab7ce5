/* Tokens of 8 and 16 bits: their scales, digits and sums. Included by prepare.h.
 *
 * [Note: runs of blocks]
 * Blocks of a tile's tokens, one token after the other, are gone through RUN at a time: what their lanes
 * hold is joined at once, and scales are divided at once. A run's scales are found before the digits of
 * the run before, since a processor would have to wait for them.
 */
enum { RUN = 16 };
typedef struct {
  const char *x;                /* of the tile's tokens */
  int64_t blocks, size, inputs; /* of a token, of a block, of a token */
} block_rows;
typedef struct {
  int64_t row, block;
} block_place;

INLINE void move_on(block_place *p, const block_rows *b) {
  if (++p->block == b->blocks) p->block = 0, p->row++;
}

INLINE int64_t inputs_at(block_place p, const block_rows *b) {
  return p.block + 1 < b->blocks ? b->size : b->inputs - p.block * b->size;
}

INLINE const char *values_at(block_place p, const block_rows *b, const int type) {
  return b->x + (p.row * b->inputs + p.block * b->size) * (type == LEZERO_FP32 ? 4 : 2);
}

#ifndef LANES_JOINED
INLINE void largest_lanes(const ints v[RUN], int32_t to[RUN]) {
  for (int i = 0; i < RUN; i++) to[i] = largest_lane(v[i]);
}
INLINE void lanes_sums(const ints v[RUN], int32_t to[RUN]) {
  for (int i = 0; i < RUN; i++) to[i] = lanes_sum(v[i]);
}
#endif

INLINE ints magnitudes(const char *x, const int64_t inputs, const int type) {
  ints high = all_ints(0);
  int64_t i = 0;
  for (; i + 16 <= inputs; i += 16) high = larger(high, magnitude(read16(x, type, i, 16)));
  if (i < inputs) high = larger(high, magnitude(read16(x, type, i, inputs - i)));
  return high;
}

/* The largest magnitude of each of `count` blocks from `p` on, as its bits: beyond 0x7f7fffff something
 * is not finite. */
INLINE void largest_in(const block_rows *b, block_place p, int64_t count, int32_t most[RUN],
                       const int type) {
  ints found[RUN];
  for (int64_t n = 0; n < count; n++, move_on(&p, b)) {
    const char *x = values_at(p, b, type);
    const int64_t inputs = inputs_at(p, b);
    found[n] = inputs == 32 ? magnitudes(x, 32, type) : magnitudes(x, inputs, type);
  }
  for (int64_t n = count; n < RUN; n++) found[n] = all_ints(0);
  largest_lanes(found, most);
}

/* The scales of values up to `most`, and their inverses, see tokens.py; `given` or null. */
static void scales_of(const int32_t most[RUN], float levels, const float *given, float scale[RUN],
                      float inverse[RUN]) {
  for (int n = 0; n < RUN; n++) {
    float high;
    memcpy(&high, most + n, 4);
    const float s = given ? *given : high / levels, kept = given || s >= 0x1p-126f ? s : 0;
    const int fits = most[n] < 0x7f800000 && s >= 0x1p-126f;
    const float part = 1 / (fits ? s : 1);
    scale[n] = most[n] < 0x7f800000 ? kept : NAN, inverse[n] = fits ? part : 0;
  }
}

/* `count` pieces of `size` bytes. */
INLINE void scatter(int8_t *to, const void *from, const int count, const int size, int64_t step) {
  if (step == size) memcpy(to, from, (size_t)(count * size));
  else
    for (int i = 0; i < count; i++) memcpy(to + i * step, (const char *)from + size * i, (size_t)size);
}

typedef struct {
  int limit; /* whether values may exceed the scale, which was given; never with 16 bits */
  int lines;
  int8_t *to; /* the first four inputs of the tile's first token */
  token_steps step;
} token_part;

INLINE void digits16(const token_part *p, int8_t *at, floats v, floats inverse, const int two,
                     const int words, ints sums[2]) {
  const int size = words ? 8 : 4; /* of four inputs */
  int8_t bytes[32];
  v = product(v, inverse);
  if (p->limit) v = limited(v, 127);
  const ints q = rounded(v);
  if (two && !words) {
    const ints high = high_digit(q), low = low_digit(q, high);
    sums[0] = ints_sum(sums[0], high), sums[1] = ints_sum(sums[1], low);
    store_codes(bytes, high, 0), scatter(at, bytes, 4, size, p->step.four);
    store_codes(bytes, low, 0), scatter(at + p->step.digit, bytes, 4, size, p->step.four);
  } else {
    sums[0] = ints_sum(sums[0], q);
    store_codes(bytes, q, words), scatter(at, bytes, 4, size, p->step.four);
  }
}

/* Where input `at` of a token lies, which begins at `token`. */
INLINE int8_t *place_of(const token_part *p, int8_t *token, int64_t at) {
  return token + (p->lines ? (at >> 6) * p->step.line + (at & 63) : at / 4 * p->step.four);
}

/* Digits of a block of `inputs`, up to `filled`, from input `first` of a token on; sums += those of each
 * digit. What is not finite has the scale NaN, and the digits 0. */
INLINE void block_digits(const token_part *p, int8_t *token, const char *x, int64_t first,
                         const int64_t inputs, const int64_t filled, const float inverse,
                         const int two, const int words, const int type, ints sums[2]) {
  const floats factor = all_floats(inverse);
  const int64_t known = inverse > 0 ? inputs : 0;
  int64_t i = 0;
  for (; i + 16 <= known; i += 16)
    digits16(p, place_of(p, token, first + i), read16(x, type, i, 16), factor, two, words, sums);
  if (i < known) {
    const floats v = read16(x, type, i, known - i);
    digits16(p, place_of(p, token, first + i), v, factor, two, words, sums), i += 16;
  }
  for (; i < filled; i += 16)
    digits16(p, place_of(p, token, first + i), all_floats(0), factor, two, words, sums);
}

/* Those of `count` blocks from `at` on, up to `padded` inputs of a token, and the sums of each. */
INLINE void digits_in(const token_part *p, const block_rows *b, block_place at, int64_t count,
                      int64_t padded, const float inverse[RUN], int32_t sums[2][RUN], const int two,
                      const int words, const int type) {
  ints total[2][RUN];
  for (int64_t n = 0; n < count; n++, move_on(&at, b)) {
    const char *x = values_at(at, b, type);
    const int64_t inputs = inputs_at(at, b), first = at.block * b->size;
    const int64_t filled = least(b->size, padded - first);
    int8_t *token = p->to + at.row * p->step.row;
    ints found[2] = {all_ints(0), all_ints(0)};
    if (inputs == 32 && filled == 32 && inverse[n] > 0)
      block_digits(p, token, x, first, 32, 32, inverse[n], two, words, type, found);
    else
      block_digits(p, token, x, first, inputs, filled, inverse[n], two, words, type, found);
    total[0][n] = found[0], total[1][n] = found[1];
  }
  for (int64_t n = count; n < RUN; n++) total[0][n] = total[1][n] = all_ints(0);
  lanes_sums(total[0], sums[0]);
  if (two && !words) lanes_sums(total[1], sums[1]);
}

typedef struct {
  float scale[RUN], inverse[RUN];
} run_scales;

/* Those of `count` blocks from `p` on. */
INLINE void find_scales(const lezero_linear *l, const block_rows *b, block_place p, int64_t count,
                        run_scales *found, const int two, const int type) {
  int32_t most[RUN];
  largest_in(b, p, count, most, type);
  scales_of(most, two ? 32639 : 127, l->x_scale, found->scale, found->inverse);
}

/* x: the tile's tokens. two: of 16 bits, whose digits are apart where they are bytes; no literal beside
 * words, which are made alike. */
INLINE void codes_in(const lezero_linear *l, const workspace *w, const token_tile *t, const void *x,
                     const int two, const int words, const int type) {
  const int D = two && !words ? 2 : 1;
  const int64_t R = t->rows, all = R * w->blocks;
  const token_part part = {!two && l->x_scale, IN_LINES(l), t->codes, steps_of(w, R)};
  const int off = SIGNED_BYTES && l->bits == 8 ? 128 : 0;
  const int middle = (l->zero ? 0 : l->bits == 8 ? 128 : 8) - off;
  const block_rows whole = {x, 1, l->K, l->K}, blocks = {x, w->blocks, w->block, l->K};
  block_place p = {0, 0}, after = p;
  run_scales found[2], each; /* each: of a token, if it has one scale */
  if (w->fine) {
    find_scales(l, &blocks, p, least(RUN, all), found, two, type);
  } else {
    find_scales(l, &whole, p, R, &each, two, type);
    memcpy(t->scale, each.scale, (size_t)R * 4);
  }
  for (int64_t first = 0; first < all; first += RUN) {
    const int64_t count = least(RUN, all - first), left = least(RUN, all - first - count);
    run_scales *now = found + first / RUN % 2;
    int32_t sums[2][RUN];
    fetch_some(l->ahead, (int)(4 * count));
    for (int64_t n = 0; n < count; n++, move_on(&after, &blocks))
      if (!w->fine) now->inverse[n] = each.inverse[after.row];
    if (w->fine && left) find_scales(l, &blocks, after, left, found + (first / RUN + 1) % 2, two, type);
    digits_in(&part, &blocks, p, count, w->padded, now->inverse, sums, two, words, type);
    for (int64_t n = 0; n < count; n++, move_on(&p, &blocks)) {
      const int64_t at = p.block * R + p.row;
      if (w->fine) t->scale[at] = now->scale[n];
      for (int d = 0; d < D; d++) t->start[at * D + d] = -middle * sums[d][n];
      t->total[at] = D == 2 ? (float)(256 * sums[0][n] + sums[1][n]) : (float)sums[0][n];
    }
  }
}

static void prepare_codes(const lezero_linear *l, const workspace *w, const token_tile *t,
                          const void *x) {
  const int two = l->x_bits == 16, any = WORDS(8, 1) || WORDS(8, 2) || WORDS(4, 2);
  if (any && w->words) BY_TYPE(l->x_type, codes_in, l, w, t, x, two, 1);
  else if (two && !(WORDS(8, 2) && WORDS(4, 2))) BY_TYPE(l->x_type, codes_in, l, w, t, x, 1, 0);
  else BY_TYPE(l->x_type, codes_in, l, w, t, x, 0, 0);
}
