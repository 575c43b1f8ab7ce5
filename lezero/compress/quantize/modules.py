"""Quantized layers: the classes that `nn.Linear`, `nn.Embedding` and convolutions become.

A layer keeps its name, its hooks and its bias; its `weight` becomes a module (see
[Note: a weight is a module] in `weights.py`). Keys of the `state_dict` of a layer:

    weight.packed | weight.codes, weight.scale, weight.zero    the last with zero points only
    bias                                                       as before
    input_scale, input_zero                                    static activations only
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lezero.compress.quantize.accepted import check_type
from lezero.compress.quantize.autocast import cast
from lezero.compress.quantize.foreign_saves import mark_saves
from lezero.compress.quantize.weights import (
    CodedWeight,
    PackedWeight,
    QuantizedWeight,
    keeping_types,
)
from lezero.core.errors import ConfigError
from lezero.nn.wrappers import why_wrapped
from lezero.ops.linear import conv_int8

# What the float layer and the quantized one have of their own. All else on a module stays: hooks,
# the training flag, and whatever a user registered there (a mask, an adapter).
_FLOAT = {"_parameters": ("weight", "bias"), "_buffers": (), "_modules": ()}
SCALES = ("input_scale", "input_zero")
_QUANTIZED = {"_parameters": ("bias",), "_buffers": SCALES, "_modules": ("weight",)}
_ATTRIBUTES = ("float_class", "had_bias", "trains", "x_bits", "x_block")
_SIZES = ("in_features", "out_features")  # of a linear layer, which Conv1D lacks


class QuantizedLayer(nn.Module):
    """Base of the quantized layers. `float_class`: what the layer was; `had_bias`: whether it had
    one; `trains`: whether its weight took gradients."""

    weight: QuantizedWeight
    bias: nn.Parameter | None
    input_scale: Tensor | None
    float_class: type[nn.Module]
    had_bias: bool
    trains: bool

    def __init__(
        self,
        was: nn.Module,
        weight: QuantizedWeight,
        bias: nn.Parameter | None,
        input_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.float_class = type(was)
        self.had_bias = was._parameters.get("bias") is not None
        self.trains = was.get_parameter("weight").requires_grad
        weight.transposed = self.transposed
        self.weight = weight
        self.register_parameter("bias", bias)
        self.register_buffer("input_scale", input_scale)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and isinstance(value, Tensor):  # which torch would take, and no layer
            raise AttributeError(
                "weight: that of a quantized layer is only read; lz.dequantize_(model) gives plain "
                "layers"
            )
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or one that was pickled."""
        super().__setstate__(state)
        mark_saves(quantized_layers)

    def take_over(self, module: nn.Module) -> None:
        """`module`, of class `float_class`, becomes this layer (which it then shares all with)."""
        mark_saves(quantized_layers)
        module.__class__ = type(self)
        for name, value in self.__dict__.items():
            if not name.startswith("_") and name != "training":
                module.__dict__[name] = value
        for kind, own in _FLOAT.items():
            module.__dict__[kind] = {**_others(module, kind, own), **self.__dict__[kind]}

    def give_back(self, weight: nn.Parameter) -> None:
        """Becomes the float layer again, with `weight` (laid out as that class has it)."""
        sizes = _SIZES if self.transposed else ()
        self.__class__ = self.float_class  # type: ignore[assignment]
        bias = {} if issubclass(self.float_class, nn.Embedding) else {"bias": self.bias}
        own = self.__dict__
        for kind, names in _QUANTIZED.items():
            own[kind] = _others(self, kind, names)
        own["_parameters"] = {"weight": weight, **bias, **own["_parameters"]}
        for name in (*_ATTRIBUTES, *sizes):
            own.pop(name, None)

    @property
    def transposed(self) -> bool:
        """Whether the float layer's weight is (K, N): transformers' `Conv1D`."""
        return self.float_class.__name__ == "Conv1D"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        return keeping_types(self, SCALES, lambda: super(QuantizedLayer, self)._apply(fn, recurse))


def _others(module: nn.Module, kind: str, own: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__[kind].items() if name not in own}


class QuantizedLinear(QuantizedLayer):
    """A linear layer (N outputs, K inputs) with an int8, int4, fp8 or nf4 weight.

    `x_bits`: 16, activations stay floats or, with a packed weight, are taken in 16-bit fixed point
    (each to 1.6e-5 of the largest of its block of 128 inputs or fewer); 8, each token is rounded to
    int8 (float8 for an fp8 weight) with a scale of its own or, where `input_scale` is there, with
    that. `x_block`: with 8 bits and a packed weight, how many of a token's inputs share a scale; 0:
    all. Many tokens in bf16 may be multiplied as they are, see `may_round` of `linear_int`. Also
    stands for transformers' `Conv1D`.
    """

    def __init__(
        self,
        was: nn.Module,
        weight: QuantizedWeight,
        bias: nn.Parameter | None,
        input_scale: Tensor | None = None,
        x_bits: int = 16,
        x_block: int = 0,
    ) -> None:
        super().__init__(was, weight, bias, input_scale)
        self.out_features, self.in_features = weight.full_shape
        self.x_bits, self.x_block = x_bits, x_block

    @property
    def W_q(self) -> QuantizedWeight:
        """By this name `peft` knows a layer whose weight it has to ask `dequantize` for (DoRA)."""
        return self.weight

    def dequantize(self) -> Tensor:
        """The weight that the codes stand for, laid out as `float_class` has it."""
        return self.weight.decode()

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        x = cast(input, weight)
        return weight.linear(x, self.bias, self.x_bits, self.input_scale, self.x_block)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        inputs = f"{self.x_bits} bits" + (f" in blocks of {self.x_block}" if self.x_block else "")
        return f"{self.in_features}, {self.out_features}, {bias=}, activations={inputs}"


