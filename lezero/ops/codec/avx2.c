// The primitives of generic.c, which says what each does, for AVX2.
#include <immintrin.h>
#include <string.h>

#include "codec.h"

static __m256 widen(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

static __m128i narrow(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16),
                                          _mm256_set1_epi32(LEZERO_BF16_NAN), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  return _mm256_castsi256_si128(packed);
}

static __m256 load(const void* x, int type, int64_t i) {
  if (type == LEZERO_FP32) return _mm256_loadu_ps((const float*)x + i);
  return widen(_mm_loadu_si128((const __m128i*)((const uint16_t*)x + i)));
}

static void store(void* x, int type, int64_t i, __m256 v) {
  if (type == LEZERO_FP32) _mm256_storeu_ps((float*)x + i, v);
  else _mm_storeu_si128((__m128i*)((uint16_t*)x + i), narrow(v));
}

static void read_block(float* y, const void* x, int type, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, load(x, type, i));
  if (i == n) return;
  const size_t size = type == LEZERO_FP32 ? 4 : 2;
  uint8_t rest[32] = {0};
  float wide[8];
  memcpy(rest, (const uint8_t*)x + i * size, (n - i) * size);
  _mm256_storeu_ps(wide, load(rest, type, 0));
  memcpy(y + i, wide, 4 * (size_t)(n - i));
}

static void write_block(void* x, int type, const float* y, int64_t n, int add) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_loadu_ps(y + i);
    store(x, type, i, add ? _mm256_add_ps(load(x, type, i), v) : v);
  }
  if (i == n) return;
  const size_t size = type == LEZERO_FP32 ? 4 : 2;
  uint8_t rest[32] = {0};
  float last[8] = {0};
  memcpy(rest, (uint8_t*)x + i * size, (n - i) * size);
  memcpy(last, y + i, 4 * (size_t)(n - i));
  const __m256 v = _mm256_loadu_ps(last);
  store(rest, type, 0, add ? _mm256_add_ps(load(rest, type, 0), v) : v);
  memcpy((uint8_t*)x + i * size, rest, (n - i) * size);
}

static void stream_block(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += 8) _mm256_stream_ps(x + i, _mm256_loadu_ps(y + i));
}

static void stream_end(void) { _mm_sfence(); }

static __m256i magnitude(__m256 x) {
  return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
}

static uint32_t largest_of(__m256i a) {
  __m128i h = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4E));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(h, _mm_shuffle_epi32(h, 0xB1)));
}

static uint32_t largest_magnitude(const float* y, int64_t n) {
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = 0; i < n; i += 16) {
    a = _mm256_max_epi32(a, magnitude(_mm256_loadu_ps(y + i)));
    b = _mm256_max_epi32(b, magnitude(_mm256_loadu_ps(y + i + 8)));
  }
  return largest_of(_mm256_max_epi32(a, b));
}

static float magnitude_sum(const float* y, int64_t n) {
  __m256 a = _mm256_setzero_ps(), b = a;
  for (int64_t i = 0; i < n; i += 16) {
    a = _mm256_add_ps(a, _mm256_castsi256_ps(magnitude(_mm256_loadu_ps(y + i))));
    b = _mm256_add_ps(b, _mm256_castsi256_ps(magnitude(_mm256_loadu_ps(y + i + 8))));
  }
  const __m256 h = _mm256_add_ps(a, b);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 two = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static __m256i rounded(const float* y, __m256 inverse, __m256 step, float* lost) {
  const __m256 x = _mm256_loadu_ps(y);
  const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse));
  if (lost)
    _mm256_storeu_ps(lost, _mm256_sub_ps(x, _mm256_mul_ps(_mm256_cvtepi32_ps(q), step)));
  return q;
}

// 16 elements as bytes, in order.
static __m128i rounded_bytes(const float* y, __m256 inverse, __m256 step, float* lost) {
  const __m256i a = rounded(y, inverse, step, lost);
  const __m256i b = rounded(y + 8, inverse, step, lost ? lost + 8 : 0);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

static void encode_int8(const float* y, int64_t n, float inverse, float step, int8_t* q,
                        float* lost) {
  const __m256 inv = _mm256_set1_ps(inverse), s = _mm256_set1_ps(step);
  for (int64_t i = 0; i < n; i += 16)
    _mm_storeu_si128((__m128i*)(q + i), rounded_bytes(y + i, inv, s, lost ? lost + i : 0));
}

static void decode_int8(const int8_t* q, int64_t n, float step, float* y) {
  const __m256 s = _mm256_set1_ps(step);
  for (int64_t i = 0; i < n; i += 8) {
    const __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(q + i)));
    _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_cvtepi32_ps(x), s));
  }
}

static void encode_int4(const float* y, int64_t n, float inverse, float step, uint8_t* q,
                        float* lost) {
  const __m256 inv = _mm256_set1_ps(inverse), s = _mm256_set1_ps(step);
  const __m128i eight = _mm_set1_epi8(8), weights = _mm_set1_epi16(0x1001);
  for (int64_t i = 0; i < n; i += 16) {
    const __m128i x = rounded_bytes(y + i, inv, s, lost ? lost + i : 0);
    const __m128i both = _mm_maddubs_epi16(_mm_add_epi8(x, eight), weights);  // low + 16 · high
    _mm_storel_epi64((__m128i*)(q + i / 2), _mm_packus_epi16(both, both));
  }
}

