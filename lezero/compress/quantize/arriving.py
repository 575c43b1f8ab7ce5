"""Quantization of what is just being read: a part of a model of which nobody needs the original,
since its file has it."""

from __future__ import annotations

import math

import torch
from torch import nn

from lezero.compress.quantize.layer import build, quantized_bytes, weight_error
from lezero.compress.quantize.methods import methods
from lezero.compress.quantize.scheme import Scheme
from lezero.compress.quantize.sites import find_sites
from lezero.core.errors import NumericsError


@torch.no_grad()
def quantize_arriving_(part: nn.Module, config: Scheme) -> None:
    """Does to `part` what `quantize_(part, config, objective="size")` does, bit for bit, and keeps
    nothing beside: no originals wait on the disk, nothing is timed, there is no report, and a part
    that raised is half done.

    `config`: of a method that needs no data. Errors: `NumericsError` for weights that are not
    finite, with the layer's name.
    """
    recipe = config.recipe()
    method = methods.get(recipe.method)()
    assert not method.needs_data, f"{recipe.method} needs calibration data"
    for site in find_sites(part, None):
        target = config.target(site)
        if target is None:
            continue
        layers = build(site, target, recipe, method, {})
        error = weight_error(site, layers)
        if not math.isfinite(error):
            raise NumericsError(
                f"'{site.name}' has weights so large that their codes stand for none; take other "
                "weights, as 'bf16'"
            )
        if error >= 1 or quantized_bytes(layers, site.users) >= site.nbytes:
            continue
        for user, layer in zip(site.users, layers, strict=True):
            layer.take_over(user.module)
        site.parameter.data = site.parameter.data.new_empty(0)
