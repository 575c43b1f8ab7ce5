"""A ResNet-type network on real digits in INT8: points of accuracy lost, 5-fold cross-validated."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SIDES = {"lezero": "", "openvino": "nncf"}
FOLDS = 5
_QUICK_IMAGES = 320


def run(side: str, place: str, quick: bool) -> dict[str, Any]:
    """Mean accuracy in percent before and after, over the folds."""
    images, labels = _digits(_QUICK_IMAGES if quick else None)
    folds = 1 if quick else FOLDS
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    before, after = [], []
    for fold in range(folds):
        held = order[fold::FOLDS]
        rest = torch.cat([order[other::FOLDS] for other in range(FOLDS) if other != fold])
        model = _trained(images[rest], labels[rest], 1 if quick else 12)
        before.append(_accuracy(_logits_of(model), images[held], labels[held]))
        call = _MAKE[side](model, images[rest[:256]])
        after.append(_accuracy(call, images[held], labels[held]))
    lost = [a - b for a, b in zip(before, after, strict=True)]
    return {
        "accuracy": statistics.mean(before),
        "int8": statistics.mean(after),
        "loss_points": statistics.mean(lost),
        "worst_fold": max(lost),
    }


def _digits(count: int | None) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    small = torch.tensor(np.asarray(found.images), dtype=torch.float32)[:count, None] / 16
    images = nn.functional.interpolate(small, size=32, mode="bilinear")
    return images, torch.tensor(np.asarray(found.target))[:count]


def _trained(images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    shape = {"hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], "layer_type": "basic"}
    config = ResNetConfig(num_channels=1, embedding_size=16, num_labels=10, **shape)
    model: Any = ResNetForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = epochs * (len(labels) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels))[: len(labels) // 64 * 64].split(64):
            loss = nn.functional.cross_entropy(model(images[rows]).logits, labels[rows])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()


def _logits_of(model: Any) -> Any:
    return lambda x: model(x).logits


@torch.no_grad()
def _accuracy(call: Any, images: Tensor, labels: Tensor) -> float:
    found = torch.cat([torch.as_tensor(call(some)) for some in images.split(64)])
    return 100 * float((found.argmax(-1) == labels).float().mean())


def _lezero(model: nn.Module, images: Tensor) -> Any:
    import lezero as lz

    scheme = lz.Int8WeightActivation(observer="kl")
    lz.quantize_(model, scheme, data=list(images.split(64)), objective="size")
    return _logits_of(model)


class _Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixels).logits


def _openvino(model: nn.Module, images: Tensor) -> Any:
    import nncf
    import openvino

    converted = openvino.convert_model(_Logits(model), example_input=images[:64])
    items = [some.numpy() for some in images.split(64)]
    compiled = openvino.compile_model(nncf.quantize(converted, nncf.Dataset(items)), "CPU")
    return lambda x: compiled([x.numpy()])[0]


_MAKE: dict[str, Any] = {"lezero": _lezero, "openvino": _openvino}
