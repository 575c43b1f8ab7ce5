"""Whether tensors that lie in the same memory can hold what a file says of each of them.

A parameter made of `other.data`, a buffer that is a slice of a parameter: the module knows of no
tie, and what is loaded last is what all of them hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lezero.core.errors import FileError
from lezero.core.tensors import flat_bytes

_WIDEST = 16  # bytes of an element
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def check_overlaps(state: Mapping[str, Tensor], given: Mapping[str, Any], source: str) -> None:
    """Raises `FileError` where a module's tensors share memory and the file tells them apart, and
    where elements of one share theirs, so that nothing can be copied into it."""
    places: dict[tuple[torch.device, int], list[str]] = {}
    for name, value in given.items():
        old = state.get(name)
        if type(old) not in _PLAIN or old is None or old.is_meta or not isinstance(value, Tensor):
            continue
        if old.layout != torch.strided:
            continue
        if old.numel() and any(
            s == 0 and n > 1 for s, n in zip(old.stride(), old.shape, strict=True)
        ):
            raise FileError(
                f"{source}: '{name}' of the module is an expanded tensor, whose elements share "
                "memory, so that no values can be copied into it; build it with .clone()"
            )
        if old.numel():
            storage = old.untyped_storage()
            places.setdefault((old.device, storage.data_ptr()), []).append(name)
    for names in places.values():
        for together in _overlapping(names, state):
            _check(together, state, given, source)


def _overlapping(names: Sequence[str], state: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Groups of names whose memory overlaps; a tied tensor counts once."""
    once: dict[int, str] = {}
    for name in names:
        once.setdefault(id(state[name]), name)
    group: list[str] = []
    reach = -1
    for name in sorted(once.values(), key=lambda name: _range(state[name])[0]):
        first, end = _range(state[name])
        if first >= reach:
            if len(group) > 1:
                yield group
            group = []
        group.append(name)
        reach = max(reach, end)
    if len(group) > 1:
        yield group


def _range(x: Tensor) -> tuple[int, int]:
    """The first byte of a storage that belongs to it, and the one behind the last."""
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    first = int(x.storage_offset()) * x.itemsize
    return first, first + int(reach + 1) * x.itemsize


def _check(
    names: Sequence[str], state: Mapping[str, Tensor], given: Mapping[str, Any], source: str
) -> None:
    """Loads them into memory that is laid out alike, and looks."""
    begin = min(_range(state[name])[0] for name in names) // _WIDEST * _WIDEST
    end = max(_range(state[name])[1] for name in names)
    memory = torch.zeros(end - begin, dtype=torch.uint8, device="cpu").untyped_storage()
    laid = {}
    for name in names:
        old = state[name].detach()
        at = (_range(old)[0] - begin) // old.itemsize
        laid[name] = torch.empty(0, dtype=old.dtype, device="cpu").set_(
            memory, at, old.shape, old.stride()
        )
        laid[name].copy_(given[name])
    for name, found in laid.items():
        wanted = given[name].detach().to("cpu", found.dtype)
        if not torch.equal(flat_bytes(found.contiguous()), flat_bytes(wanted.contiguous())):
            others = ", ".join(repr(other) for other in names if other != name)
            raise FileError(
                f"{source}: '{name}' and {others} differ in the file, but they share memory in the "
                "module, which holds what is loaded last. Build the module without sharing "
                "(.clone()), or remove the wrong ones from the file"
            )
