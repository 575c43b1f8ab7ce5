/* Plain loops that the compiler vectorises; built once for each instruction set. Bits do not depend on
 * it: a quotient is rounded once, and then to the nearest whole number, halves to even.
 */
#include "codes.h"

#include <math.h>
#include <string.h>

enum { EXPONENT = 0x7f800000 };

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline int code(float x, float scale, float zero) {
  const float found = rintf(x / scale) + zero;
  const float above = found > 0.0f ? found : 0.0f; /* of NaN: 0 */
  return (int)(above < 255.0f ? above : 255.0f);
}

int lezero_image_codes(const void *x, int is_bf16, int64_t n, float scale, float zero, uint8_t *restrict codes) {
  uint32_t bad = 0;
  if (is_bf16) {
    const uint16_t *restrict from = (const uint16_t *)x;
    for (int64_t i = 0; i < n; i++) {
      const uint32_t bits = (uint32_t)from[i] << 16;
      bad |= (bits & EXPONENT) == EXPONENT;
      codes[i] = (uint8_t)code(bits_to_float(bits), scale, zero);
    }
  } else {
    const uint32_t *restrict from = (const uint32_t *)x;
    for (int64_t i = 0; i < n; i++) {
      bad |= (from[i] & EXPONENT) == EXPONENT;
      codes[i] = (uint8_t)code(bits_to_float(from[i]), scale, zero);
    }
  }
  return !bad;
}
