/* What layers.h needs beyond the primitives of linear where no instruction does it better. */

/* 16 rows of 16 dwords, `step` bytes apart, turned: line i of `to` has dword i of each. */
INLINE void turn_dwords(char *to, const void *from, int64_t step) {
  for (int r = 0; r < 16; r++)
    for (int i = 0; i < 16; i++) memcpy(to + i * 64 + 4 * r, (const char *)from + r * step + 4 * i, 4);
}
/* v in bf16 to the even places of a line, whose odd ones become 0, or to the odd ones. */
INLINE void put_even(uint16_t line[32], floats v) {
  uint16_t half[16];
  store_bf16(half, v);
  for (int i = 0; i < 16; i++) line[2 * i] = half[i], line[2 * i + 1] = 0;
}
INLINE void put_odd(uint16_t line[32], floats v) {
  uint16_t half[16];
  store_bf16(half, v);
  for (int i = 0; i < 16; i++) line[2 * i + 1] = half[i];
}
