"""One parameter of the model as ZeRO holds it: its shard outside of compute, whole inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lezero.core.errors import OrderError
from lezero.parallel.zero.layout import Place, Rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lezero.parallel.zero.segment import Segment

REPLACED = "_lezero_replaced"
HELD = "_lezero_held"


class Mark(NamedTuple):
    """What `.grad` was when a backward under `no_sync` ended: how a `zero_grad` after it shows.

    `stands_in`: there was none, and this one only waits for the user to drop it.
    """

    gradient: torch.Tensor
    version: int
    stands_in: bool


@dataclass(eq=False)
class Held:
    """`places` are all (module, attribute) that name it; `sharded` is registered there outside of
    compute, `full` inside. `index`: place in the order of registration. `used`: a gradient has come
    since the last reduction."""

    name: str
    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    rows: Rows
    dtype: torch.dtype
    sharded: nn.Parameter
    index: int
    segment: Segment = field(init=False)
    place: Place = field(init=False)
    full: nn.Parameter | None = None
    used: bool = False
    memory: tuple[object, ...] = ()
    mark: Mark | None = None

    def show(self, parameter: nn.Parameter) -> None:
        """Registers `parameter` under every name."""
        for module, attribute in self.places:
            if isinstance(module, nn.RNNBase):  # it keeps a list of its own beside the table
                setattr(module, attribute, parameter)
            else:
                module._parameters[attribute] = parameter

    def replace(self, parameter: nn.Parameter) -> None:
        """Makes `parameter` the registered one; an optimizer that holds the old one is told so."""
        old = self.sharded
        if old is not parameter:
            setattr(old, REPLACED, self.name)
        parameter.requires_grad_(old.requires_grad)
        setattr(parameter, HELD, self)
        self.sharded = parameter
        self.memory = self._memory()
        self.show(parameter)

    def check_memory(self) -> None:
        """Raises `OrderError` when the registered parameter was converted or moved.

        `Module.to` and its kin put other memory under the same parameter: an optimizer would step
        that, while gathers go on reading the old.
        """
        now = self._memory()
        if now != self.memory:
            raise OrderError(
                f"parameter '{self.name}' has other memory than lz.shard_ gave it (it is "
                f"{self.sharded.dtype} on {self.sharded.device}, and was {self.dtype} then); "
                "convert or move the model (.to, .double, .bfloat16, .cuda) before lz.shard_, "
                "and copy values into parameters in place"
            )
        setattr(self.sharded, HELD, self)  # a conversion that changes nothing may drop it

    def _memory(self) -> tuple[object, ...]:
        inner = local(self.sharded)
        kind = (inner.dtype, inner.device, inner.stride())
        # With no other rank the parameter is the user's own, and used wherever it lies.
        return kind if self.segment.link is None else (*kind, inner.data_ptr())

    def local(self) -> torch.Tensor:
        """The rows of this rank, as memory shared with the registered parameter."""
        return local(self.sharded.detach())

    def local_grad(self) -> torch.Tensor | None:
        return None if self.sharded.grad is None else local(self.sharded.grad)

    def version(self) -> int:
        """Changes when somebody changes the registered parameter in place."""
        parameter: Any = self.sharded
        inner = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        return int(parameter._version + inner._version)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: all of it when it is no DTensor."""
    if isinstance(tensor, DTensor):
        inner: torch.Tensor = tensor._local_tensor
        return inner
    return tensor


def distributed(rows: torch.Tensor, whole: Rows, mesh: DeviceMesh | None) -> torch.Tensor:
    """`rows` of this rank as a DTensor of `whole.shape`, not copied; as they are without a mesh."""
    if mesh is None:
        return rows
    shape = torch.Size(whole.shape)
    stride = torch.empty(shape, device="meta").stride()
    inner = Shard(0) if whole.shape else Replicate()
    placements = [Replicate()] * (mesh.ndim - 1) + [inner]
    made: torch.Tensor = DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return made
