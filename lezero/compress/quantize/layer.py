"""Makes the quantized layers of one weight, beside the float ones, and puts them in their place."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lezero.compress.quantize.bias_correction import corrected_bias
from lezero.compress.quantize.inputs import Inputs, together
from lezero.compress.quantize.journal import Journal
from lezero.compress.quantize.methods import Method, Nearest
from lezero.compress.quantize.modules import (
    SCALES,
    QuantizedConv,
    QuantizedEmbedding,
    QuantizedLayer,
    QuantizedLinear,
)
from lezero.compress.quantize.observers.scales import storable, weight_scale
from lezero.compress.quantize.parts import at_once
from lezero.compress.quantize.scheme import Recipe, Target
from lezero.compress.quantize.sites import Site, User
from lezero.compress.quantize.weights import CodedWeight, PackedWeight, QuantizedWeight
from lezero.ops.linear import lies_channels_last
from lezero.ops.quantize import Grid, Quantized

# GPTQ solves with the Hessian for each part, so its parts are 128 MiB in fp32.
_AT_ONCE_WITH_HESSIAN = 1 << 25
# Tokens for each input of a head that is an embedding too, from which methods look at it.
_INPUTS_OF_A_HEAD = 4
# Below this mean of squares, those count that fp32 loses, which are under 2**-126.
_LEAST_SQUARE = 2.0**-86


@torch.no_grad()
def build(
    site: Site, target: Target, recipe: Recipe, method: Method, inputs: dict[str, Inputs]
) -> list[QuantizedLayer]:
    """One quantized layer for each user of the site, sharing one weight; nothing changes yet.

    `inputs` by the name of the user; those that no data went through are missing.
    """
    weight = site.weight()
    seen = _all_inputs(site, inputs)
    flat = weight.flatten(1)
    grid = target.grid
    if grid.scale_dtype == "fp16":
        wide = replace(grid, scale_dtype="fp32")
        grid = storable(grid, weight_scale(flat, wide, "minmax")[0])
    given = seen is not None or not method.needs_data
    few = method.needs_data and _too_few(site, flat, seen)
    if site.kind != "linear" or not given or few or not method.suits(grid):
        method = Nearest()
    statistics = seen if site.kind == "linear" else None
    made = _codes(method, flat, grid, recipe.scales, statistics)
    held: QuantizedWeight
    if target.has_kernel and site.kind != "conv":
        held = PackedWeight.of(made, grid, weight.dtype)
    else:
        held = CodedWeight.of(made, grid, weight.shape, weight.dtype)
        held.channels_last = lies_channels_last(weight)
    layers = [_layer(user, held, target, inputs.get(user.name)) for user in site.users]
    if recipe.bias_correction:
        for user, layer in zip(site.users, layers, strict=True):
            known = inputs.get(user.name)
            if known is not None and user.kind != "embedding":
                layer.bias = corrected_bias(user.module, layer, known, weight)
    return layers


def _too_few(site: Site, w_NK: Tensor, inputs: Inputs | None) -> bool:
    """Whether a method would fit the few inputs of a head at the price of what else the weight is:
    rows that are looked up, of which it knows nothing."""
    looked_up = any(user.kind == "embedding" for user in site.users)
    return looked_up and inputs is not None and inputs.count < _INPUTS_OF_A_HEAD * w_NK.shape[1]


def _codes(method: Method, w_NK: Tensor, grid: Grid, rule: str, inputs: Inputs | None) -> Quantized:
    """The method's codes for a weight of any float type, some rows at a time, since none depends on
    another: no fp32 copy of a whole vocabulary is made."""
    if inputs is not None:
        inputs.weigh(w_NK)
    if grid.group == "tensor":
        return method.codes(w_NK.to(torch.float32, copy=True), grid, rule, inputs)
    # Room for all of them first: scales that stay, some after each part, would lie between the
    # large tensors that go, and the allocator could not use those holes again.
    codes = torch.empty(w_NK.shape, dtype=grid.code_dtype, device=w_NK.device)
    scale = torch.empty(grid.scale_shape(w_NK.shape), device=w_NK.device, dtype=torch.float32)
    whole = Quantized(codes, scale, torch.empty_like(scale) if grid.zero_point else None)
    most, first = _AT_ONCE_WITH_HESSIAN if method.needs_hessian else at_once(w_NK.device), 0
    for part in w_NK.split(max(1, most // max(1, w_NK.shape[1]))):
        made = method.codes(part.to(torch.float32, copy=True), grid, rule, inputs)
        for all_rows, some in zip(whole, made, strict=True):
            assert (all_rows is None) == (some is None), f"zero points are not those of {grid}"
            if all_rows is not None and some is not None:
                all_rows[first : first + len(part)] = some
        first += len(part)
    return whole


def _all_inputs(site: Site, inputs: dict[str, Inputs]) -> Inputs | None:
    """Of all layers that the weight is multiplied in, in one; None where no data came."""
    users = [user.name for user in site.users if user.kind == site.kind]
    found = {id(known): known for name in users if (known := inputs.get(name)) is not None}
    return together(list(found.values())) if found else None


def linear_user(site: Site, seen: Container[str]) -> User:
    """The layer that counts for the weight: of a tied one a linear layer, the first whose name is
    in `seen`, those that data came through."""
    fitting = [user for user in site.users if user.kind == site.kind]
    return next((user for user in fitting if user.name in seen), fitting[0])


def _layer(
    user: User, weight: QuantizedWeight, target: Target, inputs: Inputs | None
) -> QuantizedLayer:
    was: Any = user.module
    if user.kind == "embedding":
        return QuantizedEmbedding(was, weight)
    static = target.activations == "tensor" and inputs is not None
    scale, zero = _static_scale(inputs, user.kind == "conv") if static else (None, None)
    if user.kind == "conv":
        assert isinstance(weight, CodedWeight)
        return QuantizedConv(was, weight, was.bias, scale, zero)
    bits = 16 if target.activations == "float" else 8
    return QuantizedLinear(was, weight, was.bias, scale, bits)


def _static_scale(inputs: Inputs | None, with_zero: bool) -> tuple[Tensor, Tensor | None]:
    """Scale (and zero point 0 … 255) of a layer's inputs from what its observer saw."""
    assert inputs is not None
    assert inputs.observer is not None
    low, high = inputs.observer.range(256, symmetric=not with_zero)
    least = torch.finfo(torch.float32).tiny
    if not with_zero:
        return (torch.maximum(high, -low) / 127).clamp(min=least).float(), None
    scale = ((high - low) / 255).clamp(min=least).float()
    return scale, torch.round(-low / scale).clamp(0, 255).to(torch.int32)


