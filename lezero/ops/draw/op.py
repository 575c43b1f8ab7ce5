"""`draw_tokens`, `name_tokens` and `penalized`: the kernel of this machine or the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.draw import reference
from lezero.ops.draw.native import NATIVE


def native(scores_RV: Tensor) -> bool:
    """Whether a kernel works on these scores."""
    on_cpu = scores_RV.device.type == "cpu" and scores_RV.dtype == torch.float32
    return on_cpu and NATIVE.available()


def drawer() -> int:
    """The address of a `lezero_drawer` (draw.h), for kernels that draw between two steps."""
    address: int = NATIVE.ops.drawer()
    return address


def draw_tokens(scores_RV: Tensor, asked_R5: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row of scores, int64 (R,), and the row's largest score, (R,).

    scores_RV: fp32. asked_R5: fp64; of each row temperature (0 takes the likeliest token), top-k (1
    to V, which keeps all), top-p (above 1 keeps all), min-p (0 keeps all), and a number in [0, 1)
    that decides; filters work in this order. Among equal scores the lower token comes first. A row
    does not depend on others. Where the largest score is NaN or infinite the token is 0. Raises
    `ConfigError` for other shapes and types.
    """
    R = _rows("draw_tokens", scores_RV)
    _check("draw_tokens: asked is", asked_R5, torch.float64, (R, 5))
    if not native(scores_RV):
        return reference.draw_tokens(scores_RV, asked_R5)
    token_R, highest_R = torch.empty(R, dtype=torch.int64, device="cpu"), scores_RV.new_empty(R)
    NATIVE.ops.draw_tokens(scores_RV.contiguous(), asked_R5.contiguous(), token_R, highest_R)
    return token_R, highest_R


def name_tokens(logits_RV: Tensor, token_R: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the given tokens, fp32 (R,), and the `most` likeliest tokens of each
    row, int64 (R, most), with theirs; of equals the lower token comes first.

    logits_RV: fp32. token_R: int64, 0 to V - 1. All is NaN where the largest logit is NaN or
    infinite. Raises `ConfigError` for other shapes and types.
    """
    R = _rows("name_tokens", logits_RV)
    _check("name_tokens: tokens are", token_R, torch.int64, (R,))
    if not 0 <= most <= logits_RV.shape[1]:
        raise ConfigError(f"most: got {most}, allowed is 0 to {logits_RV.shape[1]}")
    if not native(logits_RV):
        return reference.name_tokens(logits_RV, token_R, most)
    own_R, logprob_RM = logits_RV.new_empty(R), logits_RV.new_empty(R, most)
    likeliest_RM = torch.empty(R, most, dtype=torch.int64, device="cpu")
    given = (logits_RV.contiguous(), token_R.contiguous())
    NATIVE.ops.name_tokens(*given, own_R, likeliest_RM, logprob_RM)
    return own_R, likeliest_RM, logprob_RM


def penalized(
    scores_RV: Tensor, texts: Sequence[Sequence[int]], prompts: Sequence[int], penalties_R3: Tensor
) -> Tensor:
    """Scores after penalties for tokens of each row's text, fp32 (R, V).

    scores_RV: fp32. texts: of each row the tokens so far, of which the first `prompts[r]` are the
    prompt. penalties_R3: fp64; repetition (1: none; scores above 0 are divided by it, others
    multiplied, for each token of the text), presence and frequency (0: none; taken from tokens of
    the answer, once and for each time). Raises `ConfigError` for other shapes and types.
    """
    R = _rows("penalized", scores_RV)
    _check("penalized: penalties are", penalties_R3, torch.float64, (R, 3))
    if not len(texts) == len(prompts) == R:
        raise ConfigError(
            f"penalized: got {len(texts)} texts and {len(prompts)} prompts for {R} rows of scores; "
            "allowed is one of each a row"
        )
    if not native(scores_RV):
        return reference.penalized(scores_RV, texts, prompts, penalties_R3)
    spans, flat = [], list[int]()
    for text, prompt in zip(texts, prompts, strict=True):
        spans.append((len(flat), len(flat) + max(0, min(prompt, len(text))), len(flat) + len(text)))
        flat.extend(text)
    given = [torch.tensor(x, dtype=torch.int64, device="cpu") for x in (flat, spans)]
    out_RV = torch.empty_like(scores_RV, memory_format=torch.contiguous_format)
    NATIVE.ops.penalize(scores_RV.contiguous(), *given, penalties_R3.contiguous(), out_RV)
    return out_RV


def _check(what: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.shape != shape or x.dtype != dtype:
        raise ConfigError(f"{what} {x.dtype} {tuple(x.shape)}; allowed is {dtype} {shape}")


def _rows(what: str, scores_RV: Tensor) -> int:
    if scores_RV.dim() != 2 or scores_RV.dtype != torch.float32 or not scores_RV.shape[1]:
        raise ConfigError(
            f"{what}: scores of {scores_RV.dtype} {tuple(scores_RV.shape)}; allowed are float32, "
            "(R, V)"
        )
    return int(scores_RV.shape[0])
