"""`nn.TransformerEncoder` puts padded batches into nested tensors, which quantized layers refuse.

torch looks at the first layer alone, so an encoder whose others are quantized would fail in its
words. Encoders that hold quantized layers go without; one of which a part alone was given to
`lz.quantize_` is not seen from there, and its layers say what to do (`check_type`).
"""

from __future__ import annotations

from torch import nn

from lezero.compress.quantize.modules import quantized_layers

_LEFT = "lezero_left_nested_tensors"


def leave_nested(model: nn.Module) -> None:
    """After layers were quantized."""
    for part in model.modules():
        if getattr(part, "use_nested_tensor", False) and quantized_layers(part):
            part.use_nested_tensor = False  # type: ignore[assignment]
            part.__dict__[_LEFT] = True


def take_nested(model: nn.Module) -> None:
    """After all of them are plain again: where it was left."""
    for part in model.modules():
        if part.__dict__.pop(_LEFT, False):
            part.use_nested_tensor = True  # type: ignore[assignment]
