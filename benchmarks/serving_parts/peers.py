"""Other engines on SmolLM2-135M, each measured alike. They run in .peers, without LeZero.

A decode is the time of a long answer minus that of an answer of one token, both after prompts of
32 random tokens that no other measurement has, so that no engine finds them in a cache. Each is
measured several times, and the median counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from serving_parts.prompts import random_tokens

DECODED, PREFILLED, TOGETHER, PROMPT = 64, 512, 16, 32
REPEATS = 5
CONTEXT = 1024
LONG, LONG_DECODED, LONG_CONTEXT, LONG_REPEATS = 4096, 32, 4608, 2
"""A long prompt, and what is decoded behind it."""

Seconds = Callable[[int, int, int], float]
Parts = Callable[[int, int], tuple[float, float]]
"""Of an answer, by length of its prompt and new tokens: seconds to the first, and from it on."""


def _figures(seconds: Seconds, ready: float, together: bool, long: Parts) -> dict[str, Any]:
    """seconds(rows, length, new): until so many random prompts have so many new tokens each."""

    def decoded(rows: int) -> float:
        return seconds(rows, PROMPT, DECODED + 1) - seconds(rows, PROMPT, 1)

    seconds(1, PROMPT, 8)
    found = {
        "decode": DECODED / median_s(lambda: decoded(1)),
        "prefill": PREFILLED / median_s(lambda: seconds(1, PREFILLED, 1)),
        "ready_s": ready,
        **long_figures(long),
    }
    if together:
        found["together"] = TOGETHER * DECODED / median_s(lambda: decoded(TOGETHER))
    return found


def long_figures(parts: Parts, length: int = LONG) -> dict[str, float]:
    """Tokens a second of a long prompt, and of what is decoded behind it, which takes too little of
    the whole to be found as a difference."""
    found = [parts(length, LONG_DECODED + 1) for _ in range(LONG_REPEATS)]
    first, rest = (statistics.median(side) for side in zip(*found, strict=True))
    return {"prefill_long": length / first, "decode_long": LONG_DECODED / rest}


def median_s(measure: Callable[[], float]) -> float:
    """Of `REPEATS` measurements."""
    return statistics.median(measure() for _ in range(REPEATS))


def _prompts(vocab: int, rows: int, length: int, used: list[int]) -> list[list[int]]:
    """Prompts that were not used before."""
    used[0] += rows
    return [random_tokens(vocab, length, used[0] - row) for row in range(rows)]


def transformers(place: str, threads: int) -> dict[str, Any]:
    """bf16, eager. place: a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).eval()
    ready = time.perf_counter() - began
    vocab, used = model.config.vocab_size, [0]

    def seconds(rows: int, length: int, new: int) -> float:
        tokens = torch.tensor(_prompts(vocab, rows, length, used))
        mask = torch.ones_like(tokens)
        begun = time.perf_counter()
        model.generate(
            *(tokens,), attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        return time.perf_counter() - begun

    def long(length: int, new: int) -> tuple[float, float]:
        times = list[float]()

        def note(*_: Any, **__: Any) -> Any:  # after each token
            times.append(time.perf_counter())
            return torch.zeros(1, dtype=torch.bool)

        tokens, begun = torch.tensor(_prompts(vocab, 1, length, used)), time.perf_counter()
        model.generate(
            *(tokens,), attention_mask=torch.ones_like(tokens), max_new_tokens=new,
            min_new_tokens=new, do_sample=False, stopping_criteria=[note],
        )  # fmt: skip
        return times[0] - begun, times[-1] - times[0]

    size = sum(p.nbytes for p in model.parameters())
    return {**_figures(seconds, ready, True, long), "bytes_token": size}


def llama_cpp(place: str, threads: int) -> dict[str, Any]:
    """llama.cpp through its Python package. place: a GGUF file, taken as it is (Q4_1)."""
    from llama_cpp import Llama

    began = time.perf_counter()
    threading = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
    llm = Llama(place, n_ctx=CONTEXT, **threading)
    ready = time.perf_counter() - began
    roomy = Llama(place, n_ctx=LONG_CONTEXT, **threading)
    used = [0]

    def answered(llm: Any, length: int, new: int) -> tuple[float, float]:
        (prompt,) = _prompts(llm.n_vocab(), 1, length, used)
        llm.reset()
        begun = time.perf_counter()
        answer = llm.generate(prompt, temp=0.0)
        next(answer)
        first = time.perf_counter()
        for _ in range(new - 1):
            next(answer)
        return first - begun, time.perf_counter() - first

    def seconds(rows: int, length: int, new: int) -> float:
        return sum(answered(llm, length, new))

    def long(length: int, new: int) -> tuple[float, float]:
        return answered(roomy, length, new)

    size = Path(place).stat().st_size
    return {**_figures(seconds, ready, False, long), "bytes_token": size}


def openvino(place: str, threads: int) -> dict[str, Any]:
    """OpenVINO GenAI. place: a GGUF file, which it reads itself."""
    import numpy as np
    from openvino import Tensor
    from openvino_genai import GenerationConfig, LLMPipeline

    began = time.perf_counter()
    pipeline = LLMPipeline(place, "CPU", INFERENCE_NUM_THREADS=threads)
    ready = time.perf_counter() - began
    vocab, used = len(pipeline.get_tokenizer().get_vocab()), [0]

    def answered(rows: int, length: int, new: int) -> tuple[float, Any]:
        config = GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        tokens = Tensor(np.array(_prompts(vocab, rows, length, used), dtype=np.int64))
        begun = time.perf_counter()
        found = pipeline.generate(tokens, config)
        took = time.perf_counter() - begun
        assert len(found.tokens[0]) == new
        return took, found.perf_metrics

    def seconds(rows: int, length: int, new: int) -> float:
        return answered(rows, length, new)[0]

    def long(length: int, new: int) -> tuple[float, float]:
        took, told = answered(1, length, new)
        rest = (new - 1) * told.get_tpot().mean / 1000
        return took - rest, rest

    size = Path(place).stat().st_size
    return {**_figures(seconds, ready, False, long), "bytes_token": size}


PEERS: Mapping[str, tuple[str, Callable[[str, int], dict[str, Any]]]] = {
    "transformers": ("transformers", transformers),
    "llama.cpp": ("llama_cpp", llama_cpp),
    "openvino-genai": ("openvino_genai", openvino),
}
"""Name → the module that must be in .peers, and what measures it."""
