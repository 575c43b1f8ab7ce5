"""all-MiniLM-L6-v2 in W8A8: embeddings beside fp32, and speed at batch 16.

LeZero's sides are the encoder that `lz serve` opens (`lz.models.load_bert`), with bf16 or fp32
between its int8 products, and transformers' own module quantized in place. All take one scale for
each token (`exact_above=None`): blocks of 32 are some 0.001 of cosine better and 15% slower.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from quantization_parts.texts import seconds

SIDES = {
    "fp32": "",
    "bf16": "",
    "lezero": "",
    "lezero-fp32": "",
    "lezero-transformers": "",
    "torchao": "torchao",
    "quanto": "optimum.quanto",
    "onnxruntime": "onnxruntime",
    "openvino": "nncf",
}
BATCH = 16
CALIBRATION = 4
"""Batches that calibrate; the others judge."""


def run(side: str, place: str, quick: bool) -> dict[str, Any]:
    """Figures of one side. `place`: the model's folder; "" for a random small one."""
    model, batches = _inputs(place, quick)
    calibration, judging = split(batches)
    with torch.no_grad():
        exact = torch.cat([_pooled(model(**x)[0], x) for x in judging])
    call = _MAKE[side](model, calibration)
    with torch.no_grad():
        found = torch.cat([_pooled(call(x), x) for x in judging])
    timed = batches[-1]
    return {
        "seconds": seconds(lambda: call(timed), 5, in_turns=not quick),
        "cosine": statistics.mean(nn.functional.cosine_similarity(exact, found).tolist()),
        "spearman": _spearman(_similarities(exact), _similarities(found)),
    }


def split(batches: list[Any]) -> tuple[list[Any], list[Any]]:
    """Those that calibrate, and those that judge."""
    at = min(CALIBRATION, len(batches) // 2)
    return batches[:at], batches[at:]


def _inputs(place: str, quick: bool) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    sentences = [
        " ".join(text.split()[at : at + 40])
        for _, text in sorted(topics.items())
        for at in range(0, min(400, len(text.split()) - 40), 40)
    ][::4]
    sentences = sentences[: len(sentences) // BATCH * BATCH][: (2 if quick else 10) * BATCH]
    if quick:
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        model: Any = BertModel(BertConfig(vocab_size=256, intermediate_size=128, **shape)).eval()
        rows = torch.tensor([list(s.encode()[:48].ljust(48)) for s in sentences])
        kept = torch.ones_like(rows)
        return model, [{"input_ids": a, "attention_mask": b} for a, b in _pairs(rows, kept)]
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(place, dtype=torch.float32).eval()
    made = AutoTokenizer.from_pretrained(place)(
        sentences, padding="max_length", truncation=True, max_length=64, return_tensors="pt"
    )
    pairs = _pairs(made["input_ids"], made["attention_mask"])
    return model, [{"input_ids": a, "attention_mask": b} for a, b in pairs]


def _pairs(one: Tensor, two: Tensor) -> Any:
    return zip(one.split(BATCH), two.split(BATCH), strict=True)


def _pooled(hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
    kept = batch["attention_mask"][..., None].float()
    return nn.functional.normalize((hidden.float() * kept).sum(1) / kept.sum(1))


def _similarities(rows: Tensor) -> Tensor:
    one, two = torch.triu_indices(len(rows), len(rows), 1)
    return (rows @ rows.T)[one, two]


def _spearman(one: Tensor, two: Tensor) -> float:
    ranks = [x.argsort().argsort().double() for x in (one, two)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def _float(model: nn.Module, batches: Any) -> Any:
    return lambda x: model(**x)[0]


def _bf16(model: nn.Module, batches: Any) -> Any:
    model.bfloat16()
    return lambda x: model(**x)[0]


def _quantized(model: nn.Module, batches: Any) -> nn.Module:
    import lezero as lz

    scheme = lz.Int8WeightActivation(vocabulary="keep", exact_above=None)
    lz.quantize_(model, scheme, data=batches, objective="speed")
    return model


def _lezero(model: nn.Module, batches: Any) -> Any:
    return _lezero_fp32(model.bfloat16(), batches)


def _lezero_fp32(model: Any, batches: Any) -> Any:
    from lezero.models import Bert, bert_config

    ours = Bert(bert_config(model.config.to_dict(), "the model's config"))
    ours.load_state_dict(model.state_dict(), strict=False, assign=True)
    quantized = _quantized(ours.eval(), [_packed(x) for x in batches])

    def call(x: dict[str, Tensor]) -> Tensor:
        tokens, lengths = _packed(x)
        found = quantized(tokens, lengths)
        padded = found.new_zeros(*x["input_ids"].shape, found.shape[1])
        padded[x["attention_mask"].bool()] = found
        return padded

    return call


def _packed(x: dict[str, Tensor]) -> tuple[Tensor, list[int]]:
    """The tokens of all texts, one after the other, and how many each has."""
    kept = x["attention_mask"].bool()
    return x["input_ids"][kept], kept.sum(1).tolist()


def _lezero_transformers(model: nn.Module, batches: Any) -> Any:
    quantized = _quantized(model.bfloat16(), batches)
    return lambda x: quantized(**x)[0]


def _torchao(model: nn.Module, batches: Any) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    compiled = torch.compile(model, dynamic=False)  # eager is 30 times slower
    return lambda x: compiled(**x)[0]


def _quanto(model: nn.Module, batches: Any) -> Any:
    from optimum.quanto import Calibration, freeze, qint8, quantize

    quantize(model, weights=qint8, activations=qint8)
    with torch.no_grad(), Calibration():
        for batch in batches:
            model(**batch)
    freeze(model)
    return lambda x: model(**x)[0]


class _First(nn.Module):
    """Two tensors in, one out, as exporters like it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


def _onnxruntime(model: nn.Module, batches: Any) -> Any:
    import tempfile

    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    folder = Path(tempfile.mkdtemp())
    names = ["input_ids", "attention_mask"]
    args = tuple(batches[0][name] for name in names)
    plain, small = str(folder / "a.onnx"), str(folder / "b.onnx")
    torch.onnx.export(_First(model), args, plain, input_names=names, dynamo=False)
    quantize_dynamic(plain, small)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(small, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {n: x[n].numpy() for n in names})[0])


def _openvino(model: nn.Module, batches: Any) -> Any:
    import nncf
    import openvino

    names = ["input_ids", "attention_mask"]
    first = {name: batches[0][name] for name in names}
    converted = openvino.convert_model(_First(model), example_input=first)
    items = [{name: x[name].numpy() for name in names} for x in batches]
    small = nncf.quantize(
        converted, nncf.Dataset(items), model_type=nncf.ModelType.TRANSFORMER, subset_size=4
    )
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.compile_model(small, "CPU", threads)
    return lambda x: torch.from_numpy(compiled([x[name].numpy() for name in names])[0])


_MAKE: dict[str, Any] = {
    "fp32": _float,
    "bf16": _bf16,
    "lezero": _lezero,
    "lezero-fp32": _lezero_fp32,
    "lezero-transformers": _lezero_transformers,
    "torchao": _torchao,
    "quanto": _quanto,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
