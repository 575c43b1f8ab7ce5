/* Products of bytes and of words, added to sums of 32 bits: one instruction with AVX-VNNI, which
 * processors have whose AVX-512 is missing or hidden (Intel's for laptops since 2021).
 *
 *     add_bytes(sum, w, x)   sum += w · x for fours of unsigned w and signed x; where BYTES only
 *     add_words(sum, w, x)   sum += w · x for pairs of signed words
 *
 * Tests hold the form with AVX-VNNI to the reference on processors without it: LEZERO_VNNI_EMULATED.
 */
#if defined(__AVXVNNI__) || defined(LEZERO_VNNI_EMULATED)
#define VNNI
enum { BYTES = 1 };
#else
enum { BYTES = 0 };
#endif

#ifdef __AVXVNNI__
#define add_bytes(sum, w, x) _mm256_dpbusd_avx_epi32(sum, w, x)
#define add_words(sum, w, x) _mm256_dpwssd_avx_epi32(sum, w, x)
#else
INLINE __m256i add_words(__m256i sum, __m256i w, __m256i x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
}
INLINE __m256i add_bytes(__m256i sum, __m256i w, __m256i x) { /* the emulation */
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
  sum = add_words(sum, _mm256_and_si256(w, _mm256_set1_epi16(255)), even);
  return add_words(sum, _mm256_srli_epi16(w, 8), odd);
}
#endif
