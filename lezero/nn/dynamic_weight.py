"""DynamicWeightGenerator: a layer whose weights are generated from its input.

It keeps K kernels and mixes them, for each sample, with weights that a small gate computes from
that sample:

    w(x) = sum_k pi_k(x) W_k,   b(x) = sum_k pi_k(x) b_k,   y = w(x) * x + b(x)

Sources: CondConv (Yang, Bender, Le, Ngiam 2019, arXiv 1904.04971, section 3: the mixture and the
gate r(x) = sigmoid(GlobalAveragePool(x) R)) and Dynamic Convolution (Chen, Dai, Liu, Chen, Yuan,
Liu 2020, arXiv 1912.03458, section 3: a gate of two linear layers and a softmax whose temperature
starts high and is annealed to 1).

The trade-off: K times the parameters of a static layer for nearly its arithmetic. Whether that
pays is measured in `benchmarks/dynamic_weight_digits.py`.

Shape legend: B batch, C channels, S the spatial dims (none, T, or H W), K kernels, P positions
(the product of S), R = C * kernel_size^len(S) inputs of one output.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lezero.core.errors import ConfigError
from lezero.nn.unsized import UnsizedParameter, made_at, refuse


class DynamicWeightGenerator(nn.Module):
    """Applies weights generated from the input; the output has the shape of the input.

    Takes `(B, C, H, W)`, `(B, C, T)`, `(B, C)` and, with `layout="last"`, `(B, T, C)` (also
    `(B, H, W, C)`). On `(B, C, S)` it is a convolution of stride 1 that keeps the size; on
    `(B, C)` it is a linear layer and `kernel_size` has no meaning.

    Without `channels` it takes its size from its first input, and everything that needs its
    parameters before that (an optimizer, a save, a copy, compile, a wrap) is an `OrderError`.
    A module must be given `channels`, called once, or loaded from a state dict.

    Args:
        channels: C. None means: from the first input.
        dims: number of spatial dims, 0, 1 or 2, where `channels` is given. None means 2.
        kernels: K, the kernels to mix.
        kernel_size: odd; the same along each spatial dim.
        gate: "softmax" (Dynamic Convolution) or "sigmoid" (CondConv).
        temperature: of the softmax, kept in the buffer `temperature`; anneal it with
            `module.temperature.fill_(t)`, which does not recompile a compiled model.
        bias: whether to mix K biases too.
        layout: where channels stand: "first" or "last". None reads inputs as torch's convolutions
            do, channels first; since three dims may be `(B, C, T)` or `(B, T, C)`, a module that
            sizes itself from such an input without being told the layout warns how it read it.
        device, dtype: of the parameters.

    Errors: `ConfigError` for a value or an input that is not allowed; `OrderError` as above.
    """

    channels: int | None
    dims: int | None
    temperature: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    gate_hidden_weight: nn.Parameter | None
    gate_hidden_bias: nn.Parameter | None
    gate_weight: nn.Parameter
    gate_bias: nn.Parameter | None

    def __init__(
        self,
        channels: int | None = None,
        *,
        dims: int | None = None,
        kernels: int = 4,
        kernel_size: int = 3,
        gate: Literal["softmax", "sigmoid"] = "softmax",
        temperature: float = 1.0,
        bias: bool = True,
        layout: Literal["first", "last"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_positive("channels", channels, optional=True)
        _check_positive("kernels", kernels)
        _check_positive("kernel_size", kernel_size)
        if kernel_size % 2 == 0:
            raise ConfigError(
                f"kernel_size={kernel_size}: allowed is an odd number, so that the output keeps "
                "the size of the input"
            )
        _check_choice("gate", gate, ("softmax", "sigmoid"))
        _check_choice("layout", layout, ("first", "last", None))
        _check_choice("dims", dims, (0, 1, 2, None))
        if dims is not None and channels is None:
            raise ConfigError(f"dims={dims} needs channels=...; without it, both come from x")
        if not (isinstance(temperature, (int, float)) and 0 < temperature < math.inf):
            raise ConfigError(f"temperature={temperature!r}: allowed is a number above 0")
        self.channels, self.dims = None, None
        self.kernels, self.kernel_size, self.gate, self.layout = kernels, kernel_size, gate, layout
        self._temperature, self._made = float(temperature), made_at()
        self._tensor_type = type(torch.empty(0))
        for name in ("weight", "gate_weight"):
            self.register_parameter(name, UnsizedParameter(self._owner(), True, device, dtype))
        given = {"bias": bias, "gate_bias": gate == "softmax"}
        given |= dict.fromkeys(("gate_hidden_weight", "gate_hidden_bias"), gate == "softmax")
        for name, present in given.items():
            unsized = UnsizedParameter(self._owner(), True, device, dtype) if present else None
            self.register_parameter(name, unsized)
        self.register_buffer("temperature", torch.tensor(self._temperature, device=device))
        if channels is not None:
            self._size(channels, 2 if dims is None else dims)
            self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, shaped like `x`."""
        x_BCS = self._channels_first(x)
        if x_BCS.numel() == 0 and x_BCS.shape[0] != 0:
            return x.clone()
        pi_BK = self.gate_values(x_BCS)
        B, positions = x_BCS.shape[0], math.prod(x_BCS.shape[2:])
        few = x_BCS.ndim == 2 or B == 0 or (B > 1 and positions <= 4 * self.kernels)
        mix = mix_outputs if few else mix_weights
        y_BCS = mix(x_BCS, pi_BK, self._kernel_view(x_BCS), self.bias)
        return y_BCS.movedim(1, -1) if self.layout == "last" else y_BCS

    def reference(self, x: Tensor) -> Tensor:
        """The same function as one plain layer a sample: what `forward` is checked against."""
        x_BCS = self._channels_first(x)
        if x_BCS.numel() == 0:
            return x.clone()
        pi_BK, w_KCC = self.gate_values(x_BCS), self._kernel_view(x_BCS)
        y_BCS = torch.cat([_one(x_BCS[b], pi_BK[b], w_KCC, self.bias) for b in range(len(x))])
        return y_BCS.movedim(1, -1) if self.layout == "last" else y_BCS

    def gate_values(self, x_BCS: Tensor) -> Tensor:
        """pi(x), shape (B, K): the share of each kernel for each sample (channels first)."""
        pooled_BC = x_BCS.flatten(2).mean(2) if x_BCS.ndim > 2 else x_BCS
        if self.gate == "sigmoid":
            return torch.sigmoid(F.linear(pooled_BC, self.gate_weight))
        assert self.gate_hidden_weight is not None
        hidden = F.relu(F.linear(pooled_BC, self.gate_hidden_weight, self.gate_hidden_bias))
        logits_BK = F.linear(hidden, self.gate_weight, self.gate_bias)
        return torch.softmax(logits_BK / self.temperature.to(logits_BK.dtype), dim=-1)

    def reset_parameters(self) -> None:
        """Draws the parameters anew. The K kernels are scaled so that their mixture under an
        even gate starts with the variance of torch's own convolution and linear layers."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        gain = math.sqrt(self.kernels) if self.gate == "softmax" else 2 / math.sqrt(self.kernels)
        with torch.no_grad():
            self.weight.uniform_(-bound * gain, bound * gain)
            if self.bias is not None:
                self.bias.uniform_(-bound * gain, bound * gain)
            for weight, bias in (
                (self.gate_hidden_weight, self.gate_hidden_bias),
                (self.gate_weight, self.gate_bias),
            ):
                if weight is not None:
                    bound_gate = 1 / math.sqrt(weight.shape[-1])
                    weight.uniform_(-bound_gate, bound_gate)
                    if bias is not None:
                        bias.uniform_(-bound_gate, bound_gate)
            self.temperature.fill_(self._temperature)

    def extra_repr(self) -> str:
        size = "unsized" if self.channels is None else f"{self.channels}, dims={self.dims}"
        more = f"kernels={self.kernels}, kernel_size={self.kernel_size}, gate={self.gate}"
        return f"{size}, {more}" + (f", layout={self.layout}" if self.layout else "")

    # Sizing

    def _owner(self, name: str = "") -> str:
        label = f"'{name}' ({type(self).__name__}, " if name else f"{type(self).__name__} ("
        return f"{label}made at {self._made})"

    def _size(self, channels: int, dims: int) -> None:
        """Gives every unsized parameter its shape; the values are not set."""
        hidden = max(channels // 4, 4)
        inner = hidden if self.gate == "softmax" else channels
        shapes = {
            "weight": (self.kernels, channels, channels * self.kernel_size**dims),
            "bias": (self.kernels, channels),
            "gate_hidden_weight": (hidden, channels),
            "gate_hidden_bias": (hidden,),
            "gate_weight": (self.kernels, inner),
            "gate_bias": (self.kernels,),
        }
        with torch.inference_mode(False), torch.no_grad():
            for name, shape in shapes.items():
                old = self._parameters[name]
                if old is not None:
                    new = torch.empty(shape, device=old.device, dtype=old.dtype)
                    self._parameters[name] = nn.Parameter(new, old.requires_grad)
        self.channels, self.dims = channels, dims

    @torch.compiler.disable(
        reason="a DynamicWeightGenerator takes its size from its first call, which must come "
        "before compile: call the model once on a batch, give channels=..., or load a state_dict"
    )
    def _size_from(self, x: Tensor, compiling: bool) -> None:
        if compiling:
            refuse(self._owner(), " and is being compiled or exported")
        if type(torch.empty(0)) is not self._tensor_type:
            refuse(self._owner(), " and cannot take it from a shape-only (fake) run")
        if x.ndim == 3 and self.layout is None:
            warnings.warn(
                f"{self._owner()} reads its input of shape {tuple(x.shape)} as (B, C, T), "
                f"channels first: C={x.shape[1]}, T={x.shape[2]}. Say layout='first' if that is "
                "right, layout='last' if the input is (B, T, C)",
                stacklevel=3,
            )
        with torch.inference_mode(False):
            self._size(x.shape[-1 if self.layout == "last" else 1], x.ndim - 2)
            self.reset_parameters()

    def _channels_first(self, x: Tensor) -> Tensor:
        """Checks the input and returns it as (B, C, S); sizes the module on the first call."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim not in (2, 3, 4):
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ConfigError(
                f"{self._owner()} got {got}: allowed is a floating-point tensor of shape "
                "(B, C, H, W), (B, C, T), (B, C) or, with layout='last', (B, T, C)"
            )
        if self.channels is None:
            if x.shape[-1 if self.layout == "last" else 1] == 0:
                raise ConfigError(f"{self._owner()} got {tuple(x.shape)}: no channels in it")
            self._size_from(x, torch.compiler.is_compiling())
        at = -1 if self.layout == "last" else 1
        if x.shape[at] != self.channels:
            raise ConfigError(
                f"{self._owner()} is sized for {self.channels} channels and got "
                f"{tuple(x.shape)}, whose dim {at} is {x.shape[at]}" + self._layout_hint(x)
            )
        if x.ndim - 2 != self.dims and self.kernel_size != 1:
            raise ConfigError(
                f"{self._owner()} is sized for {self.dims} spatial dims and got {tuple(x.shape)}, "
                f"which has {x.ndim - 2}: use one module a kind of input, or dims={x.ndim - 2}"
            )
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ConfigError(
                f"{self._owner()} holds {self.weight.dtype} and got {x.dtype}: "
                "convert one of them, or use autocast"
            )
        return x.movedim(-1, 1) if self.layout == "last" else x

    def _layout_hint(self, x: Tensor) -> str:
        if self.layout != "last" and x.ndim > 2 and x.shape[-1] == self.channels:
            return "; if the input is (B, T, C), say layout='last'"
        if self.layout == "last" and x.shape[1] == self.channels:
            return "; if the input is (B, C, T), say layout='first'"
        return ""

    def _kernel_view(self, x_BCS: Tensor) -> Tensor:
        """The kernels as (K, C, C, *taps) for the spatial dims of `x_BCS`."""
        dims, size = x_BCS.ndim - 2, self.kernel_size if self.dims else 1
        return self.weight.unflatten(2, (x_BCS.shape[1], *[size] * dims))

    # Torch's protocols, while unsized

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DynamicWeightGenerator:
        if self.channels is not None:
            return super()._apply(fn, recurse)
        unsized = dict(self._parameters)
        for name, old in unsized.items():
            if isinstance(old, UnsizedParameter):
                like = fn(torch.empty(0, device=old.device, dtype=old.dtype))
                if like.device.type == "cpu" and like.is_shared():
                    refuse(self._owner())
                unsized[name] = old.again(like)
        self._parameters = {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters = unsized
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.channels is None:
            refuse(self._owner(prefix.removesuffix(".")))
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Loading sizes an unsized module; what does not fit is reported as torch reports it."""
        weight = state_dict.get(prefix + "weight")
        if self.channels is None and isinstance(weight, Tensor) and weight.ndim == 3:
            channels, taps = weight.shape[1], weight.shape[2] // max(weight.shape[1], 1)
            sizes = [d for d in (0, 1, 2) if self.kernel_size**d == taps]
            if channels and sizes:
                self._size(channels, sizes[0])
                self.reset_parameters()
        super()._load_from_state_dict(state_dict, prefix, *args)


# [Note: Two fast paths] Mixing the weights first runs one convolution with a group a sample
# (CondConv, section 3) and moves B * C * R generated weights through memory; mixing the outputs of
# the K kernels runs K dense convolutions and moves none. The second wins where a sample has few
# positions: (B, C) is one GEMM against B matrix-vector products. Measured, they meet at about 4 K
# positions; one sample alone is best mixed first, which is what the loop does. Unfold + bmm was
# measured too and is no third way: docs/dynamic-weights.md.


def mix_weights(x_BCS: Tensor, pi_BK: Tensor, w_KCC: Tensor, b_KC: Tensor | None) -> Tensor:
    """One convolution whose groups are the samples."""
    B, C = x_BCS.shape[:2]
    w = (pi_BK @ w_KCC.flatten(1)).unflatten(1, w_KCC.shape[1:]).flatten(0, 1)
    b = None if b_KC is None else (pi_BK @ b_KC).flatten()
    folded = x_BCS.reshape(1, B * C, *x_BCS.shape[2:])
    if torch.compiler.is_compiling():
        # Inductor (torch 2.13) cannot order the strides of this view when batch and space are
        # both dynamic ("cannot determine truth value of Relational"); of a computed copy it can
        # (a bare clone is folded away).
        folded = (folded * 1).clone()
    y = _conv(folded, w, b, groups=B)
    return y.reshape(x_BCS.shape)


def mix_outputs(x_BCS: Tensor, pi_BK: Tensor, w_KCC: Tensor, b_KC: Tensor | None) -> Tensor:
    """All K kernels applied to every sample, then mixed: for few positions."""
    B, K = x_BCS.shape[0], w_KCC.shape[0]
    y = _conv(x_BCS, w_KCC.flatten(0, 1), None if b_KC is None else b_KC.flatten())
    y_BKP = y.reshape(B, K, math.prod(x_BCS.shape[1:]))
    return torch.bmm(pi_BK.unsqueeze(1).to(y_BKP.dtype), y_BKP).reshape(x_BCS.shape)


def _one(x_CS: Tensor, pi_K: Tensor, w_KCC: Tensor, b_KC: Tensor | None) -> Tensor:
    """The formula for one sample; returns (1, C, S)."""
    w = (pi_K @ w_KCC.flatten(1)).unflatten(0, w_KCC.shape[1:])
    return _conv(x_CS.unsqueeze(0), w, None if b_KC is None else pi_K @ b_KC)


def _conv(x: Tensor, w: Tensor, b: Tensor | None, groups: int = 1) -> Tensor:
    if x.ndim == 2:
        return F.linear(x, w, b)
    conv = F.conv1d if x.ndim == 3 else F.conv2d
    return conv(x, w, b, padding=w.shape[-1] // 2, groups=groups)


def _check_positive(name: str, value: object, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}: allowed is a whole number of at least 1")


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: allowed is {', '.join(map(repr, allowed))}")
