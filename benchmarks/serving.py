"""Claim: `lz.LLM` answers faster than other engines on the same machine, and shares what it can.

SmolLM2-135M, every side in a process of its own, rounds interleaved. One request decodes 64 tokens
after a prompt of 32; a prompt of 512 is filled in; 16 requests decode at once; 16 requests share a
prefix of 256 tokens before suffixes of 32, with and without sharing; text that repeats is continued
with and without guesses looked up in it. Beside LeZero's bf16, int8 and int4: transformers in bf16,
eager, from .peers.

llama.cpp and OpenVINO GenAI are not measured yet, so the best peer is not known.

Run: python benchmarks/serving.py [--quick]
--quick takes a small random model and no peers. Figures that no side measures are null.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _table import Result, Side, arguments, compare, emit, finish, peer, side

OURS = ("bf16", "int8", "int4")
DECODED, PREFILLED, TOGETHER, PREFIX, SUFFIX = 64, 512, 16, 256, 32
PEERS_NOT_YET = ("llama.cpp", "openvino-genai")
NOT_YET = (
    "decode_vs_best_peer",
    "http_overhead",
    "dynamic_batch_vs_best_fixed",
    "soak_requests",
    "soak_wrong",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", default="", help=argparse.SUPPRESS)
    options = arguments(__doc__, parser)
    if options.side:
        _run_side(options)
        return
    place, missing = ("", "") if options.quick else _place()
    extra = ["--place", place, "--threads", str(options.threads)]
    if options.quick:
        extra.append("--quick")
    sides: list[Side] = [side(__file__, name, *extra, missing=missing) for name in OURS]
    if not options.quick:
        sides.append(peer(__file__, "transformers", "transformers", *extra))
        sides += [side(__file__, name, missing="not measured yet") for name in PEERS_NOT_YET]
    rounds = options.rounds or (1 if options.quick else 3)
    result = compare(sides, rounds=rounds, threads=options.threads)
    keys = ["decode", "prefill", "together", "ready_s", "bytes_token"]
    finish(result.table(keys), _figures(result))


def _figures(result: Result) -> dict[str, Any]:
    def ratio(key: str, one: str, other: str) -> float | None:
        if one in result.failed or result.figures.get(other, []) == []:
            return None
        return result.ratio(key, one, other)

    def of(name: str, key: str) -> float | None:
        return None if name in result.failed else result.median(name, key)

    best = max(("int8", "int4"), key=lambda name: of(name, "decode") or 0.0)
    share = of(best, "bandwidth_share")
    return {
        "decode_vs_transformers": ratio("decode", best, "transformers"),
        "decode_bandwidth_share": share,
        "bf16_vs_transformers": ratio("decode", "bf16", "transformers"),
        "prefill_vs_transformers": ratio("prefill", best, "transformers"),
        "batch16_scaling": of(best, "scaling"),
        "prefix_ttft_ratio": of(best, "prefix_ttft"),
        "speculation": of(best, "speculation"),
        **dict.fromkeys(NOT_YET),
        "soak_leaked_blocks": None,
    }


def _place() -> tuple[str, str]:
    """SmolLM2-135M as a Hugging Face folder, and why there is none."""
    from quantization_parts.smol import fixture

    from lezero.core.errors import LeZeroError

    try:
        return str(fixture()), ""
    except (FileNotFoundError, LeZeroError) as error:
        return "", str(error)


def _run_side(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(options.threads)
    # Or transformers would take kernels.py of this folder for the package of that name.
    sys.path.remove(str(Path(__file__).parent))
    if options.side == "transformers":
        emit(**_transformers(options.place))
    else:
        emit(**_ours(options.side, options.place, options.quick))


def _ours(weights: str, place: str, quick: bool) -> dict[str, Any]:
    from lezero.serve.llm import LLM

    began = time.perf_counter()
    made: Any = _tiny() if quick else place
    llm = LLM(made, weights=weights, context=1024)  # type: ignore[arg-type]
    ready = time.perf_counter() - began
    vocab = llm.program.config.vocab
    _time(llm, [_tokens(vocab, 32, 9)], 8)  # the first call builds and warms
    first = _time(llm, [_tokens(vocab, 32, 0)], 1)
    one = DECODED / (_time(llm, [_tokens(vocab, 32, 1)], DECODED + 1) - first)
    prefill = PREFILLED / _time(llm, [_tokens(vocab, PREFILLED, 2)], 1)
    many = [_tokens(vocab, 32, 10 + i) for i in range(TOGETHER)]
    begun = _time(llm, [_tokens(vocab, 32, 40 + i) for i in range(TOGETHER)], 1)
    together = TOGETHER * DECODED / (_time(llm, many, DECODED + 1) - begun)
    read = _read_bandwidth(llm.program.read_bytes)
    return {
        "decode": one,
        "prefill": prefill,
        "together": together,
        "scaling": together / one,
        "ready_s": ready,
        "bytes_token": llm.program.read_bytes,
        "bandwidth_share": one * llm.program.read_bytes / read,
        "prefix_ttft": _first_tokens(llm, vocab, shared=True) / _first_tokens(llm, vocab, False),
        "speculation": _speculation(place, weights, quick, vocab),
    }


def _time(llm: Any, prompts: list[list[int]], new: int) -> float:
    """Seconds until all prompts have `new` greedy tokens."""
    from lezero.serve.sampling import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    found = llm.generate(prompts, params)
    took = time.perf_counter() - began
    assert all(len(answer.tokens) == new for answer in found)
    return took


def _first_tokens(llm: Any, vocab: int, shared: bool) -> float:
    """Median seconds to the first token of requests whose first tokens are equal, or are not."""
    from lezero.serve.sampling import SamplingParams

    base = 100 if shared else 200
    common = _tokens(vocab, PREFIX, base)
    prompts = [
        (common if shared else _tokens(vocab, PREFIX, base + i)) + _tokens(vocab, SUFFIX, 300 + i)
        for i in range(TOGETHER)
    ]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    return statistics.median(answer.first_token_s for answer in found)


def _speculation(place: str, weights: Any, quick: bool, vocab: int) -> float:
    """Decode speed on text that repeats, with guesses over without."""
    from lezero.serve.llm import LLM

    text = _tokens(vocab, 24, 7) * 8
    took = {}
    for speculate in ("off", "lookup"):
        made: Any = _tiny() if quick else place
        llm = LLM(made, weights=weights, context=1024, speculate=speculate)  # type: ignore[arg-type]
        _time(llm, [_tokens(vocab, 32, 9)], 8)
        took[speculate] = _time(llm, [text], 2 * DECODED)
    return took["off"] / took["lookup"]


def _transformers(place: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).eval()
    ready = time.perf_counter() - began
    vocab = model.config.vocab_size

    def seconds(rows: int, length: int, new: int) -> float:
        tokens = torch.tensor([_tokens(vocab, length, 10 + i) for i in range(rows)])
        mask = torch.ones_like(tokens)
        begun = time.perf_counter()
        model.generate(
            *(tokens,), attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        return time.perf_counter() - begun

    seconds(1, 32, 8)
    return {
        "decode": DECODED / (seconds(1, 32, DECODED + 1) - seconds(1, 32, 1)),
        "prefill": PREFILLED / seconds(1, PREFILLED, 1),
        "together": TOGETHER
        * DECODED
        / (seconds(TOGETHER, 32, DECODED + 1) - seconds(TOGETHER, 32, 1)),
        "ready_s": ready,
        "bytes_token": sum(p.nbytes for p in model.parameters()),
    }


def _tokens(vocab: int, count: int, seed: int) -> list[int]:
    import random

    drawn = random.Random(seed)
    return [drawn.randrange(10, vocab) for _ in range(count)]


def _read_bandwidth(size: int) -> float:
    """Bytes a second that a sum over so many bytes reads, the best of some."""
    import torch

    buffer = torch.ones(max(size, 1 << 20) // 8, dtype=torch.float64)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - began)
    return buffer.nbytes / best


def _tiny() -> Any:
    from lezero.models import Transformer, TransformerConfig

    shape = {"vocab": 512, "dim": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 256}
    return Transformer(TransformerConfig.parse({**shape, "context": 1024}))


if __name__ == "__main__":
    main()
