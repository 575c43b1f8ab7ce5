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

static void store_key(const lezero_step *s, char *block, int64_t slot, const float x[WIDEST]) {
  if (s->cache_bits == 8) {
    int8_t codes[WIDEST];
    encode(s, block, slot, x, codes);
    for (int64_t i = 0; i < s->E / 2; i++)
      memcpy(block + (i * LEZERO_BLOCK + slot) * 2, codes + 2 * i, 2);
    return;
  }
  uint16_t half[WIDEST];
  for (int64_t i = 0; i < s->E; i += 16)
    write16(half, LEZERO_BF16, i, 16, read16(x, LEZERO_FP32, i, 16));
  for (int64_t i = 0; i < s->E / 2; i++)
    memcpy(block + (i * LEZERO_BLOCK + slot) * 4, half + 2 * i, 4);
}

static void store_value(const lezero_step *s, char *block, int64_t slot, const float x[WIDEST]) {
  const int64_t to = slot / 2 * 32 + slot % 2; /* in a panel of 16 channels */
  if (s->cache_bits == 8) {
    int8_t codes[WIDEST];
    encode(s, block, slot, x, codes);
    for (int64_t i = 0; i < s->E; i++)
      block[i / 16 * LEZERO_BLOCK * 16 + to + i % 16 * 2] = codes[i];
    return;
  }
  uint16_t half[16];
  for (int64_t i = 0; i < s->E; i += 16) {
    write16(half, LEZERO_BF16, 0, 16, read16(x, LEZERO_FP32, i, 16));
    uint16_t *line = (uint16_t *)block + i * LEZERO_BLOCK + to;
    for (int j = 0; j < 16; j++) {
      line[2 * j] = half[j];
      if (slot % 2 == 0) line[2 * j + 1] = 0;
    }
  }
}

/* Query `index` of the step, turned and scaled. */
static void store_query(const worker *w, int64_t index, const float x[WIDEST]) {
  const lezero_step *s = w->s;
  const float scale = 1.44269504f / sqrtf((float)s->E); /* powers of two, not of e */
  uint16_t *to = w->a.queries + index * s->E;
  if (s->cache_bits == 8) {
    const float step = largest_of(x, s->E) / 32767;
    w->a.query_scales[index] = step * scale;
    for (int64_t i = 0; i < s->E; i += 16) {
      const floats v = quotient(read16(x, LEZERO_FP32, i, 16), all_floats(step));
      store_words(to + i, rounded(limited(v, 32767)));
    }
    return;
  }
  for (int64_t i = 0; i < s->E; i += 16)
    write16(to, LEZERO_BF16, i, 16, product(read16(x, LEZERO_FP32, i, 16), all_floats(scale)));
}

/* Queries of one piece and key head to `queries`, its keys and values into the cache. */
static void store_piece(const worker *w, const lezero_layer *y, int64_t layer, const piece *p,
                        int64_t head, int type) {
  const lezero_step *s = w->s;
  const lezero_chunk *chunk = s->chunk + p->chunk;
  const int64_t E = s->E, G = s->H / s->K, wide = (s->H + 2 * s->K) * E;
  float x[WIDEST];
  for (int64_t row = p->row; row < p->row + p->rows; row++) {
    const int64_t position = chunk->position + row, at = (chunk->first + row) * wide;
    for (int64_t g = 0; g < G; g++) {
      turned(s, w->a.found, type, at + (head * G + g) * E, y->q_norm, position, x);
      store_query(w, (chunk->first + row) * s->H + head * G + g, x);
    }
    const int64_t block = s->table[p->chunk * s->width + position / LEZERO_BLOCK];
    const int64_t slot = position % LEZERO_BLOCK;
    turned(s, w->a.found, type, at + (s->H + head) * E, y->k_norm, position, x);
    store_key(s, block_of(s, s->keys, layer, block, head), slot, x);
    for (int64_t i = 0; i < E; i += 16)
      write16(x, LEZERO_FP32, i, 16,
              read16(w->a.found, type, at + (s->H + s->K + head) * E + i, 16));
    store_value(s, block_of(s, s->values, layer, block, head), slot, x);
  }
}
