/* The few instructions of AMX that amx.h is written in, with two bodies: the processor's own, and (for
 * tests, LEZERO_AMX_EMULATED) what Intel's manual says that they do, in plain C.
 *
 * A tile is up to 16 rows of up to 64 bytes; what is done with it takes as long as it has rows. Numbers
 * of tiles are literals:
 *     0 – 3   sums: up to 16 rows (tokens) of 16 (outputs) int32 or fp32
 *     4, 5    tokens: as many rows of `depth` bytes, 64 or 32
 *     6, 7    weights: a row of 16 outputs × 4 bytes for each 4 bytes of depth
 *
 *     tiles_configure(shapes_of(depth, rows)), tiles_release()     of the calling thread
 *     tile_zero(t), tile_load(t, at, step), tile_store(t, at, step)      step: bytes from row to row
 *     tile_stream(t, at, step)   loads what is not wanted in the first cache afterwards
 *     tile_dot_bytes(c, a, b)    c += a · b for signed bytes a, unsigned b          TDPBSUD
 *     tile_dot_signed(c, a, b)   the same for signed bytes b                        TDPBSSD
 *     tile_dot_pairs(c, a, b)    c += a · b for pairs of bf16                       TDPBF16PS
 */
#include <stdint.h>
#include <string.h>

typedef struct { /* as LDTILECFG reads it */
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_shapes;

static tile_shapes shapes_of(int depth, int rows) {
  tile_shapes s = {.palette = 1};
  for (int t = 0; t < 8; t++) s.rows[t] = (uint8_t)rows, s.row_bytes[t] = 64;
  for (int t = 4; t < 6; t++) s.row_bytes[t] = (uint16_t)depth;
  for (int t = 6; t < 8; t++) s.rows[t] = (uint8_t)(depth / 4);
  return s;
}

#ifndef LEZERO_AMX_EMULATED

#include <immintrin.h>

/* gcc 12 does not know that LDTILECFG and TILELOADD read memory: what was written before has to be
 * there. `at` is named, so that it counts as seen from outside. */
#define WRITTEN(at) __asm__ volatile("" : : "r"(at) : "memory")

static void tiles_configure(tile_shapes shapes) {
  WRITTEN(&shapes);
  _tile_loadconfig(&shapes);
}
#define tiles_release() _tile_release()
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, at, step) \
  do {                         \
    WRITTEN(at);               \
    _tile_loadd(t, at, step);  \
  } while (0)
#define tile_stream(t, at, step)     \
  do {                               \
    WRITTEN(at);                     \
    _tile_stream_loadd(t, at, step); \
  } while (0)
#define tile_store(t, at, step) _tile_stored(t, at, step)
#define tile_dot_bytes(c, a, b) _tile_dpbsud(c, a, b)
#define tile_dot_signed(c, a, b) _tile_dpbssd(c, a, b)
#define tile_dot_pairs(c, a, b) _tile_dpbf16ps(c, a, b)

#else

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* The state of a thread; what the processor would answer with a fault ends the process. */
static _Thread_local struct {
  tile_shapes shapes; /* palette 0: not configured */
  uint8_t bytes[8][16][64];
} amx;

static void fault_unless(int allowed, const char *what) {
  if (allowed) return;
  fprintf(stderr, "AMX, emulated: %s\n", what);
  abort();
}

static void tiles_configure(tile_shapes s) {
  for (int t = 0; t < 8; t++)
    fault_unless(s.rows[t] >= 1 && s.rows[t] <= 16 && s.row_bytes[t] >= 1 && s.row_bytes[t] <= 64,
                 "a tile of no or too many rows or bytes");
  fault_unless(amx.shapes.palette == 0, "configured twice");
  memset(&amx, 0, sizeof amx);
  amx.shapes = s;
}

static void tiles_release(void) { memset(&amx, 0, sizeof amx); }

static void tile_zero(int t) {
  fault_unless(amx.shapes.palette == 1, "not configured in this thread");
  memset(amx.bytes[t], 0, sizeof amx.bytes[t]);
}

static void tile_load(int t, const void *at, int64_t step) {
  tile_zero(t);
  for (int r = 0; r < amx.shapes.rows[t]; r++)
    memcpy(amx.bytes[t][r], (const char *)at + r * step, amx.shapes.row_bytes[t]);
}

#define tile_stream(t, at, step) tile_load(t, at, step)

static void tile_store(int t, void *at, int64_t step) {
  fault_unless(amx.shapes.palette == 1, "not configured in this thread");
  for (int r = 0; r < amx.shapes.rows[t]; r++)
    memcpy((char *)at + r * step, amx.bytes[t][r], amx.shapes.row_bytes[t]);
}

/* Fours of bytes in a row of a, once the shapes fit. */
static int depth_of(int c, int a, int b) {
  const tile_shapes *s = &amx.shapes;
  fault_unless(s->palette == 1, "not configured in this thread");
  fault_unless(c != a && c != b && a != b, "one tile twice");
  fault_unless(s->row_bytes[c] % 4 == 0 && s->row_bytes[a] % 4 == 0 &&
                   s->row_bytes[b] == s->row_bytes[c] && s->rows[a] == s->rows[c] &&
                   s->row_bytes[a] / 4 == s->rows[b],
               "shapes that do not fit");
  return s->row_bytes[a] / 4;
}

static void dot_of_bytes(int c, int a, int b, int is_signed) {
  const int depth = depth_of(c, a, b), outputs = amx.shapes.row_bytes[c] / 4;
  for (int m = 0; m < amx.shapes.rows[c]; m++) {
    int32_t sums[16];
    memcpy(sums, amx.bytes[c][m], 64);
    for (int k = 0; k < depth; k++)
      for (int n = 0; n < outputs; n++)
        for (int i = 0; i < 4; i++) {
          const uint8_t w = amx.bytes[b][k][4 * n + i];
          sums[n] += (int8_t)amx.bytes[a][m][4 * k + i] * (is_signed ? (int8_t)w : w);
        }
    memcpy(amx.bytes[c][m], sums, 4 * (size_t)outputs);
  }
}
static void tile_dot_bytes(int c, int a, int b) { dot_of_bytes(c, a, b, 0); }
static void tile_dot_signed(int c, int a, int b) { dot_of_bytes(c, a, b, 1); }

/* Denormals are zeros, as inputs and as results. */
static float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

static float bf16_at(const uint8_t *at) {
  uint16_t half;
  memcpy(&half, at, 2);
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, 4);
  return flushed(x);
}

/* The even and the odd of the pairs are summed apart, from 0, fused; then their sum is added. */
static void tile_dot_pairs(int c, int a, int b) {
  const int depth = depth_of(c, a, b), outputs = amx.shapes.row_bytes[c] / 4;
  for (int m = 0; m < amx.shapes.rows[c]; m++) {
    float sums[16], parts[16][2] = {{0}};
    memcpy(sums, amx.bytes[c][m], 64);
    for (int k = 0; k < depth; k++)
      for (int n = 0; n < outputs; n++)
        for (int i = 0; i < 2; i++) {
          const float x = bf16_at(amx.bytes[a][m] + 4 * k + 2 * i);
          const float w = bf16_at(amx.bytes[b][k] + 4 * n + 2 * i);
          parts[n][i] = flushed(fmaf(x, w, parts[n][i]));
        }
    for (int n = 0; n < outputs; n++)
      sums[n] = flushed(flushed(sums[n]) + flushed(parts[n][0] + parts[n][1]));
    memcpy(amx.bytes[c][m], sums, 4 * (size_t)outputs);
  }
}

#endif
