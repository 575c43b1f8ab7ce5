"""Run by test_codec_triton.py: Triton kernels against the reference, on a GPU or interpreted."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from lezero.ops.codec import FORMS, payload_bytes, reference, triton_kernel
from tests.ops.test_codec import KINDS, sample

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
CASES = [(1000, 64), (777, 256), (2100, 1024), (1, 32), (2, 32), (3, 32), (35, 32), (0, 32)]


def values(numel: int) -> Tensor:
    """A block of 64 of each kind."""
    parts = [sample(64, KINDS[part % len(KINDS)], part) for part in range(-(-numel // 64))]
    return torch.cat([*parts, torch.empty(0)])[:numel]


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.float().nan_to_num(12345.0), other.float().nan_to_num(12345.0))


def differences(form: str, numel: int, block: int) -> list[str]:
    found = []
    for dtype, kept in ((torch.float32, None), (torch.float32, 0), (torch.bfloat16, 1)):
        x = values(numel).to(dtype).to(DEVICE)
        first = None if kept is None else (x.float().nan_to_num(0.5, 0.5, 0.5) / 3)
        if first is not None:
            first = torch.where(x.float().abs() > 3e38, 0.125, first)
            first = first.bfloat16() if kept else first
        size = payload_bytes(form, numel, block)
        payloads = [torch.full((size,), 0xA5, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        errors = [None if first is None else first.clone() for _ in range(2)]
        reference.encode(x, payloads[0], errors[0], form, block)
        triton_kernel.encode(x, payloads[1], errors[1], form, block)
        where = f"{form} {numel} {block} {dtype} {kept}"
        if not torch.equal(*payloads):
            found.append(f"payload of {where}")
        if errors[0] is not None and errors[1] is not None and not same(errors[0], errors[1]):
            found.append(f"error of {where}")
        for add in (False, True):
            outs = [sample(numel, "random", 1).to(dtype).to(DEVICE) for _ in range(2)]
            reference.decode(payloads[0], outs[0], form, block, add)
            triton_kernel.decode(payloads[0], outs[1], form, block, add)
            if not same(*outs):
                found.append(f"decoded {where} {add}")
    return found


if __name__ == "__main__":
    wrong = [line for form in FORMS for case in CASES for line in differences(form, *case)]
    print("\n".join(wrong[:20]))
    print(f"{len(wrong)} differences on {DEVICE}")
    sys.exit(bool(wrong))
