// What the kernels and their registration share: one call, and the layout of a payload.
//
// A payload of `numel` elements in blocks of `block` (the last one may be shorter):
//   scales  one bf16 a block (sparse_bf16: none)
//   kept    2:4 only: one bit an element, set for the two kept of each four
//   data    int8: a byte an element; int4: element 2i in the low half of byte i, plus 8; sign: one
//           bit an element, set for negative; 2:4: the kept values in order, as bf16, int8 or int4
// Bits go from the lowest of each byte up. What pads the last byte is what zeros would encode to.
#pragma once
#include <stdint.h>

#define LEZERO_MAX_BLOCK 1024
#define LEZERO_BF16_NAN 0x7FC0

enum { LEZERO_INT8, LEZERO_INT4, LEZERO_SIGN, LEZERO_24_BF16, LEZERO_24_INT8, LEZERO_24_INT4 };
enum { LEZERO_FP32, LEZERO_BF16 };

typedef struct {
  int form, add;
  int64_t numel, block;  // block: a multiple of 32
  void* values;          // read by encode, written (or added to) by decode
  int values_type;
  void* error;  // added to the values, then what was lost; may be null
  int error_type;
  uint8_t* payload;
} lezero_codec;

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(hidden)
// Blocks first … last-1.
void lezero_codec_encode(const lezero_codec* c, int64_t first, int64_t last);
void lezero_codec_decode(const lezero_codec* c, int64_t first, int64_t last);
#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
