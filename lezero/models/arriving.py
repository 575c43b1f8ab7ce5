"""Models whose weights come part by part, for those who make something smaller of each part before
the next one is read: the whole is never in memory."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from lezero.core.errors import FileError, LeZeroError
from lezero.core.paths import expand_home
from lezero.models.gguf import opened_gguf
from lezero.models.huggingface import (
    Stored,
    hand_over,
    opened,
    read_config,
    read_tensor,
    stored_tensors,
    tensor_names,
    weight_files,
)
from lezero.models.transformer import Transformer


class Arriving:
    """A `Transformer` on meta, and what reads its weights.

    `model`'s names, shapes and types were compared with those of the files before. sizes: bytes of
    each weight as it comes. wide: whether some are in fp64. beside: bytes a number that are there
    besides while a weight is read.
    """

    def __init__(
        self,
        model: Transformer,
        reads: Mapping[str, Callable[[], Tensor]],
        sizes: Mapping[str, int],
        wide: bool = False,
        beside: int = 0,
    ) -> None:
        self.model, self._reads = model, reads
        self.sizes, self.wide, self.beside = sizes, wide, beside
        model.rope.ready(1, torch.device("cpu"))

    def fill_(self, part: nn.Module) -> None:
        """Gives the parameters of `part`, in which they are called as in the model, their values,
        on the CPU."""
        names = [name for name, _ in part.named_parameters()]
        part.load_state_dict({name: self._reads[name]() for name in names}, assign=True)


def arriving_hf(folder: str | os.PathLike[str]) -> Arriving:
    """The model in a Hugging Face folder, in the types of its files. Errors as `load_hf`, those of
    names, shapes and types at once."""
    root = Path(expand_home(folder))
    files = weight_files(root)
    with torch.device("meta"):
        model = Transformer(read_config(root))
    as_they_are = {path: _mark(path) for path in files}
    seen: dict[str, Tensor] = {}

    def look(name: str, mapped: Tensor) -> Tensor:
        seen[name] = mapped.to("meta")
        return mapped

    hand_over(model, stored_tensors(files), look, str(root))
    places = tensor_names(files)
    reads = {
        name: functools.partial(_copy, path, there, as_they_are[path])
        for name, (path, there) in places.items()
    }
    sizes = {name: x.nbytes for name, x in seen.items()}
    return Arriving(model, reads, sizes, any(x.dtype == torch.float64 for x in seen.values()))


def _mark(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns  # some file systems change a file's number


def _copy(path: Path, name: str, mark: tuple[int, ...]) -> Tensor:
    """Of a tensor; its file is closed again, so that nothing of it counts as this process's."""
    try:
        with opened(path) as file:
            found = read_tensor(file, path, name).clone()
        same = _mark(path) == mark
    except (OSError, LeZeroError):
        if path.is_file() and _mark(path) == mark:
            raise
        same = False
    if not same:
        raise FileError(
            f"{path}: was replaced or removed while the model was read from it; open it again"
        )
    return found


@contextmanager
def arriving_gguf(
    path: str | os.PathLike[str], matrices: torch.dtype | None = None
) -> Iterator[Arriving]:
    """The model in a GGUF file, dequantized: fp32, or `matrices` where it has two dims. Errors as
    `load_gguf`, those of names and shapes at once."""
    with opened_gguf(path) as (model, tensors):
        stored = list(tensors)
        hand_over(model, map(_unread, stored), lambda _, empty: empty, str(path))

        def wide(read: Callable[[], Tensor]) -> Tensor:
            values = read()
            return values.to(matrices if matrices and values.dim() == 2 else values.dtype)

        reads = {name: functools.partial(wide, read) for name, _, read in stored}
        kept = 2 if matrices else 4
        sizes = {n: math.prod(x) * (kept if len(x) == 2 else 4) for n, x, _ in stored}
        yield Arriving(model, reads, sizes, beside=4)


def _unread(stored: Stored) -> Stored:
    name, shape, _ = stored
    return name, shape, functools.partial(torch.empty, shape, device="meta")
