"""A Llama-type model of 11M full-precision parameters, trained here, in int4 with groups of 64.

Made once and kept in the cache folder: ten to twenty minutes on two cores, less than one pass over
the sources of Python's standard library, byte by byte. Only the linear layers of the blocks are
quantized on every side, so that bits are equal; those of scales and zero points count. Beside
perplexity stands how far predictions move from those of bf16: the Kullback-Leibler divergence a
token.

[Note: luck]
A small model loses a thousandth of its perplexity by rounding, and the gradient of its loss on
held-out text moves it by as much either way, so the best of several methods may be the luckiest.
Three things make that smaller. Held-out text are pieces of the same modules (of other modules it
is another distribution, where the model is far from its best). Bytes lose a little more by
rounding than words. And a seed is, beside a calibration sample (what is drawn of the training text)
and a third of the held-out text, an order of the residual stream's channels and of the neurons: the
same function, as another order of initial values would have been trained to, with other weights
sharing a scale.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_Load = Callable[[Path], Any]
_Quantize = Callable[[Any, list[Tensor]], Any]
# Name → bits a weight with its scales and zero points, and what quantizes a model on batches.
_Methods = dict[str, tuple[float, _Quantize]]

SIDES = {"lezero": "", "torchao": "torchao"}
SEEDS = (0, 1, 2)
GROUP = 64
_BATCHES, _HELD = 8, 48
_LINES = 64  # of a piece of text
_RUN: dict[str, Any] = {
    "model": {"layers": 8, "dim": 320, "heads": 5, "ffn": 1024},
    "data": {"tokenizer": "bytes", "sequence": 256},
    "train": {
        **{"steps": 1000, "batch": 8, "lr": 3e-3, "precision": "auto", "compile": "off"},
        "schedule": {"kind": "cosine", "warmup": 60, "final": 0.05},
    },
    "validation": {"every": 250, "batches": 8},
    "checkpoint": {"every": 250, "keep": 1},
}
_QUICK: dict[str, Any] = {
    "model": {"layers": 1, "dim": 64, "heads": 2, "ffn": 128},
    "data": {"train": ["python-docs"], "tokenizer": "bytes", "sequence": 64},
    "train": {"steps": 20, "batch": 8, "lr": 3e-3, "precision": "fp32", "compile": "off"},
    "validation": {"every": 0},
    "checkpoint": {"every": 0},
}


def fixture(quick: bool) -> Path:
    """The folder of the trained model: `hf/` and, for each seed, in `texts.json` the tokens to
    calibrate on and the held-out ones; made once. A run that was cut off goes on."""
    from lezero.checkpoint import export_hf
    from lezero.core.facts import cache_folder
    from lezero.data import EvalLoader, Loader, prepare
    from lezero.train import RunConfig, Trainer

    root = cache_folder() / "benchmarks" / ("llama-quick-2" if quick else "llama-11m-5")
    if (root / "texts.json").is_file():
        return root
    settings = {**(_QUICK if quick else _RUN), "run": str(root / "run")}
    if not quick:
        train, held = pieces(root)
        settings["data"] = {**_RUN["data"], "train": [str(train)], "validation": [str(held)]}
    config = RunConfig.parse(settings)
    status = Trainer(config).run().exit_status
    if status:  # asked to stop: what there is, is no fixture
        raise SystemExit(status)
    export_hf(root / "run", root / "hf", root / "run" / "tokenizer")
    data = prepare(config.data)
    assert data.validation is not None
    rows = [x["tokens"] for x in EvalLoader(data.validation, 8, limit=3 if quick else None)]
    held_rows = torch.cat(rows)
    texts = []
    for seed in SEEDS:
        loader = Loader(data.train, 8, seed=seed)
        batches = [next(loader)["tokens"].tolist() for _ in range(_BATCHES)]
        texts.append({"calibration": batches, "held": held_rows[seed :: len(SEEDS)].tolist()})
    (root / "texts.json").write_text(json.dumps(texts))
    return root


def pieces(root: Path) -> tuple[Path, Path]:
    """The modules of the standard library, without its tests and what is installed beside it, cut
    into pieces: files of those to train on, and of every twentieth, which is held out."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
    found: list[str] = []
    for path in sorted(stdlib.rglob("*.py")):
        if left_out & set(path.parts):
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except UnicodeDecodeError:  # a module in another encoding
            continue
        found += ["".join(lines[at : at + _LINES]) for at in range(0, len(lines), _LINES)]
    found = [text for text in found if text.strip()]
    random.Random(0).shuffle(found)
    count = len(found) // 20
    root.mkdir(parents=True, exist_ok=True)
    files = root / "train.jsonl", root / "held.jsonl"
    for file, texts in zip(files, (found[count:], found[:count]), strict=True):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return files


@torch.no_grad()
def reordered(model: Any, seed: int) -> Any:
    """The same function, with the residual stream's channels and the neurons in another order."""
    drawn = torch.Generator().manual_seed(seed)
    weights = dict(model.named_parameters())
    width = next(w for name, w in weights.items() if name.endswith("norm.weight")).shape[0]
    stream = torch.randperm(width, generator=drawn)
    for name, weight in weights.items():
        to_stream = name.endswith(("norm.weight", "o_proj.weight", "down_proj.weight"))
        weight.data = weight.data[stream] if to_stream else weight.data[:, stream].contiguous()
    for name, weight in weights.items():
        if name.endswith("down_proj.weight"):
            neurons = torch.randperm(weight.shape[1], generator=drawn)
            weight.data = weight.data[:, neurons].contiguous()
            for other in ("gate_proj", "up_proj"):
                rows = weights[name.replace("down_proj", other)]
                rows.data = rows.data[neurons]
    return model


