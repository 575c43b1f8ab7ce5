"""Claim: on a GPU, `lz.LLM` decodes near the memory's speed, and fills prompts near the products'.

Llama-shaped models of 1B and 8B parameters with random weights, bf16 and int4, each in a process of
its own: one request decodes 128 tokens after a prompt of 32, 64 requests do, and a prompt of 2,048
is filled in. The bandwidth that decoding reaches (bytes of weights that a token reads, times tokens
a second) is compared with a copy of 1 GiB, bytes read and written, and the products of the prompt
with the best of a large bf16 product, both measured in the same process. step_*_us: of the engine's
own trials, a step with each attention, by blocks of 16 places.

Run: python benchmarks/serving_gpu.py [--quick]
--quick takes a tiny model, on the CPU where there is no accelerator. Without one the long form has
nothing to measure: figures are null, and a row says why.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from _table import arguments, compare, emit, finish, side
from serving_parts.prompts import random_tokens
from serving_parts.timed import answered_s

SHAPES = {
    "1b": {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "8b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
}
TINY = {"dim": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 512}
WEIGHTS = ("bf16", "int4")
BARS = {"bf16": 0.75, "int4": 0.60}
PROMPT, NEW, TOGETHER, FILLED = 32, 128, 64, 2048
KEYS = ("decode", "decode_share", "together", "prefill", "prefill_share", "ready_s")
_COPIED, _SQUARE, _TRIES, _IN_A_ROW = 1 << 30, 8192, 5, 10


def main() -> None:
    options = arguments(__doc__)
    if options.side:
        emit(**_measure(*options.side.split("-"), options))
        return
    import torch

    found = torch.accelerator.is_available()
    missing = "" if found or options.quick else "no accelerator on this machine"
    sizes = list(SHAPES)[:1] if options.quick else list(SHAPES)
    names = [f"{size}-{weights}" for size in sizes for weights in WEIGHTS]
    extra = ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
    sides = [side(__file__, name, *extra, missing=missing) for name in names]
    rounds = options.rounds or (1 if options.quick else 3)
    result = compare(sides, rounds=rounds, threads=options.threads, timeout_s=1800)
    figures: dict[str, Any] = {}
    for name in names:
        ran = name not in result.failed
        rows = result.figures[name] if ran else [{}]
        tried = [key for key in rows[0] if key.startswith("step_") and all(key in r for r in rows)]
        for key in (*KEYS, *tried):
            label = f"{name.replace('-', '_')}_{key}"
            figures[label] = result.median(name, key) if ran else None
    bars = ", ".join(f"{name} {bar:.0%}" for name, bar in BARS.items())
    print(f"bars of decode_share: {bars}", flush=True)
    finish(result.table(KEYS), figures)


def _measure(size: str, weights: Any, options: argparse.Namespace) -> dict[str, float]:
    import torch

    from lezero.models import TransformerConfig
    from lezero.serve.llm import LLM

    torch.set_num_threads(options.threads)
    shape, filled = (TINY, 64) if options.quick else (SHAPES[size], FILLED)
    tries = 1 if options.quick else _TRIES
    config = TransformerConfig.parse({**shape, "context": 2 * filled + NEW})
    began = time.perf_counter()
    llm = LLM(_drawn(config), weights=weights, max_requests=TOGETHER)
    ready = time.perf_counter() - began
    vocab = config.vocab
    one = [random_tokens(vocab, PROMPT, 1)]
    many = [random_tokens(vocab, PROMPT, 10 + i) for i in range(TOGETHER)]
    for prompts in (one, many, one, many):  # builds kernels and captures graphs; then of a few
        answered_s(llm, prompts, NEW)  # tokens behind a kept prefix
    answered_s(llm, [random_tokens(vocab, filled, 2)], 1)

    def rate(prompts: list[list[int]]) -> float:
        """Tokens a second behind the first ones, the median of some answers."""
        took = [
            answered_s(llm, prompts, NEW + 1) - answered_s(llm, prompts, 1) for _ in range(tries)
        ]
        return len(prompts) * NEW / statistics.median(took)

    decode, together = rate(one), rate(many)
    prefill = filled / statistics.median(
        answered_s(llm, [random_tokens(vocab, filled, 3 + i)], 1) for i in range(tries)
    )
    tried = getattr(llm.program, "tried", {})
    small = 64 if options.quick else 1
    return {
        "decode": decode,
        "decode_share": decode * llm.program.read_bytes / _copied(_COPIED // small),
        "together": together,
        "prefill": prefill,
        "prefill_share": prefill * 2 * llm.program.products / _multiplied(_SQUARE // small),
        "ready_s": ready,
        **{
            f"step_{name}_{blocks}_us": 1e6 * took
            for blocks, both in tried.items()
            for name, took in both.items()
        },
    }


def _drawn(config: Any) -> Any:
    """A model with random weights in bf16, drawn where they lie."""
    import torch

    from lezero.core.device import device
    from lezero.models import Transformer

    with torch.device("meta"):
        model = Transformer(config).bfloat16()
    model.to_empty(device=device())
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    return model


def _copied(size: int) -> float:
    """Bytes a second that a copy of so many bytes reads and writes, the best of some."""
    import torch

    from lezero.core.device import device

    source = torch.ones(size // 8, dtype=torch.float64, device=device())
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), _IN_A_ROW)


def _multiplied(length: int) -> float:
    """FLOP/s of the best of some square products in bf16."""
    import torch

    from lezero.core.device import device

    x = torch.randn(length, length, device=device(), dtype=torch.bfloat16)
    return float(2 * length**3) / _best(lambda: x @ x, _IN_A_ROW)


def _best(work: Any, times: int = 1) -> float:
    """Seconds of `work`, the best of some tries that wait for an accelerator once."""
    from lezero.core.device import synchronize

    took = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        for _ in range(times):
            work()
        synchronize()
        took.append((time.perf_counter() - began) / times)
    return min(took[1:])


if __name__ == "__main__":
    main()
