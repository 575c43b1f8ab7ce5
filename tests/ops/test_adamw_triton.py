"""The Triton kernels of AdamW against the reference, in Triton's interpreter on the CPU.

In a process of its own: an environment variable chooses the interpreter when triton is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.house.floors import ROOT

CHECK = """
import torch
from triton.runtime.interpreter import InterpreterBuilder
from lezero.ops.adamw import eight_bit, reference, triton_kernel
from tests.ops import test_adamw as shared
from tests.ops.test_adamw_triton import fused

InterpreterBuilder.create_fma = fused

def step(*problems):
    triton_kernel.step(
        [reference.Problem(x[0], x[1], grad, tuple(x[2:]), c) for x, grad, c in problems]
    )


for shape in ((3, 300), (2, 5, 64)):
    for kind in shared.KINDS:
        for grads in (torch.float32, torch.bfloat16):
            tensors, grad = shared.problem(shape, kind)
            grad = grad.to(grads)
            given = shared.coded(tensors)
            given[3][0, 0] = float("nan")
            wanted, found = shared.copies(given), shared.copies(given)
            reference.adamw8bit(wanted[0], wanted[1], grad, *wanted[2:], shared.C)
            step((found, grad, shared.C))
            assert shared.same(found, wanted), (shape, kind, grads)
            wanted, found = shared.copies(tensors), shared.copies(tensors)
            for beta1 in (0.9, 0.2):  # the moment is taken from the nearer end
                c = reference.coefficients(3, 1e-2, beta1, 0.999, 1e-8, 0.1)
                reference.adamw(wanted[0], wanted[1], grad, *wanted[2:], c)
                step((found, grad, c))
                assert shared.same(found, wanted), (shape, kind, grads, beta1)

# many at once: of many chunks and of one, aligned or not, at another step, and nothing at all
found, wanted = [], []
for number, shape in enumerate([(17, 1024), (3, 300), (0, 300), (1, 5), (6, 768)]):
    for kind in shared.KINDS:
        tensors, grad = shared.problem(shape, kind, number)
        c = reference.coefficients(3 + number % 2, 1e-2, 0.9, 0.999, 1e-8, 0.1)
        for given in (tensors, shared.coded(tensors)):
            found.append((shared.copies(given), grad, c))
            wanted.append(shared.copies(given))
            name = "adamw" if len(given) == 4 else "adamw8bit"
            getattr(reference, name)(*wanted[-1][:2], grad, *wanted[-1][2:], c)
launches, launch = [], triton_kernel._launch
triton_kernel._launch = lambda alike, rows: launches.append(len(rows)) or launch(alike, rows)
step(*found)
assert len(launches) < sum(launches) == 32, launches
assert all(shared.same(x[0], y) for x, y in zip(found, wanted)), "together"
print("alike")
"""


OPTIMIZERS = """
import torch
from triton.runtime.interpreter import InterpreterBuilder
from lezero.ops.adamw import op, triton_kernel
from lezero.optim import AdamW, AdamW8bit
from tests.ops.test_adamw import bits
from tests.ops.test_adamw_triton import fused

InterpreterBuilder.create_fma = fused


def trained(make, dtype, launches):
    torch.manual_seed(0)
    shapes = [(64, 64), (64, 80), (7,), (), (0, 4)]
    held = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]
    held.append(torch.nn.Parameter(torch.randn(64, 64).to(dtype).T))  # not contiguous
    groups = [{"params": held[:3]}, {"params": held[3:], "weight_decay": 0.0}]
    optimizer = make(groups, lr=1e-2)
    run = triton_kernel._launch
    triton_kernel._launch = lambda alike, rows: launches.append(len(rows)) or run(alike, rows)
    for _ in range(2):
        for one in held[:-3] if len(optimizer.state) == 0 else held:  # others are a step behind
            one.grad = torch.randn(one.shape).to(dtype)
        optimizer.step()
    triton_kernel._launch = run
    kept = [x for one in held for x in optimizer.state[one].values()]
    return [bits(x) for x in (*held, *kept) if x.numel()]


for make, dtype in (
    (AdamW8bit, torch.float32),
    (lambda *a, **k: AdamW(*a, **k, masters="fp32"), torch.bfloat16),
    (lambda *a, **k: AdamW8bit(*a, **k, masters="remainder"), torch.bfloat16),
):
    launches = []
    wanted = trained(make, dtype, launches)
    assert not launches
    op.triton_runs = lambda place: True
    found = trained(make, dtype, launches)
    op.triton_runs = lambda place: False
    assert max(launches) > 1
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True)), dtype
print("alike")
"""


def fused(self, x, y, z):
    """As a GPU does; the interpreter of Triton 3.6 rounds twice."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    total = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize("check", [CHECK, OPTIMIZERS], ids=["reference", "optimizers"])
def test_triton_equals(check: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == "alike", done.stderr[-3000:]
