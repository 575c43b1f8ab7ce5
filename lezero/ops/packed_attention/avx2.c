/* Attention within texts for AVX2. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#include "../linear/avx2.h"
#include "../decoder/avx2.h"

INLINE void transpose8(__m256 x[8]) {
  __m256 y[8];
  for (int i = 0; i < 8; i += 2)
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      const __m256d low = (__m256d)y[i + j], high = (__m256d)y[i + j + 2];
      x[i + 2 * j] = (__m256)_mm256_unpacklo_pd(low, high);
      x[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd(low, high);
    }
  for (int i = 0; i < 4; i++) {
    y[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
    y[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
  }
  memcpy(x, y, sizeof y);
}
/* 16 rows of 16 numbers become the columns. */
INLINE void transpose16(floats x[16]) {
  __m256 part[2][2][8]; /* of rows, of columns */
  for (int i = 0; i < 16; i++) part[i / 8][0][i % 8] = x[i].a, part[i / 8][1][i % 8] = x[i].b;
  for (int i = 0; i < 4; i++) transpose8(part[i / 2][i % 2]);
  for (int i = 0; i < 16; i++) x[i] = (floats){part[0][i / 8][i % 8], part[1][i / 8][i % 8]};
}

enum { ROWS = 4, PANELS = 1 };
#include "attention.h"
