"""Ctrl-C at the worst moments: a model is quantized as a whole, or as it was."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize import capture, folds, journal, opened, replay, verb
from tests.compress.test_bad_input import small, tokens, unchanged
from tests.compress.test_nested import MASK, encoder

pytestmark = pytest.mark.usefixtures("ctrl_c")
AWQ = lz.Int4Weight(group=32, method="awq")
WHERE = {
    "a trial's weights": (folds, "mode_of"),
    "values that are saved": (journal.Journal, "save_values"),
    "blocks that compute something else": (replay.Replay, "_replaced"),
    "hooks": (capture.Capture, "watching"),
}


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("name", WHERE)
def test_nothing_is_left_half_done(name: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place, what = WHERE[name]
    real, calls = getattr(place, what), []

    def pressing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            press()
        return real(*args, **kwargs)

    monkeypatch.setattr(place, what, pressing)
    model = small().train()
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        lz.quantize_(model, AWQ, data=tokens(), objective="size")
    assert len(calls) >= nth
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_is_done_stays_done(monkeypatch: pytest.MonkeyPatch) -> None:
    real, model = verb.ledger.record, small()

    def pressing(*args: Any) -> None:
        press()
        real(*args)

    monkeypatch.setattr(verb.ledger, "record", pressing)
    with pytest.raises(KeyboardInterrupt):
        lz.quantize_(model, AWQ, data=tokens(), objective="size")
    assert lz.quantization_report(model).layers
    with pytest.raises(lz.OrderError, match="quantized already"):
        lz.quantize_(model, AWQ, data=tokens())


def test_an_encoder_that_is_done_takes_padded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    real, model, x = verb.ledger.record, encoder(), torch.randn(2, 6, 64)

    def pressing(*args: Any) -> None:
        press()
        real(*args)

    monkeypatch.setattr(verb.ledger, "record", pressing)
    with pytest.raises(KeyboardInterrupt):
        lz.quantize_(model, lz.Int8Weight(), filter="!layers.0.*", objective="size")
    assert lz.quantization_report(model).layers
    with torch.no_grad():
        assert model(x, src_key_padding_mask=MASK).shape == x.shape


@pytest.mark.parametrize("nth", [1, 2])
def test_a_metric_is_not_waited_for(nth: int) -> None:
    seen: list[str] = []

    def metric(model: nn.Module) -> float:
        seen.append("begun")
        if len(seen) == nth:
            press()
            seen.append("waited")
        return 1.0

    model = small()
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        lz.quantize_(model, AWQ, data=tokens(), objective="size", metric=metric, budget=0.1)
    assert seen == ["begun"] * nth


def test_pressed_twice_the_model_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    real, seen = nn.Linear.forward, []

    def slow(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        if len(seen) == 1:
            press()
            seen.append(2)
            press()
            seen.append(3)
        return real(self, x)

    monkeypatch.setattr(nn.Linear, "forward", slow)
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        lz.quantize_(model, lz.Int8Weight(), data=torch.randn(4, 64), objective="size")
    assert seen == [1, 2]


def test_dequantizing_is_whole_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = lz.quantize_(small(), lz.Int8Weight(), objective="size"), []
    real = verb._parameter

    def pressing(layer: Any) -> nn.Parameter:
        calls.append(1)
        if len(calls) == 3:
            press()
        return real(layer)

    monkeypatch.setattr(verb, "_parameter", pressing)
    with pytest.raises(KeyboardInterrupt):
        lz.dequantize_(model)
    assert len(calls) > 3
    with pytest.raises(lz.OrderError, match="no layer of this model is quantized"):
        lz.dequantize_(model)


@pytest.mark.parametrize("what", ["rebuild_", "assign_from"])
def test_a_folder_is_loaded_into_a_model_whole(
    what: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other, x = small(), small(), tokens()[0]
    lz.quantize_(model, lz.Int4Weight(group=32), objective="size")
    lz.save_quantized(model, tmp_path / "q")
    real = getattr(opened, what)

    def pressing(*args: Any) -> None:
        if other in args:  # not where it is tried
            press()
        real(*args)

    monkeypatch.setattr(opened, what, pressing)
    with pytest.raises(KeyboardInterrupt):
        lz.load_quantized(tmp_path / "q", other)
    with torch.no_grad():
        assert torch.equal(other.eval()(x), model.eval()(x))
