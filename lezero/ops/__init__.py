"""Numeric kernels, each with a plain reference that it is held to."""
