"""Measuring works at any size, leaves nothing behind, and survives what fails."""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lezero.core.errors import LeZeroError
from lezero.profiler import measure as module
from lezero.profiler.ceilings import Ceilings
from lezero.profiler.measure import Effort, measure, measure_apart
from tests.conftest import hide_accelerators


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Ceilings:
    """Of the processor, whatever else there is."""
    with pytest.MonkeyPatch.context() as patch:
        hide_accelerators(patch)
        return measure(Effort.tiny(), tmp_path_factory.mktemp("cache"))


def test_every_figure_of_a_cpu_is_there(tiny: Ceilings) -> None:
    rates = [
        *(tiny.gemm_fp32, tiny.gemm_bf16, tiny.gemm_fp16, tiny.gemm_int8),
        *(tiny.memory_read, tiny.memory_copy, tiny.memory_fresh, tiny.disk_write),
        *tiny.attention.values(),
        *tiny.elementwise.values(),
    ]
    assert tiny.failed == {}
    assert [(x.size, x.bytes_per_s) for x in tiny.read_curve] == [(1 << 20, tiny.memory_read)]
    assert all(rate is not None and 0 < rate < math.inf for rate in rates)
    assert tiny.h2d is tiny.d2h is None
    assert tiny.op_overhead is not None
    assert 1e-8 < tiny.op_overhead < 1e-2
    assert set(tiny.attention) == {
        f"{d}_{p}" for d in ("fp32", "bf16") for p in ("forward", "backward")
    }
    assert {"copy_fp32", "gelu_bf16", "layer_norm_fp32", "adamw_fp32"} <= set(tiny.elementwise)
    assert {point.layout for point in tiny.gemm_curve} == {"nn", "nt", "tn"}
    assert 0 < tiny.cpu_share <= 1
    assert Ceilings.from_dict(tiny.to_dict()) == tiny


def test_reads_are_measured_of_rising_sizes(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        hide_accelerators(patch)
        effort = replace(Effort.tiny(), memory=32 << 20)
        found = measure(effort, tmp_path)
    assert [point.size >> 20 for point in found.read_curve] == [1, 2, 4, 8, 16, 32]
    assert all(point.bytes_per_s > 0 for point in found.read_curve)


def test_a_point_reads_as_many_bytes_as_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(module, "_read", lambda bench, block: sizes.append(block.nbytes) or 1e9)
    hide_accelerators(monkeypatch)
    found = measure(replace(Effort.tiny(), memory=8 << 20), tmp_path)
    assert sorted(sizes) == [point.size for point in found.read_curve]


@pytest.mark.parametrize("seconds", [(2.0, 1.0), (1.0, 2.0)])
def test_the_faster_way_to_read_counts(seconds: tuple[float, float]) -> None:
    left = iter(seconds)
    bench = SimpleNamespace(seconds=lambda read: next(left))
    assert module._read(bench, torch.ones(4)) == 16.0


class Outputs(TorchDispatchMode):
    """Holds what a norm writes to be of the types that it gives."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.native_layer_norm.out:
            made = torch.ops.aten.native_layer_norm(*args)
            assert [x.dtype for x in kwargs.values()] == [x.dtype for x in made]
        return func(*args, **kwargs)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_keep_their_means_as_each_device_does(kind: str, dtype: torch.dtype) -> None:
    bench = SimpleNamespace(effort=Effort.tiny(), place=torch.device(kind))
    with FakeTensorMode(), torch.no_grad():
        calls = {name: call for name, call, _ in module._kernels(bench, dtype)}
        with Outputs():
            calls["layer_norm"]()


def test_the_best_product_is_the_ceiling(tiny: Ceilings) -> None:
    best = max(point.ops_per_s for point in tiny.gemm_curve if point.dtype == "bf16")
    assert tiny.gemm_bf16 == best


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    found = measure(Effort.tiny(), tmp_path, threads=1)
    assert (found.threads, found.failed) == (1, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert os.listdir(tmp_path) == []
    assert torch.is_grad_enabled()


def test_what_fails_is_left_out_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    (tmp_path / "file").write_text("")
    found = measure(Effort.tiny(), tmp_path / "file" / "cache")
    assert found.gemm_int8 is None
    assert found.failed["gemm_int8"] == "no such kernel"
    assert found.disk_write is None
    assert "disk_write" in found.failed
    assert found.gemm_fp32 is not None


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = measure_apart(threads=1, folder=tmp_path, tiny=True)
    assert found.threads == 1
    assert found.gemm_fp32 is not None


def test_a_crash_there_is_a_message_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def crash(command: list[str], **keywords: object) -> object:
        return real([command[0], "-c", "import os; os.abort()"], **keywords)

    monkeypatch.setattr(module.subprocess, "run", crash)
    with pytest.raises(LeZeroError, match="signal 6"):
        measure_apart(folder=tmp_path)

    def hang(command: list[str], **keywords: object) -> object:
        return real([command[0], "-c", "import time; time.sleep(60)"], **keywords)

    monkeypatch.setattr(module.subprocess, "run", hang)
    with pytest.raises(LeZeroError, match="timed out"):
        measure_apart(folder=tmp_path, timeout_s=0.5)


def test_a_figure_is_the_lower_quartile_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = module._Bench(None, replace(Effort.tiny(), seconds_each=1.0), Path())
    for repeats in (1, 2):
        rounds = iter((0.5, 0.4, 0.1, 0.9, 0.2, 0.3))  # the first one warms up
        monkeypatch.setattr(bench, "_round", lambda *_, rounds=rounds: next(rounds))
        assert bench.seconds(lambda: None, repeats) == pytest.approx(0.2 / repeats)
