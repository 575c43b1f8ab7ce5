/* AdamW in one pass over memory, with moments in fp32 or in 8 bits.
 *
 * [Note: whole lanes only]
 * The arithmetic knows only full vectors. A ragged end is copied into zeroed lanes on the stack and
 * back, so that every element sees the same operations wherever it lies.
 */
#include "code.h"

enum { BLOCK = 256, NORMAL_BITS = 0x00800000 };

INLINE vi rounded(vi x) { return right(addi(x, alli(0x8000)), 16); } /* of a quiet x: its bf16 */

INLINE vi joined(vi weight, vi low) { /* below zero, either zero, lie the NaNs of the other sign */
  return addi(left(weight, 16), not_negative_unless(low, weight, 0x7fff));
}

INLINE vf weight_at(const void *param, const void *extra, int64_t at, int kind) {
  if (kind == LEZERO_FP32) return loadf((const float *)param + at);
  const vi weight = load16((const uint16_t *)param + at);
  if (kind == LEZERO_BF16_REMAINDER)
    return number(joined(weight, load16_signed((const uint16_t *)extra + at)));
  if (kind == LEZERO_BF16) return number(left(weight, 16));
  const vi master = bits(loadf((const float *)extra + at));
  return number(if_equal(rounded(quiet(master)), weight, master, left(weight, 16)));
}

INLINE void keep_weight(void *param, void *extra, int64_t at, int kind, vf value) {
  if (kind == LEZERO_FP32) {
    storef((float *)param + at, value);
    return;
  }
  const vi exact = quiet(bits(value));
  store16((uint16_t *)param + at, rounded(exact));
  if (kind == LEZERO_BF16_REMAINDER) store16((uint16_t *)extra + at, exact);
  if (kind == LEZERO_BF16_MASTER) storef((float *)extra + at, number(exact));
}

INLINE vf grad_at(const void *grad, int64_t at, int is_fp32) {
  return is_fp32 ? loadf((const float *)grad + at)
                 : number(left(load16((const uint16_t *)grad + at), 16));
}

typedef struct {
  vf decay, lerp, beta2, square, step, root, eps;
  int small; /* lerp < 1/2, see torch.lerp */
} spread;

INLINE spread over_lanes(const lezero_adamw_coefficients *c) {
  const spread s = {allf(c->decay), allf(c->lerp < 0.5f ? c->lerp : c->lerp - 1.0f), allf(c->beta2), allf(c->square),
                    allf(c->step),  allf(c->root), allf(c->eps), c->lerp < 0.5f};
  return s;
}

INLINE vf updated(const spread *s, vf weight, vf grad, vf *m, vf *v) {
  *m = fused(s->lerp, sub(grad, *m), s->small ? *m : grad);
  *v = fused(mul(s->square, grad), grad, mul(*v, s->beta2));
  const vf denominator = add(quotient(root(*v), s->root), s->eps);
  return add(mul(weight, s->decay), quotient(mul(s->step, *m), denominator));
}

/* The square of a gradient above 1e21 is infinite in fp32, and an infinity would take its whole block
 * along: 2^126 is kept instead, and of a first moment its root at most. That of an infinite gradient
 * stays, and so does NaN. */
INLINE void within(vf grad, vf *m, vf *v) {
  const vi magnitude = alli(0x7fffffff), inf = alli(INF_BITS), most = bits(allf(0x1p63f));
  const vi size = andi(bits(*m), magnitude), sign = andi(bits(*m), alli(INT32_MIN));
  const vi held = if_greater(size, inf, bits(*m), if_greater(size, most, ori(sign, most), bits(*m)));
  const vi finite = andi(bits(grad), magnitude); /* else no second moment is equal to these bits: */
  const vi beyond = if_greater(inf, finite, inf, alli(-1));
  *m = number(if_equal(bits(*v), beyond, held, bits(*m)));
  *v = number(if_equal(bits(*v), beyond, bits(allf(0x1p126f)), bits(*v)));
}

