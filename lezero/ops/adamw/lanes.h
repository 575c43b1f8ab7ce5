/* A vector of fp32 or int32 lanes for each instruction set, so that a kernel is written once: 16 lanes
 * with AVX-512, 8 with AVX2, one without either. Every operation rounds as IEEE 754 says, so that all
 * of them give the same bits. `table` holds eight numbers, looked up by lane. */
#ifndef LEZERO_ADAMW_LANES_H
#define LEZERO_ADAMW_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { NAN_BITS = 0x7fc00000, INF_BITS = 0x7f800000 };

#if defined(__AVX512F__)
#include <immintrin.h>

enum { LANES = 16 };
typedef __m512 vf;
typedef __m512i vi;

INLINE vf loadf(const float *p) { return _mm512_loadu_ps(p); }
INLINE void storef(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf allf(float x) { return _mm512_set1_ps(x); }
INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf quotient(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf fused(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf root(vf a) { return _mm512_sqrt_ps(a); }
INLINE vf least(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vi alli(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi addi(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi andi(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi ori(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi mosti(vi a, vi b) { return _mm512_max_epi32(a, b); }
#define left(a, n) _mm512_slli_epi32(a, n)
#define right(a, n) _mm512_srli_epi32(a, n)
#define right_signed(a, n) _mm512_srai_epi32(a, n)
INLINE vi bits(vf a) { return _mm512_castps_si512(a); }
INLINE vf number(vi a) { return _mm512_castsi512_ps(a); }
INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi nearest(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vi if_greater(vi a, vi b, vi x, vi y) {
  return _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a, b), y, x);
}
INLINE vi if_equal(vi a, vi b, vi x, vi y) {
  return _mm512_mask_blend_epi32(_mm512_cmpeq_epi32_mask(a, b), y, x);
}
INLINE vi plus_one_if_reached(vi count, vf x, vf threshold) {
  const __mmask16 reached = _mm512_cmp_ps_mask(x, threshold, _CMP_GE_OQ);
  return _mm512_mask_add_epi32(count, reached, count, _mm512_set1_epi32(1));
}
INLINE vi load8(const uint8_t *p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
INLINE void store8(uint8_t *p, vi x) {
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x));
}
INLINE vi load16(const uint16_t *p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}
INLINE void store16(uint16_t *p, vi x) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x));
}
INLINE vi load16_signed(const uint16_t *p) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vi quiet(vi x) {
  const __mmask16 nan = _mm512_cmp_ps_mask(number(x), number(x), _CMP_UNORD_Q);
  return _mm512_mask_ternarylogic_epi32(x, nan, alli(INT32_MIN), alli(NAN_BITS), 0xea);
}
INLINE vi not_negative_unless(vi x, vi flags, int32_t mask) {
  const __mmask16 none = _mm512_testn_epi32_mask(flags, alli(mask));
  return _mm512_mask_max_epi32(x, none, x, _mm512_setzero_si512());
}

#elif defined(__AVX2__)
#include <immintrin.h>

enum { LANES = 8 };
typedef __m256 vf;
typedef __m256i vi;
typedef __m256 table;

INLINE vf loadf(const float *p) { return _mm256_loadu_ps(p); }
INLINE void storef(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf allf(float x) { return _mm256_set1_ps(x); }
INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf quotient(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf fused(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf root(vf a) { return _mm256_sqrt_ps(a); }
INLINE vf least(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vi alli(int32_t x) { return _mm256_set1_epi32(x); }
INLINE vi addi(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi andi(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi ori(vi a, vi b) { return _mm256_or_si256(a, b); }
INLINE vi mosti(vi a, vi b) { return _mm256_max_epi32(a, b); }
#define left(a, n) _mm256_slli_epi32(a, n)
#define right(a, n) _mm256_srli_epi32(a, n)
#define right_signed(a, n) _mm256_srai_epi32(a, n)
INLINE vi bits(vf a) { return _mm256_castps_si256(a); }
INLINE vf number(vi a) { return _mm256_castsi256_ps(a); }
INLINE vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vi nearest(vf a) { return _mm256_cvtps_epi32(a); }
INLINE vi if_greater(vi a, vi b, vi x, vi y) {
  return _mm256_blendv_epi8(y, x, _mm256_cmpgt_epi32(a, b));
}
INLINE vi if_equal(vi a, vi b, vi x, vi y) {
  return _mm256_blendv_epi8(y, x, _mm256_cmpeq_epi32(a, b));
}
INLINE vi plus_one_if_reached(vi count, vf x, vf threshold) {
  return _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(x, threshold, _CMP_GE_OQ)));
}
INLINE vi load8(const uint8_t *p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
INLINE __m128i halves(vi x) { /* of values below 2^16 */
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0xd8));
}
INLINE void store8(uint8_t *p, vi x) {
  const __m128i words = halves(x);
  _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
INLINE vi load16(const uint16_t *p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}
INLINE void store16(uint16_t *p, vi x) {
  _mm_storeu_si128((__m128i *)p, halves(andi(x, alli(0xffff))));
}
INLINE table of_eight(const float *p) { return _mm256_loadu_ps(p); }
INLINE vf look_up(table t, vi at) { return _mm256_permutevar8x32_ps(t, at); }

#else

enum { LANES = 1 };
typedef float vf;
typedef int32_t vi;
typedef const float *table;

INLINE vf loadf(const float *p) { return *p; }
INLINE void storef(float *p, vf x) { *p = x; }
INLINE vf allf(float x) { return x; }
INLINE vf add(vf a, vf b) { return a + b; }
INLINE vf sub(vf a, vf b) { return a - b; }
INLINE vf mul(vf a, vf b) { return a * b; }
INLINE vf quotient(vf a, vf b) { return a / b; }
INLINE vf fused(vf a, vf b, vf c) { return fmaf(a, b, c); }
INLINE vf root(vf a) { return sqrtf(a); }
INLINE vf least(vf a, vf b) { return a < b ? a : b; }
INLINE vi alli(int32_t x) { return x; }
INLINE vi addi(vi a, vi b) { return (vi)((uint32_t)a + (uint32_t)b); }
INLINE vi andi(vi a, vi b) { return a & b; }
INLINE vi ori(vi a, vi b) { return a | b; }
INLINE vi mosti(vi a, vi b) { return a > b ? a : b; }
#define left(a, n) ((vi)((uint32_t)(a) << (n)))
#define right(a, n) ((vi)((uint32_t)(a) >> (n)))
#define right_signed(a, n) ((a) >> (n))
INLINE vi bits(vf a) { return ((union { vf f; vi i; }){a}).i; }
INLINE vf number(vi a) { return ((union { vi i; vf f; }){a}).f; }
INLINE vf to_float(vi a) { return (vf)a; }
INLINE vi nearest(vf a) { return (vi)rintf(a); }
INLINE vi if_greater(vi a, vi b, vi x, vi y) { return a > b ? x : y; }
INLINE vi if_equal(vi a, vi b, vi x, vi y) { return a == b ? x : y; }
INLINE vi plus_one_if_reached(vi count, vf x, vf threshold) { return count + (x >= threshold); }
INLINE vi load8(const uint8_t *p) { return *p; }
INLINE void store8(uint8_t *p, vi x) { *p = (uint8_t)x; }
INLINE vi load16(const uint16_t *p) { return *p; }
INLINE void store16(uint16_t *p, vi x) { *p = (uint16_t)x; }
INLINE table of_eight(const float *p) { return p; }
INLINE vf look_up(table t, vi at) { return t[at & 7]; }

#endif

#if !defined(__AVX512F__)
INLINE vi load16_signed(const uint16_t *p) { return right_signed(left(load16(p), 16), 16); }
INLINE vi quiet(vi x) {
  const vi magnitude = andi(x, alli(0x7fffffff)), nan = ori(andi(x, alli(INT32_MIN)), alli(NAN_BITS));
  return if_greater(magnitude, alli(INF_BITS), nan, x);
}
INLINE vi not_negative_unless(vi x, vi flags, int32_t mask) {
  return if_greater(andi(flags, alli(mask)), alli(0), x, mosti(x, alli(0)));
}
#endif

#endif
