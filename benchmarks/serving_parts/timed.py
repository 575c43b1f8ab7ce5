"""How long `lz.LLM` takes for whole answers."""

from __future__ import annotations

import time
from typing import Any


def answered_s(llm: Any, prompts: list[list[int]], new: int, **asked: float) -> float:
    """Seconds until all prompts have `new` tokens, greedy ones unless others are asked for."""
    from lezero.serve.sampling import SamplingParams

    params = SamplingParams.parse(
        {"temperature": 0, "seed": 0, **asked, "max_tokens": new, "ignore_eos": True}
    )
    began = time.perf_counter()
    found = llm.generate(prompts, params)
    took = time.perf_counter() - began
    assert all(len(answer.tokens) == new for answer in found)
    return took
