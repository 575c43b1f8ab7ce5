"""Draws a token from each row of logits.

A row is drawn as if it were alone: its token depends on its logits, its request's parameters and
history, and on (seed, position, sample), never on the other rows. Temperature, top-k and top-p, in
this order, choose the tokens that the plain generation of `lezero.models.sampling` chooses; among
equal logits the lower token comes first.

Penalties come before the temperature: repetition as in Keskar et al. 2019 (CTRL), section 4.1, and
`RepetitionPenaltyLogitsProcessor` of transformers, over prompt and answer; then presence and
frequency as in OpenAI's API reference, over the answer. Min-p (Nguyen et al. 2024) comes last, as
in transformers.

Shapes: R rows, S rows that chance decides, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lezero.models.sampling import chance
from lezero.serve.request import Request
from lezero.serve.sampling import Drawn, SamplingParams, TokenLogprob

# Sorting a whole vocabulary costs more than all else. Few tokens nearly always reach top-p, or the
# drawn number, so the most likely ones are tried first, then more, then all.
_TRIED_FIRST = (256, 4096)


@dataclass(frozen=True, slots=True)
class Row:
    """Whose token a row of logits gives. position: the one that the token will take.

    history: prompt and answer so far, of which the prompt is the first `prompt` tokens; read only
    when there are penalties.
    """

    params: SamplingParams
    seed: int
    position: int
    sample: int = 0
    history: Sequence[int] = ()
    prompt: int = 0

    @classmethod
    def of(cls, request: Request, guesses: Sequence[int] = ()) -> Row:
        """The row of the token after the request's last one, and after guesses behind it."""
        history: Sequence[int] = ()
        if request.params.penalizes:
            history = [*request.tokens, *guesses]
        position, prompt = len(request.tokens) + len(guesses), len(request.prompt)
        return cls(request.params, request.seed, position, request.sample, history, prompt)


