/* The primitives of tiles.h, which says what each does, for AVX2 with FMA and F16C; with AVX-VNNI,
 * where flags allow, bytes are multiplied by one instruction, and so are words. */
#include <immintrin.h>
#include <string.h>

#include "avx_vnni.h"

typedef struct {
  __m256 a, b;
} floats;
typedef struct {
  __m256i a, b;
} ints;

/* How many rows' sums registers hold beside weights. */
enum { MOST_WHOLE = BYTES ? 6 : 4, MOST_BLOCKS = 4, MOST_DIGITS = 2, MOST_BF16 = 4 };
enum { MOST_HALVES = MOST_BLOCKS, MOST_ROWS = 6 };
/* Whether tokens of so many digits lie as words beside weights of so many bits: where words are
 * multiplied by one instruction those of two digits do, elsewhere what has no SHORT_SUMS. */
#define WORDS(bits, digits) (BYTES ? (digits) == 2 : (bits) == 8)
/* Beside bf16 weights tokens lie in fp32; bytes of a pair of their inputs. */
enum { FLOATS = 1, PAIR_BYTES = 8 };
/* Two panels are two streams of memory; with more tokens one leaves registers for their sums. */
#define AT_ONCE(R) ((R) == 1 ? 2 : 1)
enum { ALONE = 2 };

#define BOTH(type, call_a, call_b) ((type){call_a, call_b})

INLINE __m256 widen8(__m128i half, int type) {
  if (type == LEZERO_FP16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE floats read16(const void *x, int type, int64_t i, int64_t count) {
  const int size = type == LEZERO_FP32 ? 4 : 2;
  const char *at = (const char *)x + i * size;
  char part[64] = {0};
  if (count < 16) memcpy(part, at, (size_t)count * size), at = part;
  if (type == LEZERO_FP32)
    return BOTH(floats, _mm256_loadu_ps((const float *)at), _mm256_loadu_ps((const float *)at + 8));
  return BOTH(floats, widen8(_mm_loadu_si128((const __m128i *)at), type),
              widen8(_mm_loadu_si128((const __m128i *)(at + 16)), type));
}

INLINE __m128i narrow8(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v), one = _mm256_set1_epi32(1);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i high =
      _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  return _mm256_castsi256_si128(packed);
}

INLINE void store_bf16(uint16_t to[16], floats v) {
  _mm_storeu_si128((__m128i *)to, narrow8(v.a));
  _mm_storeu_si128((__m128i *)(to + 8), narrow8(v.b));
}

INLINE void write16(void *x, int type, int64_t i, int64_t count, floats v) {
  const int size = type == LEZERO_FP32 ? 4 : 2;
  char part[64], *to = (char *)x + i * size, *at = count < 16 ? part : to;
  if (type == LEZERO_FP32) {
    _mm256_storeu_ps((float *)at, v.a), _mm256_storeu_ps((float *)at + 8, v.b);
  } else if (type == LEZERO_FP16) {
    _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph(v.a, 0));
    _mm_storeu_si128((__m128i *)(at + 16), _mm256_cvtps_ph(v.b, 0));
  } else {
    store_bf16((uint16_t *)at, v);
  }
  if (count < 16) memcpy(to, part, (size_t)count * size);
}

INLINE ints load_line(const void *at) {
  return BOTH(ints, _mm256_loadu_si256((const __m256i *)at),
              _mm256_loadu_si256((const __m256i *)at + 1));
}
INLINE void prefetch(const void *at) { _mm_prefetch((const char *)at, _MM_HINT_T0); }
INLINE void prefetch_far(const void *at) { _mm_prefetch((const char *)at, _MM_HINT_T1); }
INLINE ints low_halves(ints x) {
  const __m256i low = _mm256_set1_epi8(15);
  return BOTH(ints, _mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
}
INLINE ints high_halves(ints x) {
  return low_halves(BOTH(ints, _mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)));
}

INLINE ints all_ints(int32_t x) { return BOTH(ints, _mm256_set1_epi32(x), _mm256_set1_epi32(x)); }

