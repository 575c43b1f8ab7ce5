"""Plain generation: the loop that a faster engine must agree with, token by token.

Prompts of different length are padded on the left; the padding has negative positions, which no
token sees, so a prompt gives the same tokens alone and in a batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.models.cache import KVCache
from lezero.models.sampling import Sampling, choose
from lezero.models.transformer import Transformer

Prompts = Sequence[int] | Sequence[Sequence[int]] | Tensor


def generate(
    model: Transformer,
    tokens: Prompts,
    max_new_tokens: int = 128,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop: Sequence[int] | Tensor = (),
    use_cache: bool = True,
) -> list[list[int]]:
    """New tokens for each prompt, the prompt itself left out.

    `tokens` is one prompt or several, as lists or a tensor `(T,)` or `(B, T)`. Temperature 0 is
    greedy. A sequence ends after `max_new_tokens`, or with a token of `stop`, which it then
    contains. Prompt i draws with sample number i: the same seed gives the same tokens, with and
    without cache. Where RoPE scaling turns all keys anew as a sequence grows, the cache begins
    again: once with longrope, with dynamic scaling at every token beyond the context. Errors are
    `ConfigError`: an empty prompt, a token outside the vocabulary, or more tokens than the model's
    context.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    prompts = _prompts(model, tokens, max_new_tokens)
    found: list[list[int]] = [[] for _ in prompts]
    ends = _ends(stop)
    for rows in _together(model, prompts, max_new_tokens):
        asked = {row: prompts[row] for row in rows}
        for step in _steps(model, asked, max_new_tokens, sampling, ends, use_cache):
            for row, token in step.items():
                found[row].append(token)
    return found


def generate_stream(
    model: Transformer,
    tokens: Sequence[int] | Tensor,
    max_new_tokens: int = 128,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop: Sequence[int] | Tensor = (),
    use_cache: bool = True,
) -> Iterator[int]:
    """The tokens of `generate` for one prompt, each as soon as it is known.

    Arguments are checked at once, not when the first token is asked for.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    prompts = _prompts(model, tokens, max_new_tokens)
    if len(prompts) != 1:
        raise ConfigError(f"generate_stream takes one prompt, got {len(prompts)}; use generate")
    asked = dict(enumerate(prompts))
    steps = _steps(model, asked, max_new_tokens, sampling, _ends(stop), use_cache)
    return (step[0] for step in steps)


def _ends(stop: Sequence[int] | Tensor) -> frozenset[int]:
    """Plain numbers, also of a tensor, whose elements equal none."""
    try:
        return frozenset(map(operator.index, stop))
    except TypeError:
        raise ConfigError(f"stop: got {stop!r:.80}, allowed is a list of tokens") from None


def _prompts(model: Transformer, tokens: Prompts, max_new_tokens: int) -> list[list[int]]:
    """One list of ints a prompt, checked against the vocabulary and the context."""
    config = model.config
    plain = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    rows = plain if plain and all(isinstance(row, (list, tuple)) for row in plain) else [plain]
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: got {max_new_tokens}, must be at least 1")
    prompts: list[list[int]] = []
    for number, row in enumerate(rows):
        which = "the prompt" if len(rows) == 1 else f"prompt {number}"
        if not row:
            raise ConfigError(f"{which} is empty: give at least one token")
        for token in row:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ConfigError(f"{which} holds {token!r}; tokens are whole numbers")
            if not 0 <= token < config.vocab:
                raise ConfigError(
                    f"{which} holds token {token}; the vocabulary is 0 to "
                    f"{config.vocab - 1}. Is this the model's tokenizer?"
                )
        length = len(row) + max_new_tokens
        if length > config.longest:
            room = config.longest - len(row)
            remedy = f"shorten it or ask for at most {room}" if room > 0 else "shorten it"
            raise ConfigError(
                f"{which} of {len(row)} tokens and {max_new_tokens} new ones are {length}, "
                f"more than the model's context of {config.longest}; {remedy}"
            )
        prompts.append(list(row))
    return prompts


def _together(
    model: Transformer, prompts: list[list[int]], max_new_tokens: int
) -> Iterator[list[int]]:
    """Which prompts go through the model together: the angles of one whose sequence grows so long
    that they change are those of its own length, so it goes alone."""
    steady = model.config.steady - max_new_tokens
    if within := [row for row, prompt in enumerate(prompts) if len(prompt) <= steady]:
        yield within
    yield from ([row] for row, prompt in enumerate(prompts) if len(prompt) > steady)


def _steps(
    model: Transformer,
    prompts: dict[int, list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop: frozenset[int],
    use_cache: bool,
) -> Iterator[dict[int, int]]:
    """One dict a step: row → its new token, for the rows that have not ended."""
    device = model.embed_tokens.weight.device
    config = model.actual_config
    width = max(map(len, prompts.values()))
    pads = [width - len(prompt) for prompt in prompts.values()]
    padded = [[0] * pad + prompt for pad, prompt in zip(pads, prompts.values(), strict=True)]
    tokens_BT = torch.tensor(padded, device=device)
    pads_B1 = torch.tensor(pads, device=device)[:, None]
    cache = KVCache(config, width + max_new_tokens) if use_cache else None
    own = type(model).forward is not Transformer.forward or "forward" in vars(model)
    last = {} if own else {"last": True}  # a forward of the user's own may not know it
    alive = set(prompts)
    fed = 0
    for step in range(max_new_tokens):
        end = width + step
        if cache is not None and config.angles(end) != config.angles(fed):
            cache, fed = KVCache(config, width + max_new_tokens), 0
        positions = None
        if any(pads):
            positions = torch.arange(fed, end, device=device)[None] - pads_B1
        with torch.no_grad():
            logits_BV = model(tokens_BT[:, fed:], cache, positions, **last)[:, -1]
            next_B = choose(logits_BV, sampling, [end - pad for pad in pads], list(prompts))
        if cache is not None:
            fed = end
        tokens_BT = torch.cat((tokens_BT, next_B[:, None]), dim=1)
        found = dict(zip(prompts, next_B.tolist(), strict=True))
        yield {row: token for row, token in found.items() if row in alive}
        alive -= {row for row, token in found.items() if token in stop}
        if not alive:
            return
