/* Attention within texts for AVX-512. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#include "../linear/avx512.h"
#include "../decoder/avx512.h"

/* 16 rows of 16 numbers become the columns: pairs of rows, pairs of pairs, then quarters. */
INLINE void transpose16(floats x[16]) {
  floats y[16];
  for (int i = 0; i < 16; i += 2)
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      const __m512d low = (__m512d)y[i + j], high = (__m512d)y[i + j + 2];
      x[i + 2 * j] = (floats)_mm512_unpacklo_pd(low, high);
      x[i + 2 * j + 1] = (floats)_mm512_unpackhi_pd(low, high);
    }
  for (int i = 0; i < 8; i++) {
    const floats low = x[i / 4 * 8 + i % 4], high = x[i / 4 * 8 + i % 4 + 4];
    y[i] = _mm512_shuffle_f32x4(low, high, 0x88), y[i + 8] = _mm512_shuffle_f32x4(low, high, 0xdd);
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      const floats low = y[8 * j + i], high = y[8 * j + i + 4];
      x[4 * j + i] = _mm512_shuffle_f32x4(low, high, 0x88);
      x[4 * j + i + 8] = _mm512_shuffle_f32x4(low, high, 0xdd);
    }
}

/* Measured: as fast as the 24 sums that registers would hold, and fewer rows are filled up. */
enum { ROWS = 8, PANELS = 2 };
#include "attention.h"