INLINE int64_t fewer(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int width(int kind) { return kind == LEZERO_FP32 ? 4 : 2; }

INLINE int extra_width(int kind) {
  return kind == LEZERO_BF16_MASTER ? 4 : kind == LEZERO_BF16_REMAINDER ? 2 : 0;
}

/* A ragged end: up to LANES elements of weight and gradient, on the stack. */
typedef struct {
  _Alignas(64) char param[4 * LANES], extra[4 * LANES], grad[4 * LANES];
} ragged;

INLINE void take(ragged *r, const void *param, const void *extra, const void *grad, int64_t at,
                 int64_t count, int kind, int fp32) {
  const int w = width(kind), e = extra_width(kind), g = fp32 ? 4 : 2;
  memset(r, 0, sizeof *r);
  memcpy(r->param, (const char *)param + at * w, count * w);
  if (e) memcpy(r->extra, (const char *)extra + at * e, count * e);
  memcpy(r->grad, (const char *)grad + at * g, count * g);
}

INLINE void give(const ragged *r, void *param, void *extra, int64_t at, int64_t count, int kind) {
  const int w = width(kind), e = extra_width(kind);
  memcpy((char *)param + at * w, r->param, count * w);
  if (e) memcpy((char *)extra + at * e, r->extra, count * e);
}

INLINE void lanes_fp32(const spread *s, void *param, void *extra, const void *grad, float *exp_avg,
                       float *exp_avg_sq, int64_t at, int kind, int fp32) {
  vf m = loadf(exp_avg + at), v = loadf(exp_avg_sq + at);
  const vf before = weight_at(param, extra, at, kind);
  const vf after = updated(s, before, grad_at(grad, at, fp32), &m, &v);
  storef(exp_avg + at, m);
  storef(exp_avg_sq + at, v);
  keep_weight(param, extra, at, kind, after);
}

INLINE void run_fp32(const lezero_adamw *a, int64_t begin, int64_t end, int kind, int fp32) {
  const spread s = over_lanes(&a->c);
  int64_t at = begin;
  for (; at + LANES <= end; at += LANES)
    lanes_fp32(&s, a->param, a->extra, a->grad, a->exp_avg, a->exp_avg_sq, at, kind, fp32);
  const int64_t count = end - at;
  if (count <= 0) return;
  ragged r;
  float m[LANES] = {0}, v[LANES] = {0};
  take(&r, a->param, a->extra, a->grad, at, count, kind, fp32);
  memcpy(m, a->exp_avg + at, count * 4);
  memcpy(v, a->exp_avg_sq + at, count * 4);
  lanes_fp32(&s, r.param, r.extra, r.grad, m, v, 0, kind, fp32);
  memcpy(a->exp_avg + at, m, count * 4);
  memcpy(a->exp_avg_sq + at, v, count * 4);
  give(&r, a->param, a->extra, at, count, kind);
}

/* The scale of a block whose largest magnitude has these bits, and what its values are multiplied by;
 * NaN marks a block that holds a NaN or an infinity, 0 one that holds nothing above 2^-126. */
INLINE float scale_of(int32_t most, float *inverse) {
  *inverse = 0.0f;
  if (most >= INF_BITS) return NAN;
  if (most < NORMAL_BITS) return 0.0f;
  float scale;
  memcpy(&scale, &most, 4);
  *inverse = 1.0f / scale;
  return scale;
}

typedef struct {
  float m[BLOCK], v[BLOCK];
  uint8_t m_code[BLOCK], v_code[BLOCK];
} block;

INLINE int32_t highest(vi x) {
  int32_t lane[LANES], most = 0;
  memcpy(lane, &x, sizeof lane);
  for (int i = 0; i < LANES; i++) most = lane[i] > most ? lane[i] : most;
  return most;
}

INLINE void run_block(const lezero_adamw8bit *a, const spread *s, const code *with_sign,
                      const code *without, int64_t index, int kind, int fp32) {
  const int64_t in_row = (a->columns + BLOCK - 1) / BLOCK, column = index % in_row * BLOCK;
  const int64_t count = fewer(BLOCK, a->columns - column);
  const int64_t start = index / in_row * a->columns + column;
  const vf m_scale = allf(a->exp_avg_scale[index]), v_scale = allf(a->exp_avg_sq_scale[index]);
  block b;
  uint8_t *m_codes = a->exp_avg + start, *v_codes = a->exp_avg_sq + start;
  if (count < BLOCK) { /* zeros fill the last lanes: they change no maximum */
    m_codes = memcpy(memset(b.m_code, 0, BLOCK), m_codes, count);
    v_codes = memcpy(memset(b.v_code, 0, BLOCK), v_codes, count);
  }
  vi m_most = alli(0), v_most = alli(0);
  for (int64_t i = 0; i < count; i += LANES) {
    const vi m_code = load8(m_codes + i);
    const vi sign = left(andi(m_code, alli(0x80)), 24);
    const vf magnitude = decoded(with_sign, andi(m_code, alli(0x7f)));
    vf m = mul(number(ori(bits(magnitude), sign)), m_scale);
    vf v = mul(decoded(without, load8(v_codes + i)), v_scale);
    vf grad;
    if (count - i >= LANES) {
      const vf before = weight_at(a->param, a->extra, start + i, kind);
      grad = grad_at(a->grad, start + i, fp32);
      const vf after = updated(s, before, grad, &m, &v);
      keep_weight(a->param, a->extra, start + i, kind, after);
    } else {
      ragged r;
      take(&r, a->param, a->extra, a->grad, start + i, count - i, kind, fp32);
      const vf before = weight_at(r.param, r.extra, 0, kind);
      grad = grad_at(r.grad, 0, fp32);
      keep_weight(r.param, r.extra, 0, kind, updated(s, before, grad, &m, &v));
      give(&r, a->param, a->extra, start + i, count - i, kind);
    }
    within(grad, &m, &v);
    storef(b.m + i, m);
    storef(b.v + i, v);
    m_most = mosti(m_most, andi(bits(m), alli(0x7fffffff)));
    v_most = mosti(v_most, andi(bits(v), alli(0x7fffffff)));
  }
  float m_inverse, v_inverse;
  a->exp_avg_scale[index] = scale_of(highest(m_most), &m_inverse);
  a->exp_avg_sq_scale[index] = scale_of(highest(v_most), &v_inverse);
  for (int64_t i = 0; i < count; i += LANES) {
    const vi m = bits(mul(loadf(b.m + i), allf(m_inverse)));
    const vi n = encoded(with_sign, number(andi(m, alli(0x7fffffff))));
    store8(m_codes + i, ori(n, andi(right(m, 24), alli(0x80))));
    store8(v_codes + i, encoded(without, mul(loadf(b.v + i), allf(v_inverse))));
  }
  if (m_inverse == 0.0f) memset(m_codes, 0, count < BLOCK ? count & 255 : BLOCK);
  if (v_inverse == 0.0f) memset(v_codes, 0, count < BLOCK ? count & 255 : BLOCK);
  if (count < BLOCK) {
    memcpy(a->exp_avg + start, m_codes, count);
    memcpy(a->exp_avg_sq + start, v_codes, count);
  }
}

INLINE void run_8bit(const lezero_adamw8bit *a, int64_t begin, int64_t end, int kind, int fp32) {
  const spread s = over_lanes(&a->c);
  const code with_sign = of_code(&a->with_sign), without = of_code(&a->without_sign);
  for (int64_t index = begin; index < end; index++)
    run_block(a, &s, &with_sign, &without, index, kind, fp32);
}

/* One copy of `run` for each way to keep a weight and each type of gradient. */
#define SPECIALISED(run, a, begin, end)                                                            \
  switch ((a)->weight * 2 + (a)->grad_is_fp32) {                                                   \
    case 0: run(a, begin, end, LEZERO_FP32, 0); break;                                             \
    case 1: run(a, begin, end, LEZERO_FP32, 1); break;                                             \
    case 2: run(a, begin, end, LEZERO_BF16, 0); break;                                             \
    case 3: run(a, begin, end, LEZERO_BF16, 1); break;                                             \
    case 4: run(a, begin, end, LEZERO_BF16_MASTER, 0); break;                                      \
    case 5: run(a, begin, end, LEZERO_BF16_MASTER, 1); break;                                      \
    case 6: run(a, begin, end, LEZERO_BF16_REMAINDER, 0); break;                                   \
    case 7: run(a, begin, end, LEZERO_BF16_REMAINDER, 1); break;                                   \
  }

void lezero_adamw_run(const lezero_adamw *a, int64_t begin, int64_t end) {
  SPECIALISED(run_fp32, a, begin, end)
}

void lezero_adamw8bit_run(const lezero_adamw8bit *a, int64_t begin, int64_t end) {
  SPECIALISED(run_8bit, a, begin, end)
}