class QuantizedEmbedding(QuantizedLayer):
    """An embedding whose rows are decoded as they are looked up."""

    def __init__(self, was: nn.Module, weight: QuantizedWeight) -> None:
        super().__init__(was, weight, None)
        self.num_embeddings, self.embedding_dim = weight.full_shape
        self.padding_idx = was.padding_idx

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.rows(input)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def own_names(module: nn.Module) -> list[str]:
    """What somebody registered on a float layer under names that a quantized one needs."""
    names = {*SCALES, *_ATTRIBUTES}
    for kind in (QuantizedLayer, QuantizedLinear, QuantizedEmbedding, QuantizedConv):
        names |= {name for name in vars(kind) if not hasattr(nn.Module, name)}
    names |= {"bias"} if isinstance(module, nn.Embedding) else set()
    names |= set(_SIZES) if type(module).__name__ == "Conv1D" else set()
    names -= {"transposed"} if isinstance(module, nn.Conv1d | nn.Conv2d) else set()  # torch's
    return sorted(name for name in names if getattr(module, name, None) is not None)


def even_padding(
    padding: str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...] | None:
    """Zeros at either end of each dim of a convolution; None where "same" needs one more at one."""
    if not isinstance(padding, str):
        return tuple(padding)
    both = [d * (k - 1) * (padding == "same") for d, k in zip(dilation, kernel, strict=True)]
    return None if any(zeros % 2 for zeros in both) else tuple(zeros // 2 for zeros in both)


class QuantizedConv(QuantizedLayer):
    """A convolution of one or two dims with an 8-bit weight, a scale for each output channel.

    With `input_scale` and `input_zero` (static activations) it computes in int8; else the weight is
    decoded at each use. Outputs lie in memory as inputs do, channels last or contiguous, but for
    those of a weight that says `channels_last`.
    """

    input_zero: Tensor | None
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]

    def __init__(
        self,
        was: nn.Module,
        weight: CodedWeight,
        bias: nn.Parameter | None,
        input_scale: Tensor | None = None,
        input_zero: Tensor | None = None,
    ) -> None:
        super().__init__(was, weight, bias, input_scale)
        self.register_buffer("input_zero", input_zero)
        for name in ("stride", "padding", "dilation", "groups"):
            setattr(self, name, getattr(was, name))

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == len(self.weight.full_shape) - 1:
            return self.forward(input[None])[0]
        assert isinstance(self.weight, CodedWeight)
        x, last = cast(input, self.weight), self.weight.channels_last
        places: dict[str, Any] = {
            name: getattr(self, name) for name in ("stride", "padding", "dilation", "groups")
        }
        if self.input_scale is None or self.input_zero is None:
            convolve = F.conv1d if len(self.weight.full_shape) == 3 else F.conv2d
            bias = self.bias if self.bias is None else self.bias.to(x.dtype)
            wide = self.weight.decoded(x.dtype)
            wide = wide.contiguous(memory_format=torch.channels_last) if last else wide
            return convolve(x, wide, bias, **places)
        check_type(x, "int8")
        scale = self.weight.scale.flatten()
        zeros = even_padding(self.padding, self.weight.full_shape[2:], self.dilation)
        places |= {"padding": zeros, "x_scale": self.input_scale, "x_zero": self.input_zero}
        return conv_int8(x, self.weight.codes, scale, self.bias, **places, channels_last=last)

    def extra_repr(self) -> str:
        static = self.input_scale is not None
        return f"{self.weight.full_shape}, stride={self.stride}, int8 activations={static}"


def check_module(model: object, what: str) -> None:
    """`ConfigError` where `what` got no module, or one that others wrap (a file of it would fit
    no model)."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{what}: got a {type(model).__name__}, allowed is a torch.nn.Module")
    if wrapped := why_wrapped(model):
        raise ConfigError(f"{what}: {wrapped}")


def check_names(model: nn.Module, what: str) -> None:
    """`ConfigError` where a wrapper inside of `model` renames parameters: a file of it would fit no
    other model."""
    for name, module in model.named_modules():
        if wrapped := why_wrapped(module):
            raise ConfigError(
                f"{what}: '{name}' {wrapped}; module.compile() compiles a block and keeps its names"
            )


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Every quantized layer of `model` by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}


__all__ = [
    "CodedWeight",
    "PackedWeight",
    "QuantizedConv",
    "QuantizedEmbedding",
    "QuantizedLayer",
    "QuantizedLinear",
    "QuantizedWeight",
    "check_module",
    "check_names",
    "own_names",
    "quantized_layers",
]
