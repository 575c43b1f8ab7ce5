/* The cache of blocks, and what goes into it; included by layers.h.
 *
 * [Note: blocks of keys and values]
 * Of each head, a block of keys lies as [pair of E][16 tokens][2], a block of values as [16 of E][pair
 * of tokens][16][2], so that one line is what one instruction multiplies: of 64 bytes in bf16, as a
 * packed weight, and of 32 in int8. The token after an odd number of tokens has values 0 in bf16, so
 * that pairs are whole; what lies beyond is not read.
 *
 * [Note: codes of keys and values]
 * In int8 each token and head has a scale of its own, the largest magnitude / 127 in bf16, so that a
 * token's codes do not depend on its neighbours. A block's 16 scales lie behind its codes. Queries
 * and weights of attention become whole numbers of 16 bits: all products with codes are then exact,
 * and what is rounded is finer than bf16. A token with NaN or Inf has a scale that is none.
 */

static int64_t head_bytes(const lezero_step *s) {
  return LEZERO_BLOCK * (s->cache_bits == 8 ? s->E + 2 : 2 * s->E);
}

/* Where a head's part of a block begins. */
INLINE char *block_of(const lezero_step *s, char *cache, int64_t layer, int64_t block,
                      int64_t head) {
  return cache + ((layer * s->blocks + block) * s->K + head) * head_bytes(s);
}

INLINE uint16_t *scales_of(const lezero_step *s, char *block) {
  return (uint16_t *)(block + s->E * LEZERO_BLOCK);
}

/* Head of E numbers of `found`, normalised by `norm` (or null) and turned to `position`, in fp32. */
INLINE void turned(const lezero_step *s, const void *found, int64_t first, const float *norm,
                   int64_t position, float to[WIDEST], const int type) {
  const int64_t half = s->E / 2;
  const float *cos = s->cos + position * half, *sin = s->sin + position * half;
  const floats factor =
      all_floats(norm ? inverse_rms(found, type, first, s->E, s->eps) : 1.0f);
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = least_of(half - i, 16);
    floats a = read16(found, type, first + i, n), b = read16(found, type, first + half + i, n);
    if (norm) {
      a = product(product(a, factor), read16(norm, LEZERO_FP32, i, n));
      b = product(product(b, factor), read16(norm, LEZERO_FP32, half + i, n));
    }
    const floats c = read16(cos, LEZERO_FP32, i, n), d = read16(sin, LEZERO_FP32, i, n);
    write16(to, LEZERO_FP32, i, n, fused_less(b, d, product(a, c)));
    write16(to, LEZERO_FP32, half + i, n, fused(a, d, product(b, c)));
  }
}

/* The largest magnitude of n numbers; NaN where one is. */
INLINE float largest_of(const float *x, int64_t n) {
  ints most = all_ints(0);
  for (int64_t i = 0; i < n; i += 16) most = larger(most, magnitude(read16(x, LEZERO_FP32, i, 16)));
  const int32_t bits = largest_lane(most);
  float found;
  memcpy(&found, &bits, 4);
  return found;
}

/* Codes of E numbers; their scale goes to its place in the block. */
INLINE void encode(const lezero_step *s, char *block, int64_t slot, const float x[WIDEST],
                   int8_t codes[WIDEST]) {
  uint16_t kept[16];
  store_bf16(kept, all_floats(largest_of(x, s->E) / 127));
  scales_of(s, block)[slot] = kept[0];
  const floats scale = read16(kept, LEZERO_BF16, 0, 16);
  for (int64_t i = 0; i < s->E; i += 16) {
    const floats v = quotient(read16(x, LEZERO_FP32, i, 16), scale);
    store_bytes(codes + i, rounded(limited(v, 127)));
  }
}

/* Codes of a key of the block's token `slot`, or of a value. */
static void encode_key(const lezero_step *s, char *block, int64_t slot, const float x[WIDEST]) {
  int8_t codes[WIDEST];
  encode(s, block, slot, x, codes);
  for (int64_t i = 0; i < s->E / 2; i++)
    memcpy(block + (i * LEZERO_BLOCK + slot) * 2, codes + 2 * i, 2);
}

static void encode_value(const lezero_step *s, char *block, int64_t slot, const float x[WIDEST]) {
  const int64_t to = slot / 2 * 32 + slot % 2; /* in a panel of 16 channels */
  int8_t codes[WIDEST];
  encode(s, block, slot, x, codes);
  for (int64_t i = 0; i < s->E; i++)
    block[i / 16 * LEZERO_BLOCK * 16 + to + i % 16 * 2] = codes[i];
}

