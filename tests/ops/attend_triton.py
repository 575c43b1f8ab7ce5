"""Run by test_attend_triton.py: attention of one token against fp64, on a GPU or interpreted."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch

from lezero.ops.counts import counts
from lezero.ops.decoder.triton_attend import attend
from tests.ops.attend_cases import DEVICE, EPS, KINDS, Case, Made

# The interpreter cuts bf16 off where GPUs round.
NEAR = {torch.bfloat16: 1.5e-2 if DEVICE.type == "cpu" else 6e-3, torch.float16: 1.5e-3}


CASES = [
    Case(2, 4, 2, 32, 8),
    Case(3, 4, 1, 32, 20, normed=True),
    Case(2, 2, 2, 64, 40, window=100),
    Case(1, 8, 2, 32, 40),
    Case(2, 34, 2, 32, 4, window=20, normed=True),
]


def checked(case: Case, dtype: torch.dtype) -> Iterator[tuple[str, bool]]:
    made = Made(case, dtype)
    wanted = made.wanted()
    found = attend(
        *(made.qkv, made.cos, made.sin, made.position_B, made.table_BW, made.keys, made.values),
        heads=case.H,
        window=case.window,
        norms=made.norms,
        eps=EPS,
    )
    near = {"away": NEAR[dtype], "keys": 1.0, "values": 1.0}
    for name, off in made.differs(found, wanted).items():
        yield f"{case} {dtype}: {name} {off:g}", off < near[name]


if __name__ == "__main__":
    made = [found for pair in itertools.product(CASES, KINDS) for found in checked(*pair)]
    made.append(("counts are 0 again", not counts(DEVICE).any()))
    wrong = [name for name, right in made if not right]
    print("\n".join(wrong[:20]))
    print(f"{len(wrong)} of {len(made)} differ on {DEVICE}")
    sys.exit(bool(wrong))
