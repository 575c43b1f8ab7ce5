"""Small models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lezero.models import Transformer, TransformerConfig
from lezero.serve.likeliest import best_tokens
from lezero.serve.program import Fed, Program

VOCAB = 97
_SHAPE = {"vocab": VOCAB, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 96}


def small(**changes: object) -> Transformer:
    """64 wide, two layers; weights large enough for tokens to differ."""
    config = TransformerConfig.parse({**_SHAPE, "context": 512, **changes})
    model = Transformer(config, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(6)
    return model


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=drawn).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=drawn).tolist() for n in lengths]


def runs(program: Program, run: Callable[[Any], Any]) -> None:
    """Lets `run` take the place of the program's own, also where only the likeliest are asked."""
    program.run = run  # type: ignore[method-assign]
    program.best = lambda fed: best_tokens(run(fed))  # type: ignore[method-assign]
    program.steps_at_once = lambda *_: 1  # type: ignore[method-assign]


def says(program: Program, prompt: int, answer: Sequence[int]) -> None:
    """Lets the likeliest tokens behind a prompt of so many tokens be these, again and again."""

    def run(fed: Sequence[Fed]) -> torch.Tensor:
        places = [one.position + row + 1 - prompt for one in fed for row in one.rows]
        found = torch.zeros(len(places), program.vocab)
        for row, place in enumerate(places):
            found[row, answer[place % len(answer)]] = 20.0
        return found

    runs(program, run)
