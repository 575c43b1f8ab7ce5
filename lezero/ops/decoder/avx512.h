/* What layers.h needs beyond the primitives of linear, for AVX-512. */

INLINE floats quotient(floats a, floats b) { return _mm512_div_ps(a, b); }
INLINE floats inverse(floats a) { /* of a from 1 to 2^126, to 1 ulp */
  const floats r = _mm512_rcp14_ps(a);
  return _mm512_fmadd_ps(r, _mm512_fnmadd_ps(a, r, _mm512_set1_ps(1)), r);
}
INLINE floats most_of(floats a, floats b) { return _mm512_max_ps(a, b); } /* b where one is NaN */
/* Lanes of a that exceed those of b by more than `least`, the others of b. */
INLINE floats larger_by(floats a, floats b, float least) {
  const __mmask16 larger = _mm512_cmp_ps_mask(a, _mm512_add_ps(b, _mm512_set1_ps(least)), _CMP_GT_OQ);
  return _mm512_mask_mov_ps(b, larger, a);
}
INLINE float lanes_most(floats a) { return _mm512_reduce_max_ps(a); }
INLINE ints most_of_lanes(ints a, ints b) { return (ints)most_of((floats)a, (floats)b); }
/* Lane r: the largest lane of v[r]. */
INLINE floats lanes_most_of(const floats v[16]) {
  return (floats)lanes_joined((const ints *)v, most_of_lanes);
}
INLINE float lanes_total(floats a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
INLINE floats whole(floats a) { return _mm512_roundscale_ps(a, 0); } /* the nearest one */
/* a · 2^n for whole n. */
INLINE floats times_power(floats a, floats n) { return _mm512_scalef_ps(a, n); }
/* Lanes `from` to `to` - 1 of a, the others `other`. */
INLINE floats only_lanes(floats a, int64_t from, int64_t to, float other) {
  const uint32_t upto = to <= 0 ? 0 : to >= 16 ? 0xffff : (1u << to) - 1;
  const uint32_t below = from <= 0 ? 0 : from >= 16 ? 0xffff : (1u << from) - 1;
  return _mm512_mask_blend_ps((__mmask16)(upto & ~below), _mm512_set1_ps(other), a);
}
INLINE ints load_words(const void *at) { /* 32 bytes as words */
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(at));
}
INLINE void store_words(uint16_t to[16], ints q) {
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(q));
}
/* sum + w · x for pairs of words. */
INLINE ints dot_words(ints sum, ints w, int32_t x) {
  return _mm512_dpwssd_epi32(sum, w, _mm512_set1_epi32(x));
}
enum { MOST_SUMS = 24 }; /* that registers hold beside what is multiplied */
/* Weights of attention (not negative) as `read_pair` reads them, and what they became. */
INLINE floats store_weights(int8_t *to, floats v) {
#ifdef __AVX512BF16__
  const __m256i half = (__m256i)_mm512_cvtneps_pbh(v);
  _mm256_storeu_si256((__m256i *)to, half);
  return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
  _mm512_storeu_ps(to, v);
  return v;
#endif
}
/* 16 rows of 16 dwords, `step` bytes apart, turned: line i of `to` has dword i of each. */
INLINE void turn_dwords(char *to, const void *from, int64_t step) {
  ints row[16], pair[16], four[16];
  for (int i = 0; i < 16; i++) row[i] = load_line((const char *)from + i * step);
  for (int i = 0; i < 16; i += 2) {
    pair[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    pair[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    four[i] = _mm512_unpacklo_epi64(pair[i], pair[i + 2]);
    four[i + 1] = _mm512_unpackhi_epi64(pair[i], pair[i + 2]);
    four[i + 2] = _mm512_unpacklo_epi64(pair[i + 1], pair[i + 3]);
    four[i + 3] = _mm512_unpackhi_epi64(pair[i + 1], pair[i + 3]);
  }
  for (int i = 0; i < 4; i++) { /* quarters of four[i], [4 + i], [8 + i] and [12 + i] */
    const ints a = _mm512_shuffle_i32x4(four[i], four[4 + i], 0x44);
    const ints b = _mm512_shuffle_i32x4(four[i], four[4 + i], 0xee);
    const ints c = _mm512_shuffle_i32x4(four[8 + i], four[12 + i], 0x44);
    const ints d = _mm512_shuffle_i32x4(four[8 + i], four[12 + i], 0xee);
    _mm512_storeu_si512(to + i * 64, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_storeu_si512(to + (4 + i) * 64, _mm512_shuffle_i32x4(a, c, 0xdd));
    _mm512_storeu_si512(to + (8 + i) * 64, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_storeu_si512(to + (12 + i) * 64, _mm512_shuffle_i32x4(b, d, 0xdd));
  }
}
/* v in bf16 to the even places of a line, whose odd ones become 0, or to the odd ones. */
INLINE void put_even(uint16_t line[32], floats v) {
  _mm512_storeu_si512(line, _mm512_cvtepu16_epi32(to_bf16(v)));
}
INLINE void put_odd(uint16_t line[32], floats v) {
  const ints wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(v)), 16);
  _mm512_storeu_si512(line, _mm512_mask_blend_epi16(0xaaaaaaaa, load_line(line), wide));
}
INLINE void rest(void) { _mm_pause(); } /* while a worker waits for another core */
