"""Attention of one new token a sequence: inputs, and what comes of them in fp64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lezero.core import device

BLOCK = 16
DEVICE = device.device()
KINDS = (torch.bfloat16, torch.float16)
EPS = 1e-5


class Case(NamedTuple):
    """Letters as in `triton_attend.py`."""

    B: int
    H: int
    K: int
    E: int
    W: int
    window: int | None = None
    normed: bool = False
    last: int | None = None
    """Position of the first sequence; None: the last one that there is room for."""


class Made:
    """Inputs. Places that nobody may look at hold NaN."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        B, H, K, E, W, window, _, last = self.case = case
        draw = torch.Generator().manual_seed(W)
        T = W * BLOCK

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(dtype).to(DEVICE)

        position_B = torch.tensor([T - 1 if last is None else last, 5, T // 3][:B])
        inputs = torch.zeros(B, 3 + W, dtype=torch.int64)  # as a captured step holds them
        inputs[:, 2] = position_B
        inputs[:, 3:] = torch.randperm(B * W, generator=draw).view(B, W)
        inputs = inputs.to(DEVICE)
        self.position_B, self.table_BW = inputs[:, 2], inputs[:, 3:]
        self.at = position_B.tolist()
        self.places = self.table_BW.repeat_interleave(BLOCK, 1) * BLOCK
        self.places += torch.arange(T, device=DEVICE) % BLOCK
        self.low = [0 if window is None else max(0, at - window + 1) for at in self.at]
        self.keys, self.values = (
            torch.full((B * T, K, E), torch.nan, dtype=dtype, device=DEVICE) for _ in "kv"
        )
        for b, (low, at) in enumerate(zip(self.low, self.at, strict=True)):
            seen = self.places[b, low:at]
            self.keys[seen], self.values[seen] = drawn(at - low, K, E), drawn(at - low, K, E)
        angle = torch.rand(T, E // 2, generator=draw).to(DEVICE) * 7
        self.cos, self.sin = angle.cos(), angle.sin()
        self.qkv = drawn(B, (H + 2 * K) * E)
        self.norms = (drawn(E).abs() + 0.5, drawn(E).abs() + 0.5) if case.normed else None

    def turned(self, x_BHE: Tensor, which: int) -> Tensor:
        if self.norms is not None:
            factor = torch.rsqrt(x_BHE.square().mean(-1, keepdim=True) + EPS)
            x_BHE = x_BHE * factor * self.norms[which].double()
        cos, sin = (x[self.position_B].double()[:, None] for x in (self.cos, self.sin))
        first, second = x_BHE.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def wanted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values as they are afterwards, and what is found (B, H E)."""
        B, H, K, E, *_ = self.case
        q, k, v = self.qkv.double().split([H * E, K * E, K * E], 1)
        q, k = self.turned(q.view(B, H, E), 0), self.turned(k.view(B, K, E), 1)
        keys, values = self.keys.clone(), self.values.clone()
        out = []
        for b, (low, at) in enumerate(zip(self.low, self.at, strict=True)):
            seen = self.places[b, low : at + 1]
            keys[seen[-1]], values[seen[-1]] = k[b].to(keys.dtype), v[b].view(K, E).to(keys.dtype)
            ks, vs = (x[seen].double().repeat_interleave(H // K, 1) for x in (keys, values))
            weight = torch.softmax(torch.einsum("he,she->hs", q[b], ks) * E**-0.5, -1)
            out.append(torch.einsum("hs,she->he", weight, vs).flatten())
        return keys, values, torch.stack(out)

    def differs(self, found: Tensor, wanted: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
        """How far `found` (B, H E) is away, and what the cache now holds, in units of what its
        dtype tells apart."""
        keys, values, right = wanted
        away = ((found.double() - right).norm(dim=1) / right.norm(dim=1)).max()
        near = 2.0**-7 if self.keys.dtype == torch.bfloat16 else 2.0**-9
        alike = {"away": float(away)}
        for name, one, other in (("keys", self.keys, keys), ("values", self.values, values)):
            assert torch.equal(one.isnan(), other.isnan()), name
            off = (one - other).abs() / (near + near * other.abs())
            alike[name] = float(off.nan_to_num(0.0).max())
        return alike
