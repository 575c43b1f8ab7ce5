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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lezero.core import device
from lezero.models.sampling import chance
from lezero.ops.draw import draw_tokens, name_tokens, native, penalized
from lezero.serve.likeliest import likeliest
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

    Log-probabilities are the model's own: log-softmax of the logits as they come, in fp32 (on a CPU
    in fp64, rounded once). A row whose largest logit is not a finite number gives an error in place
    of a token; others go on.

    The host asks an accelerator once, for what is found among the likeliest tokens; again only
    for rows where these do not suffice. On a CPU kernels draw (see `lezero.ops.draw`).
    """
    assert logits_RV.shape[0] == len(rows), "one row of logits for each row"
    if not rows:
        return []
    logits_RV = device.with_doubles(logits_RV)
    wide_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    if native(wide_RV):
        return _drawn_by_kernels(wide_RV, rows)
    found: list[Drawn | None] = [None] * len(rows)
    V, left = logits_RV.shape[1], list(range(len(rows)))
    for count in [*(count for count in _TRIED_FIRST if count < V), V]:
        if not left:
            break
        tried = _tried(_rows(logits_RV, left), [rows[number] for number in left], count)
        for number, drawn in zip(left, tried, strict=True):
            found[number] = drawn
        left = [number for number in left if found[number] is None]
    return [drawn for drawn in found if drawn is not None]


def _drawn_by_kernels(logits_RV: Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """The same by two calls, of which the second one is made where log-probabilities are asked."""
    V = logits_RV.shape[1]
    asked_R5 = torch.tensor([_numbers(row, V) for row in rows], dtype=torch.float64, device="cpu")
    token_R, highest_R = draw_tokens(_penalized(logits_RV, rows), asked_R5)
    tokens, highest = token_R.tolist(), highest_R.tolist()
    wanted = [number for number, row in enumerate(rows) if row.params.logprobs is not None]
    named: dict[int, TokenLogprob] = {}
    if wanted:
        most = min(max(rows[number].params.logprobs or 0 for number in wanted), V)
        found = name_tokens(_rows(logits_RV, wanted), token_R[wanted], most)
        for number, own, tokens_M, values_M in zip(
            wanted, *(x.tolist() for x in found), strict=True
        ):
            count = min(rows[number].params.logprobs or 0, most)
            pairs = zip(tokens_M[:count], values_M[:count], strict=True)
            named[number] = TokenLogprob(own, tuple(pairs))
    return [
        _no_token(row, logits_RV, number)
        if not math.isfinite(highest[number])
        else Drawn(tokens[number], named.get(number))
        for number, row in enumerate(rows)
    ]


def asked_of(requests: Sequence[Request], steps: int, vocabulary: int) -> Tensor:
    """What `draw_tokens` takes for the next tokens of each, fp64 (steps, requests, 5)."""
    rows = [Row.of(request, (0,) * step) for step in range(steps) for request in requests]
    table = [_numbers(row, vocabulary) for row in rows]
    return torch.tensor(table, dtype=torch.float64, device="cpu").view(steps, len(requests), -1)


def _numbers(row: Row, V: int) -> tuple[float, float, float, float, float]:
    """What a row asks of its token, and its chance."""
    params = row.params
    top_k = min(params.top_k or V, V)
    drawn = chance(row.seed, row.position, row.sample) if params.temperature > 0 else 0.0
    return params.temperature, top_k, _top_p(params), params.min_p or 0.0, drawn


def _no_token(row: Row, logits_RV: Tensor, number: int) -> Drawn:
    """What is said where the largest score is no finite number: whether the model's own was."""
    penalized = row.params.penalizes
    sound = penalized and math.isfinite(float(likeliest(logits_RV[number : number + 1])[0]))
    return Drawn(-1, error=no_token(row), sound=sound)


def _tried(logits_RV: Tensor, rows: Sequence[Row], count: int) -> list[Drawn | None]:
    """What the `count` likeliest tokens of each row say; None where that is not enough."""
    R = len(rows)
    scores_RV = _penalized(logits_RV, rows)
    highest_R, token_R = likeliest(scores_RV)
    by_chance = [number for number, row in enumerate(rows) if row.params.temperature > 0]
    parts = [highest_R]
    if by_chance:
        highest_S1 = _rows(highest_R, by_chance).double()[:, None]
        chosen = [rows[number] for number in by_chance]
        token_S, certain_S = _draw_by_chance(_rows(scores_RV, by_chance), highest_S1, chosen, count)
        if len(by_chance) == R:
            token_R = token_S
        else:
            token_R.index_copy_(0, _index(by_chance, token_R.device), token_S)
        parts.append(certain_S)
    wanted = [number for number, row in enumerate(rows) if row.params.logprobs is not None]
    most = min(max((rows[n].params.logprobs or 0 for n in wanted), default=0), logits_RV.shape[1])
    if wanted:
        parts += _logprobs(_rows(logits_RV, wanted), _rows(token_R, wanted), most, count)
    # In fp32 numbers of tokens are exact, as there are fewer than 2^24.
    told = torch.cat([x.flatten().float() for x in (token_R, *parts)]).tolist()
    tokens, highest = [int(token) for token in told[:R]], told[R : 2 * R]
    at = 2 * R + len(by_chance)
    uncertain = {
        number for number, sure in zip(by_chance, told[2 * R : at], strict=True) if not sure
    }
    logprobs = _named_logprobs(told[at:], wanted, rows, most)
    uncertain |= {number for number, found in logprobs.items() if found is None}
    drawn: list[Drawn | None] = []
    for number, token in enumerate(tokens):
        if not math.isfinite(highest[number]):
            drawn.append(_no_token(rows[number], logits_RV, number))
        else:
            sure = number not in uncertain
            drawn.append(Drawn(token, logprobs.get(number)) if sure else None)
    return drawn


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
    if len(numbers) == x_RV.shape[0]:
        return x_RV
    return x_RV.index_select(0, _index(numbers, x_RV.device))


