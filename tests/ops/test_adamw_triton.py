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
import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from lezero.ops.adamw import eight_bit, reference, triton_kernel
from tests.ops import test_adamw as shared


def fused(self, x, y, z):  # as a GPU does; the interpreter of Triton 3.6 rounds twice
    total = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


InterpreterBuilder.create_fma = fused

for shape in ((3, 300), (2, 5, 64)):
    for kind in shared.KINDS:
        for grads in (torch.float32, torch.bfloat16):
            tensors, grad = shared.problem(shape, kind)
            grad = grad.to(grads)
            given = shared.coded(tensors)
            given[3][0, 0] = float("nan")
            wanted, found = shared.copies(given), shared.copies(given)
            reference.adamw8bit(wanted[0], wanted[1], grad, *wanted[2:], shared.C)
            triton_kernel.adamw8bit(found[0], found[1], grad, *found[2:], shared.C)
            assert shared.same(found, wanted), (shape, kind, grads)
            wanted, found = shared.copies(tensors), shared.copies(tensors)
            for beta1 in (0.9, 0.2):  # the moment is taken from the nearer end
                c = reference.coefficients(3, 1e-2, beta1, 0.999, 1e-8, 0.1)
                reference.adamw(wanted[0], wanted[1], grad, *wanted[2:], c)
                triton_kernel.adamw(found[0], found[1], grad, *found[2:], c)
                assert shared.same(found, wanted), (shape, kind, grads, beta1)
print("alike")
"""


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_triton_equals_the_reference() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == "alike", done.stderr[-3000:]
