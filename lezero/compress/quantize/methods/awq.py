"""Activation-aware weight quantization."""

from __future__ import annotations

from lezero.compress.quantize.methods.method import methods
from lezero.compress.quantize.methods.nearest import Nearest


@methods.register("awq")
class AWQ(Nearest):
    """Rounds to nearest after making the channels that matter larger.

    Lin et al., 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and
    Acceleration", arXiv:2306.00978. Input channel j of a layer is multiplied by s_j in the weight
    and divided by it in the layer before (equation 2); s = s_X^α with s_X the mean magnitude of the
    channel's activations, and α the best of 20 by the error of the layers' outputs (equations 4 and
    5). Where nothing before a layer in its block can take the division, it is rounded as it is.
    Ranges are narrowed (the paper's clipping) with `scales="mse"`, in which a weight's error counts
    with the mean square of its input.
    """

    needs_data = True
    scales_channels = True
