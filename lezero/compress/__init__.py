"""Models made smaller: quantized."""
