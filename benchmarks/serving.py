"""Claim: `lz.LLM` answers faster than other engines on the same machine, and shares what it can.

SmolLM2-135M, every side in a process of its own, rounds interleaved. One request decodes 64 tokens
after a prompt of 32, the likeliest ones, and 64 that chance draws ("drawn": temperature 1, as
OpenAI's protocol has it unless told otherwise); a prompt of 512 is filled in, and one of 4,096,
behind which 32 more are decoded ("long"); 16 requests decode at once; 16 requests share a prefix of
256 tokens before suffixes of 32, with and without sharing; text that repeats is continued with and
without guesses looked up in it; what it costs that bits do not depend on neighbours is the time of
products over torch's own; what int8 and int4 cost in quality is perplexity over bf16's, and the
best of them is the faster one that stays within the bars of quantization. int4 opens the GGUF file
and keeps its own blocks (Q4_1, the head Q8_0); bf16 and int8 open a folder in bf16 that was made of
it. Beside them, from .peers: transformers in bf16, eager; llama.cpp and OpenVINO GenAI on the GGUF
file as it is.

Then, each in processes of its own: what HTTP adds to a token, dynamic batching beside the best
fixed batch, and a soak in which every answer is checked.

Run: python benchmarks/serving.py [--quick] [--parts engine,http,dynamic,soak] [--soak-seconds 600]
--quick takes small random models, no peers and a few seconds of soak. Figures that nothing measured
are null, and a row says why. The best peer is the fastest of those that ran.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _table import Result, Side, arguments, columns, compare, emit, finish, peer, side
from serving_parts.peers import (
    DECODED,
    LONG,
    LONG_CONTEXT,
    PEERS,
    PREFILLED,
    PROMPT,
    TOGETHER,
    long_figures,
    median_s,
)
from serving_parts.prompts import random_tokens
from serving_parts.timed import answered_s

OURS = ("bf16", "int8", "int4")
PREFIX, SUFFIX = 256, 32
INVARIANCE = (1, 16, 256)
PARTS = ("engine", "http", "dynamic", "soak")
OF_PARTS = {
    "http": ("http_overhead",),
    "dynamic": ("dynamic_batch_vs_best_fixed",),
    "soak": ("soak_requests", "soak_wrong", "soak_leaked_blocks"),
}
WORST = {"int8": 1.005, "int4": 1.02}
"""Perplexity over bf16's at most: the bars of quantization to 8 and to 4 bits."""
BY_CHANCE = {"temperature": 1.0}
SOAK_S = 600.0
FOLDER = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(PARTS), help="which, with commas between")
    parser.add_argument("--soak-seconds", type=float, default=SOAK_S, help="length of the soak")
    parser.add_argument("--place", default="", help=argparse.SUPPRESS)
    options = arguments(__doc__, parser)
    if options.side:
        _run_side(options)
        return
    wanted = options.parts.split(",")
    if not set(wanted) <= set(PARTS):
        parser.error(f"--parts: got {options.parts!r}, allowed are {', '.join(PARTS)}")
    place, missing = ("", "") if options.quick else _place()
    figures = dict.fromkeys(_figures(Result({}, dict.fromkeys(OURS, ""))))
    if "engine" in wanted:
        result = _engine(options, place, missing)
        keys = ["decode", "drawn", "decode_long", "prefill", "prefill_long", "together", "scaling"]
        keys += ["ready_s", "bytes_token", "perplexity"]
        keys += [f"invariance_{rows}" for rows in INVARIANCE]
        print(result.table(keys), end="\n\n", flush=True)
        figures |= _figures(result)
    rows = [["part", "figure", "value"]]
    for part, keys_of_part in OF_PARTS.items():
        found, why = _part(options, part, place, missing) if part in wanted else ({}, "not asked")
        rows += [[part, key, _said(value)] for key, value in found.items()]
        rows += [[part, why]] if why else []
        figures |= {key: found.get(key) for key in keys_of_part}
    finish(columns(rows), figures)


