/* Part of amx.h: weights as steps multiply them. */

/* Whether codes of 8 bits are multiplied as they lie, from 0 to 255: less 128 takes a copy of them,
 * which pays from a few tiles on. */
static int in_bytes(const lezero_linear *l, const workspace *w) {
  return l->bits == 8 && (l->zero || w->tiles < 4);
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
 * twice in fp32 and then to bf16, as dequantize_packed() and pack_bf16() do. With a scale a row
 * only the power of two in it is multiplied here, and the sums with the rest as they go out: bf16 holds
 * whole numbers of 8 bits exactly, and rounding them loses as much again as rounding to 8 bits did. With
 * the power of two sums are no larger than those of the weight. Once a stretch, for all tokens; a few take
 * longer for that than for the products. */
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

/* round_line() of codes of 8 bits less 128, times a power of two: bf16 holds what comes of that, so the
 * upper halves of fp32 are all of it, in half the operations. In the lowest bits of 2^23 a code stands
 * for itself, one byte up for 256 times that. */
INLINE void exact_line(uint8_t *to, const uint8_t *from, floats power) {
  const ints base = (ints)all_floats(0x1p23f);
  const floats unit[2] = {power, product(power, all_floats(0x1p-8f))};
  const floats less[2] = {product(unit[0], all_floats(0x1p23f + 128)),
                          product(unit[1], all_floats(0x1p23f + 128 * 256))};
  for (int i = 0; i < 16; i++, to += LINE) { /* halves of the lines that are read */
    const ints line = load_line(from + i / 2 * LINE);
    const ints half = i % 2 ? _mm512_srli_epi32(line, 16) : line;
    floats code[2];
    for (int j = 0; j < 2; j++) {
      const ints bits = _mm512_ternarylogic_epi32(half, all_ints(0xff << 8 * j), base, 0xea);
      code[j] = _mm512_fmsub_ps((floats)bits, unit[j], less[j]);
    }
    const ints first = _mm512_srli_epi32((ints)code[0], 16);
    _mm512_store_si512(to, _mm512_or_si512(first, (ints)code[1]));
  }
}

static void round_lines(const lezero_linear *l, const panel_pair *p, int panel, uint8_t *to,
                        const uint8_t *from, int64_t line, int64_t lines) {
  const int64_t last = l->group ? (l->K - 1) / l->group : 0; /* padding has no scale of its own */
  for (int64_t i = line; i < line + lines; i++, to += TILE_BYTES, from += 64 * l->bits) {
    const int64_t group = l->group ? least(i * (LINE / 2) / l->group, last) : 0;
    const floats own = read16(p->scale[panel], l->scale_type, 16 * group, 16);
    const floats scale = l->group ? own : _mm512_scalef_ps(all_floats(1), power_of(own));
    const floats zero = l->zero ? read16(p->zero[panel], l->scale_type, 16 * group, 16)
                                : all_floats(l->bits == 8 ? 128 : 8);
    if (l->bits == 8 && !l->group && !l->zero) exact_line(to, from, scale);
    else if (l->bits == 8) round_line(to, from, scale, zero, 8);
    else round_line(to, from, scale, zero, 4);
  }
}

/* A pair's stretch from the line `at` on; fetched meanwhile: that of the pair `next` from `next_at`. */
static stretch stretch_at(const lezero_linear *l, const workspace *w, uint8_t *spread,
                          const panel_pair *p, int64_t at, int64_t next, int64_t next_at) {
  /* Bytes of a line in a panel. */
  const int64_t line = l->rounded ? 64 * l->bits : l->bits == 4 ? TILE_BYTES / 2 : TILE_BYTES;
  const int64_t steps = w->digits == 2 && !w->parts ? w->tiles : (w->tiles + 1) / 2;
  stretch s = {.begin = at, .lines = least(span_of(w), lines_of(w) - at)};
  const panel_pair q = pair_at(l, w, next);
  for (int j = 0; j < 2; j++, spread += SPREAD_PAIR / 2) {
    s.weight[j] = p->weight[j] + at * line, s.next[j] = q.weight[j] + next_at * line;
    if (!l->rounded && (l->bits == 16 || w->whole || in_bytes(l, w))) continue;
    if (l->rounded) round_lines(l, p, j, spread, s.weight[j], at, s.lines);
    else if (l->bits == 8) spread_bytes(spread, s.weight[j], s.lines);
    else spread_halves(spread, s.weight[j], s.lines, l->zero ? 0 : 8);
    s.weight[j] = spread;
  }
  s.fetches = (s.lines * line / LINE + steps * s.lines - 1) / (steps * s.lines);
  return s;
}
