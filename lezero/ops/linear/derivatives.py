"""How the ops of this package are differentiated.

Gradients come from a formula that saves nothing but the weight's codes (`torch.library` would do
as much). Whatever else torch can ask for (forward mode, `torch.func` and its nestings) goes by the
float layer that the op stands for:

    y = op(x, bias) + layer(x - x₀, bias - bias₀)        x₀, bias₀: the same without derivatives

The differences are exact zeros, so y is what the op gives; their derivatives, of any order and
in any mode, are those of the decoded weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lezero.ops.transforms import transformed

Args = tuple[Any, ...]


def differentiate(
    library: torch.library.Library,
    name: str,
    *,
    save: Callable[[Any, Args], None],
    backward: Callable[[Any, Tensor], tuple[Tensor | None, ...]],
    float_layer: Callable[[Tensor, Tensor | None, Args], Tensor],
    bias_at: int,
) -> None:
    """Gives the op `lezero::name`, whose first argument is x, its derivatives.

    save: puts what `backward` needs into ctx. float_layer: of (x, bias, arguments), the layer with
    the decoded weight. bias_at: the place of the bias among the arguments. The dispatcher leaves
    out the last arguments where they are the defaults.
    """
    op = getattr(torch.ops.lezero, name).default

    def below(keys: torch._C.DispatchKeySet, args: Args) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = op.redispatch(keys & torch._C._after_autograd_keyset, *args)
        return found

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: torch._C.DispatchKeySet, *args: Any) -> Tensor:
            save(ctx, args)
            return below(keys, args)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return None, *backward(ctx, grad)

    def by_float_layer(keys: torch._C.DispatchKeySet, args: Args) -> Tensor:
        x, bias = args[0], args[bias_at]
        plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
        change = None if bias is None else (bias - bias.detach()).to(x.dtype)
        return below(keys, tuple(plain)) + float_layer(x - x.detach(), change, args)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any) -> Tensor:
        if transformed():
            return by_float_layer(keys, args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            found: Tensor = Formula.apply(keys, *args)
            return found
        return below(keys, args)

    library.impl(name, kernel, "Autograd", with_keyset=True)


def bias_grad(ctx: Any, grad: Tensor) -> Tensor | None:
    """Of a linear layer's bias; `ctx.bias` is its type, or None."""
    if ctx.bias is None:
        return None
    return grad.reshape(-1, grad.shape[-1]).float().sum(0).to(ctx.bias)
