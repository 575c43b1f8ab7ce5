// The walk over blocks, the same for every instruction set: a kernel file defines the primitives
// (see generic.c, which says what each does) and includes this. A block lies in the first cache as
// fp32 while it is worked on; a short last block is padded with zeros there.
#pragma once
#include <string.h>

#include "codec.h"

#define NEARLY_INFINITE 0x7F7D0000u  // from here on rounding up may decode, or keep, an infinity
#define STREAMED (1 << 22)  // elements, 16 MiB: more than the caches keep until it is used

typedef struct {
  int64_t blocks, kept, data;            // number of blocks; where these parts of the payload begin
  int64_t kept_bytes, data_bytes, block; // of one full block
} layout;

static int sparse(int form) { return form >= LEZERO_24_BF16; }

static int64_t data_bytes(int form, int64_t n) {
  const int64_t groups = (n + 3) / 4;
  switch (form) {
    case LEZERO_INT8: return n;
    case LEZERO_INT4: return (n + 1) / 2;
    case LEZERO_SIGN: return (n + 7) / 8;
    case LEZERO_24_BF16: return 4 * groups;
    case LEZERO_24_INT8: return 2 * groups;
    default: return groups;
  }
}

static int64_t kept_bytes(int form, int64_t n) { return sparse(form) ? ((n + 3) / 4 + 1) / 2 : 0; }

static layout layout_of(const lezero_codec* c) {
  layout l;
  l.block = c->block;
  l.blocks = (c->numel + c->block - 1) / c->block;
  l.kept = c->form == LEZERO_24_BF16 ? 0 : 2 * l.blocks;
  l.data = l.kept + kept_bytes(c->form, c->numel);
  l.kept_bytes = kept_bytes(c->form, c->block);
  l.data_bytes = data_bytes(c->form, c->block);
  return l;
}

static float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// The smallest bf16 that is not below |top| / levels; 0 where its inverse would overflow.
static uint32_t scale_above(uint32_t top, float levels) {
  if (top >= 0x7F800000u) return LEZERO_BF16_NAN;
  const uint32_t scale = (to_bits(from_bits(top) / levels) + 0xFFFFu) >> 16;
  return scale < 0x0080u ? 0 : scale;
}

static uint32_t mean_scale(float sum, int64_t n) {
  const uint32_t bits = to_bits(sum / (float)n);
  if (bits >= 0x7F800000u) return LEZERO_BF16_NAN;
  const uint32_t scale = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
  return scale >= 0x7F80u ? LEZERO_BF16_NAN : scale;
}

static uint8_t* at(void* base, int type, int64_t element) {
  return (uint8_t*)base + element * (type == LEZERO_FP32 ? 4 : 2);
}

// Encodes one padded block: `data` and `kept` get the bytes of a full block, `lost` y - decoded.
// 0 for a block that is not finite, 2 for one with values so large that `lost` may not be.
static int encode_block(int form, const float* y, int64_t n, int64_t block, uint16_t* scale,
                        uint8_t* kept, uint8_t* data, float* lost) {
  _Alignas(64) float pairs[LEZERO_MAX_BLOCK / 2], back[LEZERO_MAX_BLOCK / 2];
  if (form == LEZERO_SIGN) {
    const float sum = magnitude_sum(y, block);
    *scale = (uint16_t)mean_scale(sum, n);
    const int good = *scale != LEZERO_BF16_NAN;
    encode_sign(y, block, from_bits((uint32_t)*scale << 16), data, good ? lost : 0);
    if (!good) memset(data, 0, (size_t)block / 8);
    return good ? 1 + (to_bits(sum) >= NEARLY_INFINITE) : 0;
  }
  const uint32_t top = sparse(form) ? keep_two(y, block, kept, pairs) : largest_magnitude(y, block);
  const float levels = form == LEZERO_INT8 || form == LEZERO_24_INT8 ? 127.0f : 7.0f;
  const uint32_t bits = scale_above(top, levels);
  const int good = bits == LEZERO_BF16_NAN ? 0 : 1 + (top >= NEARLY_INFINITE);
  const float step = from_bits(bits << 16), inverse = bits && good ? 1.0f / step : 0.0f;
  *scale = (uint16_t)bits;
  _Alignas(64) float instead[LEZERO_MAX_BLOCK];
  if (!good) {  // with a scale of NaN anything decodes to NaN; without a scale NaN itself is sent
    const float x = form == LEZERO_24_BF16 ? from_bits((uint32_t)LEZERO_BF16_NAN << 16) : 0.0f;
    for (int64_t i = 0; i < block; i++) instead[i] = x;
    y = instead, lost = 0;
    if (sparse(form)) keep_two(y, block, kept, pairs);
  }
  switch (form) {
    case LEZERO_INT8: encode_int8(y, block, inverse, step, (int8_t*)data, lost); return good;
    case LEZERO_INT4: encode_int4(y, block, inverse, step, data, lost); return good;
    case LEZERO_24_BF16: encode_bf16(pairs, block / 2, (uint16_t*)data); break;
    case LEZERO_24_INT8: encode_int8(pairs, block / 2, inverse, step, (int8_t*)data, 0); break;
    default: encode_int4(pairs, block / 2, inverse, step, data, 0);
  }
  if (lost) {
    if (form == LEZERO_24_BF16) decode_bf16((const uint16_t*)data, block / 2, back);
    else if (form == LEZERO_24_INT8) decode_int8((const int8_t*)data, block / 2, step, back);
    else decode_int4(data, block / 2, step, back);
    subtract_spread(y, back, kept, block, lost);
  }
  return good;
}

