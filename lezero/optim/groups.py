"""Parameter groups: what weight decay applies to.

Decay pulls weights towards zero, which helps matrices and harms everything that sets a scale or an
offset. So norms, biases and embeddings (any parameter of an `nn.Embedding`, tied heads included)
are not decayed; nor is any other parameter of fewer than two dims.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lezero.nn.unsized import check_sized


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the trainable parameters that weight decay applies to.

    `OrderError` for a model with layers that have no size yet: its matrices are not known.
    """
    check_sized(model)
    spared = set()
    for module in model.modules():
        norm = "norm" in type(module).__name__.lower()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or norm:
            spared |= {id(p) for p in module.parameters(recurse=False)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.ndim >= 2
        and id(parameter) not in spared
        and name.rpartition(".")[2] != "bias"
    }


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for a torch optimizer, decayed and not; frozen parameters are in neither."""
    names = decayed_names(model)
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if name in names else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
