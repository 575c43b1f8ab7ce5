/* What an AdamW kernel is asked, in plain C. kernel.c defines the two functions below and is compiled
 * once for each instruction set; registration.cpp is linked with one of them. `reference.py` says what
 * they compute. */
#ifndef LEZERO_ADAMW_PROBLEM_H
#define LEZERO_ADAMW_PROBLEM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How a weight is kept. */
enum { LEZERO_FP32, LEZERO_BF16, LEZERO_BF16_MASTER, LEZERO_BF16_REMAINDER };

typedef struct {
  float decay, lerp, beta2, square, step, root, eps; /* see reference.Coefficients */
} lezero_adamw_coefficients;

/* An 8-bit code: for each of eight decades the threshold that begins it, and the two lines from values
 * to numbers (up, from value 0 on) and from numbers to values (see eight_bit.py). */
typedef struct {
  const float *threshold, *up, *up_from, *down, *down_from;
} lezero_adamw_code;

typedef struct {
  void *param, *extra; /* extra: fp32 master or int16 remainder */
  const void *grad;
  float *exp_avg, *exp_avg_sq;
  int weight, grad_is_fp32;
  lezero_adamw_coefficients c;
} lezero_adamw;

/* In 8 bits: (rows, columns) in blocks of up to 256 elements of a row, one scale each. */
typedef struct {
  void *param, *extra;
  const void *grad;
  uint8_t *exp_avg, *exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale;
  int64_t columns;
  int weight, grad_is_fp32;
  lezero_adamw_coefficients c;
  lezero_adamw_code with_sign, without_sign;
} lezero_adamw8bit;

/* Elements begin to end. */
void lezero_adamw_run(const lezero_adamw *a, int64_t begin, int64_t end);

/* Blocks begin to end, counted row by row. */
void lezero_adamw8bit_run(const lezero_adamw8bit *a, int64_t begin, int64_t end);

#ifdef __cplusplus
}
#endif
#endif