/* Keys in bf16 of tokens from `slot` on; those of a whole block are turned as it is written. */
static void store_keys(const lezero_step *s, char *block, int64_t slot, int rows,
                       uint16_t key[][WIDEST]) {
  int64_t i = 0;
  for (; i + 32 <= s->E && rows == LEZERO_BLOCK; i += 32)
    turn_dwords(block + i / 2 * LINE, key[0] + i, sizeof *key);
  for (; i < s->E; i += 2)
    for (int r = 0; r < rows; r++) memcpy(block + i / 2 * LINE + (slot + r) * 4, key[r] + i, 4);
}

static void store_value(const lezero_step *s, char *block, int64_t slot, const float x[WIDEST]) {
  for (int64_t i = 0; i < s->E; i += 16) {
    uint16_t *line = (uint16_t *)block + i * LEZERO_BLOCK + slot / 2 * 32;
    const floats v = read16(x, LEZERO_FP32, i, 16);
    if (slot % 2) put_odd(line, v);
    else put_even(line, v);
  }
}

INLINE void halved(const lezero_step *s, const float x[WIDEST], floats factor, uint16_t to[WIDEST]) {
  for (int64_t i = 0; i < s->E; i += 16)
    write16(to, LEZERO_BF16, i, 16, product(read16(x, LEZERO_FP32, i, 16), factor));
}

/* Query `index` of the step, turned and scaled: by powers of two, not of e. */
INLINE void store_query(const worker *w, int64_t index, const float x[WIDEST], float scale) {
  const lezero_step *s = w->s;
  uint16_t *to = w->a.queries + index * s->E;
  if (s->cache_bits == 16) {
    halved(s, x, all_floats(scale), to);
    return;
  }
  const float step = largest_of(x, s->E) / 32767;
  w->a.query_scales[index] = step * scale;
  for (int64_t i = 0; i < s->E; i += 16) {
    const floats v = quotient(read16(x, LEZERO_FP32, i, 16), all_floats(step));
    store_words(to + i, rounded(limited(v, 32767)));
  }
}

INLINE void store_piece_in(const worker *w, const lezero_layer *y, int64_t layer, const piece *p,
                           int64_t head, const int type) {
  const lezero_step *s = w->s;
  const lezero_chunk *chunk = s->chunk + p->chunk;
  const int64_t E = s->E, G = s->H / s->K, wide = (s->H + 2 * s->K) * E;
  const int64_t begin = chunk->position + p->row, slot = begin % LEZERO_BLOCK;
  const int64_t index = s->table[p->chunk * s->width + begin / LEZERO_BLOCK];
  char *keys = block_of(s, s->keys, layer, index, head);
  char *values = block_of(s, s->values, layer, index, head);
  const float scale = 1.44269504f / sqrtf((float)E);
  const void *found = w->a.found;
  float x[WIDEST];
  uint16_t key[LEZERO_BLOCK][WIDEST];
  for (int r = 0; r < p->rows; r++) {
    const int64_t row = chunk->first + p->row + r, at = row * wide;
    for (int64_t g = head * G; g < head * G + G; g++) {
      turned(s, found, at + g * E, y->q_norm, begin + r, x, type);
      store_query(w, row * s->H + g, x, scale);
    }
    turned(s, found, at + (s->H + head) * E, y->k_norm, begin + r, x, type);
    if (s->cache_bits == 8) encode_key(s, keys, slot + r, x);
    else halved(s, x, all_floats(1), key[r]);
    for (int64_t i = 0; i < E; i += 16)
      write16(x, LEZERO_FP32, i, 16, read16(found, type, at + (s->H + s->K + head) * E + i, 16));
    if (s->cache_bits == 8) encode_value(s, values, slot + r, x);
    else store_value(s, values, slot + r, x);
  }
  if (s->cache_bits == 16) store_keys(s, keys, slot, p->rows, key);
}

/* Queries of one piece and key head to `queries`, its keys and values into the cache. type: as type_of()
 * has it. */
static void store_piece(const worker *w, const lezero_layer *y, int64_t layer, const piece *p,
                        int64_t head, int type) {
  if (type == LEZERO_BF16) store_piece_in(w, y, layer, p, head, LEZERO_BF16);
  else store_piece_in(w, y, layer, p, head, LEZERO_FP32);
}