def adopt(site: Site, layers: list[QuantizedLayer], journal: Journal) -> None:
    """The site's layers become the quantized ones; their weight goes from memory to the journal."""
    for user, layer in zip(site.users, layers, strict=True):
        journal.remember(user.module)
        layer.take_over(user.module)
    journal.release(site.parameter)


def quantized_bytes(layers: list[QuantizedLayer], users: tuple[User, ...]) -> int:
    """Bytes of the shared weight, and of what is new beside it."""
    new = [
        layer.bias
        for layer, user in zip(layers, users, strict=True)
        if layer.bias is not None and user.module._parameters.get("bias") is None
    ]
    held = [layer._buffers.get(name) for layer in layers for name in SCALES]
    scales = [x for x in held if x is not None]
    return layers[0].weight.nbytes + sum(x.nbytes for x in [*new, *scales])


def relative_error(wanted: Tensor, found: Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖ in fp32, in parts so that no whole fp32 copy is made; the host
    waits once, for the sums. In fp64 once more where fp32 does not hold the squares.

    Places where both are the same infinity (what a mask leaves) or NaN do not count. Infinite where
    one alone is not finite, and where `wanted` is nothing but zeros and `found` is not.
    """
    return _relative_error(lambda: _in_parts(wanted, found))


def _in_parts(wanted: Tensor, found: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    most = at_once(wanted.device)
    return zip(*(x.flatten().split(most) for x in (wanted, found)), strict=True)


def _relative_error(pairs: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> float:
    """Of parts, `wanted` and `found`."""
    wrong, whole, count = _squares(pairs(), torch.float32)
    if not math.isfinite(wrong + whole) or whole < count * _LEAST_SQUARE:
        wrong, whole, _ = _squares((_finite_places(*pair) for pair in pairs()), torch.float64)
    if not math.isfinite(wrong + whole):
        return math.inf
    if whole == 0:
        return 0.0 if wrong == 0 else math.inf
    return float((wrong / whole) ** 0.5)


def _squares(pairs: Iterable[tuple[Tensor, Tensor]], kind: torch.dtype) -> tuple[float, float, int]:
    """‖found - wanted‖², ‖wanted‖² and how many numbers there are; squares that the type `kind`
    does not hold are infinite, or 0."""
    sums, count = torch.zeros(2, dtype=torch.float64, device="cpu"), 0
    for wanted, found in pairs:
        both = ((found.to(kind) - wanted.to(kind)).square(), wanted.to(kind).square())
        sums = sums.to(wanted.device)
        sums += torch.stack([x.sum(dtype=torch.float64) for x in both])
        count += wanted.numel()
    wrong, whole = sums.tolist()
    return wrong, whole, count


def _finite_places(wanted: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the places where they are not finite and the same."""
    same = ~torch.isfinite(wanted) & ((wanted == found) | (wanted.isnan() & found.isnan()))
    return wanted[~same], found[~same]


def weight_error(site: Site, layers: list[QuantizedLayer]) -> float:
    """Relative error of the weight."""
    w, held = site.weight(), layers[0].weight
    rows = max(1, at_once(w.device) // max(1, w[0].numel()))

    def pairs() -> Iterable[tuple[Tensor, Tensor]]:
        for own, found in held.decoded_rows(rows):
            yield from _in_parts(w[own], found)

    return _relative_error(pairs)


def output_error(site: Site, layer: QuantizedLayer, wanted: Tensor, found: Tensor) -> float:
    """Relative error of the layer's outputs, of its weight where those are nothing but zeros;
    infinite where an output is not finite that was."""
    error = relative_error(wanted, found)
    if math.isfinite(error) or bool(wanted.any()) or not bool(found.isfinite().all()):
        return error
    return weight_error(site, [layer])
