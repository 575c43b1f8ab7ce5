"""Claim: quantizing needs little more memory than the model, which it calibrates block by block.

On a model of 1.01 billion random parameters in bf16 (eight layers of Llama 3.2's, its vocabulary, a
head of its own) the highest resident memory above what the process held before there was a model is
compared with what the documentation allows:

    the model + two of its blocks + the largest Hessian ("gptq": 4 K² bytes) + activations

activations: what one forward pass of one micro-batch takes at its peak, measured in the same
process. The kernel's own high-water mark is read (VmHWM), which misses nothing. A small model goes
through the same before, since libraries and kernels are not the model's. Ranges are those of
`scales="minmax"`: the default tries 20, some rows at a time, which takes ten times as long.

Run: python benchmarks/quantization_memory.py [--quick] [--sides gptq,w8a8]
--quick takes a model of 3M parameters, which shows that it runs: blocks that the heap keeps count
more there than the model.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from _table import arguments, compare, emit, finish, side

SIDES = ("gptq", "w8a8")
LLAMA_1B = {
    **{"vocab": 128_256, "dim": 2048, "layers": 8, "heads": 32, "kv_heads": 8, "ffn": 8192},
    **{"context": 512, "tied": False},
}
QUICK = {
    **{"vocab": 2048, "dim": 256, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 768},
    **{"context": 512, "tied": True},
}
BATCHES, TOKENS = 2, 256


def measure(name: str, quick: bool, threads: int) -> dict[str, Any]:
    """One side: a model in bf16, its forward pass and its quantization."""
    import torch

    import lezero as lz
    from lezero.profiler import MemorySampler
    from lezero.profiler.memory import rss

    torch.set_num_threads(threads)
    shape = QUICK if quick else LLAMA_1B
    tokens = 128 if quick else TOKENS
    _quantize(name, _model({**QUICK, "layers": 1}), tokens)
    empty = rss()
    model = _model(shape)
    weights = sum(p.nbytes for p in model.parameters())
    block = sum(p.nbytes for p in model.layers[0].parameters())
    hessian = 4 * shape["ffn"] ** 2 if name == "gptq" else 0
    with torch.no_grad(), MemorySampler() as forward:
        model(_data(model, tokens)[0])
    began = time.perf_counter()
    with MemorySampler(baseline=empty) as memory:
        _quantize(name, model, tokens)
    report = lz.quantization_report(model)
    allowed = weights + 2 * block + hessian + forward.above
    return {
        "parameters": sum(layer.weights for layer in report.layers),
        "model_bytes": weights,
        "extra_bytes": 2 * block + hessian,
        "activation_bytes": forward.above,
        "peak_bytes": memory.above,
        "allowed_bytes": allowed,
        "peak_over_allowed": memory.above / allowed,
        "extra_over_allowed": (memory.above - weights) / (allowed - weights),
        "exact": memory.exact,
        "size_ratio": report.bytes_after / report.bytes_before,
        "minutes": (time.perf_counter() - began) / 60,
    }


def _model(shape: dict[str, Any]) -> Any:
    """Random weights, made in bf16 at once: an fp32 model would be twice as large."""
    import torch

    from lezero.models import Transformer, TransformerConfig

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Transformer(TransformerConfig(**shape)).eval()
    finally:
        torch.set_default_dtype(before)
    return model.bfloat16()


def _data(model: Any, tokens: int) -> list[Any]:
    import torch

    made = torch.Generator().manual_seed(1)
    vocab = model.config.vocab
    return [torch.randint(0, vocab, (1, tokens), generator=made) for _ in range(BATCHES)]


def _quantize(name: str, model: Any, tokens: int) -> None:
    import lezero as lz

    scheme = {
        "gptq": lz.Int4Weight(group=64, method="gptq", scales="minmax"),
        "w8a8": lz.Int8WeightActivation(scales="minmax"),
    }[name]
    lz.quantize_(model, scheme, data=_data(model, tokens), objective="size")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sides", default=",".join(SIDES), help="which, separated by commas")
    options = arguments(__doc__, parser)
    if options.side:
        emit(**measure(options.side, options.quick, options.threads))
        return
    wanted = [name for name in SIDES if name in options.sides.split(",")]
    more = ("--quick",) if options.quick else ()
    sides = [side(__file__, name, *more, "--threads", str(options.threads)) for name in wanted]
    result = compare(sides, rounds=options.rounds or 1, threads=options.threads, timeout_s=3600)
    keys = ["peak_over_allowed", "extra_over_allowed", "peak_bytes", "allowed_bytes", "minutes"]
    table = result.table(keys)
    if result.failed:
        print(table)
        raise SystemExit(next(iter(result.failed.values())))
    worst = max(wanted, key=lambda name: result.median(name, "peak_over_allowed"))
    found = result.figures[worst][-1]
    finish(
        table,
        {
            **{key: found[key] for key in ("parameters", "peak_bytes", "allowed_bytes")},
            **{f"{name}_over_allowed": result.median(name, "peak_over_allowed") for name in wanted},
            "peak_over_allowed": result.median(worst, "peak_over_allowed"),
            "exact": found["exact"],
        },
    )


if __name__ == "__main__":
    sys.exit(main())
