"""The ops in plain PyTorch, which sorts the whole vocabulary. Shapes: R rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lezero.core.device import sent


def draw_tokens(scores_RV: Tensor, asked_R5: Tensor) -> tuple[Tensor, Tensor]:
    """By inversion: of the tokens that are kept, the likeliest first, the first one whose share and
    those before it exceed the number that was drawn."""
    highest_R = scores_RV.amax(1)  # NaN is the maximum of what it is in
    temperature, top_k, top_p, min_p, drawn = asked_R5.to(torch.float64).split(1, 1)
    sorted_RV, order_RV = scores_RV.double().sort(dim=1, descending=True, stable=True)
    relative_RV = (sorted_RV - sorted_RV[:, :1]) / torch.where(temperature > 0, temperature, 1.0)
    rank_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    within_RV = rank_V < torch.where(temperature > 0, top_k, 1.0)
    weight_RV = torch.where(within_RV, relative_RV.exp(), 0.0)
    before_RV = weight_RV.cumsum(1) - weight_RV
    kept_RV = (weight_RV >= min_p) & (before_RV < top_p * weight_RV.sum(1, keepdim=True))
    kept_RV |= rank_V == 0
    weight_RV = torch.where(kept_RV, weight_RV, 0.0)
    reached_RV = weight_RV.cumsum(1)
    index_R1 = torch.searchsorted(reached_RV, drawn * reached_RV[:, -1:], right=True)
    last_R1 = (weight_RV > 0).sum(1, keepdim=True).clamp(min=1) - 1
    token_R = order_RV.gather(1, torch.minimum(index_R1, last_R1))[:, 0]
    return torch.where(highest_R.isfinite(), token_R, 0), highest_R


def name_tokens(logits_RV: Tensor, token_R: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax in fp64, rounded once, of the given tokens and of the `most` likeliest ones."""
    finite_R1 = logits_RV.amax(1, keepdim=True).isfinite()
    logprob_RV = torch.where(finite_R1, logits_RV.double().log_softmax(1), torch.nan).float()
    order_RV = logits_RV.sort(dim=1, descending=True, stable=True).indices[:, :most]
    likeliest_RM = torch.where(finite_R1, order_RV, 0)
    own_R = logprob_RV.gather(1, token_R[:, None])[:, 0]
    return own_R, likeliest_RM, logprob_RV.gather(1, likeliest_RM)


def penalized(
    scores_RV: Tensor, texts: Sequence[Sequence[int]], prompts: Sequence[int], penalties_R3: Tensor
) -> Tensor:
    """Repetition over the whole text first, then presence and frequency over the answer."""
    found_RV = scores_RV.clone()
    rows = zip(found_RV, texts, prompts, penalties_R3.tolist(), strict=True)
    for scores_V, text, prompt, (repetition, presence, frequency) in rows:
        if len(text):
            seen = torch.tensor(text, device="cpu").unique()  # what is unique has to be waited for
            seen = sent(seen, scores_V.device)
            score = scores_V[seen]
            scores_V[seen] = torch.where(score < 0, score * repetition, score / repetition)
        if len(text) > prompt:
            answer = torch.tensor(text[max(0, prompt) :], device="cpu")
            found = answer.unique(return_counts=True)
            given, times = (sent(x, scores_V.device) for x in found)
            scores_V[given] -= presence + frequency * times
    return found_RV
