// The primitives of generic.c, which says what each does, for AVX-512 (F, BW, DQ, VL).
#include <immintrin.h>
#include <string.h>

#include "codec.h"

static __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

static __m256i narrow(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i high = _mm512_srli_epi32(up, 16);
  return _mm512_cvtepi32_epi16(
      _mm512_mask_mov_epi32(high, nan, _mm512_set1_epi32(LEZERO_BF16_NAN)));
}

static __mmask16 first(int64_t n) { return n >= 16 ? 0xFFFF : (__mmask16)((1u << n) - 1); }

static __m512 load(const void* x, int type, int64_t i, __mmask16 m) {
  if (type == LEZERO_FP32) return _mm512_maskz_loadu_ps(m, (const float*)x + i);
  return widen(_mm256_maskz_loadu_epi16(m, (const uint16_t*)x + i));
}

static void read_block(float* y, const void* x, int type, int64_t n) {
  for (int64_t i = 0; i < n; i += 16)
    _mm512_mask_storeu_ps(y + i, first(n - i), load(x, type, i, first(n - i)));
}

static void write_block(void* x, int type, const float* y, int64_t n, int add) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 m = first(n - i);
    __m512 v = _mm512_maskz_loadu_ps(m, y + i);
    if (add) v = _mm512_add_ps(load(x, type, i, m), v);
    if (type == LEZERO_FP32) _mm512_mask_storeu_ps((float*)x + i, m, v);
    else _mm256_mask_storeu_epi16((uint16_t*)x + i, m, narrow(v));
  }
}

static void stream_block(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) _mm512_stream_ps(x + i, _mm512_loadu_ps(y + i));
}

static void stream_end(void) { _mm_sfence(); }

static uint32_t largest_magnitude(const float* y, int64_t n) {
  const __m512i mask = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i a = _mm512_setzero_si512(), b = a;
  for (int64_t i = 0; i < n; i += 32) {
    a = _mm512_max_epu32(a, _mm512_and_si512(mask, _mm512_loadu_si512(y + i)));
    b = _mm512_max_epu32(b, _mm512_and_si512(mask, _mm512_loadu_si512(y + i + 16)));
  }
  return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
}

static float magnitude_sum(const float* y, int64_t n) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) sum = _mm512_add_ps(sum, _mm512_abs_ps(_mm512_loadu_ps(y + i)));
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 two = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static __m512i rounded(const float* y, __m512 inverse, __m512 step, float* lost) {
  const __m512 x = _mm512_loadu_ps(y);
  const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
  if (lost)
    _mm512_storeu_ps(lost, _mm512_sub_ps(x, _mm512_mul_ps(_mm512_cvtepi32_ps(q), step)));
  return q;
}

static void encode_int8(const float* y, int64_t n, float inverse, float step, int8_t* q,
                        float* lost) {
  const __m512 inv = _mm512_set1_ps(inverse), s = _mm512_set1_ps(step);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512i x = rounded(y + i, inv, s, lost ? lost + i : 0);
    _mm_storeu_si128((__m128i*)(q + i), _mm512_cvtepi32_epi8(x));
  }
}

static void decode_int8(const int8_t* q, int64_t n, float step, float* y) {
  const __m512 s = _mm512_set1_ps(step);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(q + i)));
    _mm512_storeu_ps(y + i, _mm512_mul_ps(_mm512_cvtepi32_ps(x), s));
  }
}

static void encode_int4(const float* y, int64_t n, float inverse, float step, uint8_t* q,
                        float* lost) {
  const __m512 inv = _mm512_set1_ps(inverse), s = _mm512_set1_ps(step);
  const __m128i eight = _mm_set1_epi8(8), weights = _mm_set1_epi16(0x1001);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512i x = rounded(y + i, inv, s, lost ? lost + i : 0);
    const __m128i half = _mm_add_epi8(_mm512_cvtepi32_epi8(x), eight);
    const __m128i both = _mm_maddubs_epi16(half, weights);  // low + 16 · high
    _mm_storel_epi64((__m128i*)(q + i / 2), _mm_packus_epi16(both, both));
  }
}

static void decode_int4(const uint8_t* q, int64_t n, float step, float* y) {
  const __m512i levels = _mm512_setr_epi32(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512 table = _mm512_mul_ps(_mm512_cvtepi32_ps(levels), _mm512_set1_ps(step));
  for (int64_t i = 0; i < n; i += 16) {
    const __m512i both = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i*)(q + i / 2)));
    const __m512i at = _mm512_srlv_epi32(_mm512_permutexvar_epi32(halves, both), shifts);
    _mm512_storeu_ps(y + i, _mm512_permutexvar_ps(at, table));  // sees the low four bits only
  }
}

