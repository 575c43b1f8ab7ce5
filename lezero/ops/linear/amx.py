"""Whether the AMX kernel may run in this process: asked of Linux, and tried on a few products.

[Note: what is tried]
The kernel's logic is held to the reference by emulation, on any processor (`amx_tile.h`). What
emulation cannot show is tried where the instructions are, once a process, in milliseconds: one
product of each form. A kernel that differs is not chosen.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from lezero.ops.build import BuildError
from lezero.ops.linear import reference
from lezero.ops.linear.layout import pack, pack_bf16

INSTRUCTIONS = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # asm/unistd_64.h, asm/prctl.h, asm/fpu/types.h


def try_out(ops: Any) -> None:
    """Raises `BuildError` where `ops`, the kernel's, must not be used in this process."""
    _ask_for_tiles()
    # Modes of torch (fake tensors, a default device) are per thread; this one has none.
    with ThreadPoolExecutor(1) as pool:
        differs = pool.submit(_first_difference, ops).result()
    if differs:
        raise BuildError(f"its {differs} products differ from the reference on this processor")


def _ask_for_tiles() -> None:
    """Linux gives a process the tiles' registers on request only; for all its threads, at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    asked = [ctypes.c_long(number) for number in (_ARCH_PRCTL, _REQUEST, _TILE_DATA)]
    if libc.syscall(*asked):
        why = os.strerror(ctypes.get_errno())
        raise BuildError(f"Linux does not give this process the registers of AMX: {why}")


def _first_difference(ops: Any) -> str:
    """The form that differs, "" if none does."""
    M, N, K = 21, 40, 200
    draw = torch.Generator("cpu").manual_seed(0)
    wide: dict[str, Any] = {"dtype": torch.float32, "generator": draw, "device": "cpu"}
    x, weight = torch.randn(M, K, **wide), pack_bf16(torch.randn(N, K, **wide))
    found, wanted = ops.linear_bf16(x, weight, None, N), reference.linear_bf16(x, weight, None, N)
    if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-3):
        return "bf16"
    forms = ((8, 0, 8, 0), (4, 32, 8, 0), (4, 32, 8, 32), (8, 64, 8, 32), (4, 64, 16, 0))
    for bits, group, x_bits, x_block in forms:
        codes = torch.randint(0, 1 << bits, (N, K), generator=draw, device="cpu")
        codes = codes.to(torch.uint8) if bits == 4 else (codes - 128).to(torch.int8)
        groups = -(-K // group) if group else 1
        packed = pack(codes, torch.rand(N, groups, **wide), None, bits=bits)
        given = (N, bits, group, x_bits, x_block)
        wanted = reference.linear_int(x, packed, None, None, *given)
        if not torch.equal(ops.linear_int(x, *packed, None, None, *given), wanted):
            return f"W{bits}A{x_bits}{' in blocks' if x_block else ''}"
    return ""
