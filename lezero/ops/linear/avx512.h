/* The primitives of tiles.h, which says what each does, for AVX-512 with VNNI. */
#include <immintrin.h>
#include <string.h>

typedef __m512 floats;
typedef __m512i ints;

enum { MOST_WHOLE = 14, MOST_BLOCKS = 6, MOST_DIGITS = 4, MOST_ROWS = 16 };
/* Whether tokens of so many digits lie as words beside weights of so many bits. */
#define WORDS(bits, digits) 0
/* Beside bf16 weights: whether tokens lie in fp32, bytes of a pair of inputs, rows of a tile. With
 * both halves of two weights split and a token's pair, 24 sums are what registers hold. */
#ifdef __AVX512BF16__
enum { FLOATS = 0, PAIR_BYTES = 4, MOST_BF16 = 14 };
#else
enum { FLOATS = 1, PAIR_BYTES = 8, MOST_BF16 = 12 };
#endif
#define AT_ONCE(R) 2
/* With AMX neither one panel at a time nor more rows of 4 bits were measured. Of eight rows the sums of
 * finished blocks lie in memory: weights of 4 bits are split for fewer tiles. */
#ifdef FEW_TOKENS
enum { ALONE = 2, MOST_HALVES = MOST_BLOCKS };
#else
enum { ALONE = 1, MOST_HALVES = 8 };
#endif

INLINE __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
}

