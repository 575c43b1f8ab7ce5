/* The primitives of tiles.h, which says what each does, in the vectors of gcc and clang, 16 bytes
 * each: for any processor. Products are those of 64-bit Arm and of SSE2 where there are these. */
#include <stdint.h>
#include <string.h>
#ifdef __aarch64__
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef struct {
  f4 a, b, c, d;
} floats;
typedef struct {
  i4 a, b, c, d;
} ints;
#define EACH(type, f, x) ((type){f((x).a), f((x).b), f((x).c), f((x).d)})
#define EACH_TWO(type, f, x, y) \
  ((type){f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d)})
#define EACH_THREE(type, f, x, y, z)                                                    \
  ((type){f((x).a, (y).a, (z).a), f((x).b, (y).b, (z).b), f((x).c, (y).c, (z).c), \
          f((x).d, (y).d, (z).d)})

enum { MOST_WHOLE = 4, MOST_BLOCKS = 4, MOST_DIGITS = 2, MOST_BF16 = 4, MOST_ROWS = 4 };
enum { MOST_HALVES = MOST_BLOCKS }; /* with 4-bit weights */
/* Beside bf16 weights tokens lie in fp32; bytes of a pair of their inputs. */
enum { FLOATS = 1, PAIR_BYTES = 8 };
#define WORDS(bits, digits) 0
#define AT_ONCE(R) ((R) == 1 ? 2 : 1)
enum { ALONE = 2 };

INLINE f4 all4(float x) { return (f4){x, x, x, x}; }
INLINE i4 all4i(int32_t x) { return (i4){x, x, x, x}; }
INLINE floats all_floats(float x) { return (floats){all4(x), all4(x), all4(x), all4(x)}; }
INLINE ints all_ints(int32_t x) { return (ints){all4i(x), all4i(x), all4i(x), all4i(x)}; }
INLINE f4 chosen(i4 mask, f4 x, f4 y) { return (f4)((mask & (i4)x) | (~mask & (i4)y)); }

INLINE float from_half(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = half & 0x7fff;
  uint32_t bits = (size << 13) + (112u << 23);
  float x;
  if (size >= 0x7c00) bits += 112u << 23;
  memcpy(&x, &bits, 4);
  if (size < 0x0400) x = (float)size * 0x1p-24f;
  memcpy(&bits, &x, 4), bits |= sign, memcpy(&x, &bits, 4);
  return x;
}
INLINE uint16_t to_half(float x) {
  uint32_t bits, half;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) half = 0x7e00;
  else if (size >= 0x47800000) half = 0x7c00;
  else if (size >= 0x38800000) half = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  else { /* below the normal ones: adding 1/2 rounds to multiples of 2^-24 */
    float small;
    memcpy(&small, &size, 4), small += 0.5f, memcpy(&half, &small, 4), half -= 0x3f000000;
  }
  return (uint16_t)(sign | half);
}

/* Kept out of the loops that call them: inlined, they take most of the time to build. */
#define APART static __attribute__((noinline, unused))
APART floats widened(const char *at, int type) { /* 16 numbers of 16 bits */
  uint16_t half[16];
  uint32_t wide[16];
  floats v;
  memcpy(half, at, 32);
  if (type == LEZERO_FP16)
    for (int i = 0; i < 16; i++) {
      const float x = from_half(half[i]);
      memcpy(wide + i, &x, 4);
    }
  else
    for (int i = 0; i < 16; i++) wide[i] = (uint32_t)half[i] << 16;
  memcpy(&v, wide, 64);
  return v;
}
INLINE floats read16(const void *x, int type, int64_t i, int64_t count) {
  const int size = type == LEZERO_FP32 ? 4 : 2;
  const char *at = (const char *)x + i * size;
  char part[64] = {0};
  floats v;
  if (count < 16) memcpy(part, at, (size_t)count * size), at = part;
  if (type != LEZERO_FP32) return widened(at, type);
  memcpy(&v, at, 64);
  return v;
}

