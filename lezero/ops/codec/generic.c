// The primitives in plain C, for any processor, and what each of them does. n is a multiple of 16.
#include <string.h>

#include "codec.h"

static float bf16_to_fp32(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

// To the nearest, halves to even; every NaN becomes the same one.
static uint16_t fp32_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return LEZERO_BF16_NAN;
  return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}

// To the nearest integer, halves to even, for |x| < 2^22.
static int32_t nearest(float x) {
  const float shifted = x + 12582912.0f;
  int32_t bits;
  memcpy(&bits, &shifted, 4);
  return bits - 0x4B400000;
}

// n elements of memory, any n, as fp32.
static void read_block(float* y, const void* x, int type, int64_t n) {
  if (type == LEZERO_FP32) memcpy(y, x, 4 * (size_t)n);
  else
    for (int64_t i = 0; i < n; i++) y[i] = bf16_to_fp32(((const uint16_t*)x)[i]);
}

// n elements to memory, any n, in place of what is there or added to it in fp32.
static void write_block(void* x, int type, const float* y, int64_t n, int add) {
  if (type == LEZERO_FP32) {
    float* to = (float*)x;
    if (add)
      for (int64_t i = 0; i < n; i++) to[i] += y[i];
    else memcpy(to, y, 4 * (size_t)n);
  } else {
    uint16_t* to = (uint16_t*)x;
    for (int64_t i = 0; i < n; i++) to[i] = fp32_to_bf16(add ? bf16_to_fp32(to[i]) + y[i] : y[i]);
  }
}

// The same in place of what is there, past the caches if the processor can, x a multiple of 64 bytes.
static void stream_block(float* x, const float* y, int64_t n) { memcpy(x, y, 4 * (size_t)n); }

// Makes what was streamed visible to other threads.
static void stream_end(void) {}

// The bits of the largest |y|; a NaN is larger than infinity.
static uint32_t largest_magnitude(const float* y, int64_t n) {
  uint32_t top = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, y + i, 4);
    bits &= 0x7FFFFFFFu;
    top = bits > top ? bits : top;
  }
  return top;
}

// The sum of |y| in a fixed order: 16 sums of every 16th element, then halves onto halves.
static float magnitude_sum(const float* y, int64_t n) {
  float lane[16] = {0};
  for (int64_t i = 0; i < n; i += 16)
    for (int j = 0; j < 16; j++) lane[j] += y[i + j] < 0 ? -y[i + j] : y[i + j];
  for (int half = 8; half; half /= 2)
    for (int j = 0; j < half; j++) lane[j] += lane[j + half];
  return lane[0];
}

// q = nearest(y · inverse); lost = y - q · step, where it is wanted.
static void encode_int8(const float* y, int64_t n, float inverse, float step, int8_t* q,
                        float* lost) {
  for (int64_t i = 0; i < n; i++) q[i] = (int8_t)nearest(y[i] * inverse);
  if (lost)
    for (int64_t i = 0; i < n; i++) lost[i] = y[i] - (float)q[i] * step;
}

static void decode_int8(const int8_t* q, int64_t n, float step, float* y) {
  for (int64_t i = 0; i < n; i++) y[i] = (float)q[i] * step;
}

static void encode_int4(const float* y, int64_t n, float inverse, float step, uint8_t* q,
                        float* lost) {
  for (int64_t i = 0; i < n; i += 2) {
    const int32_t low = nearest(y[i] * inverse), high = nearest(y[i + 1] * inverse);
    q[i / 2] = (uint8_t)((low + 8) | (high + 8) << 4);
    if (lost) lost[i] = y[i] - (float)low * step, lost[i + 1] = y[i + 1] - (float)high * step;
  }
}

static void decode_int4(const uint8_t* q, int64_t n, float step, float* y) {
  for (int64_t i = 0; i < n; i += 2) {
    y[i] = (float)((q[i / 2] & 15) - 8) * step;
    y[i + 1] = (float)((q[i / 2] >> 4) - 8) * step;
  }
}

// One bit an element, set where the sign bit is; lost = y ∓ scale.
static void encode_sign(const float* y, int64_t n, float scale, uint8_t* bits, float* lost) {
  for (int64_t i = 0; i < n; i += 8) {
    uint32_t byte = 0;
    for (int j = 0; j < 8; j++) {
      uint32_t word;
      memcpy(&word, y + i + j, 4);
      byte |= (word >> 31) << j;
      if (lost) lost[i + j] = y[i + j] - (word >> 31 ? -scale : scale);
    }
    bits[i / 8] = (uint8_t)byte;
  }
}

static void decode_sign(const uint8_t* bits, int64_t n, float scale, float* y) {
  for (int64_t i = 0; i < n; i++) y[i] = bits[i / 8] >> (i % 8) & 1 ? -scale : scale;
}

static void encode_bf16(const float* y, int64_t n, uint16_t* q) {
  for (int64_t i = 0; i < n; i++) {
    const uint16_t x = fp32_to_bf16(y[i]);
    memcpy(q + i, &x, 2);
  }
}

static void decode_bf16(const uint16_t* q, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i++) {
    uint16_t x;
    memcpy(&x, q + i, 2);
    y[i] = bf16_to_fp32(x);
  }
}

// Of each four the two largest in magnitude (of equal ones the first), in order, and a bit for each.
// Gives the bits of the largest of all.
static uint32_t keep_two(const float* y, int64_t n, uint8_t* kept, float* pairs) {
  const uint32_t top = largest_magnitude(y, n);
  memset(kept, 0, (size_t)n / 8);
  for (int64_t i = 0; i < n; i += 4) {
    uint32_t size[4];
    memcpy(size, y + i, 16);
    for (int j = 0; j < 4; j++) size[j] &= 0x7FFFFFFFu;
    for (int j = 0; j < 4; j++) {
      int larger = 0;
      for (int k = 0; k < 4; k++) larger += size[k] > size[j] || (size[k] == size[j] && k < j);
      if (larger >= 2) continue;
      kept[i / 8] |= (uint8_t)(1 << (i % 8 + j));
      *pairs++ = y[i + j];
    }
  }
  return top;
}

// The pairs back where they were, zeros between. Of bits that keep more than two of four, as damage
// makes them, the first two count.
static void spread(const float* pairs, const uint8_t* kept, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += 4) {
    const float* const two = pairs + i / 2;
    int used = 0;
    for (int j = 0; j < 4; j++) {
      const int there = (kept[i / 8] >> (i % 8 + j) & 1) && used < 2;
      y[i + j] = there ? two[used] : 0.0f;
      used += there;
    }
  }
}

// lost = y - the pairs where they were.
static void subtract_spread(const float* y, const float* pairs, const uint8_t* kept, int64_t n,
                            float* lost) {
  spread(pairs, kept, n, lost);
  for (int64_t i = 0; i < n; i++) lost[i] = y[i] - lost[i];
}

#include "blocks.h"