INLINE floats read16(const void *x, int type, int64_t i, int64_t count) {
  const __mmask16 m = first_lanes(count);
  if (type == LEZERO_FP32) return _mm512_maskz_loadu_ps(m, (const float *)x + i);
  const __m256i half = _mm256_maskz_loadu_epi16(m, (const uint16_t *)x + i);
  if (type == LEZERO_FP16) return _mm512_cvtph_ps(half);
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

/* Where there is an instruction for it, numbers below the normal ones become 0. */
#ifdef __AVX512BF16__
INLINE __m256i to_bf16(floats v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#else
INLINE __m256i to_bf16(floats v) {
  const ints bits = (ints)v, one = _mm512_set1_epi32(1);
  const ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const ints up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const ints high = _mm512_mask_set1_epi32(_mm512_srli_epi32(up, 16), nan, 0x7fc0);
  return _mm512_cvtepi32_epi16(high);
}
#endif

/* A store of all lanes is one operation, of some of 16 bits each many. */
INLINE void write16(void *x, int type, int64_t i, int64_t count, floats v) {
  const __mmask16 m = first_lanes(count);
  if (type == LEZERO_FP32) {
    if (count >= 16) _mm512_storeu_ps((float *)x + i, v);
    else _mm512_mask_storeu_ps((float *)x + i, m, v);
    return;
  }
  const __m256i half = type == LEZERO_BF16 ? to_bf16(v) : _mm512_cvtps_ph(v, 0);
  if (count >= 16) _mm256_storeu_si256((__m256i *)((uint16_t *)x + i), half);
  else _mm256_mask_storeu_epi16((uint16_t *)x + i, m, half);
}

INLINE ints load_line(const void *at) { return _mm512_loadu_si512(at); }
INLINE void prefetch(const void *at) { _mm_prefetch((const char *)at, _MM_HINT_T0); }
INLINE void prefetch_far(const void *at) { _mm_prefetch((const char *)at, _MM_HINT_T1); }
INLINE ints low_halves(ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE ints high_halves(ints x) { return low_halves(_mm512_srli_epi16(x, 4)); }

INLINE ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
typedef int32_t token_codes; /* four inputs of a token */
INLINE token_codes read_codes(const int8_t *at, const int words) {
  (void)words;
  int32_t x;
  memcpy(&x, at, 4);
  return x;
}
INLINE ints dot_codes(ints sum, ints w, token_codes x, const int words) {
  (void)words;
  return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x));
}
INLINE ints digits_joined(ints high, ints low) {
  return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}
/* Hides from gcc 12 what x was: it would keep every sum twice, as the type that the loop has and as
 * the type that comes after, and spill them. */
INLINE ints settled(ints x) {
  __asm__("" : "+v"(x));
  return x;
}
INLINE floats float_of(ints x) { return _mm512_cvtepi32_ps(settled(x)); }
INLINE floats all_floats(float x) { return _mm512_set1_ps(x); }
INLINE floats product(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats difference(floats a, floats b) { return _mm512_sub_ps(a, b); }
INLINE floats sum_of(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats fused(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats fused_less(floats a, floats b, floats c) { return _mm512_fnmadd_ps(a, b, c); }

INLINE ints magnitude(floats x) {
  return _mm512_and_si512((ints)x, _mm512_set1_epi32(0x7fffffff));
}
INLINE ints larger(ints a, ints b) { return _mm512_max_epi32(a, b); }
INLINE int32_t largest_lane(ints a) { return _mm512_reduce_max_epi32(a); }
INLINE ints ints_sum(ints a, ints b) { return _mm512_add_epi32(a, b); }
INLINE int32_t lanes_sum(ints a) { return _mm512_reduce_add_epi32(a); }
/* Lane r: all lanes of v[r] joined. Halves of two rows meet in one, then quarters of four. */
INLINE ints lanes_joined(const ints v[16], ints (*join)(ints, ints)) {
  ints two[8], four[4];
  for (int i = 0; i < 8; i++) {
    const ints a = v[2 * i], b = v[2 * i + 1];
    two[i] = join(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  }
  for (int i = 0; i < 4; i++) {
    const ints a = two[2 * i], b = two[2 * i + 1];
    four[i] = join(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  const ints low = join(_mm512_shuffle_i32x4(four[0], four[1], 0x44),
                        _mm512_shuffle_i32x4(four[0], four[1], 0xee));
  const ints high = join(_mm512_shuffle_i32x4(four[2], four[3], 0x44),
                         _mm512_shuffle_i32x4(four[2], four[3], 0xee));
  return join(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xdd));
}
#define LANES_JOINED
INLINE void largest_lanes(const ints v[16], int32_t to[16]) {
  _mm512_storeu_si512(to, lanes_joined(v, larger));
}
INLINE void lanes_sums(const ints v[16], int32_t to[16]) {
  _mm512_storeu_si512(to, lanes_joined(v, ints_sum));
}

INLINE floats limited(floats x, float most) {
  return _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-most)), _mm512_set1_ps(most));
}
INLINE ints rounded(floats x) { return _mm512_cvtps_epi32(x); }
INLINE ints high_digit(ints q) {
  return _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
}
INLINE ints low_digit(ints q, ints high) {
  return _mm512_sub_epi32(q, _mm512_slli_epi32(high, 8));
}
INLINE void store_bytes(int8_t to[16], ints q) {
  _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(q));
}
INLINE void store_codes(int8_t to[16], ints q, const int words) { (void)words, store_bytes(to, q); }

/* bf16: `dot_pair` is sum + w · x for pairs of bf16. */
INLINE void store_bf16(uint16_t to[16], floats v) {
  _mm256_storeu_si256((__m256i *)to, to_bf16(v));
}
#ifdef __AVX512BF16__
typedef int32_t token_pair; /* two inputs of a token, in bf16 */
INLINE token_pair read_pair(const int8_t *at) { return read_codes(at, 0); }
INLINE floats dot_pair(floats sum, ints w, token_pair x) {
  return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
}
INLINE floats low_part(floats v) { /* v less its bf16; 0 where that is not finite */
  const ints wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(v)), 16);
  const __mmask16 finite =
      _mm512_cmplt_epi32_mask(magnitude((floats)wide), _mm512_set1_epi32(0x7f800000));
  return _mm512_maskz_sub_ps(finite, v, (floats)wide);
}
INLINE void store_pairs(int8_t to[32], floats v, int low) {
  store_bf16((uint16_t *)to, low ? low_part(v) : v);
}
#else
typedef struct { /* the same in fp32 */
  floats first, second;
} token_pair;
INLINE token_pair read_pair(const int8_t *at) {
  const float *pair = (const float *)at;
  return (token_pair){_mm512_set1_ps(pair[0]), _mm512_set1_ps(pair[1])};
}
INLINE floats first_of(ints pairs) { return (floats)_mm512_slli_epi32(pairs, 16); }
INLINE floats second_of(ints pairs) {
  return (floats)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u));
}
INLINE floats dot_pair(floats sum, ints w, token_pair x) {
  sum = _mm512_fmadd_ps(first_of(w), x.first, sum);
  return _mm512_fmadd_ps(second_of(w), x.second, sum);
}
INLINE void store_pairs(int8_t to[64], floats v, int low) { /* all of v, in one part */
  (void)low;
  _mm512_storeu_ps(to, v);
}
#endif
