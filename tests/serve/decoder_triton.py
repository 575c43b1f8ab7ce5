"""Run by test_decoding.py: steps of the fused kernels beside the plain program's, on a GPU or
interpreted; there captured steps are run again, as graphs would be.

Arguments: names of models.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from lezero.compress.quantize import quantize_
from lezero.compress.quantize.int4 import Int4Weight
from lezero.compress.quantize.int8 import Int8Weight
from lezero.compress.quantize.modules import QuantizedLinear
from lezero.core.device import device
from lezero.models import Transformer
from lezero.ops import cuda_source
from lezero.ops.linear import rows
from lezero.serve.captured import CapturedProgram, seconds_of
from lezero.serve.decoding import Decoder, fits
from lezero.serve.plain import PlainProgram
from lezero.serve.program import Fed
from tests.serve.models import VOCAB, small
from tests.serve.test_captured import again

PLACE = device()
GPU = PLACE.type != "cpu"
BLOCKS = [list(range(i * 10, i * 10 + 10)) for i in range(3)]
LENGTHS = [5, 31, 70]
# The interpreter cuts bf16 off where GPUs round.
NEAR = {torch.bfloat16: 3e-2 if GPU else 6e-2, torch.float16: 8e-3}
BF16, FP16 = torch.bfloat16, torch.float16


def model(dtype: torch.dtype, scheme: Any = None, filter: Any = None, **shape: Any) -> Transformer:
    usual = {"dim": 256, "heads": 4, "head_dim": 32, "ffn": 256, "layers": 1}
    made = small(**{**usual, **shape}).to(PLACE, dtype)
    if scheme is not None:
        quantize_(made, scheme, filter=filter, objective="size")
        assert isinstance(made.layers[0].self_attn.q_proj, QuantizedLinear)
    return made


def not_values(name: str, _: Any) -> bool:
    return not name.endswith(("v_proj", "gate_proj"))


MODELS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": BF16, "qk_norm": True, "layers": 2},
    "window": {"dtype": FP16, "sliding_window": 40, "attention_bias": "qkv"},
    "int4": {"dtype": BF16, "scheme": Int4Weight(group=32)},
    "symmetric": {"dtype": FP16, "scheme": Int4Weight(group=64, zero_point=False)},
    "int8": {"dtype": FP16, "scheme": Int8Weight(), "tied": True},
    "several forms": {"dtype": FP16, "scheme": Int4Weight(group=32), "filter": not_values},
}

WIDE = {
    "heads of 64": {**MODELS["bf16"], "head_dim": 64},
    "heads of 128, window": {**MODELS["window"], "head_dim": 128},
    "heads of 128, int4": {**MODELS["int4"], "head_dim": 128},
}
"""Those that `cuda_attend.py` has a kernel for: without a GPU test_slices.py runs it."""
if PLACE.type == "cuda":
    MODELS |= WIDE


def programs(name: str) -> tuple[PlainProgram, CapturedProgram]:
    made = model(**MODELS[name])
    joined = copy.deepcopy(made)
    assert fits(joined)
    captured = CapturedProgram(joined) if GPU else CapturedProgram(joined, again)
    assert captured._decoder is not None
    plain = PlainProgram(made)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in LENGTHS]
    for program in (plain, captured):
        program.reserve(30)
        program.run([Fed(x, 0, blocks, []) for x, blocks in zip(prompts, BLOCKS, strict=True)])
    return plain, captured


def steps(name: str) -> Iterator[tuple[str, bool]]:
    plain, captured = programs(name)
    near = NEAR[MODELS[name]["dtype"]]
    tokens = [3, 9, 4]
    for step in range(2):
        fed = [
            Fed([token], n + step, blocks, [0])
            for token, n, blocks in zip(tokens, LENGTHS, BLOCKS, strict=True)
        ]
        wanted, found = plain.run(fed), captured.run(fed)
        away = float((wanted - found).norm() / wanted.norm())
        yield f"{name}, step {step}: {away:g} away", away < near
        tokens = wanted.argmax(1).tolist()
    alone = captured.run(fed[1:2])
    away = float((alone - found[1:2]).norm() / alone.norm())
    yield f"{name}: alone {away:g} away", away < near


def ahead(name: str) -> Iterator[tuple[str, bool]]:
    """Three steps, each launched before the last one is read: the second needs a larger graph."""
    _, captured = programs(name)

    def fed(step: int, *tokens: int) -> list[Fed]:
        return [Fed([tokens[i]], LENGTHS[i] + step, BLOCKS[i], [0]) for i in range(2)]

    first = captured.launch(fed(0, 3, 9))
    assert first is not None
    sizes = set(captured._steps)
    second = captured.launch(fed(1, 0, 0), first, [0, 1])
    assert second is not None
    yield f"{name}: a larger graph", set(captured._steps) > sizes
    found = [first.tokens()]
    # The third takes what the second found, in another order.
    third = captured.launch([fed(2, 0, 0)[1], fed(2, 0, 0)[0]], second, [1, 0])
    assert third is not None
    found += [second.tokens(), third.tokens()[::-1]]
    tokens, wanted = [3, 9], []
    for step in range(3):
        tokens = captured.run(fed(step, *tokens)).argmax(1).tolist()
        wanted.append(tokens)
    yield f"{name}: {found} ahead, {wanted} waited for", found == wanted


def by_each_attention(name: str) -> Iterator[tuple[str, bool]]:
    """Steps with ours, then with Triton's, whichever is faster here; the trial replays both."""
    for took in ([1.0, 2.0], [2.0, 1.0]):
        trials = []

        def seconds(*given: Any, took: list[float] = took, trials: list[Any] = trials) -> Any:
            trials.append(seconds_of(*given))
            return took

        with mock.patch("lezero.serve.captured.seconds_of", seconds):
            yield from steps(name)
        yield f"{name}: {len(trials)} trials", bool(trials) or not cuda_source.runs(PLACE)


def ways(name: str) -> list[Any]:
    return [steps, ahead, *([by_each_attention] if name in WIDE else [])]


if __name__ == "__main__":
    if not GPU:
        Decoder.suits = staticmethod(fits)  # type: ignore[method-assign]
        rows.takes_rows = lambda place: True
    made = [found for name in sys.argv[1:] for way in ways(name) for found in way(name)]
    wrong = [name for name, right in made if not right]
    print("\n".join(wrong[:20]))
    print(f"{len(wrong)} of {len(made)} differ on {PLACE}")
    sys.exit(bool(wrong or not made))
