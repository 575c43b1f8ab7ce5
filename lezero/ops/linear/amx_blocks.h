/* Part of amx.h: a step of the forms with blocks. */

/* Adds the whole-number sums of block b and of panel i, scaled, to those of a tile of tokens: as
 * blocks_tile() does. */
INLINE void settle(const lezero_linear *l, const workspace *w, const token_tile *t,
                   const panel_pair *p, int64_t b, const int i, const int32_t (*found)[32],
                   const int32_t (*low)[32], found_tile *f, const int D, const int fine,
                   const int is_signed) {
  const int64_t R = t->rows, group = l->group ? b * w->block / l->group : 0;
  const int32_t *start = t->start + b * R * D;
  const float *total = t->total + b * R, *x_scale = t->scale + b * R;
  const floats scale = read16(p->scale[i], l->scale_type, 16 * group, 16);
  const int zeros = l->zero != 0;
  const floats zero = zeros ? read16(p->zero[i], l->scale_type, 16 * group, 16) : all_floats(0);
  _Pragma("GCC unroll 4") for (int64_t r = 0; r < R; r++) {
    ints sum = load_line(found[r] + 16 * i);
    if (D == 2) sum = digits_joined(sum, load_line(low[r] + 16 * i));
    if (!is_signed)
      sum = ints_sum(sum, all_ints(D == 2 ? 256 * start[2 * r] + start[2 * r + 1] : start[r]));
    floats v = float_of(sum);
    if (zeros) v = fused_less(zero, all_floats(total[r]), v);
    const floats step = fine ? product(scale, all_floats(x_scale[r])) : scale;
    f->sum[r][i] = fused(step, v, f->sum[r][i]);
  }
}

/* [Note: forms with blocks]
 * A block is settled between the products of the next one: products and stores of tiles keep the
 * second vector unit busy, so what follows them has to be there to fill the first. `two` tiles: of
 * tokens, or with two digits those of one tile of tokens. */
INLINE void blocks_step(const lezero_linear *l, const workspace *w, stretch *s, const panel_pair *p,
                        const token_tile t[2], const own_space *own, found_tile *f, const int two,
                        const int D, const int fine, const int is_signed) {
  const int64_t depth = least(w->block, LINE), begin = s->begin * LINE;
  const int8_t *a0 = t[0].codes + begin * LINE_ROWS * D;
  const int8_t *a1 = D == 2 ? a0 + TILE_BYTES : t[two].codes + begin * LINE_ROWS;
  const int64_t first = begin / w->block;
  const int64_t end = least(w->blocks, (begin + s->lines * LINE + w->block - 1) / w->block);
#define DOT(c, a, b)                         \
  do {                                       \
    if (is_signed) tile_dot_signed(c, a, b); \
    else tile_dot_bytes(c, a, b);            \
  } while (0)
#define SETTLE(tile, i)                                                                        \
  do {                                                                                         \
    if (D == 1) settle(l, w, t + tile, p, b - 1, i, before[tile], 0, f + tile, 1, fine, is_signed); \
    else if (tile == 0) settle(l, w, t, p, b - 1, i, before[0], before[1], f, 2, fine, is_signed);  \
  } while (0)
  for (int64_t b = first; b <= end; b++) {
    const int32_t(*before)[LINE_ROWS][32] = own->found[(b - 1) & 1];
    if (b == end) {
      SETTLE(0, 0);
      SETTLE(0, 1);
      if (two) SETTLE(1, 0);
      if (two) SETTLE(1, 1);
      break;
    }
    int32_t(*now)[LINE_ROWS][32] = own->found[b & 1];
    const int64_t inputs = least(w->block, w->padded - b * w->block);
    const int settles = b != first;
    SUMS(ZERO, two, 0, 0);
    for (int64_t k = b * w->block - begin, last = k + inputs; k < last; k += depth) {
      const int64_t a = k / LINE * TILE_BYTES * D + k % LINE;
      const int begins = k + inputs == last, ends = k + depth == last; /* the block */
      if (k % LINE == 0) fetch_next(s);
      load_weights(s->weight[0] + k * LINE_ROWS, s->weight[1] + k * LINE_ROWS);
      tile_load(4, a0 + a, LINE);
      DOT(0, 4, 6);
      if (begins && settles) SETTLE(0, 0);
      DOT(1, 4, 7);
      if (begins && settles) SETTLE(0, 1);
      if (two) {
        tile_load(5, a1 + a, LINE);
        DOT(2, 5, 6);
      }
      if (!ends) {
        if (two) DOT(3, 5, 7);
        continue;
      }
      tile_store(0, now[0], ROW);
      if (two) {
        if (settles) SETTLE(1, 0);
        DOT(3, 5, 7);
      }
      tile_store(1, (char *)now[0] + LINE, ROW);
      if (two) {
        if (settles) SETTLE(1, 1);
        tile_store(2, now[1], ROW);
        tile_store(3, (char *)now[1] + LINE, ROW);
      }
    }
  }
#undef SETTLE
#undef DOT
}
