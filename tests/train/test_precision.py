"""What precision "auto" is on a processor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.core import device
from lezero.core.decisions import Decisions
from lezero.train import precision
from lezero.train.engine import Engine


def made():
    model = nn.Linear(2, 1)
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_auto_precision_is_a_recorded_decision():
    engine = made()
    record = engine.decisions.records["precision"]
    assert record.chosen in ("bf16", "fp16", "fp32")
    assert record.reason
    assert not record.overridden


@pytest.mark.parametrize(("fp32", "chosen"), [(0.95, "bf16"), (0.8, "fp32"), (2.0, "bf16")])
def test_auto_takes_bf16_only_where_it_is_not_slower(monkeypatch, fp32, chosen):
    monkeypatch.setattr(precision, "instruction_sets", lambda: ("avx512_bf16",))
    monkeypatch.setattr(precision, "product_seconds", lambda: {"bf16": 1.0, "fp32": fp32})
    engine = made()
    record = engine.decisions.records["precision"]
    assert engine.precision.name == record.chosen == chosen
    figures = {name: figure["s a product"] for name, figure in record.candidates.items()}
    assert figures == {"bf16": 1.0, "fp32": fp32}
    assert "native bf16: avx512_bf16" in record.reason


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")],
)
def test_auto_is_fp16_on_gpus_without_bf16(monkeypatch, capability, chosen):
    monkeypatch.setattr(device, "capability", lambda *_: capability)
    assert precision.resolve("auto", torch.device("cuda"), Decisions()) == chosen


def test_what_a_run_had_before_a_resume_is_not_measured_again(monkeypatch):
    monkeypatch.setattr(precision, "product_seconds", lambda: pytest.fail("measured"))
    for kept in ("fp16", "bf16", "fp32"):
        earlier = Decisions()
        earlier.record("precision", kept, reason="of another machine")
        decisions = Decisions.from_json(earlier.to_json())
        assert precision.resolve("auto", torch.device("cpu"), decisions) == kept
        assert decisions.records["precision"].replayed


def test_the_loss_scale_is_kept_while_another_precision_is_in_use(tmp_path):
    def started():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Engine(
            model, optimizer, loss=lambda m, x: m(x).float().mean(), precision="fp16", compile="off"
        )

    engine = started()
    engine.train_step(torch.ones(3, 2))
    engine.precision.scaler.update(128.0)
    for name in ("fp32", "bf16"):
        engine.set_precision(name)
        engine.train_step(torch.ones(3, 2))
    engine.save(tmp_path)
    engine.set_precision("fp16")
    assert engine.precision.scale == 128.0
    other = started()
    other.load(tmp_path)
    assert other.precision.name == "bf16"
    other.set_precision("fp16")
    assert other.precision.scale == 128.0


def test_a_loaded_run_without_a_loss_scale_starts_with_a_new_one() -> None:
    place = torch.device("cpu")
    used, fresh = (precision.Precision("fp16", place) for _ in range(2))
    used.scaler.load_state_dict({**used.scaler.state_dict(), "scale": 16.0})
    assert used.scale == 16
    used.load_state({"name": "fp32", "scaler": {}})
    assert used.scale == fresh.scale
