"""A codec is timed where it works, and an accelerator is waited for."""

from __future__ import annotations

import pytest
import torch

from lezero.comm import codec_speed as module
from lezero.comm.choice import Speed
from lezero.comm.codec_speed import codec_speed
from lezero.plan import communication


def test_a_codec_takes_time_whatever_the_default_type_is() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        found = codec_speed("int8:256", torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert 0 < found.encode_s < 1e-6
    assert 0 < found.decode_s < 1e-6


def test_the_work_of_an_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Recorder:
        def bytes(self, numel: int) -> int:
            return numel

        def encode(self, *_: torch.Tensor) -> None:
            done.append("encode")

        def decode(self, *_: torch.Tensor, add: bool) -> None:
            done.append("decode")

    monkeypatch.setattr(module, "codec", lambda name: Recorder())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: done.append("wait"))
    codec_speed("any", torch.device("meta"))
    assert done == ["wait", "encode", "wait", "decode", "wait"] * 3


def test_a_forecast_times_it_where_the_run_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def timed(name: str, place: torch.device) -> Speed:
        asked.append(place.type)
        return Speed(1.0, 1.0)

    monkeypatch.setattr(communication, "codec_speed", timed)
    communication._speed.cache_clear()
    communication._speed("int8:256", "cuda")
    communication._speed("int8:256", "cpu")
    communication._speed.cache_clear()
    assert asked == ["cuda", "cpu"]
