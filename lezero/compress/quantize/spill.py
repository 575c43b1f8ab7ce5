"""Tensors that wait on the disk: original weights, and activations between two blocks.

Calibration may hold little more than the model in memory. What it needs later lies in files of a
folder that is gone afterwards, beside the caches (`LEZERO_CACHE`), since temporary folders are
often memory. What a killed process left there goes when the next one begins.
"""

from __future__ import annotations

import shutil
from collections.abc import Hashable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lezero.compress.quantize.tensors import is_dense, raw
from lezero.core.errors import CapacityError
from lezero.core.facts import cache_folder
from lezero.files.folder import aside
from lezero.report import units


class Spill:
    """Trees of tensors by key. Bytes and devices come back as they were; other leaves stay, and
    sparse tensors with them."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._end = ExitStack()
        self._held: dict[Hashable, tuple[Path, list[Any], Any]] = {}
        self._count = 0

    def __enter__(self) -> Self:
        self._folder = self._end.enter_context(aside(cache_folder() / "spill", "tensors"))
        self._folder.chmod(0o700)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.clear()
        self._end.close()

    def need(self, size: int, what: str) -> None:
        """Raises `CapacityError` when `size` bytes do not fit."""
        assert self._folder is not None
        free = shutil.disk_usage(self._folder).free
        if size > free:
            raise CapacityError(
                f"{what} needs {units.size(size)} of disk under {cache_folder()}, which has "
                f"{units.size(free)}; make room, or set LEZERO_CACHE to a folder on another disk"
            )

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def put(self, key: Hashable, tree: Any) -> None:
        """Writes the tensors of `tree`; an older one under `key` is dropped. Raises `CapacityError`
        when the disk does not take them."""
        assert self._folder is not None
        self.drop(key)
        leaves, shape = pytree.tree_flatten(tree)
        path = self._folder / str(self._count)
        self._count += 1
        kept: list[tuple[bool, Any]] = []
        try:
            # Not by numpy's tofile, which says nothing of a full disk at the end of a file.
            with open(path, "wb") as file:
                for leaf in leaves:
                    if isinstance(leaf, Tensor) and is_dense(leaf):
                        (flat,) = raw(leaf)
                        file.write(flat.cpu().numpy().data)
                        kept.append((True, (tuple(leaf.shape), leaf.dtype, leaf.device)))
                    else:
                        kept.append((False, leaf))
        except OSError as error:
            raise CapacityError(
                f"the disk under {cache_folder()} did not take what waits there until all is done "
                f"({error.strerror}); make room, or set LEZERO_CACHE to a folder on another disk"
            ) from error
        self._held[key] = (path, kept, shape)

    def get(self, key: Hashable) -> Any:
        path, kept, shape = self._held[key]
        leaves: list[Any] = []
        with open(path, "rb", buffering=0) as file:
            for written, about in kept:
                leaves.append(_read(file, *about) if written else about)
        return pytree.tree_unflatten(leaves, shape)

    def drop(self, key: Hashable) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            held[0].unlink(missing_ok=True)


def _read(file: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    flat = (
        torch.from_numpy(np.fromfile(file, np.uint8, size))
        if size
        else torch.empty(0, dtype=torch.uint8)
    )
    return flat.view(dtype).view(shape).to(device)
