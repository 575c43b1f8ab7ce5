"""Takes the mean error of a quantized layer's outputs out of its bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.modules import QuantizedLayer
from lezero.compress.quantize.parts import at_once


@torch.no_grad()
def corrected_bias(
    layer: nn.Module, quantized: QuantizedLayer, inputs: Inputs, weight: Tensor
) -> nn.Parameter:
    """The bias with which the quantized layer's outputs have the mean that the layer's have.

    Nagel et al., 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction",
    arXiv:1906.04721, equations 16 and 17: E[ỹ] - E[y] = ε E[x] with ε the error of the weights. Of
    a linear layer E[x] is that of all calibration data; of a convolution, whose borders see less,
    both outputs are computed on the first batch.
    """
    assert inputs.first is not None
    bias = quantized.bias
    if inputs.image:
        with inputs.as_called():
            wanted, found = layer.forward(inputs.first), quantized.forward(inputs.first)
        difference = wanted.float() - found.float()
        error_N = difference.transpose(0, 1).flatten(1).mean(1)
    else:
        rows = max(1, at_once(weight.device) // max(1, weight.shape[1]))
        parts = quantized.weight.decoded_rows(rows)
        error_N = torch.cat([(weight[own].float() - made) @ inputs.mean for own, made in parts])
    before = torch.zeros_like(error_N) if bias is None else bias.float()
    kind = weight.dtype if bias is None else bias.dtype
    trains = quantized.trains if bias is None else bias.requires_grad
    return nn.Parameter((before + error_N).to(kind), trains)
