"""What every op must do: each kernel that this machine runs is held to the reference.

class TestScale(OpConformance):
    native = native.NATIVE

    def cases(self):
        yield "random", (torch.randn(100),)
        …                                    # ragged, empty, and NaN and infinity too

    def expected(self, x): ...               # a tuple of tensors, by the reference
    def kernel(self, ops, x): ...            # the same by the ops of one native kernel
    def public(self, x): ...                 # the same by what users call

Inputs are given fresh to each call, so that ops may write into them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lezero.core.errors import LeZeroError
from lezero.ops.build import BuildError, compilers
from lezero.ops.native import Native

Args = tuple[Any, ...]
KINDS = ("random", "ragged", "empty", "nan", "inf")
"""What the names of the cases begin with: each kind is there."""


def fresh(args: Args) -> Args:
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in args)


def strided(x: Tensor) -> Tensor:
    """The same values, every second element of a larger tensor."""
    wide = torch.stack([x, torch.full_like(x, 3)], -1)
    return wide[..., 0]


class OpConformance:
    """Name the native side in `native` (None: there is none) and define the four methods above."""

    native: ClassVar[Native | None] = None
    refuses_strides: ClassVar[bool] = False
    """True where a non-contiguous input is an error; else it gives what a contiguous one gives."""
    rtol: ClassVar[float] = 0.0
    atol: ClassVar[float] = 0.0

    def cases(self) -> Iterator[tuple[str, Args]]:
        raise NotImplementedError

    def expected(self, *args: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def kernel(self, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def public(self, *args: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def held(self, case: str, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            torch.testing.assert_close(
                one,
                other,
                rtol=self.rtol,
                atol=self.atol,
                equal_nan=True,
                msg=lambda text, n=number: f"{case}, output {n}: {text}",
            )

    def test_the_cases_are_of_every_kind(self) -> None:
        names = [name for name, _ in self.cases()]
        missing = [kind for kind in KINDS if not any(name.startswith(kind) for name in names)]
        assert not missing, f"no case begins with {missing}"

    def test_every_kernel_equals_the_reference(self) -> None:
        if self.native is None or not self.native.able():
            pytest.skip("no native kernel suits this processor")
        try:
            compilers()
        except BuildError as error:
            pytest.skip(str(error))
        ran, problems = 0, []
        for one in self.native.able():
            try:
                ops = self.native.load(one)
            except BuildError as error:
                if one.trial is None:
                    raise
                problems.append(f"{one.name}: {error}")
                continue
            ran += 1
            for name, args in self.cases():
                found = self.kernel(ops, *fresh(args))
                self.held(f"{one.name}, {name}", found, self.expected(*fresh(args)))
        if not ran:
            pytest.skip("; ".join(problems))

    def test_the_public_op_equals_the_reference(self) -> None:
        for name, args in self.cases():
            self.held(name, self.public(*fresh(args)), self.expected(*fresh(args)))

    def test_strided_inputs(self) -> None:
        name, args = next(iter(self.cases()))
        for place, x in enumerate(args):
            if not isinstance(x, Tensor) or x.dim() == 0 or x.numel() < 2:
                continue
            odd = list(fresh(args))
            odd[place] = strided(x)
            if self.refuses_strides:
                with pytest.raises(LeZeroError, match="contiguous"):
                    self.public(*odd)
            else:
                self.held(f"{name}, strided", self.public(*odd), self.expected(*fresh(args)))
