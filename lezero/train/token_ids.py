"""Token ids that are none, or that the model has no row for, told before torch fails on them.

Their values are looked at where the batch lies on the host, which takes microseconds. Ids that are
on an accelerator already are not: reading them would make every step wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.models import Transformer
from lezero.train.counting import Batch


def check_token_ids(model: nn.Module, batch: Batch) -> None:
    """`ConfigError` when `batch["tokens"]` of a LeZero model holds an id outside its vocabulary, or
    no ids at all."""
    if not isinstance(model, Transformer) or not isinstance(batch, Mapping):
        return
    tokens = batch.get("tokens")
    if not isinstance(tokens, torch.Tensor):
        return
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ConfigError(
            f"tokens: got a tensor of {tokens.dtype}, allowed are token ids in torch.int64 or "
            "torch.int32: give tokens.long()"
        )
    if tokens.device.type != "cpu" or not tokens.numel():
        return
    low, high = (int(end) for end in tokens.aminmax())
    vocab = model.config.vocab
    if low < 0 or high >= vocab:
        raise ConfigError(
            f"tokens: got token {high if high >= vocab else low}, allowed is 0 to {vocab - 1} (the "
            f"model's vocabulary of {vocab}). Use the tokenizer that belongs to the model, or "
            "build the model with the tokenizer's number of tokens"
        )
