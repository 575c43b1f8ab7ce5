"""A Llama-type model of 11M full-precision parameters, trained here, in int4 with groups of 64.

Made once, in four minutes on two cores, and kept in the cache folder. Only the linear layers of the
blocks are quantized on every side, so that bits are equal. Seeds choose the calibration text.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantization_parts.texts import perplexity

SIDES = {"lezero": "", "torchao": "torchao"}
SEEDS = (0, 1, 2)
GROUP = 64
_RUN: dict[str, Any] = {
    "model": {"layers": 6, "dim": 384, "heads": 6, "ffn": 1024},
    "data": {"train": ["python-docs"], "tokenizer": {"train": 2048}, "sequence": 128},
    "train": {
        **{"steps": 300, "batch": 16, "lr": 3e-3, "precision": "bf16", "compile": "off"},
        "schedule": {"kind": "cosine", "warmup": 30},
    },
    "checkpoint": {"every": 300, "keep": 1},
}
_QUICK: dict[str, Any] = {
    **_RUN,
    "model": {"layers": 1, "dim": 64, "heads": 2, "ffn": 128},
    "data": {"train": ["python-docs"], "tokenizer": "bytes", "sequence": 64},
    "train": {"steps": 20, "batch": 8, "lr": 3e-3, "precision": "fp32", "compile": "off"},
}


def fixture(quick: bool) -> Path:
    """The folder of the trained model: `hf/`, `held.json`, and the run with its data; made once."""
    from lezero.checkpoint import export_hf
    from lezero.data import EvalLoader, prepare
    from lezero.data.build import default_cache
    from lezero.train import RunConfig, Trainer

    root = default_cache().parent / "benchmarks" / ("llama-quick-1" if quick else "llama-11m-1")
    if not (root / "held.json").is_file():
        config = RunConfig.parse({**(_QUICK if quick else _RUN), "run": str(root / "run")})
        Trainer(config).run()
        export_hf(root / "run", root / "hf", root / "run" / "tokenizer")
        data = prepare(config.data)
        assert data.validation is not None
        rows = [x["tokens"] for x in EvalLoader(data.validation, 16, limit=2 if quick else 24)]
        (root / "held.json").write_text(json.dumps(torch.cat(rows).tolist()))
    return root


def run(side: str, place: str, quick: bool) -> dict[str, Any]:
    """Perplexities of bf16 and of the methods of one side."""
    root = Path(place)
    held = torch.tensor(json.loads((root / "held.json").read_text()))
    return _ours(root, held, quick) if side == "lezero" else _torchao(root, held)


def _ours(root: Path, held: Tensor, quick: bool) -> dict[str, Any]:
    import lezero as lz
    from lezero.data import Loader, prepare
    from lezero.models import load_hf
    from lezero.train import RunConfig

    config = RunConfig.parse({**(_QUICK if quick else _RUN), "run": str(root / "run")})
    data = prepare(config.data)

    def ratio(seed: int, **scheme: Any) -> float:
        model = load_hf(root / "hf", torch.bfloat16)
        loader = Loader(data.train, 8, seed=seed)
        batches = [next(loader)["tokens"] for _ in range(2 if quick else 16)]
        form = lz.Int4Weight(group=32 if quick else GROUP, vocabulary="keep", **scheme)
        lz.quantize_(model, form, data=batches, objective="size")
        return perplexity(model, held, 16)

    bf16 = perplexity(load_hf(root / "hf", torch.bfloat16), held, 16)
    figures: dict[str, Any] = {
        "parameters": sum(p.numel() for p in load_hf(root / "hf").parameters()),
        "bf16": bf16,
        "nearest": ratio(0, method="nearest", scales="minmax"),
    }
    for name in ("gptq", "awq"):
        found = [ratio(seed, method=name) for seed in (SEEDS[:1] if quick else SEEDS)]
        figures |= {name: statistics.mean(found), f"{name}_seeds": found}
    figures["best"] = min(figures["gptq"], figures["awq"])
    return figures


def _torchao(root: Path, held: Tensor) -> dict[str, Any]:
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_
    from transformers import AutoModelForCausalLM

    figures: dict[str, Any] = {}
    for name, options in {
        "asymmetric": {"mapping_type": MappingType.ASYMMETRIC},
        "symmetric": {"mapping_type": MappingType.SYMMETRIC},
        "hqq": {"intx_choose_qparams_algorithm": "hqq_scale_only"},
    }.items():
        model = AutoModelForCausalLM.from_pretrained(root / "hf", dtype=torch.bfloat16).eval()
        config = IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(GROUP), **options)
        quantize_(model, config, _in_blocks)
        figures[name] = perplexity(model, held, 16)
    return {**figures, "best": min(figures.values())}


def _in_blocks(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name
