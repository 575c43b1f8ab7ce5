"""Extension point: methods, which find the codes of a linear layer's weight.

Who calls what when: `quantize_` makes one instance of the method that the config names. For each
linear layer, when the calibration data has been through it, it calls `codes` once. Of the inputs'
statistics a method gets what `needs_hessian` asks for; without data `inputs` is None, which only a
method with `needs_data` False sees. Embeddings and convolutions are always rounded to nearest.
Built in: "nearest", "gptq", "awq", "hqq"; a plug-in's: entry point group `lezero.plugins`, name
`quantization-method.<name>`.

`tests/compress/method_conformance.py` holds a test class that a new method's tests inherit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from lezero.compress.quantize.inputs import Inputs
from lezero.core.errors import ConfigError
from lezero.core.registry import Registry
from lezero.ops.quantize import Grid, Quantized


class Method(ABC):
    """Finds codes."""

    needs_data: ClassVar[bool] = False
    needs_hessian: ClassVar[bool] = False
    """Whether `inputs.hessian` is wanted: K × K fp32 numbers of memory for each layer's inputs."""
    scales_channels: ClassVar[bool] = False
    """Whether input channels are scaled beforehand (`scaling.py`)."""

    def suits(self, grid: Grid) -> bool:
        """Whether the method can work on `grid`; others are rounded to nearest."""
        return True

    @abstractmethod
    def codes(self, w_NK: Tensor, grid: Grid, rule: str, inputs: Inputs | None) -> Quantized:
        """Codes and scales on `grid` for an fp32 weight, which may be written to.

        rule: an observer's name, for `weight_scale`.
        """


methods: Registry[type[Method]] = Registry("quantization method", Method)


def check_method(name: str) -> str:
    """A method's name, built in or of a plug-in; `ValueError` names the nearest one."""
    try:
        methods.get(name)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return name
