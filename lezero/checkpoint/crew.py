"""The ranks that write one generation together.

Every rank writes the rows that it has into one folder, which all must see; rank 0 commits it once
every rank has said that its files are durable. A rank that fails says so, one that dies ends the
others' wait; either way no generation appears, and every rank knows why.

The exchanges are made by the threads that write, over a group of their own, so they never mix with
the collectives of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lezero.core import groups
from lezero.core.errors import DistributedError, FileError
from lezero.files import Slice, check_space, commit_parts, folder, step_path, write_part
from lezero.files.generation import tensor_bytes

_TIMEOUT_S = 3600.0  # a slow disk on one rank is no failure


class Crew:
    """Made by every rank together; with `alone`, or in a world of one, it is this process."""

    def __init__(self, alone: bool = False) -> None:
        self.size = 1 if alone else groups.world_size()
        self.rank = 0 if self.size == 1 else groups.rank()
        self._group = None
        if self.size > 1:
            self._group = groups.make([list(range(self.size))], "cpu", _TIMEOUT_S)

    def write(
        self,
        root: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        places: Mapping[str, Slice],
        documents: Mapping[str, Any],
        problem: str = "",
        spared: Path | None = None,
    ) -> None:
        """Writes generation `step`; returns when it is durable, or raises `FileError` on each rank.

        `tensors` and `places` are this rank's (see `rows.slices`), `documents` rank 0's. `problem`:
        why this rank cannot write. `spared`: where rank 0 puts a generation that this one replaces.
        """
        target = Path(root) if problem else step_path(root, step)  # the step may be the problem
        with ExitStack() as stack:

            def begin() -> dict[str, Any]:
                if problem:
                    raise FileError(problem)
                made = stack.enter_context(folder.aside(root, target.name)) if not self.rank else ""
                return {"step": step, "folder": str(made), "bytes": tensor_bytes(tensors)}

            begun = self._agree(begin, target)
            _check_steps([one["step"] for one in begun])
            made = Path(begun[0]["folder"])
            label = f"{self.rank:05d}-" if self.size > 1 else ""

            def put() -> dict[str, Any]:
                if not self.rank:
                    check_space(root, sum(one["bytes"] for one in begun))
                if not made.is_dir():
                    raise FileError(
                        f"{root}: rank {self.rank} does not see the folder that rank 0 has made in "
                        "it; checkpoints need a file system that all ranks share"
                    )
                return write_part(made, label, tensors, places)

            parts = self._agree(put, target)

            def commit() -> dict[str, Any]:
                if not self.rank:
                    commit_parts(made, target, step, parts, documents, spared)
                return {}

            self._agree(commit, target)

    def close(self) -> None:
        groups.end(self._group)
        self._group = None

    def _agree(self, act: Callable[[], dict[str, Any]], target: Path) -> list[dict[str, Any]]:
        """Every rank's answer; `FileError` on every rank, in the same words, when one failed."""
        try:
            mine = act()
        except Exception as error:  # whatever it is, the others must not wait for it
            mine = {"error": _told(error, target)}
        every = self._exchange(mine)
        for rank, answer in enumerate(every):
            if "error" in answer:
                raise FileError(
                    f"rank {rank}: {answer['error']}" if self.size > 1 else answer["error"]
                )
        return every

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        if self.size == 1:
            return [mine]
        body = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        try:
            dist.all_gather(sizes, torch.tensor([body.numel()], device="cpu"), group=self._group)
            lengths = [int(size) for size in sizes]
            padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
            padded[: body.numel()] = body
            bodies = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(bodies, padded, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise DistributedError(
                "another rank was lost while the checkpoint was written; nothing of it remains "
                f"({str(error).splitlines()[0][:120]})"
            ) from error
        pairs = zip(bodies, lengths, strict=True)
        return [json.loads(bytes(body[:n].numpy().tobytes())) for body, n in pairs]


def _check_steps(steps: list[int]) -> None:
    """Raises `FileError` where ranks are at different saves: rows of two steps never mix."""
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise FileError(
                f"rank 0 saves step {steps[0]}, but rank {rank} step {step}; call save on every "
                "rank at the same steps"
            )


def _told(error: Exception, target: Path) -> str:
    if isinstance(error, OSError):
        return str(folder.cannot_write(target, error))
    return str(error) if isinstance(error, FileError) else f"{type(error).__name__}: {error}"