APART void store_bf16(uint16_t to[16], floats v) {
  uint32_t bits[16];
  memcpy(bits, &v, 64);
  for (int i = 0; i < 16; i++) {
    const uint32_t up = bits[i] + 0x7fff + ((bits[i] >> 16) & 1);
    to[i] = (uint16_t)((bits[i] & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : up >> 16);
  }
}
APART void store_fp16(uint16_t to[16], floats v) {
  float wide[16];
  memcpy(wide, &v, 64);
  for (int i = 0; i < 16; i++) to[i] = to_half(wide[i]);
}
INLINE void write16(void *x, int type, int64_t i, int64_t count, floats v) {
  const int size = type == LEZERO_FP32 ? 4 : 2;
  char part[64], *to = (char *)x + i * size;
  if (type == LEZERO_FP32) memcpy(part, &v, 64);
  else (type == LEZERO_BF16 ? store_bf16 : store_fp16)((uint16_t *)part, v);
  memcpy(to, part, (size_t)(count < 16 ? count : 16) * size);
}

INLINE ints load_line(const void *at) {
  ints x;
  memcpy(&x, at, 64);
  return x;
}
INLINE void prefetch(const void *at) { __builtin_prefetch(at, 0, 3); }
INLINE void prefetch_far(const void *at) { __builtin_prefetch(at, 0, 2); }
INLINE i4 low4(i4 x) { return x & all4i(0x0f0f0f0f); }
INLINE i4 high4(i4 x) { return low4(x >> 4); }
INLINE ints low_halves(ints x) { return EACH(ints, low4, x); }
INLINE ints high_halves(ints x) { return EACH(ints, high4, x); }

/* Four inputs of a token. Arm multiplies signed bytes only: 8-bit weights less 128. */
#ifdef __ARM_FEATURE_DOTPROD
#define SIGNED_BYTES 1
typedef int8x16_t token_codes;
INLINE token_codes read_codes(const int8_t *at, const int words) {
  int32_t x;
  (void)words, memcpy(&x, at, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(x));
}
INLINE i4 dot4(i4 sum, i4 w, token_codes x) { return (i4)vdotq_s32((int32x4_t)sum, (int8x16_t)w, x); }
INLINE i4 made_signed(i4 w) { return w ^ all4i((int32_t)0x80808080); }
#else
#define SIGNED_BYTES 0
#ifdef __SSE2__ /* as words: the even ones, and the odd ones */
typedef struct {
  i4 even, odd;
} token_codes;
INLINE token_codes read_codes(const int8_t *at, const int words) {
  int32_t x;
  (void)words, memcpy(&x, at, 4);
  const __m128i all = _mm_set1_epi32(x);
  return (token_codes){(i4)_mm_srai_epi16(_mm_slli_epi16(all, 8), 8), (i4)_mm_srai_epi16(all, 8)};
}
INLINE i4 dot4(i4 sum, i4 w, token_codes x) {
  const __m128i even = (__m128i)(w & all4i(0x00ff00ff)), odd = _mm_srli_epi16((__m128i)w, 8);
  sum += (i4)_mm_madd_epi16(even, (__m128i)x.even);
  return sum + (i4)_mm_madd_epi16(odd, (__m128i)x.odd);
}
#else
typedef struct {
  int32_t x[4];
} token_codes;
INLINE token_codes read_codes(const int8_t *at, const int words) {
  (void)words;
  return (token_codes){{at[0], at[1], at[2], at[3]}};
}
INLINE i4 dot4(i4 sum, i4 w, token_codes t) {
  const i4 byte = all4i(255);
  sum += (w & byte) * all4i(t.x[0]) + (w >> 8 & byte) * all4i(t.x[1]);
  return sum + (w >> 16 & byte) * all4i(t.x[2]) + (w >> 24 & byte) * all4i(t.x[3]);
}
#endif
INLINE i4 made_signed(i4 w) { return w; }
#endif
INLINE ints dot_codes(ints sum, ints w, token_codes x, const int words) {
  (void)words;
  return (ints){dot4(sum.a, w.a, x), dot4(sum.b, w.b, x), dot4(sum.c, w.c, x), dot4(sum.d, w.d, x)};
}
/* A line of 8-bit weights as dot_codes takes it. */
INLINE ints load_bytes(const void *at) { return EACH(ints, made_signed, load_line(at)); }

INLINE i4 add4i(i4 x, i4 y) { return x + y; }
INLINE ints ints_sum(ints x, ints y) { return EACH_TWO(ints, add4i, x, y); }
INLINE i4 join4(i4 high, i4 low) { return high * 256 + low; }
INLINE ints digits_joined(ints high, ints low) { return EACH_TWO(ints, join4, high, low); }
INLINE ints settled(ints x) { return x; }
INLINE f4 float4(i4 x) { return __builtin_convertvector(x, f4); }
INLINE floats float_of(ints x) { return EACH(floats, float4, x); }

INLINE f4 mul4(f4 x, f4 y) { return x * y; }
INLINE f4 sub4(f4 x, f4 y) { return x - y; }
INLINE f4 add4(f4 x, f4 y) { return x + y; }
/* Rounded once. */
#ifdef __aarch64__
INLINE f4 fma4(f4 x, f4 y, f4 z) {
  return (f4)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
}
#else
/* In fp64 the product is exact. If the sum is not, it is made odd towards what it lacks, so that it
 * is no tie of fp32, which would be rounded a second time. */
INLINE f4 fma4(f4 x, f4 y, f4 z) {
  typedef double d4 __attribute__((vector_size(32)));
  typedef int64_t l4 __attribute__((vector_size(32)));
  const d4 p = __builtin_convertvector(x, d4) * __builtin_convertvector(y, d4);
  const d4 c = __builtin_convertvector(z, d4), sum = p + c, part = sum - p, zero = {0};
  const d4 rest = (p - (sum - part)) + (c - part); /* NaN beyond the finite ones */
  const l4 bits = (l4)sum, away = (l4)((rest > zero) == (sum > zero)); /* -1 or 0 */
  const l4 even = (l4)((bits & 1) == 0) & (l4)((rest > zero) | (rest < zero));
  return __builtin_convertvector((d4)(bits + (even & (-1 - 2 * away))), f4);
}
#endif
INLINE f4 fma_less4(f4 x, f4 y, f4 z) { return fma4(-x, y, z); }
INLINE floats product(floats x, floats y) { return EACH_TWO(floats, mul4, x, y); }
INLINE floats difference(floats x, floats y) { return EACH_TWO(floats, sub4, x, y); }
INLINE floats sum_of(floats x, floats y) { return EACH_TWO(floats, add4, x, y); }
INLINE floats fused(floats x, floats y, floats z) { return EACH_THREE(floats, fma4, x, y, z); }
INLINE floats fused_less(floats x, floats y, floats z) {
  return EACH_THREE(floats, fma_less4, x, y, z);
}

INLINE i4 magnitude4(f4 x) { return (i4)x & all4i(0x7fffffff); }
INLINE ints magnitude(floats x) { return EACH(ints, magnitude4, x); }
INLINE i4 larger4(i4 x, i4 y) {
  const i4 mask = x > y;
  return (mask & x) | (~mask & y);
}
INLINE ints larger(ints x, ints y) { return EACH_TWO(ints, larger4, x, y); }
INLINE int32_t largest_lane(ints x) {
  const i4 q = larger4(larger4(x.a, x.b), larger4(x.c, x.d));
  const int32_t low = q[0] > q[1] ? q[0] : q[1], high = q[2] > q[3] ? q[2] : q[3];
  return low > high ? low : high;
}
INLINE int32_t lanes_sum(ints x) {
  const i4 q = x.a + x.b + x.c + x.d;
  return q[0] + q[1] + q[2] + q[3];
}

INLINE f4 most4(f4 x, f4 y) { return chosen(x > y, x, y); } /* y where one is NaN */
INLINE f4 least4(f4 x, f4 y) { return chosen(x < y, x, y); }
INLINE f4 limited4(f4 x, f4 most) { return least4(most4(x, -most), most); }
INLINE floats limited(floats x, float most) {
  return EACH_TWO(floats, limited4, x, all_floats(most));
}
/* The nearest one, of numbers below 2^22. */
INLINE f4 whole4(f4 x) { return (x + all4(0x1.8p23f)) - all4(0x1.8p23f); }
INLINE i4 rounded4(f4 x) { return __builtin_convertvector(whole4(x), i4); }
INLINE ints rounded(floats x) { return EACH(ints, rounded4, x); }
INLINE i4 high_digit4(i4 q) { return (q + 128) >> 8; }
INLINE i4 low_digit4(i4 q, i4 high) { return q - high * 256; }
INLINE ints high_digit(ints q) { return EACH(ints, high_digit4, q); }
INLINE ints low_digit(ints q, ints high) { return EACH_TWO(ints, low_digit4, q, high); }
INLINE void store_bytes(int8_t to[16], ints q) {
  int32_t wide[16];
  memcpy(wide, &q, 64);
  for (int i = 0; i < 16; i++) to[i] = (int8_t)wide[i];
}
INLINE void store_codes(int8_t to[16], ints q, const int words) { (void)words, store_bytes(to, q); }

/* Two inputs of a token, as floats. */
typedef struct {
  f4 first, second;
} token_pair;
INLINE token_pair read_pair(const int8_t *at) {
  const float *pair = (const float *)at;
  return (token_pair){all4(pair[0]), all4(pair[1])};
}
/* sum + w · x for pairs of bf16. */
INLINE f4 pair4(f4 sum, i4 w, token_pair x) {
  const f4 first = (f4)(w << 16), second = (f4)(w & all4i((int32_t)0xffff0000));
#ifdef __aarch64__
  return fma4(second, x.second, fma4(first, x.first, sum));
#else
  return sum + first * x.first + second * x.second;
#endif
}
INLINE floats dot_pair(floats sum, ints w, token_pair x) {
  return (floats){pair4(sum.a, w.a, x), pair4(sum.b, w.b, x), pair4(sum.c, w.c, x),
                  pair4(sum.d, w.d, x)};
}
INLINE void store_pairs(int8_t to[64], floats v, int low) { /* all of v, in one part */
  (void)low, memcpy(to, &v, 64);
}
