"""FLOPs, bytes and calls of a function, its backward pass included, without running it.

The function runs on fake tensors (shapes without numbers), so a model of any size is counted in
milliseconds and nothing is allocated; parameters, gradients, buffers and random numbers stay as
they were, and so do attributes of the modules and optimizers that the function names or is given.
What it reaches through objects of another kind keeps the fake tensors that it assigns. Products and
convolutions are counted by torch's own formulas (`flop_registry`); the attention and the LSTM of
the CPU, which that table lacks, are added here. A multiply-add counts as two, attention as if every
pair were computed, also under a causal mask (the usual convention).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from lezero.core.errors import ConfigError, LeZeroError
from lezero.profiler.untouched import untouched, untouched_random

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class OpRow:
    """All calls of one operation in one phase. `bytes`: every tensor read or written once."""

    op: str
    phase: str
    kind: str
    calls: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class FlopCount:
    """What one call does. `rows` holds the operations that do work, most FLOPs first."""

    rows: tuple[OpRow, ...]

    @property
    def total(self) -> int:
        """FLOPs of everything counted: products, convolutions and attention."""
        return sum(row.flops for row in self.rows)

    @property
    def forward(self) -> int:
        return sum(row.flops for row in self.rows if row.phase == FORWARD)

    @property
    def backward(self) -> int:
        return self.total - self.forward

    @property
    def attention(self) -> int:
        """FLOPs inside fused attention."""
        return sum(row.flops for row in self.rows if row.kind == "attention")

    @property
    def matmul(self) -> int:
        """FLOPs of matrix products and convolutions."""
        return sum(row.flops for row in self.rows if row.kind == "matmul")

    @property
    def bytes(self) -> int:
        """Bytes moved if every operation reads its inputs and writes its outputs once."""
        return sum(row.bytes for row in self.rows)

    def table(self, limit: int = 20) -> str:
        """Lines for people: the operations with most FLOPs, then most bytes."""
        lines = [f"{'operation':<52}{'phase':<10}{'calls':>7}{'GFLOP':>11}{'MB':>11}"]
        for row in self.rows[:limit]:
            figures = f"{row.calls:>7}{row.flops / 1e9:>11.3f}{row.bytes / 1e6:>11.2f}"
            lines.append(f"{row.op:<52}{row.phase:<10}{figures}")
        lines.append(f"{'all':<69}{self.total / 1e9:>11.3f}{self.bytes / 1e6:>11.2f}")
        return "\n".join(lines)


def count_flops(
    function: Callable[..., Any], *args: Any, backward: bool = True, **kwargs: Any
) -> FlopCount:
    """Counts one call `function(*args, **kwargs)`; a module is a function too.

    backward: also counts the gradients of everything the result depends on and that wants them (a
    result that is no scalar gets a gradient of ones; nothing to differentiate: forward only). Real
    tensors in `args` stand for their shapes and are not touched.

    Raises `ConfigError` when the function needs the numbers themselves (`.item()`, a data-dependent
    shape), which fake tensors do not have.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    counter = _Counter(fake.from_tensor)
    try:
        with untouched(function, (args, kwargs)), untouched_random(), fake, counter:
            with nullcontext() if backward else torch.no_grad():
                result = function(*args, **kwargs)
            if backward:
                counter.phase = BACKWARD
                counter.differentiate(result)
    except LeZeroError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or ["no message"])[0]
        raise ConfigError(
            f"FLOPs not counted: the function does not run on tensors without numbers "
            f"({type(error).__name__}: {first})"
        ) from error
    rows = sorted(counter.rows(), key=lambda row: (-row.flops, -row.bytes, row.op, row.phase))
    return FlopCount(tuple(rows))