static void decode_int4(const uint8_t* q, int64_t n, float step, float* y) {
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i low = _mm256_set1_epi32(15), eight = _mm256_set1_epi32(8);
  const __m256 s = _mm256_set1_ps(step);
  for (int64_t i = 0; i < n; i += 8) {
    int32_t halves;
    memcpy(&halves, q + i / 2, 4);
    const __m256i at = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(halves), shifts), low);
    _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(at, eight)), s));
  }
}

static __m256 signed_scale(__m256i negative, __m256 scale) {
  return _mm256_xor_ps(scale, _mm256_and_ps(_mm256_castsi256_ps(negative), _mm256_set1_ps(-0.0f)));
}

// All ones in the lanes whose bit is set.
static __m256i lanes(uint8_t bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), each), each);
}

static void encode_sign(const float* y, int64_t n, float scale, uint8_t* bits, float* lost) {
  const __m256 s = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < n; i += 8) {
    const __m256 x = _mm256_loadu_ps(y + i);
    bits[i / 8] = (uint8_t)_mm256_movemask_ps(x);
    if (lost) _mm256_storeu_ps(lost + i, _mm256_sub_ps(x, signed_scale(_mm256_castps_si256(x), s)));
  }
}

static void decode_sign(const uint8_t* bits, int64_t n, float scale, float* y) {
  const __m256 s = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < n; i += 8) _mm256_storeu_ps(y + i, signed_scale(lanes(bits[i / 8]), s));
}

static void encode_bf16(const float* y, int64_t n, uint16_t* q) {
  for (int64_t i = 0; i < n; i += 8)
    _mm_storeu_si128((__m128i*)(q + i), narrow(_mm256_loadu_ps(y + i)));
}

static void decode_bf16(const uint16_t* q, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += 8)
    _mm256_storeu_ps(y + i, widen(_mm_loadu_si128((const __m128i*)(q + i))));
}

// For two of four kept, twice: which lanes these are, and where among them each of the eight finds
// itself. Of four that do not keep two, the first stands for all.
static uint8_t take[256][8], give[256][8];

static void __attribute__((constructor)) fill_tables(void) {
  for (int keep = 0; keep < 256; keep++)
    for (int four = 0; four < 2; four++) {
      const int two = __builtin_popcount(keep >> 4 * four & 15) == 2;
      take[keep][2 * four] = take[keep][2 * four + 1] = (uint8_t)(4 * four);
      for (int lane = 4 * four, n = 2 * four; lane < 4 * four + 4; lane++) {
        const int kept = two && keep >> lane & 1;
        give[keep][lane] = (uint8_t)(kept ? n : 2 * four);
        if (kept) take[keep][n++] = (uint8_t)lane;
      }
    }
}

static __m256i lanes_of(const uint8_t table[256][8], uint8_t keep) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)table[keep]));
}

// Each lane is compared with the three others of its four; one that stands before it wins a tie,
// so there a lane's own size counts one less.
static __m128 keep_8(const float* y, uint8_t* kept, __m256i* top) {
  const __m256i tie1 = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0, 0, 1));
  const __m256i tie2 = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0, 1, 1));
  const __m256i tie3 = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 1, 1, 1));
  const __m256 x = _mm256_loadu_ps(y);
  const __m256i size = magnitude(x);
  *top = _mm256_max_epi32(*top, size);
  const __m256i a = _mm256_cmpgt_epi32(_mm256_shuffle_epi32(size, 0x39),
                                       _mm256_sub_epi32(size, tie1));
  const __m256i b = _mm256_cmpgt_epi32(_mm256_shuffle_epi32(size, 0x4E),
                                       _mm256_sub_epi32(size, tie2));
  const __m256i c = _mm256_cmpgt_epi32(_mm256_shuffle_epi32(size, 0x93),
                                       _mm256_sub_epi32(size, tie3));
  const __m256i two = _mm256_or_si256(_mm256_and_si256(a, b),
                                      _mm256_and_si256(c, _mm256_or_si256(a, b)));
  const uint8_t keep = (uint8_t)~_mm256_movemask_ps(_mm256_castsi256_ps(two));
  *kept = keep;
  return _mm256_castps256_ps128(_mm256_permutevar8x32_ps(x, lanes_of(take, keep)));
}

static uint32_t keep_two(const float* y, int64_t n, uint8_t* kept, float* pairs) {
  __m256i top = _mm256_setzero_si256();
  for (int64_t i = 0; i < n; i += 16) {
    const __m128 low = keep_8(y + i, kept + i / 8, &top);
    const __m128 high = keep_8(y + i + 8, kept + i / 8 + 1, &top);
    // One store, as one load reads them: a load of two stores waits until both have left.
    _mm256_storeu_ps(pairs + i / 2, _mm256_set_m128(high, low));
  }
  return largest_of(top);
}

static __m256 spread_8(const float* pairs, const uint8_t* kept, int64_t i) {
  const __m256 x = _mm256_castps128_ps256(_mm_loadu_ps(pairs + i / 2));
  const __m256 placed = _mm256_permutevar8x32_ps(x, lanes_of(give, kept[i / 8]));
  return _mm256_and_ps(placed, _mm256_castsi256_ps(lanes(kept[i / 8])));
}

static void spread(const float* pairs, const uint8_t* kept, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += 8) _mm256_storeu_ps(y + i, spread_8(pairs, kept, i));
}

static void subtract_spread(const float* y, const float* pairs, const uint8_t* kept, int64_t n,
                            float* lost) {
  for (int64_t i = 0; i < n; i += 8) {
    const __m256 x = _mm256_loadu_ps(y + i);
    _mm256_storeu_ps(lost + i, _mm256_sub_ps(x, spread_8(pairs, kept, i)));
  }
}

#include "blocks.h"
