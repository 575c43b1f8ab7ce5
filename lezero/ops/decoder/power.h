/* 2^x, to 2 ulp; at least 2^-126, infinite from 2^128 on. Cephes' coefficients for 2^f, f from -0.5 to
 * 0.5. */
INLINE floats power_of_two(floats x) {
  x = most_of(all_floats(-126), x); /* NaN stays */
  const floats n = whole(x), f = difference(x, n);
  floats p = fused(all_floats(1.535336188319500e-4f), f, all_floats(1.339887440266574e-3f));
  p = fused(p, f, all_floats(9.618437357674640e-3f));
  p = fused(p, f, all_floats(5.550332471162809e-2f));
  p = fused(p, f, all_floats(2.402264791363012e-1f));
  p = fused(p, f, all_floats(6.931472028550421e-1f));
  p = fused(p, f, all_floats(1));
  return times_power(p, n);
}

/* x / (1 + e^-x) */
INLINE floats silu(floats x) {
  const floats power = power_of_two(limited(product(x, all_floats(-1.44269504f)), 126));
  return product(x, inverse(sum_of(all_floats(1), power)));
}
