"""Fitting groups of weights to their grid: scales of least error, zero points by HQQ."""

from __future__ import annotations

from lezero.ops.grid_fit.op import half_quadratic, least_error

__all__ = ["half_quadratic", "least_error"]
