/* What layers.h needs beyond the primitives of linear, for AVX-512. */

INLINE floats quotient(floats a, floats b) { return _mm512_div_ps(a, b); }
INLINE floats most_of(floats a, floats b) { return _mm512_max_ps(a, b); } /* b where one is NaN */
INLINE float lanes_most(floats a) { return _mm512_reduce_max_ps(a); }
INLINE float lanes_total(floats a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
/* a · 2^n for n from -126 to 127. */
INLINE floats times_power(floats a, ints n) {
  const ints bits = _mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(a, (floats)bits);
}
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
