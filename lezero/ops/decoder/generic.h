/* What layers.h needs beyond the primitives of linear, for any processor. */

#include "plain.h"

INLINE f4 quotient4(f4 x, f4 y) { return x / y; }
INLINE floats quotient(floats x, floats y) { return EACH_TWO(floats, quotient4, x, y); }
INLINE floats inverse(floats x) { return quotient(all_floats(1), x); }
INLINE floats most_of(floats x, floats y) { return EACH_TWO(floats, most4, x, y); }
INLINE float lanes_most(floats x) {
  const f4 q = most4(most4(x.a, x.b), most4(x.c, x.d));
  const float low = q[0] > q[1] ? q[0] : q[1], high = q[2] > q[3] ? q[2] : q[3];
  return low > high ? low : high;
}
INLINE float lanes_total(floats x) {
  const f4 q = (x.a + x.c) + (x.b + x.d);
  return (q[0] + q[2]) + (q[1] + q[3]);
}
INLINE floats whole(floats x) { return EACH(floats, whole4, x); }
INLINE f4 power4(f4 x, f4 n) {
  return x * (f4)((__builtin_convertvector(least4(n, all4(128)), i4) + 127) << 23);
}
/* x · 2^n for whole n from -126 on. */
INLINE floats times_power(floats x, floats n) { return EACH_TWO(floats, power4, x, n); }
INLINE f4 within4(f4 x, i4 lane, int32_t from, int32_t to, float other) {
  return chosen((lane >= all4i(from)) & (lane < all4i(to)), x, all4(other));
}
/* Lanes `from` to `to` - 1 of x, the others `other`. */
INLINE floats only_lanes(floats x, int64_t from, int64_t to, float other) {
  const int32_t low = from < 0 ? 0 : from > 16 ? 16 : (int32_t)from;
  const int32_t high = to < 0 ? 0 : to > 16 ? 16 : (int32_t)to;
  const i4 lane = {0, 1, 2, 3};
  return (floats){within4(x.a, lane, low, high, other), within4(x.b, lane + 4, low, high, other),
                  within4(x.c, lane + 8, low, high, other), within4(x.d, lane + 12, low, high, other)};
}
INLINE ints load_words(const void *at) { /* 32 bytes as words */
  int16_t words[32];
  for (int i = 0; i < 32; i++) words[i] = ((const int8_t *)at)[i];
  return load_line(words);
}
INLINE void store_words(uint16_t to[16], ints q) {
  int32_t wide[16];
  memcpy(wide, &q, 64);
  for (int i = 0; i < 16; i++) to[i] = (uint16_t)wide[i];
}
/* sum + w · x for pairs of words. */
INLINE i4 words4(i4 sum, i4 w, int32_t x) {
  return sum + ((w << 16) >> 16) * all4i((int16_t)x) + (w >> 16) * all4i(x >> 16);
}
INLINE ints dot_words(ints sum, ints w, int32_t x) {
  return (ints){words4(sum.a, w.a, x), words4(sum.b, w.b, x), words4(sum.c, w.c, x),
                words4(sum.d, w.d, x)};
}
enum { MOST_SUMS = 6 }; /* that registers hold beside what is multiplied */
/* Weights of attention (not negative) as `read_pair` reads them, and what they became. */
INLINE floats store_weights(int8_t *to, floats v) {
  memcpy(to, &v, 64);
  return v;
}
INLINE void rest(void) { /* while a worker waits for another core */
#ifdef __aarch64__
  __asm__ volatile("yield");
#endif
}
