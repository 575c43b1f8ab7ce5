/* Numbers as codes of 8 bits (reference.py). */
#ifndef LEZERO_IMAGE_CODES_H
#define LEZERO_IMAGE_CODES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* codes[i] = clamp(round(x[i] / scale) + zero, 0, 255), of fp32 or bf16; returns whether all x are
 * finite. */
int lezero_image_codes(const void *x, int is_bf16, int64_t n, float scale, float zero, uint8_t *codes);

#ifdef __cplusplus
}
#endif
#endif
