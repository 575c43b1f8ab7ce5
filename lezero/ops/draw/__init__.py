"""Tokens drawn from rows of scores, and log-probabilities of the likeliest."""

from lezero.ops.draw.op import draw_tokens, drawer, name_tokens, native, penalized

__all__ = ["draw_tokens", "drawer", "name_tokens", "native", "penalized"]
