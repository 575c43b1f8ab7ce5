/* 2^x, to 2 ulp; at least 2^-126. Cephes' coefficients for 2^f, f from -0.5 to 0.5. */
INLINE floats power_of_two(floats x) {
  x = most_of(all_floats(-126), x); /* NaN stays */
  const ints n = rounded(x);
  const floats f = fused_less(all_floats(1), float_of(n), x);
  floats p = fused(all_floats(1.535336188319500e-4f), f, all_floats(1.339887440266574e-3f));
  p = fused(p, f, all_floats(9.618437357674640e-3f));
  p = fused(p, f, all_floats(5.550332471162809e-2f));
  p = fused(p, f, all_floats(2.402264791363012e-1f));
  p = fused(p, f, all_floats(6.931472028550421e-1f));
  p = fused(p, f, all_floats(1));
  return times_power(p, n);
}
