"""One parameter of the model as ZeRO holds it: its shard outside of compute, whole inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lezero.core.errors import OrderError
from lezero.parallel.zero.layout import Place, Rows
from lezero.parallel.zero.outside import Outside

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lezero.parallel.zero.segment import Segment

REPLACED = "_lezero_replaced"
HELD = "_lezero_held"
_NO_USERS = ("_lezero", "_dynamo", "_is_param", "full_tensor")
"""How attributes begin that are LeZero's, or what torch knows of one tensor and of no other."""


class Mark(NamedTuple):
    """What `.grad` was when a backward under `no_sync` ended: how a `zero_grad` after it shows.

    Every `zero_grad`, of modules and of optimizers, takes away the graph of a gradient or, without
    one, its `requires_grad`: so that is set until then. Neither values nor version counters tell:
    zeros may be right, and those of DTensors stand still under torch's foreach functions.
    `stands_in`: there was no gradient, and this one only waits for the user to drop it.
    """

    gradient: torch.Tensor
    stands_in: bool

    @classmethod
    def put(cls, gradient: torch.Tensor, *, stands_in: bool) -> Mark:
        if not gradient.requires_grad:
            gradient.requires_grad_()
        return cls(gradient, stands_in)

    def take(self, now: torch.Tensor | None) -> bool:
        """Takes the mark away; whether the user has dropped the gradient. `now`: the one there."""
        dropped = now is None or (now is self.gradient and not now.requires_grad)
        if self.gradient.is_leaf:
            self.gradient.requires_grad_(False)
        return dropped


def retire(old: nn.Parameter, name: str) -> None:
    """Says of a parameter that the model no longer has what it was. No optimizer may hold it, and a
    gradient that reaches it was computed from values that no step changes."""
    setattr(old, REPLACED, name)
    if old.requires_grad and old.is_leaf:
        old.register_hook(partial(_stale, name))


def _stale(name: str, _: torch.Tensor) -> None:
    raise OrderError(
        f"parameter '{name}' was replaced by lz.shard_, and the loss was computed from the tensor "
        "that it was before, whose values no step changes: something keeps it beside the model's "
        "table of parameters, such as a list or an attribute set by object.__setattr__. Read it "
        "from the module that has it, each time"
    )


def mark_alike(parameter: torch.Tensor, old: torch.Tensor) -> None:
    """Gives `parameter` the attributes that somebody has set on `old`, whose place it takes, such
    as a `_no_weight_decay` that tells the optimizer's groups apart."""
    own = vars(parameter)
    for name, value in vars(old).items():
        if not name.startswith(_NO_USERS):
            own.setdefault(name, value)


def register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Puts `parameter` where the module has one of that name."""
    if isinstance(module, nn.RNNBase):  # it keeps a list of its own beside the table
        setattr(module, name, parameter)
    else:
        module._parameters[name] = parameter


@dataclass(eq=False)
class Held:
    """`places` are all (module, attribute) that name it; `sharded` is registered there outside of
    compute, `full` inside. `index`: place in the order of registration. `used`: a gradient has come
    since the last reduction. `shell`: what a DTensor has for a storage, beside its rows."""

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
    shell: torch.UntypedStorage | None = None
    mark: Mark | None = None

    def show(self, parameter: nn.Parameter) -> None:
        """Registers `parameter` under every name."""
        for module, attribute in self.places:
            register(module, attribute, parameter)

    def replace(self, parameter: nn.Parameter) -> None:
        """Makes `parameter` the registered one; an optimizer that holds the old one is told so."""
        old = self.sharded
        if old is not parameter:
            mark_alike(parameter, old)
            retire(old, self.name)
        parameter.requires_grad_(old.requires_grad)
        setattr(parameter, HELD, self)
        self.sharded = parameter
        self._align_gradients()
        self.memory = self._memory()
        self.shell = parameter.untyped_storage() if isinstance(parameter, DTensor) else None
        self.show(parameter)

    def _align_gradients(self) -> None:
        """Has gradients that come to the shards themselves (of penalties) split as these are."""
        parameter = self.sharded
        if not isinstance(parameter, DTensor):
            return
        trained = parameter.requires_grad
        parameter.requires_grad_()  # only then torch takes a hook, which outlives a freeze
        parameter.register_hook(self._aligned)
        parameter.requires_grad_(trained)
        Outside(parameter, self.name, self, lambda held: held.segment.unit.sharding.backward.alike)

    def _aligned(self, gradient: torch.Tensor) -> torch.Tensor:
        parameter: Any = self.sharded
        if self.mark is not None:  # autograd adds to the gradient: it is one of its own from now on
            self.mark = self.mark._replace(stands_in=False)
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            split = gradient.redistribute(parameter.device_mesh, parameter.placements)
            # Of a gradient with other strides torch keeps a copy, which torch 2.11 does not split.
            return split.contiguous()
        return gradient

    def check_memory(self) -> None:
        """Raises `OrderError` when the registered parameter was converted or moved.

        `Module.to` and its kin put other memory under the same parameter: an optimizer would step
        that, while gathers go on reading the old. An assignment to `.data` of a DTensor exchanges
        its shell and nothing else.
        """
        now = self._memory()
        if now != self.memory:
            raise OrderError(
                f"parameter '{self.name}' has other memory than lz.shard_ gave it (it is "
                f"{self.sharded.dtype} on {self.sharded.device}, and was {self.dtype} then); "
                "convert or move the model (.to, .double, .bfloat16, .cuda) before lz.shard_, "
                "and copy values into parameters in place"
            )
        if self.shell is not None and self.sharded.untyped_storage()._cdata != self.shell._cdata:
            raise OrderError(
                f"parameter '{self.name}' was assigned to through .data, and torch keeps no such "
                "values in the shards of stages 1 to 3: the old ones are there; write "
                "parameter.copy_(values) under torch.no_grad(), or parameter.mul_ and the like"
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

    def version(self) -> tuple[int, int]:
        """Changes when somebody changes the registered parameter in place, or its memory."""
        parameter: Any = self.sharded
        inner = local(parameter)
        # Other memory of shards is refused by `check_memory`; asking where it lies takes time.
        at = inner.data_ptr() if self.segment.link is None else 0
        return parameter._version + inner._version, at


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
    rows = _by_itself(rows)
    shape = torch.Size(whole.shape)
    stride = torch.empty(shape, device="meta").stride()
    inner = Shard(0) if whole.shape else Replicate()
    placements = [Replicate()] * (mesh.ndim - 1) + [inner]
    made: torch.Tensor = DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return made


@torch.no_grad()
def _by_itself(view: torch.Tensor) -> torch.Tensor:
    """The same contiguous memory as a tensor that begins where its storage does: torch can neither
    copy nor write a DTensor of one that does not."""
    if type(view) is not torch.Tensor or view.is_meta:
        return view
    if not view.numel():
        return torch.empty_like(view)
    start = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[start : start + view.nbytes]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(
        storage, 0, view.shape, view.stride()
    )
