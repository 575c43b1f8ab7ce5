"""Codec kernels: how much of the memory's read bandwidth encoding and decoding reach.

    python benchmarks/codecs.py [--quick] [--device cuda]

Speed counts the bytes of the fp32 side only, read or written (with feedback: values read, errors
read and written; adding: read and written), over at least 1 GiB in turn, so that no cache helps.
The limit is that of memory: torch.sum and torch.dot over the same tensors, in the same rounds.
Beside it, how many times faster than the formula in PyTorch's operations. The last line is one JSON
object: `codec_bandwidth_share_min` is the least of encoding and decoding int8, int4, sign and 2:4.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _table import arguments, columns, finish
from torch import Tensor

from lezero.comm.codec import Codec, codec
from lezero.ops.codec import native, reference

PART = 16 << 20  # elements: 64 MiB in fp32
PARTS = 16
NAMES = ["int8", "int4", "sign", "2:4-bf16", "2:4-int8", "2:4-int4"]
CASTS = ["bf16", "fp16"]
TOPK = "topk:0.01"


def settle() -> None:
    """What an accelerator has queued is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def rate(work: Callable[[int], object], bytes_a_part: int, parts: int = PARTS) -> float:
    """GB/s of one turn over the parts."""
    settle()
    began = time.perf_counter()
    for part in range(parts):
        work(part)
    settle()
    return bytes_a_part * parts / (time.perf_counter() - began) / 1e9


class Bench:
    """The tensors, and the figures of each codec over the rounds."""

    def __init__(self, device: str) -> None:
        one = torch.randn(PART, device=device)
        self.x = [one.roll(part) for part in range(PARTS)]
        self.errors = [torch.zeros_like(one) for _ in range(PARTS // 2)]
        self.found: dict[tuple[str, str], list[float]] = {}
        self.read: list[float] = []

    def note(self, name: str, what: str, value: float) -> None:
        self.found.setdefault((name, what), []).append(value)

    def round(self, names: list[str]) -> None:
        sums = rate(lambda i: torch.sum(self.x[i]), 4 * PART)
        self.read.append(max(sums, rate(lambda i: torch.dot(self.x[i], self.x[i]), 4 * PART)))
        for name in names:
            self.codec_round(name, codec(name))

    def codec_round(self, name: str, one: Codec) -> None:
        x, errors, half = self.x, self.errors, len(self.errors)
        payloads = [x[0].new_zeros(one.bytes(PART), dtype=torch.uint8) for _ in range(PARTS)]
        outs = errors + x[:half]
        turns = {
            "encode": (lambda i: one.encode(x[i], payloads[i]), 4, PARTS),
            "feedback": (lambda i: one.encode(x[i], payloads[i], errors[i]), 12, half),
            "decode": (lambda i: one.decode(payloads[i], outs[i]), 4, PARTS),
            "adding": (lambda i: one.decode(payloads[i], outs[i], add=True), 8, PARTS),
        }
        for what, (work, bytes_an_element, parts) in turns.items():
            self.note(name, what, rate(work, bytes_an_element * PART, parts))
        for i, out in enumerate(outs):
            out.zero_() if i < half else out.copy_(x[-1])

    def median(self, name: str, what: str) -> float:
        return statistics.median(self.found[name, what])


def against_torch(one: Codec, x: Tensor) -> float:
    """Times faster than the formula in PyTorch's operations, encoding and decoding together."""
    payload, out = x.new_zeros(one.bytes(len(x)), dtype=torch.uint8), torch.empty_like(x)
    form, block = one.form, one.block  # type: ignore[attr-defined]

    def ours() -> None:
        one.encode(x, payload)
        one.decode(payload, out)

    def theirs() -> None:
        reference.encode(x, payload, None, form, block)
        reference.decode(payload, out, form, block, False)

    seconds = []
    for way in (theirs, ours):
        way()
        settle()
        began = time.perf_counter()
        way()
        settle()
        seconds.append(time.perf_counter() - began)
    return seconds[0] / seconds[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = arguments(__doc__, parser)
    torch.set_num_threads(options.threads)
    if options.device == "cpu" and not native.NATIVE.available():
        finish(f"no kernel: {native.NATIVE.problem}", {"codec_bandwidth_share_min": None})
        return
    bench = Bench(options.device)
    rounds = options.rounds or (2 if options.quick else 7)
    names = NAMES if options.quick else NAMES + CASTS
    if options.device != "cpu":  # kernels are compiled in the first round
        bench.round(names)
        bench.found.clear(), bench.read.clear()
    for _ in range(rounds):
        bench.round(names)
    read = statistics.median(bench.read)
    small = bench.x[0][: 1 << (20 if options.quick else 24)]
    rows = [
        ["codec", "bits", "encode", "share", "decode", "share", "feedback", "adding", "× torch"]
    ]
    shares = []
    for name in names:
        one = codec(name)
        speeds = [bench.median(name, what) for what in ("encode", "decode")]
        row = [name, f"{8 * one.bytes(PART) / PART:.4g}"]
        for speed in speeds:
            row += [f"{speed:.1f}", f"{speed / read:.2f}"]
        row += [f"{bench.median(name, what):.1f}" for what in ("feedback", "adding")]
        rows.append([*row, f"{against_torch(one, small):.0f}" if name in NAMES else "–"])
        if name in NAMES:
            shares += [speed / read for speed in speeds]
    if not options.quick:
        one, payloads = codec(TOPK), {}
        payloads[0] = small.new_zeros(one.bytes(PART), dtype=torch.uint8)
        speed = rate(lambda i: one.encode(bench.x[i], payloads[0]), 4 * PART, 2)
        rows.append([TOPK, "0.64", f"{speed:.2f}", f"{speed / read:.2f}", *["–"] * 5])
    name = native.NATIVE.kernel_name() if options.device == "cpu" else "triton"
    title = (
        f"kernel {name}, {options.threads} threads; GB/s of the fp32 side; "
        f"memory reads at {read:.1f} GB/s\n"
    )
    figures = {"codec_bandwidth_share_min": min(shares), "memory_read_gb_s": read, "rounds": rounds}
    finish(title + columns(rows), figures)


if __name__ == "__main__":
    main()