class _Counter(TorchDispatchMode):
    """Sees every operation that reaches a kernel. `to_fake` makes the shape of a real tensor."""

    def __init__(self, to_fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._to_fake = to_fake
        self.phase = FORWARD
        self._seen: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if packet not in flop_registry and packet not in _ATTENTION:
            # Without autograd, composite operations arrive here whole: look at their parts.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if func._schema.is_mutable:
            # The fake mode would write through to a real tensor of one element (a step counter).
            args, kwargs = tree_map(self._unreal, (args, kwargs))
        result = func(*args, **kwargs)
        if func.is_view or packet is torch.ops.aten.detach:
            return result
        kind, flops = "other", 0
        if packet in _ATTENTION:
            kind, flops = "attention", _ATTENTION[packet](*args, **kwargs)
        elif packet in _LSTM:
            kind, flops = "matmul", _LSTM[packet](*args, **kwargs)
        elif packet in flop_registry:
            kind = "attention" if "attention" in str(packet) else "matmul"
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        seen = self._seen[str(func), self.phase, kind]
        seen[0] += 1
        seen[1] += int(flops)
        seen[2] += sum(map(_nbytes, tree_leaves((args, kwargs, result))))
        return result

    def _unreal(self, leaf: Any) -> Any:
        real = isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
        return self._to_fake(leaf) if real else leaf

    def differentiate(self, result: Any) -> None:
        """Backward to every leaf, without adding to anybody's `.grad`."""
        outputs = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        ]
        leaves = list(_leaves([output.grad_fn for output in outputs]))
        if leaves:
            ones = [torch.ones_like(output) for output in outputs]
            torch.autograd.grad(outputs, leaves, ones, allow_unused=True)

    def rows(self) -> Iterator[OpRow]:
        for (op, phase, kind), (calls, flops, size) in self._seen.items():
            yield OpRow(op, phase, kind, calls, flops, size)


def _leaves(functions: list[Any]) -> Iterator[torch.Tensor]:
    """The tensors that a backward pass from these functions ends in."""
    seen: set[Any] = set()
    while functions:
        function = functions.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            yield function.variable
        functions.extend(item[0] for item in function.next_functions)


def _nbytes(leaf: Any) -> int:
    """Bytes of a tensor; what is expanded (stride 0) is there once."""
    if not isinstance(leaf, torch.Tensor):
        return 0
    count = 1
    for size, stride in zip(leaf.shape, leaf.stride(), strict=True):
        count *= size if stride or size == 0 else 1
    return count * leaf.element_size()


def _attention_forward(q_BHTD: Any, k_BHSD: Any, v_BHSE: Any, *_: Any, **__: Any) -> int:
    """Scores (T·S·D) and their product with the values (T·S·E), for each query head."""
    batch, heads, length, width = q_BHTD.shape
    return 2 * batch * heads * length * k_BHSD.shape[2] * (width + v_BHSE.shape[3])


def _attention_backward(
    grad: Any, q_BHTD: Any, k_BHSD: Any, v_BHSE: Any, *_: Any, **__: Any
) -> int:
    """Scores again, then gradients of scores, values, queries and keys: five products for two."""
    batch, heads, length, width = q_BHTD.shape
    pairs = 2 * batch * heads * length * k_BHSD.shape[2]
    return pairs * (3 * width + 2 * v_BHSE.shape[3])


def _attention_table() -> dict[Any, Callable[..., int]]:
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }


_ATTENTION = _attention_table()


def _lstm_forward(x_TNI: Any, w_GI: Any, w_GH: Any, *_: Any, **__: Any) -> int:
    """Of each step, the input's and the hidden state's products with the weights of all gates."""
    return 2 * x_TNI.shape[0] * x_TNI.shape[1] * (w_GI.numel() + w_GH.numel())


def _lstm_backward(*args: Any, **_: Any) -> int:
    return 2 * _lstm_forward(*args)


_LSTM = {
    torch.ops.aten.mkldnn_rnn_layer: _lstm_forward,
    torch.ops.aten.mkldnn_rnn_layer_backward: _lstm_backward,
}
