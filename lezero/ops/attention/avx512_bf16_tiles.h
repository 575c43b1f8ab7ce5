/* Pieces of the AVX512-BF16 kernels: exp2, packing, and the 8 x 32 tile of every matrix product.
 *
 * [Note: operands of vdpbf16ps]
 * One instruction adds, in each of 16 fp32 lanes, the products of a pair of bf16 numbers. The left
 * operand A is a broadcast pair, so any matrix whose pairs along the summed dim are adjacent will do.
 * The right operand B is "paired": [panel of 32 columns][summed dim / 2][32 columns][2].
 * Everything is counted in pairs (uint32_t) below.
 */
#ifndef LEZERO_AVX512_BF16_TILES_H
#define LEZERO_AVX512_BF16_TILES_H

#include <immintrin.h>
#include <string.h>

#include "problem.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

typedef uint32_t pair;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

INLINE __mmask16 first_lanes(int64_t count) {
  return count <= 0 ? 0 : count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
}

INLINE __m512 pair_broadcast(const pair *at) { return (__m512)_mm512_set1_epi32((int)*at); }

INLINE __m512 dot(__m512 acc, __m512 a, __m512 b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

/* 2^x for x <= 127, relative error below 1.3e-7 (degree 6 fitted to [-1/2, 1/2]); NaN stays NaN, and
 * -inf gives 0 because the operand order of max hands a NaN through. */
INLINE __m512 exp2_ps(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(0x1.41d332p-13f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.5f456ap-10f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.3b2dbcp-7f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6aed4p-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebfbdap-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e430p-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

/* (low, high) as 32 bf16: those of `low` first. */
INLINE __m512i to_bf16(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

INLINE __m512i interleaving(void) {
  return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                          21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
}

/* C[8][32] += A[8][pairs] B[pairs][32]; a_row and a_pair are A's strides in pairs, c_row is C's in
 * floats. With `fresh`, C is overwritten; with `scales`, row i of C is multiplied by scales[i]. */
INLINE void tile(const pair *A, int64_t a_row, int64_t a_pair, const pair *B, int64_t pairs, float *C,
                 int64_t c_row, int fresh, const float *scales) {
  __m512 acc[8][2];
  UNROLL for (int i = 0; i < 8; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; k++) {
    const __m512 b0 = _mm512_load_ps(B + k * 32), b1 = _mm512_load_ps(B + k * 32 + 16);
    UNROLL for (int i = 0; i < 8; i++) {
      const __m512 x = pair_broadcast(A + i * a_row + k * a_pair);
      acc[i][0] = dot(acc[i][0], x, b0);
      acc[i][1] = dot(acc[i][1], x, b1);
    }
  }
  UNROLL for (int i = 0; i < 8; i++) UNROLL for (int j = 0; j < 2; j++) {
    float *c = C + i * c_row + j * 16;
    __m512 sum = acc[i][j];
    if (!fresh && scales)
      sum = _mm512_fmadd_ps(_mm512_load_ps(c), _mm512_set1_ps(scales[i]), sum);
    else if (!fresh)
      sum = _mm512_add_ps(_mm512_load_ps(c), sum);
    _mm512_store_ps(c, sum);
  }
}

/* 16 x 16 transpose of pairs: to[j * to_row + i] = from[i][j]; a null row counts as zeros. */
INLINE void transpose16(const pair *const from[16], pair *to, int64_t to_row) {
  __m512i r[16], t[16];
  UNROLL for (int i = 0; i < 16; i++)
    r[i] = from[i] ? _mm512_loadu_si512(from[i]) : _mm512_setzero_si512();
  UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
    r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
    r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
  }
  UNROLL for (int i = 0; i < 16; i += 8) UNROLL for (int j = 0; j < 4; j++) {
    t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
    t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
  }
  UNROLL for (int j = 0; j < 8; j++) {
    const __m512i even = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    _mm512_store_si512(to + j * to_row, even);
    _mm512_store_si512(to + (j + 8) * to_row, odd);
  }
}

/* x[row][E] as B of a product summed over E, 32 rows a panel; rows beyond `rows` are zeros. */
static void pack_summed_over_E(const bf16 *x, int64_t row, int64_t rows, int64_t E, pair *to) {
  for (int64_t n = 0; n < rows; n += 16) {
    pair *panel = to + n / 32 * (16 * E) + n % 32;
    for (int64_t e = 0; e < E; e += 32) {
      const pair *from[16];
      UNROLL for (int i = 0; i < 16; i++)
        from[i] = n + i < rows ? (const pair *)(x + (n + i) * row + e) : 0;
      transpose16(from, panel + e / 2 * 32, 32);
    }
  }
  if (rows % 32 && rows % 32 <= 16) {
    pair *panel = to + rows / 32 * (16 * E) + 16;
    for (int64_t e = 0; e < E / 2; e++) _mm512_store_si512(panel + e * 32, _mm512_setzero_si512());
  }
}

/* x[row][E] as B of a product summed over rows, 32 of E a panel; zeros up to `padded` rows. */
static void pack_summed_over_rows(const bf16 *x, int64_t row, int64_t rows, int64_t padded, int64_t E,
                                  pair *to) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i zero = _mm512_setzero_si512();
  for (int64_t n = 0; n < padded; n += 2)
    for (int64_t e = 0; e < E; e += 32) {
      const __m512i a = n < rows ? _mm512_loadu_si512(x + n * row + e) : zero;
      const __m512i b = n + 1 < rows ? _mm512_loadu_si512(x + (n + 1) * row + e) : zero;
      pair *at = to + e * (padded / 2) + n / 2 * 32;
      _mm512_store_si512(at, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(at + 16, _mm512_permutex2var_epi16(a, high, b));
    }
}

/* x[row][E] as A: the rows one after the other, zeros up to `padded` rows. */
static void pack_rows(const bf16 *x, int64_t row, int64_t rows, int64_t padded, int64_t E, pair *to) {
  for (int64_t n = 0; n < padded; n++)
    for (int64_t e = 0; e < E; e += 32)
      _mm512_store_si512(to + (n * E + e) / 2, n < rows ? _mm512_loadu_si512(x + n * row + e)
                                                        : _mm512_setzero_si512());
}

/* The first `rows` rows of x[rows][E] times `scale`, in bf16. */
static void unpack_rows(const float *x, int64_t rows, int64_t E, float scale, bf16 *to, int64_t row) {
  const __m512 s = _mm512_set1_ps(scale);
  for (int64_t n = 0; n < rows; n++)
    for (int64_t e = 0; e < E; e += 32) {
      const __m512 low = _mm512_mul_ps(_mm512_load_ps(x + n * E + e), s);
      const __m512 high = _mm512_mul_ps(_mm512_load_ps(x + n * E + e + 16), s);
      _mm512_storeu_si512(to + n * row + e, to_bf16(low, high));
    }
}

#endif