def draw(logits_RV: Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """The token of each row, and its log-probabilities where they are asked for.

    Log-probabilities are the model's own: fp32 `log_softmax` of the logits as they come. A row
    whose largest logit is not a finite number gives an error in place of a token; others go on.
    """
    assert logits_RV.shape[0] == len(rows), "one row of logits for each row"
    if not rows:
        return []
    scores_RV = _penalized(logits_RV, rows)
    top_R1 = scores_RV.argmax(dim=-1, keepdim=True)  # a NaN counts as the largest
    highest_R1 = scores_RV.gather(1, top_R1)
    found: list[list[int]] = torch.cat((top_R1, highest_R1.isfinite().long()), dim=1).tolist()
    tokens = [token if finite else -1 for token, finite in found]
    by_chance = [
        number
        for number, row in enumerate(rows)
        if row.params.temperature > 0 and tokens[number] >= 0
    ]
    if by_chance:
        scores_SV = _rows(scores_RV, by_chance)
        highest_S1 = _rows(highest_R1, by_chance).double()
        drawn = _draw_by_chance(scores_SV, highest_S1, [rows[number] for number in by_chance])
        for number, token in zip(by_chance, drawn, strict=True):
            tokens[number] = token
    logprobs = _logprobs(logits_RV, rows, tokens)
    return [
        Drawn(token, logprobs.get(number), None if token >= 0 else no_token(rows[number]))
        for number, token in enumerate(tokens)
    ]


def no_token(row: Row) -> str:
    """Why none could be drawn, for people."""
    whose = "the model's logits"
    if row.params.penalizes:
        whose += ", after the penalties that were asked for,"
    return (
        f"{whose} for position {row.position} hold NaN or no finite maximum; "
        "no token can be drawn from them"
    )


def _rows(x_RV: Tensor, numbers: list[int]) -> Tensor:
    return x_RV if len(numbers) == x_RV.shape[0] else x_RV[numbers]


def _penalized(logits_RV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits after penalties; the same tensor where no row has any."""
    if not any(row.params.penalizes for row in rows):
        return logits_RV
    scores_RV = logits_RV.to(torch.float32, copy=True)
    for scores_V, row in zip(scores_RV, rows, strict=True):
        params = row.params
        if params.repetition_penalty != 1.0 and len(row.history):
            seen = torch.tensor(row.history, device=scores_V.device).unique()
            score, penalty = scores_V[seen], params.repetition_penalty
            scores_V[seen] = torch.where(score < 0, score * penalty, score / penalty)
        answer = row.history[row.prompt :]
        if len(answer) and (params.presence_penalty or params.frequency_penalty):
            given, times = torch.tensor(answer, device=scores_V.device).unique(return_counts=True)
            scores_V[given] -= params.presence_penalty + params.frequency_penalty * times
    return scores_RV


def _draw_by_chance(scores_SV: Tensor, highest_S1: Tensor, rows: Sequence[Row]) -> list[int]:
    """Tokens by inversion: the first whose share and those before it exceed the drawn number."""
    device, V = scores_SV.device, scores_SV.shape[1]
    asked_S = _Asked.of(rows, V, device)
    everything = [number for number, row in enumerate(rows) if (row.params.top_k or V) >= V]
    total_S1 = torch.ones_like(highest_S1)
    if everything:
        total_S1[everything] = _total(
            _rows(scores_SV, everything), highest_S1[everything], asked_S.temperature[everything]
        )
    tokens_S = torch.full((len(rows),), -1, device=device)
    left_S = torch.arange(len(rows), device=device)
    for count in [*(count for count in _TRIED_FIRST if count < V), V]:
        some_SV = scores_SV if len(left_S) == len(rows) else scores_SV[left_S]
        token_SK, sure_S1 = _ranked(some_SV, count)
        score_SK = some_SV.gather(1, token_SK).double()
        weight_SK = ((score_SK - highest_S1[left_S]) / asked_S.temperature[left_S]).exp()
        weight_SK[torch.arange(count, device=device) >= sure_S1] = 0.0
        asked = asked_S.at(left_S)
        index_S1, certain_S = _choose(weight_SK, sure_S1, total_S1[left_S], asked, V)
        tokens_S[left_S[certain_S]] = token_SK.gather(1, index_S1)[certain_S, 0]
        left_S = left_S[~certain_S]
        if len(left_S) == 0:
            break
    return [int(token) for token in tokens_S.tolist()]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What each row asks for, `(S, 1)` fp64; a filter that is not asked for lets all pass."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    drawn: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], vocabulary: int, device: torch.device) -> _Asked:
        table = [
            (
                row.params.temperature,
                min(row.params.top_k or vocabulary, vocabulary),
                row.params.top_p or 2.0,
                row.params.min_p or 0.0,
                chance(row.seed, row.position, row.sample),
            )
            for row in rows
        ]
        columns = torch.tensor(table, dtype=torch.float64, device=device).split(1, dim=1)
        return cls(*columns)

    def at(self, rows_S: Tensor) -> _Asked:
        """The same for some rows."""
        return _Asked(
            *(self.temperature[rows_S], self.top_k[rows_S], self.top_p[rows_S]),
            *(self.min_p[rows_S], self.drawn[rows_S]),
        )


def _choose(
    weight_SK: Tensor, sure_S1: Tensor, total_S1: Tensor, asked: _Asked, V: int
) -> tuple[Tensor, Tensor]:
    """The candidate that is drawn in each row, and whether it is certain.

    weight_SK: from most to least likely, 1 for the first; of the first `sure_S1` candidates, 0 for
    the others. total_S1: the weight of all tokens, for rows without top-k. It is certain when the
    filters keep only candidates, or when there are no filters and the candidates reach beyond the
    drawn number.
    """
    K = weight_SK.shape[1]
    reached_SK = weight_SK.cumsum(dim=-1)
    whole_S1 = asked.top_k <= sure_S1  # all within top-k are candidates
    last_of_k_S1 = asked.top_k.clamp(max=K).long() - 1
    mass_S1 = torch.where(whole_S1, reached_SK.gather(1, last_of_k_S1), total_S1)
    rank_K = torch.arange(K, device=weight_SK.device)
    kept_SK = (rank_K < asked.top_k) & (weight_SK >= asked.min_p) & (weight_SK > 0)
    kept_SK &= reached_SK - weight_SK < asked.top_p * mass_S1
    kept_S1 = kept_SK.sum(dim=-1, keepdim=True).clamp(min=1)
    known_S1 = whole_S1 | (asked.top_k == V)  # whether mass_S1 is that of all within top-k
    complete_S1 = known_S1 & ((kept_S1 < sure_S1) | whole_S1)
    end_S1 = torch.where(complete_S1, reached_SK.gather(1, kept_S1 - 1), total_S1)
    target_S1 = asked.drawn * end_S1
    index_S1 = torch.searchsorted(reached_SK, target_S1, right=True).minimum(kept_S1 - 1)
    unfiltered_S1 = (asked.top_k == V) & (asked.top_p > 1) & (asked.min_p == 0)
    certain_S1 = complete_S1 | (unfiltered_S1 & (reached_SK[:, -1:] > target_S1))
    return index_S1, certain_S1[:, 0]


def _total(scores_SV: Tensor, highest_S1: Tensor, temperature_S1: Tensor) -> Tensor:
    """The weight of all tokens, where the most likely one has 1.

    Softmax works row by row however many rows there are; a sum would divide a row that is alone
    among the threads, and round otherwise.
    """
    relative_SV = scores_SV.to(torch.float64, copy=True).sub_(highest_S1).div_(temperature_S1)
    return 1 / relative_SV.softmax(dim=-1).amax(dim=-1, keepdim=True)


def _ranked(scores_SV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` most likely tokens, best first, and how many of them are sure, `(S, 1)`.

    Among equals the lower token comes first. Top-k does not say which of equals it takes, so those
    that equal its last are not sure.
    """
    V = scores_SV.shape[1]
    if count == V:
        order_SV = scores_SV.sort(dim=-1, descending=True, stable=True).indices
        return order_SV, torch.full_like(order_SV[:, :1], V)
    token_SK = scores_SV.topk(count, dim=-1).indices.sort(dim=-1).values
    score_SK, order_SK = scores_SV.gather(1, token_SK).sort(dim=-1, descending=True, stable=True)
    sure_S1 = (score_SK > score_SK[:, -1:]).sum(dim=-1, keepdim=True)
    return token_SK.gather(1, order_SK), sure_S1


def _logprobs(
    logits_RV: Tensor, rows: Sequence[Row], tokens: Sequence[int]
) -> dict[int, TokenLogprob]:
    """Row → log-probabilities, for rows that want them and have a token."""
    counts = {
        number: row.params.logprobs
        for number, row in enumerate(rows)
        if row.params.logprobs is not None and tokens[number] >= 0
    }
    if not counts:
        return {}
    raw_SV = _rows(logits_RV, list(counts)).float()
    logprob_SV = raw_SV.log_softmax(dim=-1)
    drawn_S1 = torch.tensor([tokens[number] for number in counts], device=raw_SV.device)[:, None]
    own = logprob_SV.gather(1, drawn_S1)[:, 0].tolist()
    most = min(max(counts.values()), raw_SV.shape[1])
    if most == 0:
        return {number: TokenLogprob(value) for number, value in zip(counts, own, strict=True)}
    token_SK = _most_likely(raw_SV, most)
    pairs = [
        tuple(zip(likeliest, values, strict=True))
        for likeliest, values in zip(
            token_SK.tolist(), logprob_SV.gather(1, token_SK).tolist(), strict=True
        )
    ]
    return {
        number: TokenLogprob(value, pair[:count])
        for (number, count), value, pair in zip(counts.items(), own, pairs, strict=True)
    }


def _most_likely(scores_SV: Tensor, count: int) -> Tensor:
    """Exactly the `count` most likely tokens, best first."""
    V = scores_SV.shape[1]
    for tried in [*(tried for tried in _TRIED_FIRST if tried < V), V]:
        token_SK, sure_S1 = _ranked(scores_SV, tried)
        if tried == V or bool((sure_S1 >= count).all()):
            break
    return token_SK[:, :count]
