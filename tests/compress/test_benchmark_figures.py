"""The last lines of the benchmarks of quantization: their keys, and which way their ratios are."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.house.floors import ROOT

SECONDS = {
    "torch bf16": 2.0, "bf16 packed": 1.0, "W8A8": 0.5, "W8A16": 0.25, "W4A8 g64": 0.4,
    "W4A16 g64": 0.2,
}  # fmt: skip


def loaded(monkeypatch: pytest.MonkeyPatch, *names: str) -> ModuleType:
    """The last of these files, which import those before; no module stays, or transformers would
    take kernels.py for the package of that name."""
    for name in names:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module, "_ENDS", (), raising=False)  # signals do what they did
    return module


def test_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = loaded(monkeypatch, "_table", "kernels")
    able = SimpleNamespace(available=lambda: True)
    sizes = dict.fromkeys(SECONDS, 10**9)
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--threads", "1"])
    monkeypatch.setattr(kernels, "POOL", 64)
    monkeypatch.setattr(kernels, "kernels", dict)
    monkeypatch.setattr(kernels, "fuzz", lambda count, every: (count, 0))
    monkeypatch.setattr(
        kernels, "native", SimpleNamespace(NATIVE=able, kernel_name=lambda: "one of the test")
    )

    def bench(pool: Any, shape: tuple[int, int], *given: Any) -> Any:
        slower = 1.25 if shape == kernels.SHAPES[0] else 1.0
        ours = {name: s * (1 if name == "torch bf16" else slower) for name, s in SECONDS.items()}
        return ours, sizes, 10.0

    monkeypatch.setattr(kernels, "bench", bench)
    kernels.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "int8_gemv_bandwidth_share": 0.32,  # 1 GB in 0.25 · 1.25 s, of 10 GB/s
        "int4_gemv_bandwidth_share": 0.4,
        "w8a8_vs_bf16_m256": 3.2,
        "w4a8_vs_bf16_m256": 4.0,
        "bf16_packed_vs_torch_m256": 1.6,
        "fuzz_shapes": 400,
        "fuzz_failures": 0,
        "rounds": 5,
    }


def method(ratio: float, nats: float) -> dict[str, Any]:
    return {"bits": 4.5, "seeds": [ratio, ratio], "nats": [nats, nats]}


FIGURES: dict[str, dict[str, Any]] = {
    "smol/lezero": {"perplexity": 20.2, "bytes": 60, "prefill_s": 0.5},
    "smol/bf16": {"perplexity": 20.0, "bytes": 100, "prefill_s": 1.0},
    "trained/lezero": {
        "methods": {
            "nearest": method(1.05, 0.04), "nearest mse": method(1.04, 0.03),
            "gptq": method(1.02, 0.02), "awq": method(1.03, 0.01),
        },
    },
    "trained/torchao": {"methods": {"nearest": method(1.06, 0.05), "awq": method(1.03, 0.04)}},
    "minilm/lezero": {"seconds": 0.5, "cosine": 0.99, "spearman": 0.8},
    "minilm/lezero-transformers": {"seconds": 0.8, "cosine": 0.99, "spearman": 0.8},
    "minilm/fp32": {"seconds": 2.0, "cosine": 1.0, "spearman": 0.8},
    "minilm/bf16": {"seconds": 1.0, "cosine": 1.0, "spearman": 0.8},
    "digits/lezero": {"accuracy": 0.99, "int8": 0.985, "loss_points": 0.5, "worst_fold": 0.6},
    "sweep/lezero": {
        "models": {
            "a": {"ratio": 1.0, "interval": None, "layers": 0, "of": 3, "error": 0.0},
            "b": {"ratio": 0.7, "interval": (0.6, 0.8), "layers": 2, "of": 3, "error": 0.01},
        }
    },
}  # fmt: skip

WANTED = {
    "smol_w8a8_ppl_ratio": 1.01, "smol_w8a8_size_ratio": 0.6, "smol_w8a8_prefill": 2.0,
    "int4_ppl_ratio": 1.02, "int4_vs_torchao": 1.02 / 1.03,
    "minilm_cosine": 0.99, "minilm_vs_fp32": 4.0, "minilm_vs_bf16": 2.0,
    "digits_loss_points": 0.5, "never_slower_worst": 1.0, "never_slower_models": 2,
}  # fmt: skip


def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], figures: dict[str, Any]
) -> dict[str, Any]:
    """The last line of quantization.py, where its sides gave `figures`."""
    quantization = loaded(monkeypatch, "_table", "_turns", "quantization")

    def compare(part: str, options: Any) -> Any:
        own = {name: [one] for name, one in figures.items() if name.startswith(f"{part}/")}
        return quantization.Result(own, {} if own else {f"{part}/lezero": "failed: it is away"})

    monkeypatch.setattr(quantization, "_compare", compare)
    monkeypatch.setattr(sys, "argv", ["quantization.py", "--threads", "1"])
    quantization.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_quantization(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(monkeypatch, capsys, FIGURES)
    assert {key: found[key] for key in WANTED} == pytest.approx(WANTED, rel=1e-3)


def test_quantization_whose_sides_are_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(monkeypatch, capsys, {})
    assert {key: found[key] for key in WANTED} == {
        key: 0 if key == "never_slower_models" else None for key in WANTED
    }