/* Four inputs of a token: as words the even ones, and the odd ones; as bytes `even` is all. */
typedef struct {
  __m256i even, odd;
} token_codes;
INLINE token_codes read_codes(const int8_t *at, const int words) {
  int32_t even, odd;
  memcpy(&even, at, 4), memcpy(&odd, words ? at + 4 : at, 4);
  return (token_codes){_mm256_set1_epi32(even), _mm256_set1_epi32(odd)};
}
/* 8 sums of four products. Without AVX-VNNI as words, since pairs of u8 · s8 would saturate. */
INLINE __m256i dot8(__m256i sum, __m256i w, token_codes x, const int words) {
  if (!words) return add_bytes(sum, w, x.even);
  const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w, 8);
  /* A sum of the two first: they would wait for each other, and the next two for them. */
  return _mm256_add_epi32(sum, add_words(_mm256_madd_epi16(even, x.even), odd, x.odd));
}
INLINE ints dot_codes(ints sum, ints w, token_codes x, const int words) {
  return BOTH(ints, dot8(sum.a, w.a, x, words), dot8(sum.b, w.b, x, words));
}
#ifndef VNNI
/* Where weights have 4 bits, a sum of 16 bits holds what 32 inputs add to one of two: 16 · 15 · 127. */
#define SHORT_SUMS
/* In assembly, or gcc 12 adds the products to each other first, and spills them. */
INLINE __m256i short8(__m256i sum, __m256i w, __m256i x) {
  __m256i out;
  __asm__("vpaddw %2, %1, %0" : "=x"(out) : "%x"(sum), "x"(_mm256_maddubs_epi16(w, x)));
  return out;
}
INLINE ints dot_short(ints sum, ints w, token_codes x) {
  return BOTH(ints, short8(sum.a, w.a, x.even), short8(sum.b, w.b, x.even));
}
INLINE ints first_short(ints w, token_codes x) {
  return BOTH(ints, _mm256_maddubs_epi16(w.a, x.even), _mm256_maddubs_epi16(w.b, x.even));
}
INLINE ints add_short(ints sum, ints pairs) {
  const __m256i one = _mm256_set1_epi16(1);
  return BOTH(ints, add_words(sum.a, pairs.a, one), add_words(sum.b, pairs.b, one));
}
#endif
INLINE ints ints_sum(ints x, ints y) {
  return BOTH(ints, _mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b));
}
INLINE ints digits_joined(ints high, ints low) {
  return ints_sum(BOTH(ints, _mm256_slli_epi32(high.a, 8), _mm256_slli_epi32(high.b, 8)), low);
}
INLINE ints settled(ints x) { return x; }
INLINE floats float_of(ints x) {
  return BOTH(floats, _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b));
}
INLINE floats all_floats(float x) { return BOTH(floats, _mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE floats product(floats x, floats y) {
  return BOTH(floats, _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b));
}
INLINE floats difference(floats x, floats y) {
  return BOTH(floats, _mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b));
}
INLINE floats sum_of(floats x, floats y) {
  return BOTH(floats, _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b));
}
INLINE floats fused(floats x, floats y, floats z) {
  return BOTH(floats, _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
INLINE floats fused_less(floats x, floats y, floats z) {
  return BOTH(floats, _mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b));
}

INLINE ints magnitude(floats x) {
  const __m256i all = _mm256_set1_epi32(0x7fffffff);
  return BOTH(ints, _mm256_and_si256(_mm256_castps_si256(x.a), all),
              _mm256_and_si256(_mm256_castps_si256(x.b), all));
}
INLINE ints larger(ints x, ints y) {
  return BOTH(ints, _mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b));
}
INLINE int32_t largest_lane(ints x) {
  const __m256i h = _mm256_max_epi32(x.a, x.b);
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
INLINE int32_t lanes_sum(ints x) {
  const __m256i h = _mm256_add_epi32(x.a, x.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

INLINE __m256 limited8(__m256 x, float most) {
  return _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-most)), _mm256_set1_ps(most));
}
INLINE floats limited(floats x, float most) {
  return BOTH(floats, limited8(x.a, most), limited8(x.b, most));
}
INLINE ints rounded(floats x) {
  return BOTH(ints, _mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
}
INLINE ints high_digit(ints q) {
  const __m256i half = _mm256_set1_epi32(128);
  return BOTH(ints, _mm256_srai_epi32(_mm256_add_epi32(q.a, half), 8),
              _mm256_srai_epi32(_mm256_add_epi32(q.b, half), 8));
}
INLINE ints low_digit(ints q, ints high) {
  return BOTH(ints, _mm256_sub_epi32(q.a, _mm256_slli_epi32(high.a, 8)),
              _mm256_sub_epi32(q.b, _mm256_slli_epi32(high.b, 8)));
}
INLINE void store_bytes(int8_t to[16], ints q) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(q.a, q.b), 0xd8);
  _mm_storeu_si128((__m128i *)to, _mm_packs_epi16(_mm256_castsi256_si128(words),
                                                  _mm256_extracti128_si256(words, 1)));
}
/* As bytes, or as words, see [Note: tiles of tokens]. */
INLINE void store_codes(int8_t to[32], ints q, const int words) {
  if (!words) {
    store_bytes(to, q);
    return;
  }
  const __m256i line = _mm256_permute4x64_epi64(_mm256_packs_epi32(q.a, q.b), 0xd8);
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(line, order));
}

INLINE __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
INLINE __m256 second_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)));
}
/* Two inputs of a token, as floats. */
typedef struct {
  __m256 first, second;
} token_pair;
INLINE token_pair read_pair(const int8_t *at) {
  const float *pair = (const float *)at;
  return (token_pair){_mm256_broadcast_ss(pair), _mm256_broadcast_ss(pair + 1)};
}
/* sum + w · x for pairs of bf16. */
INLINE floats dot_pair(floats sum, ints w, token_pair x) {
  sum.a = _mm256_fmadd_ps(first_of(w.a), x.first, sum.a);
  sum.b = _mm256_fmadd_ps(first_of(w.b), x.first, sum.b);
  sum.a = _mm256_fmadd_ps(second_of(w.a), x.second, sum.a);
  sum.b = _mm256_fmadd_ps(second_of(w.b), x.second, sum.b);
  return sum;
}
INLINE void store_pairs(int8_t to[64], floats v, int low) { /* all of v, in one part */
  (void)low;
  write16(to, LEZERO_FP32, 0, 16, v);
}
