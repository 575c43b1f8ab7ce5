"""Numeric comparison of tensors and state dicts: where they part, and by how much.

A figure is only worth something with its name: `compare_states` says which tensor differs first, in
the order of the expected one, and `Difference` says how far apart two tensors are, absolutely,
relatively and in units in the last place. NaN equals NaN, an infinity equals itself, and a NaN on
one side only is a difference of its own kind. Memory: a few MB, whatever the tensors' size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from lezero.core.errors import ConfigError

Kind = Literal["missing", "extra", "shape", "dtype", "nan", "value"]
_CHUNK = 1 << 20
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


@dataclass(frozen=True)
class Difference:
    """How one tensor differs. Figures are over the elements where both sides are finite.

    kind: "missing" (only expected), "extra" (only actual), "shape", "dtype", "nan" (a NaN or an
    infinity on one side only) or "value". max_abs, max_rel (against the expected element; inf where
    that is 0), max_ulp (None unless both are of one floating dtype). differing: elements beyond the
    tolerance, of `elements`. index: the first of them, with its two values.
    """

    name: str
    kind: Kind
    detail: str
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = None
    differing: int = 0
    elements: int = 0
    index: tuple[int, ...] = ()
    expected: float | None = None
    actual: float | None = None

    def __str__(self) -> str:
        name = self.name or "tensor"
        if self.kind not in ("nan", "value"):
            return f"{name}: {self.detail}"
        ulp = "" if self.max_ulp is None else f", {self.max_ulp} ulp"
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return (
            f"{name}: {self.differing} of {self.elements} elements differ "
            f"(max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}{ulp}); "
            f"first at {name}{where}: expected {self.expected!r}, got {self.actual!r}"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; numbers that JSON lacks (NaN, inf) become text."""
        return {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


@dataclass(frozen=True)
class Comparison:
    """All differences of two states, in the order of the expected one; `compared` tensors."""

    differences: tuple[Difference, ...]
    compared: int

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """Where they part first."""
        return self.differences[0] if self.differences else None

    @property
    def max_abs(self) -> float:
        return max((item.max_abs for item in self.differences), default=0.0)

    def __str__(self) -> str:
        if self.equal:
            return f"equal: {self.compared} tensors"
        others = len(self.differences) - 1
        more = f" (and {others} more)" if others else ""
        return f"{self.differences[0]}{more}"


def compare_tensors(
    expected: torch.Tensor,
    actual: torch.Tensor,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    name: str = "",
    check_dtype: bool = True,
) -> Difference | None:
    """None where |actual - expected| ≤ atol + rtol·|expected| everywhere, else the difference.

    With both tolerances 0 elements must be equal (0.0 and -0.0 are). The devices may differ.
    `ConfigError` for a tolerance that is negative or NaN.
    """
    for field, tolerance in (("rtol", rtol), ("atol", atol)):
        if not tolerance >= 0:  # nor is NaN
            raise ConfigError(f"{field}: got {tolerance}, allowed is a number from 0")
    if expected.shape != actual.shape:
        shapes = f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        return Difference(name, "shape", shapes)
    if check_dtype and expected.dtype != actual.dtype:
        return Difference(name, "dtype", f"dtype {actual.dtype}, expected {expected.dtype}")
    found = _Found()
    for start, one, two in _chunks(expected, actual):
        found.add(start, one, two, rtol, atol)
    if not found.differing:
        return None
    index = tuple(int(i) for i in _unravel(found.at, _real_shape(expected)))
    return Difference(
        name=name,
        kind="nan" if found.unlike else "value",
        detail="",
        max_abs=found.max_abs,
        max_rel=found.max_rel,
        max_ulp=found.max_ulp if _ulp_dtype(expected, actual) is not None else None,
        differing=found.differing,
        elements=math.prod(_real_shape(expected)),
        index=index,
        expected=found.expected,
        actual=found.actual,
    )


def compare_states(
    expected: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    check_dtype: bool = True,
) -> Comparison:
    """Compares two state dicts name by name; names on one side only are differences too."""
    found: list[Difference] = []
    for name, value in expected.items():
        if name not in actual:
            found.append(Difference(name, "missing", "expected, but not there"))
            continue
        item = compare_tensors(
            value, actual[name], rtol=rtol, atol=atol, name=name, check_dtype=check_dtype
        )
        if item is not None:
            found.append(item)
    for name in actual:
        if name not in expected:
            found.append(Difference(name, "extra", "there, but not expected"))
    return Comparison(tuple(found), len(expected.keys() & actual.keys()))


class _Found:
    """Figures gathered chunk by chunk."""

    def __init__(self) -> None:
        self.max_abs = self.max_rel = 0.0
        self.max_ulp = self.differing = self.at = 0
        self.unlike = False
        self.expected: float | None = None
        self.actual: float | None = None

    def add(
        self, start: int, expected: torch.Tensor, actual: torch.Tensor, rtol: float, atol: float
    ) -> None:
        one, two = expected.to(torch.float64), actual.to(torch.float64)
        # Integers beyond 2^53 differ also where their float64 do not.
        same = expected == actual if expected.dtype == actual.dtype else one == two
        same |= one.isnan() & two.isnan()
        finite = one.isfinite() & two.isfinite()
        apart = torch.where(finite & ~same, (two - one).abs(), 0.0)
        size = torch.where(finite, one.abs(), 0.0)
        beyond = ~same & (~finite | (apart > atol + rtol * size) | (rtol == atol == 0))
        if not apart.numel():
            return
        self.max_abs = max(self.max_abs, float(apart.max()))
        relative = torch.where(apart > 0, apart / size, 0.0)
        self.max_rel = max(self.max_rel, float(relative.max()))
        if _ulp_dtype(expected, actual) is not None:
            self.max_ulp = max(self.max_ulp, _ulps(expected, actual, finite & ~same))
        count = int(beyond.sum())
        if not count:
            return
        self.unlike = self.unlike or bool((~finite & ~same).any())
        if not self.differing:
            at = int(beyond.nonzero()[0])
            self.at = start + at
            self.expected, self.actual = expected[at].item(), actual[at].item()
        self.differing += count


def _chunks(
    expected: torch.Tensor, actual: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    one, two = _real(expected).reshape(-1), _real(actual).reshape(-1)
    for start in range(0, one.numel(), _CHUNK):
        yield start, _plain(one[start : start + _CHUNK]), _plain(two[start : start + _CHUNK])


def _plain(part: torch.Tensor) -> torch.Tensor:
    """On the CPU, in a dtype that compares: 8-bit floats become float32 without loss."""
    part = part.cpu()
    narrow = part.is_floating_point() and part.dtype not in _BITS
    return part.float() if narrow else part


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _real_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def _ulp_dtype(expected: torch.Tensor, actual: torch.Tensor) -> torch.dtype | None:
    return _BITS.get(expected.dtype) if expected.dtype == actual.dtype else None


def _ulps(expected: torch.Tensor, actual: torch.Tensor, where: torch.Tensor) -> int:
    """Steps between neighbouring numbers of the dtype; bit patterns ordered as their numbers are.

    Source: B. Dawson, "Comparing Floating Point Numbers, 2012 Edition".
    """
    bits = _BITS[expected.dtype]
    lowest = torch.iinfo(bits).min

    def ordered(part: torch.Tensor) -> torch.Tensor:
        pattern = part[where].contiguous().view(bits).to(torch.int64)
        return torch.where(pattern < 0, lowest - pattern, pattern)

    one, two = ordered(expected), ordered(actual)
    if not one.numel():
        return 0
    # Two float64 of opposite sign may be further apart than int64 counts.
    far = (one >= 0) != (two >= 0)
    near = int(torch.where(far, 0, two - one).abs().max())
    if not bool(far.any()):
        return near
    one, two = one[far], two[far]
    widest = int((one.double() - two.double()).abs().argmax())
    return max(near, abs(int(one[widest]) - int(two[widest])))


def _unravel(flat: int, shape: tuple[int, ...]) -> list[int]:
    index = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        index.append(rest)
    return index[::-1]
