/* Attention within texts for any processor. */
#include "problem.h"
#define INLINE static inline __attribute__((always_inline))
#include "../linear/generic.h"
#include "../decoder/generic.h"

/* 16 rows of 16 numbers become the columns. */
INLINE void transpose16(floats x[16]) {
  float rows[16][16], columns[16][16];
  memcpy(rows, x, sizeof rows);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) columns[j][i] = rows[i][j];
  memcpy(x, columns, sizeof columns);
}

enum { ROWS = 4, PANELS = 1 };
#include "attention.h"
