/* What layers.h needs beyond the primitives of linear, for AVX2. */

#include "plain.h"

INLINE floats quotient(floats x, floats y) {
  return BOTH(floats, _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b));
}
INLINE floats inverse(floats x) { return quotient(all_floats(1), x); }
INLINE floats most_of(floats x, floats y) { /* y where one is NaN */
  return BOTH(floats, _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b));
}
INLINE float lanes_most(floats x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
INLINE float lanes_total(floats x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
INLINE floats whole(floats x) { /* the nearest one */
  enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
  return BOTH(floats, _mm256_round_ps(x.a, NEAREST), _mm256_round_ps(x.b, NEAREST));
}
INLINE __m256 power8(__m256 n) {
  const __m256i up = _mm256_cvtps_epi32(_mm256_min_ps(n, _mm256_set1_ps(128)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(up, _mm256_set1_epi32(127)), 23));
}
/* x · 2^n for whole n from -126 on. */
INLINE floats times_power(floats x, floats n) {
  return BOTH(floats, _mm256_mul_ps(x.a, power8(n.a)), _mm256_mul_ps(x.b, power8(n.b)));
}
INLINE __m256 within8(__m256 x, __m256i lane, int from, int to, float other) {
  const __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(from), lane);
  const __m256i high = _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane);
  const __m256i kept = _mm256_andnot_si256(low, high);
  return _mm256_blendv_ps(_mm256_set1_ps(other), x, _mm256_castsi256_ps(kept));
}
/* Lanes `from` to `to` - 1 of x, the others `other`. */
INLINE floats only_lanes(floats x, int64_t from, int64_t to, float other) {
  const int low = from < 0 ? 0 : from > 16 ? 16 : (int)from, high = to < 0 ? 0 : to > 16 ? 16 : (int)to;
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i more = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
  return BOTH(floats, within8(x.a, lane, low, high, other), within8(x.b, more, low, high, other));
}
INLINE ints load_words(const void *at) { /* 32 bytes as words */
  const __m128i *half = at;
  return BOTH(ints, _mm256_cvtepi8_epi16(_mm_loadu_si128(half)),
              _mm256_cvtepi8_epi16(_mm_loadu_si128(half + 1)));
}
INLINE void store_words(uint16_t to[16], ints q) {
  const __m256i words = _mm256_packs_epi32(q.a, q.b);
  _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(words, 0xd8));
}
/* sum + w · x for pairs of words. */
INLINE ints dot_words(ints sum, ints w, int32_t x) {
  const __m256i pair = _mm256_set1_epi32(x);
  return BOTH(ints, add_words(sum.a, w.a, pair), add_words(sum.b, w.b, pair));
}
enum { MOST_SUMS = 4 }; /* that registers hold beside what is multiplied */
/* Weights of attention (not negative) as `read_pair` reads them, and what they became. */
INLINE floats store_weights(int8_t *to, floats v) {
  write16(to, LEZERO_FP32, 0, 16, v);
  return v;
}
INLINE void rest(void) { _mm_pause(); } /* while a worker waits for another core */
