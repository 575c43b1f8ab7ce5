"""The keys and values of tokens already seen.

Shapes: B batch, T new tokens, S tokens seen so far, K key-value heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.models.config import TransformerConfig


class LayerCache:
    """Keys and values of one layer, in storage allocated once for `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def append(self, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new tokens; returns all keys and values so far, each `(B, K, S, D)`."""
        if self._k is None or self._v is None:
            B, K, _, D = k_BKTD.shape
            self._k = k_BKTD.new_empty(B, K, self.capacity, D)
            self._v = v_BKTD.new_empty(B, K, self.capacity, D)
        end = self.length + k_BKTD.shape[2]
        self._k[:, :, self.length : end] = k_BKTD
        self._v[:, :, self.length : end] = v_BKTD
        self.length = end
        return self._k[:, :, :end], self._v[:, :, :end]


class KVCache:
    """One `LayerCache` a layer, and the positions of the tokens in it.

    Plain on purpose: one block of storage a layer, no paging, no sharing. Made for one batch;
    `Transformer.forward(tokens, cache=cache)` appends to it.
    """

    def __init__(self, config: TransformerConfig, capacity: int | None = None) -> None:
        capacity = config.longest if capacity is None else capacity
        if not 1 <= capacity <= config.longest:
            raise ConfigError(f"a cache of {capacity} tokens: allowed is 1 to {config.longest}")
        self.capacity = capacity
        self.layers = [LayerCache(capacity) for _ in range(config.layers)]
        self.positions_BS: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.layers[0].length

    def extend_positions(self, positions_BT: Tensor) -> Tensor:
        """Appends explicit positions; returns those of all tokens, `(B, S)`."""
        if self.positions_BS is None:
            if self.length:
                raise ConfigError("positions must be given from a cache's first tokens on")
            self.positions_BS = positions_BT
        else:
            self.positions_BS = torch.cat((self.positions_BS, positions_BT), dim=1)
        return self.positions_BS
