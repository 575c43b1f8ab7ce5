"""quantize_: every scheme on a small model, undone, tied weights, reports."""

from __future__ import annotations

import pytest
import torch

import lezero as lz
from lezero.compress.quantize.modules import QuantizedLinear, quantized_layers
from lezero.models import Transformer, TransformerConfig


def small(tied: bool = False, seed: int = 0) -> Transformer:
    shape = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}
    config = TransformerConfig(**shape, vocab=128, context=64, tied=tied)
    return Transformer(config, seed=seed)


def tokens(count: int = 2) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(0, 128, (2, 12), generator=made) for _ in range(count)]


def difference(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).norm() / two.norm())


SCHEMES = {
    "int8": (lz.Int8Weight(), 0.02),
    "int8-group": (lz.Int8Weight(group=32, zero_point=True), 0.02),
    "int8-tensor": (lz.Int8Weight(group="tensor"), 0.05),
    "w8a8": (lz.Int8WeightActivation(), 0.03),
    "w8a8-static": (lz.Int8WeightActivation(activations="tensor", smooth=0.5), 0.06),
    "int4": (lz.Int4Weight(group=32), 0.12),
    "int4-a8": (lz.Int4Weight(activations="token", zero_point=False), 0.15),
    "gptq": (lz.Int4Weight(group=32, method="gptq"), 0.12),
    "awq": (lz.Int4Weight(group=32, method="awq"), 0.12),
    "hqq": (lz.Int4Weight(group=32, method="hqq"), 0.12),
    "fp8": (lz.Fp8(), 0.06),
    "nf4": (lz.Nf4(group=32), 0.15),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_stays_near_and_is_undone(name):
    scheme, bound = SCHEMES[name]
    model, data = small(), tokens()
    names = [n for n, _ in model.named_modules()]
    with torch.no_grad():
        wanted = model(data[0])
        assert lz.quantize_(model, scheme, data=data, objective="size") is model
        assert isinstance(model.layers[0].mlp.up_proj, QuantizedLinear)
        found = model(data[0])
        assert 0 < difference(found, wanted) < bound
        assert [n for n, _ in model.named_modules() if not n.endswith(".weight")] == names
        report = lz.quantization_report(model)
        assert report.quality_after == pytest.approx(difference(found, wanted), rel=0.01)
        assert report.bytes_after < 0.5 * report.bytes_before
        lz.dequantize_(model)
        assert type(model.layers[0].mlp.up_proj) is torch.nn.Linear
        assert difference(model(data[0]), wanted) < bound
    assert [n for n, _ in model.named_modules()] == names
    assert not quantized_layers(model)
