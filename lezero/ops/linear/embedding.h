/* Rows of a packed weight of 4 or 8 bits, dequantized: (code - middle or zero point) · scale, each
 * rounded in fp32. A row lies across a panel, four inputs to each of its lines. */

/* 16 codes of output `lane` from input i, a multiple of 16, on. */
INLINE void codes_at(const lezero_linear *l, const uint8_t *panel, int64_t lane, int64_t i,
                     float code[16]) {
  const int four = l->bits == 4;
  for (int j = 0; j < 16; j += 4) {
    const int64_t at = (i + j) / 4;
    const uint8_t *byte = panel + (four ? at / 2 : at) * 64 + 4 * lane;
    for (int k = 0; k < 4; k++)
      code[j + k] = (float)(!four ? byte[k] : at % 2 ? byte[k] >> 4 : byte[k] & 15);
  }
}

/* A lane of a line of scales or zero points. */
static float lane_of(const void *x, int type, int64_t line, int64_t lane) {
  float all[16];
  write16(all, LEZERO_FP32, 0, 16, read16(x, type, 16 * line, 16));
  return all[lane];
}

void lezero_embedding(const lezero_linear *l, const int64_t *ids, int64_t begin, int64_t end) {
  const int64_t size = l->x_type == LEZERO_FP32 ? 4 : 2, group = l->group ? l->group : l->K;
  const int64_t groups = (l->K + group - 1) / group;
  const int64_t panel = panel_bytes(l);
  for (int64_t row = begin; row < end; row++) {
    const int64_t p = ids[row] / 16, lane = ids[row] % 16;
    char *out = (char *)l->out + row * l->K * size;
    for (int64_t g = 0; g < groups; g++) {
      const float scale = lane_of(l->scale, l->scale_type, p * groups + g, lane);
      const float zero = l->zero     ? lane_of(l->zero, l->scale_type, p * groups + g, lane)
                         : l->bits == 8 ? 128
                                        : 8;
      for (int64_t i = g * group; i < least((g + 1) * group, l->K); i += 16) {
        float v[16];
        codes_at(l, (const uint8_t *)l->weight + p * panel, lane, i, v);
        for (int k = 0; k < 16; k++) v[k] = (v[k] - zero) * scale;
        write16(out, l->x_type, i, least(l->K - i, 16), read16(v, LEZERO_FP32, 0, 16));
      }
    }
  }
}