// What is lost where that is finite as it is kept, else the error that was there.
static void keep_finite(float* lost, const void* error, int type, int64_t n) {
  _Alignas(64) float before[LEZERO_MAX_BLOCK];
  read_block(before, error, type, n);
  const uint32_t infinite = type == LEZERO_FP32 ? 0x7F800000u : 0x7F7F8000u;
  for (int64_t i = 0; i < n; i++)
    if ((to_bits(lost[i]) & 0x7FFFFFFFu) >= infinite) lost[i] = before[i];
}

void lezero_codec_encode(const lezero_codec* c, int64_t first, int64_t last) {
  _Alignas(64) float y[LEZERO_MAX_BLOCK], lost[LEZERO_MAX_BLOCK];
  _Alignas(64) uint8_t data[2 * LEZERO_MAX_BLOCK], kept[LEZERO_MAX_BLOCK / 8];
  const layout l = layout_of(c);
  for (int64_t b = first; b < last; b++) {
    const int64_t start = b * l.block;
    const int64_t n = c->numel - start < l.block ? c->numel - start : l.block;
    const void* values = at(c->values, c->values_type, start);
    void* error = c->error ? at(c->error, c->error_type, start) : 0;
    const float* from = y;
    uint16_t scale = 0;
    if (n == l.block && c->values_type == LEZERO_FP32 && !error) {
      from = (const float*)values;
    } else {
      read_block(y, values, c->values_type, n);
      if (error) {
        read_block(lost, error, c->error_type, n);
        for (int64_t i = 0; i < n; i++) y[i] += lost[i];
      }
      for (int64_t i = n; i < l.block; i++) y[i] = 0.0f;
    }
    uint8_t* to = c->payload + l.data + b * l.data_bytes;
    uint8_t* to_kept = c->payload + l.kept + b * l.kept_bytes;
    const int whole = n == l.block;
    const int good = encode_block(c->form, from, n, l.block, &scale, whole ? to_kept : kept,
                                  whole ? to : data, error ? lost : 0);
    if (!whole) {
      memcpy(to, data, (size_t)data_bytes(c->form, n));
      memcpy(to_kept, kept, (size_t)kept_bytes(c->form, n));
    }
    if (c->form != LEZERO_24_BF16) memcpy(c->payload + 2 * b, &scale, 2);
    if (error && good > 1) keep_finite(lost, error, c->error_type, n);
    if (error && good) write_block(error, c->error_type, lost, n, 0);
  }
}

void lezero_codec_decode(const lezero_codec* c, int64_t first, int64_t last) {
  _Alignas(64) float y[LEZERO_MAX_BLOCK], pairs[LEZERO_MAX_BLOCK / 2];
  _Alignas(64) uint8_t data[2 * LEZERO_MAX_BLOCK], kept[LEZERO_MAX_BLOCK / 8];
  const layout l = layout_of(c);
  // A large output is written without being read into the caches first.
  const int past_caches = c->values_type == LEZERO_FP32 && !c->add && c->numel >= STREAMED &&
                          (uintptr_t)c->values % 64 == 0;
  for (int64_t b = first; b < last; b++) {
    const int64_t start = b * l.block;
    const int64_t n = c->numel - start < l.block ? c->numel - start : l.block;
    const uint8_t* from = c->payload + l.data + b * l.data_bytes;
    const uint8_t* from_kept = c->payload + l.kept + b * l.kept_bytes;
    if (n < l.block) {
      memset(data, 0, sizeof data), memset(kept, 0, sizeof kept);
      memcpy(data, from, (size_t)data_bytes(c->form, n));
      memcpy(kept, from_kept, (size_t)kept_bytes(c->form, n));
      from = data, from_kept = kept;
    }
    uint16_t scale = 0;
    if (c->form != LEZERO_24_BF16) memcpy(&scale, c->payload + 2 * b, 2);
    const float step = from_bits((uint32_t)scale << 16);
    float* part = sparse(c->form) ? pairs : y;
    const int64_t count = sparse(c->form) ? l.block / 2 : l.block;
    switch (c->form) {
      case LEZERO_SIGN: decode_sign(from, count, step, part); break;
      case LEZERO_24_BF16: decode_bf16((const uint16_t*)from, count, part); break;
      case LEZERO_INT8:
      case LEZERO_24_INT8: decode_int8((const int8_t*)from, count, step, part); break;
      default: decode_int4(from, count, step, part);
    }
    if (sparse(c->form)) spread(pairs, from_kept, l.block, y);
    void* to = at(c->values, c->values_type, start);
    if (past_caches && n == l.block) stream_block((float*)to, y, n);
    else write_block(to, c->values_type, y, n, c->add);
  }
  if (past_caches) stream_end();
}
