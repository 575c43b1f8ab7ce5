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
