"""Triton kernels are launched on their tensors' device, which need not be the current one.

In a process of its own, with tensors that say that they are on a second accelerator and kernels
that are not run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.house.floors import ROOT
from tests.ranks import HIDDEN

CHECK = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from lezero.ops.adamw import eight_bit, triton_kernel as adamw
from lezero.ops.adamw.reference import coefficients
from lezero.ops.codec import FORMS, payload_bytes, triton_kernel as codec
from lezero.ops.decoder import triton_attend as attention
from lezero.ops.linear import Packed, triton_fp8 as fp8, triton_rows as rows
from lezero.ops.linear import triton_few as few, triton_few_kernel
from lezero.ops.linear import triton_tokens as tokens, triton_w8a8 as w8a8

inside, launched = [None], []

class Guard:
    def __init__(self, index):
        self.index = index
    def __enter__(self):
        inside.append(self.index)
    def __exit__(self, *_):
        inside.pop()

class Kernel:
    def __getitem__(self, grid):
        return lambda *arguments, **options: launched.append(inside[-1])

torch.accelerator.device_index = Guard
codec._encode_dense = codec._encode_sign = codec._encode_sparse = codec._decode = Kernel()
adamw._step = adamw._step8bit = fp8._round = Kernel()
adamw._address, adamw._stream = lambda x: 16, lambda place: 0
adamw._sent = lambda values, dtype, place: torch.zeros(len(values), len(values[0])).to(place)
rows._decode = tokens._round = w8a8._multiply = Kernel()
triton_few_kernel.few = triton_few_kernel.gate = attention._attend = Kernel()
with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:1"):
    x = torch.empty(1000)
    for form in FORMS:
        payload = torch.empty(payload_bytes(form, 1000, 64), dtype=torch.uint8)
        codec.encode(x, payload, None, form, 64)
        codec.decode(payload, x, form, 64, False)
    param, codes = torch.empty(2, 300), torch.empty(2, 300, dtype=torch.uint8)
    scales = torch.empty(eight_bit.scales_shape(param.shape))
    steps = coefficients(1.0, 1e-3, 0.9, 0.99, 1e-8, 0.0)
    state = (codes, scales, codes, scales)
    for kept in ((param, param), state):
        adamw.step([adamw.Problem(param, None, param, kept, steps)])
    weight = Packed(torch.empty(32, 64, dtype=torch.int8), torch.empty(32, 1), None)
    rows.dequantize(weight, 32, 64, 8, 0, torch.bfloat16)
    rows.embedding(torch.zeros(3, dtype=torch.int64), weight, 64, 8, 0, torch.bfloat16)
    a, token = tokens.quantize_tokens(torch.empty(3, 64), None, 64)
    w8a8.linear_w8a8(a, token, weight.weight, weight.scale, None, torch.bfloat16)
    fp8.fp8_tokens(torch.empty(3, 64))
    a, cut = torch.empty(3, 128, dtype=torch.bfloat16), few.Cut(32, 64, 1, 3, 4)
    few.linear_few(a, weight, None, 32, 64, 8, 0, few.Around(gated=True), cut)
    at, table = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
    angles, cache = torch.empty(32, 16), torch.empty(64, 1, 32, dtype=torch.bfloat16)
    attention.attend(a, angles, angles, at, table, cache, cache, heads=2)
assert launched == [1] * (2 * len(FORMS) + 10), launched
print("alike")
"""


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_kernels_run_where_their_tensors_are() -> None:
    command, env = [sys.executable, "-c", CHECK], {**os.environ, **HIDDEN}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "alike", done.stderr[-3000:]