def run(side: str, place: str, quick: bool) -> dict[str, Any]:
    """Of each method of one side: its bits a weight, and for each seed perplexity / bf16 and the
    divergence from bf16 in nats a token."""
    root = Path(place)
    texts = json.loads((root / "texts.json").read_text())
    load, methods = _ours(quick) if side == "lezero" else _torchao()
    bf16: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    nats: dict[str, list[float]] = {name: [] for name in methods}
    for seed, text in enumerate(texts[:1] if quick else texts):
        held = torch.tensor(text["held"][: 16 if quick else _HELD])
        batches = [torch.tensor(batch) for batch in text["calibration"][: 2 if quick else _BATCHES]]
        wanted = _log_probs(reordered(load(root / "hf"), seed), held)
        bf16.append(_perplexity(wanted, held))
        for name, (_, quantize) in methods.items():
            model = reordered(load(root / "hf"), seed)
            quantize(model, batches)
            found = _log_probs(model, held)
            ratios[name].append(_perplexity(found, held) / bf16[-1])
            nats[name].append(_divergence(wanted, found))
    rows = {
        name: {"bits": bits, "seeds": ratios[name], "nats": nats[name]}
        for name, (bits, _) in methods.items()
    }
    return {"bf16": statistics.mean(bf16), "methods": rows}


@torch.no_grad()
def _log_probs(model: Any, rows: Tensor) -> list[Tensor]:
    """Of each next token, (R, T - 1, V) in parts of some rows."""
    found = []
    for some in rows.split(8):
        logits = model(some)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        found.append(logits[:, :-1].float().log_softmax(-1))
    return found


def _perplexity(log_probs: list[Tensor], rows: Tensor) -> float:
    parts = zip(log_probs, rows.split(8), strict=True)
    taken = [p.gather(-1, some[:, 1:, None]).flatten() for p, some in parts]
    return math.exp(-float(torch.cat(taken).double().mean()))


def _divergence(wanted: list[Tensor], found: list[Tensor]) -> float:
    """KL(wanted ‖ found), the mean over tokens."""
    parts = zip(wanted, found, strict=True)
    each = [((p.exp() * (p - q)).sum(-1)).flatten() for p, q in parts]
    return float(torch.cat(each).double().mean())


def _ours(quick: bool) -> tuple[_Load, _Methods]:
    import lezero as lz
    from lezero.models import load_hf

    def method(**options: Any) -> _Quantize:
        scheme = lz.Int4Weight(group=32 if quick else GROUP, vocabulary="keep", **options)
        return lambda model, batches: lz.quantize_(model, scheme, data=batches, objective="size")

    methods: _Methods = {
        "nearest": (4.5, method(method="nearest", scales="minmax")),
        "nearest mse": (4.5, method(method="nearest")),
        "gptq": (4.5, method(method="gptq")),
        "awq": (4.5, method(method="awq")),
    }
    return (lambda folder: load_hf(folder, torch.bfloat16)), methods


def _torchao() -> tuple[_Load, _Methods]:
    """All that torchao has of 4 bits on a CPU: its GPTQ needs CUDA."""
    from torchao.prototype.awq import AWQConfig
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_
    from transformers import AutoModelForCausalLM

    def plain(config: Any) -> _Quantize:
        return lambda model, batches: quantize_(model, config, _in_blocks)

    def intx(**options: Any) -> _Quantize:
        return plain(IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(GROUP), **options))

    def int4(rule: str) -> Any:
        return PrototypeInt4WeightOnlyConfig(GROUP, rule, set_inductor_config=False)

    def awq(rule: str) -> _Quantize:
        def quantize(model: Any, batches: list[Tensor]) -> None:
            quantize_(model, AWQConfig(int4(rule), "prepare"), _in_blocks)
            # Its search computes each layer 40 times on all that it has seen: 4096 tokens of it.
            for batch in batches[:2]:
                model(batch)
            is_observed = lambda module, name: hasattr(module, "act_obs")  # noqa: E731
            quantize_(model, AWQConfig(int4(rule), "convert"), is_observed)

        return quantize

    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    # Scales are bf16; zero points int8 in "asymmetric", bf16 in what follows.
    return load, {
        "symmetric": (4.25, intx(mapping_type=MappingType.SYMMETRIC)),
        "symmetric hqq": (4.25, intx(intx_choose_qparams_algorithm="hqq_scale_only")),
        "asymmetric": (4.375, intx(mapping_type=MappingType.ASYMMETRIC)),
        "tinygemm": (4.5, plain(int4("tinygemm"))),
        "hqq": (4.5, plain(int4("hqq"))),
        "awq tinygemm, on 1/4 of the sample": (4.5, awq("tinygemm")),
        "awq hqq, on 1/4 of the sample": (4.5, awq("hqq")),
    }


def _in_blocks(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name
