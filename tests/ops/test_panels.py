"""Few tokens through one panel of a weight after the other, or two at a time."""

from __future__ import annotations

import pytest
import torch

from lezero.ops.decoder import Decoder, Ending
from lezero.ops.decoder.native import NATIVE
from lezero.ops.decoder.panels import faster, settle_panels
from tests.ops.test_decoder import FORMS, PLAIN, layers, poisoned, tables, weight


def made(form: str) -> Decoder:
    torch.manual_seed(0)
    ending = Ending(torch.rand(PLAIN.dim) + 0.5, weight(333, PLAIN.dim, True, **FORMS[form]))
    return Decoder(PLAIN, layers(PLAIN, form), ending)


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("form", FORMS)
def test_sums_are_the_same_to_the_bit(form, kernel, monkeypatch):
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    decoder, angles = made(form), tables(PLAIN)
    table = torch.arange(20, dtype=torch.int32)[None]
    for tokens in (1, 2, 3, 4, 5, 6, 7):
        x = torch.randn(tokens, PLAIN.dim)
        chunk = torch.tensor([[0, tokens, 0]], dtype=torch.int32)
        rows = torch.arange(tokens, dtype=torch.int32)
        found = []
        for decoder.panels in (0, 1, 2):
            given = (x.clone(), *angles, chunk, table, poisoned(PLAIN))
            found.append(decoder.logits(*given, rows)[0])
        assert found[0].isfinite().all()
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_a_decoder_takes_what_was_faster():
    decoder = made("W4A8 in blocks")
    took = settle_panels(decoder)
    assert set(took) == {1, 2}
    assert min(took.values()) > 0
    assert decoder.panels in (0, min(took, key=lambda panels: took[panels]))


def test_default_types_and_devices_do_not_matter():
    decoder, before = made("bf16"), torch.get_default_dtype()
    took: list[tuple[torch.dtype, ...]] = []
    real = decoder.logits

    def noting(*given):
        took.append(tuple((x.dtype, x.device.type) for x in given if isinstance(x, torch.Tensor)))
        return real(*given)

    decoder.logits = noting
    torch.set_default_dtype(torch.bfloat16)
    try:
        settle_panels(decoder)
    finally:
        torch.set_default_dtype(before)
    kinds = [torch.float32] * 3 + [torch.int32] * 3
    assert set(took) == {tuple((kind, "cpu") for kind in kinds)}


def test_a_decoder_without_kernels_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(type(NATIVE), "available", lambda self: False)
    decoder = made("bf16")
    assert settle_panels(decoder) == {}
    assert decoder.panels == 0


def test_only_a_clear_win_counts():
    assert faster([1.0, 1.1, 1.2], [1.3, 1.4, 9.0]) == 1
    assert faster([1.3, 1.4, 9.0], [1.0, 1.1, 1.2]) == 2
    assert faster([1.0, 1.01], [1.02, 1.03]) == 0
    assert faster([1.0, 9.0, 9.0], [2.0, 2.0, 2.0]) == 0  # at its best alone