static __m512 signed_scale(__mmask16 negative, __m512 scale) {
  return _mm512_mask_xor_ps(scale, negative, scale, _mm512_set1_ps(-0.0f));
}

static void encode_sign(const float* y, int64_t n, float scale, uint8_t* bits, float* lost) {
  const __m512 s = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 x = _mm512_loadu_ps(y + i);
    const uint16_t m = _mm512_movepi32_mask(_mm512_castps_si512(x));
    memcpy(bits + i / 8, &m, 2);
    if (lost) _mm512_storeu_ps(lost + i, _mm512_sub_ps(x, signed_scale(m, s)));
  }
}

static void decode_sign(const uint8_t* bits, int64_t n, float scale, float* y) {
  const __m512 s = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < n; i += 16) {
    uint16_t m;
    memcpy(&m, bits + i / 8, 2);
    _mm512_storeu_ps(y + i, signed_scale(m, s));
  }
}

static void encode_bf16(const float* y, int64_t n, uint16_t* q) {
  for (int64_t i = 0; i < n; i += 16)
    _mm256_storeu_si256((__m256i*)(q + i), narrow(_mm512_loadu_ps(y + i)));
}

static void decode_bf16(const uint16_t* q, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += 16)
    _mm512_storeu_ps(y + i, widen(_mm256_loadu_si256((const __m256i*)(q + i))));
}

// Each lane is compared with the three others of its four: the difference is negative where the other
// is larger. One that stands before it wins a tie, so there a lane's own size counts one less.
static __m256 keep_16(const float* y, uint8_t* kept, __m512i* top) {
  const __m512i mask = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512i tie1 = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 0, 1));
  const __m512i tie2 = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 1, 1));
  const __m512i tie3 = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 1, 1, 1));
  const __m512 x = _mm512_loadu_ps(y);
  const __m512i size = _mm512_and_si512(mask, _mm512_castps_si512(x));
  *top = _mm512_max_epu32(*top, size);
  const __m512i other1 = _mm512_shuffle_epi32(size, 0x39);  // of lanes 1, 2, 3, 0
  const __m512i other2 = _mm512_shuffle_epi32(size, 0x4E);
  const __m512i other3 = _mm512_shuffle_epi32(size, 0x93);
  const __m512i a = _mm512_sub_epi32(_mm512_sub_epi32(size, tie1), other1);
  const __m512i b = _mm512_sub_epi32(_mm512_sub_epi32(size, tie2), other2);
  const __m512i c = _mm512_sub_epi32(_mm512_sub_epi32(size, tie3), other3);
  // Negative where at most one of the three is: not their majority.
  const __mmask16 keep = _mm512_movepi32_mask(_mm512_ternarylogic_epi32(a, b, c, 0x17));
  const uint16_t bits = (uint16_t)keep;
  memcpy(kept, &bits, 2);
  return _mm512_castps512_ps256(_mm512_maskz_compress_ps(keep, x));
}

static uint32_t keep_two(const float* y, int64_t n, uint8_t* kept, float* pairs) {
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 32) {
    const __m256 low = keep_16(y + i, kept + i / 8, &top);
    const __m256 high = keep_16(y + i + 16, kept + i / 8 + 2, &top);
    // One store, as one load reads them: a load of two stores waits until both have left.
    _mm512_storeu_ps(pairs + i / 2, _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1));
  }
  return _mm512_reduce_max_epu32(top);
}

static __m512 spread_16(const float* pairs, const uint8_t* kept, int64_t i) {
  uint16_t keep;
  memcpy(&keep, kept + i / 8, 2);
  return _mm512_maskz_expand_ps(keep, _mm512_castps256_ps512(_mm256_loadu_ps(pairs + i / 2)));
}

static void spread(const float* pairs, const uint8_t* kept, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += 16) _mm512_storeu_ps(y + i, spread_16(pairs, kept, i));
}

static void subtract_spread(const float* y, const float* pairs, const uint8_t* kept, int64_t n,
                            float* lost) {
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 x = _mm512_loadu_ps(y + i);
    _mm512_storeu_ps(lost + i, _mm512_sub_ps(x, spread_16(pairs, kept, i)));
  }
}

#include "blocks.h"
