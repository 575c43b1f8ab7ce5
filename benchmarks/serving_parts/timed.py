"""How long `lz.LLM` takes for whole answers."""

from __future__ import annotations

import time
from typing import Any


def answered_s(llm: Any, prompts: list[list[int]], new: int) -> float:
    """Seconds until all prompts have `new` greedy tokens."""
    from lezero.serve.sampling import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    found = llm.generate(prompts, params)
    took = time.perf_counter() - began
    assert all(len(answer.tokens) == new for answer in found)
    return took