def _engine(options: argparse.Namespace, place: str, missing: str) -> Result:
    """Every engine in turns."""
    extra = ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
    real = not options.quick and not missing
    file = str(_file()) if real else place
    places = {"bf16": place, "int8": place, "int4": file, "transformers": place}
    sides: list[Side] = [
        side(__file__, name, "--place", places[name], *extra, missing=missing) for name in OURS
    ]
    for name, (module, _) in PEERS.items() if real else ():
        sides.append(peer(__file__, name, module, "--place", places.get(name, file), *extra))
    rounds = options.rounds or (1 if options.quick else 3)
    return compare(sides, rounds=rounds, threads=options.threads)


def _part(
    options: argparse.Namespace, part: str, place: str, missing: str
) -> tuple[dict[str, Any], str]:
    """Figures of a part that runs once, or why there are none."""
    words = ["--place", place, "--soak-seconds", str(options.soak_seconds)]
    words += ["--quick"] if options.quick else []
    one = side(__file__, part, *words, missing=missing)
    limit = 1200 + options.soak_seconds
    result = compare([one], rounds=1, threads=options.threads, timeout_s=limit)
    return (result.figures[part] or [{}])[0], result.failed.get(part, "")


def _said(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _figures(result: Result) -> dict[str, Any]:
    def ratio(key: str, one: str, other: str, by: str = "") -> float | None:
        there = of(one, key) is not None and of(other, by or key) is not None
        return result.ratio(key, one, other, by) if there else None

    def of(name: str, key: str) -> float | None:
        rows = [] if name in result.failed else result.figures.get(name, [])
        return result.median(name, key) if rows and key in rows[0] else None

    def over_peers(key: str) -> float | None:
        theirs = {name: found for name in ran if (found := of(name, key)) is not None}
        return ratio(key, best, max(theirs, key=lambda name: theirs[name])) if theirs else None

    quality = {name: ratio("perplexity", name, "bf16") for name in WORST}
    good = [name for name, found in quality.items() if found is not None and found <= WORST[name]]
    best = max(good, key=lambda name: of(name, "decode") or 0.0, default="")
    share = of(best, "bandwidth_share")
    ran = [name for name in PEERS if result.figures.get(name)]
    fastest = max(ran, key=lambda name: result.median(name, "decode"), default="")
    return {
        "decode_vs_best_peer": ratio("decode", best, fastest),
        "best_peer": fastest or None,
        "weights": best or None,
        **{f"quality_{name}": found for name, found in quality.items()},
        "decode_bandwidth_share": share,
        "ready_s": of(best, "ready_s"),
        "bf16_vs_transformers": ratio("decode", "bf16", "transformers"),
        "prefill_vs_transformers": ratio("prefill", best, "transformers"),
        "batch16_scaling": of(best, "scaling"),
        "batch16_scaling_bf16": of("bf16", "scaling"),
        "drawn_vs_likeliest": ratio("drawn", best, best, "decode"),
        **{f"{key}_vs_best_peer": over_peers(key) for key in ("decode_long", "prefill_long")},
        "prefix_ttft_ratio": of(best, "prefix_ttft"),
        "speculation": of(best, "speculation"),
        **{f"invariance_{rows}": of(best, f"invariance_{rows}") for rows in INVARIANCE},
    }


def _place() -> tuple[str, str]:
    """SmolLM2-135M as a Hugging Face folder, and why there is none."""
    from quantization_parts.smol import fixture

    from lezero.core.errors import LeZeroError

    try:
        return str(fixture()), ""
    except (FileNotFoundError, LeZeroError) as error:
        return "", str(error)


def _file() -> Path:
    from lezero.models import packaged_gguf

    return packaged_gguf()


def _run_side(options: argparse.Namespace) -> None:
    import quantization_parts  # noqa: F401  (found now, its modules are later)

    name, quick, place = options.side, options.quick, options.place
    # Or transformers would take kernels.py of this folder for the package of that name.
    sys.path.remove(str(FOLDER))
    if name in PEERS:
        emit(**PEERS[name][1](place, options.threads))
        return
    if name not in OURS:
        emit(**_run_part(name, quick, place, options.soak_seconds))
        return
    import torch

    torch.set_num_threads(options.threads)
    emit(**_ours(name, place, quick))


def _run_part(name: str, quick: bool, place: str, soak_seconds: float) -> dict[str, Any]:
    if name == "http":
        from serving_parts.http import run as http

        return http(quick, place)
    if name == "soak":
        from serving_parts.soak import run as soak

        return soak(quick, soak_seconds, place)
    from serving_parts.dynamic import run as dynamic

    return dynamic(quick)


def _ours(weights: str, place: str, quick: bool) -> dict[str, Any]:
    from serving_parts.quality import text_perplexity

    from lezero.serve.llm import LLM

    began = time.perf_counter()
    made: Any = _tiny() if quick else place
    llm = LLM(made, weights=weights, context=1024)  # type: ignore[arg-type]
    ready = time.perf_counter() - began
    vocab = llm.program.config.vocab
    answered_s(llm, [random_tokens(vocab, 32, 9)], 8)  # the first call builds and warms
    seeds = itertools.count(10_000)

    def seconds(rows: int, length: int, new: int, **asked: float) -> float:
        prompts = [random_tokens(vocab, length, next(seeds)) for _ in range(rows)]
        return answered_s(llm, prompts, new, **asked)

    def decoded(rows: int, **asked: float) -> float:
        return seconds(rows, PROMPT, DECODED + 1, **asked) - seconds(rows, PROMPT, 1, **asked)

    one = DECODED / median_s(lambda: decoded(1))
    drawn = DECODED / median_s(lambda: decoded(1, **BY_CHANCE))
    prefill = PREFILLED / median_s(lambda: seconds(1, PREFILLED, 1))
    together = TOGETHER * DECODED / median_s(lambda: decoded(TOGETHER))
    read = _read_bandwidth(llm.program.read_bytes)
    return {
        "decode": one,
        "drawn": drawn,
        "prefill": prefill,
        "together": together,
        "scaling": together / one,
        "ready_s": ready,
        "bytes_token": llm.program.read_bytes,
        "bandwidth_share": one * llm.program.read_bytes / read,
        "perplexity": text_perplexity(llm, quick),
        **_invariance(llm),
        "prefix_ttft": _first_tokens(llm, vocab, shared=True) / _first_tokens(llm, vocab, False),
        "speculation": _speculation(place, weights, quick, vocab),
        **_long(made, weights, vocab, quick),
    }


def _long(made: Any, weights: Any, vocab: int, quick: bool) -> dict[str, float]:
    """Of a long prompt, in an engine that has room for it."""
    from lezero.serve.llm import LLM
    from lezero.serve.sampling import SamplingParams

    context = 1024 if quick else LONG_CONTEXT
    llm = LLM(_tiny() if quick else made, weights=weights, context=context)
    seeds = itertools.count(20_000)
    answered_s(llm, [random_tokens(vocab, 32, 9)], 8)

    def parts(length: int, new: int) -> tuple[float, float]:
        asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        prompt, began = random_tokens(vocab, length, next(seeds)), time.perf_counter()
        told = [time.perf_counter() for _ in llm.stream(prompt, asked)]
        return told[0] - began, told[-1] - told[0]

    return long_figures(parts, 512 if quick else LONG)


def _first_tokens(llm: Any, vocab: int, shared: bool) -> float:
    """Median seconds to the first token of requests whose first tokens are equal, or are not."""
    from lezero.serve.sampling import SamplingParams

    base = 100 if shared else 200
    common = random_tokens(vocab, PREFIX, base)
    prompts = [
        (common if shared else random_tokens(vocab, PREFIX, base + i))
        + random_tokens(vocab, SUFFIX, 300 + i)
        for i in range(TOGETHER)
    ]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    return statistics.median(answer.first_token_s for answer in found)


def _speculation(place: str, weights: Any, quick: bool, vocab: int) -> float:
    """Decode speed on text that repeats, with guesses over without."""
    from lezero.serve.llm import LLM

    text = random_tokens(vocab, 24, 7) * 8
    took = {}
    for speculate in ("off", "lookup"):
        made: Any = _tiny() if quick else place
        llm = LLM(made, weights=weights, context=1024, speculate=speculate)  # type: ignore[arg-type]
        answered_s(llm, [random_tokens(vocab, 32, 9)], 8)
        took[speculate] = answered_s(llm, [text], 2 * DECODED)
    return took["off"] / took["lookup"]


def _invariance(llm: Any) -> dict[str, float]:
    """Time of the layers' products over torch's own, for 1, 16 and 256 rows."""
    from lezero.serve.invariance import invariance_costs

    return {f"invariance_{cost.rows}": cost.ratio for cost in invariance_costs(llm.program)}


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