def _index(numbers: list[int], place: torch.device) -> Tensor:
    """In place of a list, which torch sends by itself and waits for the device."""
    return device.sent(torch.tensor(numbers, dtype=torch.int64, device="cpu"), place)


def _penalized(logits_RV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits after penalties; the same tensor where no row has any."""
    if not any(row.params.penalizes for row in rows):
        return logits_RV
    asked = [
        (x.repetition_penalty or 1.0, x.presence_penalty, x.frequency_penalty)
        for x in (row.params for row in rows)
    ]
    texts, prompts = [row.history for row in rows], [row.prompt for row in rows]
    return penalized(
        logits_RV.float(), texts, prompts, torch.tensor(asked, dtype=torch.float64, device="cpu")
    )


def _draw_by_chance(
    scores_SV: Tensor, highest_S1: Tensor, rows: Sequence[Row], count: int
) -> tuple[Tensor, Tensor]:
    """Tokens by inversion, (S,): the first whose share and those before it exceed the drawn number;
    and whether the `count` likeliest ones are enough to be certain of it."""
    V = scores_SV.shape[1]
    asked = _Asked.of(rows, V, scores_SV.device)
    everything = [number for number, row in enumerate(rows) if (row.params.top_k or V) >= V]
    total_S1 = torch.ones_like(highest_S1)
    if len(everything) == len(rows):
        total_S1 = _total(scores_SV, highest_S1, asked.temperature)
    elif everything:
        chosen = (_rows(x, everything) for x in (scores_SV, highest_S1, asked.temperature))
        total_S1.index_copy_(0, _index(everything, total_S1.device), _total(*chosen))
    token_SK, sure_S1 = _ranked(scores_SV, count)
    score_SK = scores_SV.gather(1, token_SK).double()
    weight_SK = ((score_SK - highest_S1) / asked.temperature).exp()
    unsure_SK = torch.arange(count, device=scores_SV.device) >= sure_S1
    index_S1, certain_S = _choose(weight_SK.masked_fill(unsure_SK, 0), sure_S1, total_S1, asked, V)
    return token_SK.gather(1, index_S1)[:, 0], certain_S


@dataclass(frozen=True, slots=True)
class _Asked:
    """What each row asks for, `(S, 1)` fp64; a filter that is not asked for lets all pass."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    drawn: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], vocabulary: int, place: torch.device) -> _Asked:
        table = [_numbers(row, vocabulary) for row in rows]
        asked_S5 = torch.tensor(table, dtype=torch.float64, device="cpu")
        return cls(*device.sent(asked_S5, place).split(1, dim=1))


def _top_p(params: SamplingParams) -> float:
    """2 for no filter, which a top-p of 1, the default of many clients, is too: candidates that are
    tried could never be told to reach it."""
    return 2.0 if params.top_p is None or params.top_p >= 1 else params.top_p


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


def _logprobs(logits_SV: Tensor, token_S: Tensor, most: int, count: int) -> list[Tensor]:
    """Log-probabilities of the tokens, and of the `most` likeliest ones: these, theirs, and how
    many of them are sure among `count` candidates."""
    raw_SV = logits_SV.float()
    logprob_SV = raw_SV.log_softmax(dim=-1)
    own_S1 = logprob_SV.gather(1, token_S[:, None])
    if most == 0:
        return [own_S1]
    token_SK, sure_S1 = _ranked(raw_SV, count)
    token_SK = token_SK[:, :most]
    return [own_S1, token_SK, logprob_SV.gather(1, token_SK), sure_S1]


def _named_logprobs(
    told: Sequence[float], numbers: Sequence[int], rows: Sequence[Row], most: int
) -> dict[int, TokenLogprob | None]:
    """By row what `_logprobs` found, in a row here; None where too few are sure."""
    S, found = len(numbers), dict[int, TokenLogprob | None]()
    values, sure = S + S * most, S + 2 * S * most
    for index, number in enumerate(numbers):
        count = min(rows[number].params.logprobs or 0, most)
        if count and told[sure + index] < count:
            found[number] = None
            continue
        of = slice(index * most, index * most + count)
        likeliest = [int(token) for token in told[S:values][of]]
        pairs = zip(likeliest, told[values:sure][of], strict=True)
        found[number] = TokenLogprob(told[index], tuple(pairs))
    return found
