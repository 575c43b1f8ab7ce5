"""Small models and loops that the tests of ZeRO share."""

from __future__ import annotations

import copy
import types

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, ROWS, LENGTH = 19, 12, 24, 6


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Rows that do not divide among ranks, a parameter without dims, tied ends."""

    def __init__(self, blocks: int = 3, width: int = WIDTH, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


class Vectors(Tiny):
    """FSDP2 takes no parameters without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))


HIDDEN: list[torch.Tensor] = []


class Supervised(Block):
    """Keeps a loss of its own, computed with its weights, beside what it returns."""

    def __init__(self, way="attribute"):
        super().__init__()
        self.exit, self.way = nn.Linear(WIDTH, 19), way

    def forward(self, x):
        x = super().forward(x)
        loss = self.exit(x).logsumexp(-1).mean()
        if self.way == "attribute":
            self.losses = {"exit": loss}
        elif self.way == "hidden":
            HIDDEN.append(loss)
        return (x, types.SimpleNamespace(loss=loss)) if self.way == "object" else x


class DeepSupervision(Tiny):
    def __init__(self, way, **options):
        super().__init__(**options)
        self.blocks = nn.ModuleList(Supervised(way) for _ in range(5))

    def forward(self, tokens):
        x, self.losses = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x, extra = x
                self.losses.append(extra.loss)
            elif block.way == "attribute":
                self.losses.append(block.losses["exit"])
        return self.head(self.norm(x)) * self.scale


def make(kind=Tiny, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return kind(**options).to(dtype)


def batches(count, ranks=1, rank=0):
    """This rank's part of each of `count` global batches."""
    generator = torch.Generator().manual_seed(1)
    part = ROWS // ranks
    for _ in range(count):
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
        yield tokens[rank * part : (rank + 1) * part]


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def whole(model):
    """Every parameter in full, by name; collective."""
    from lezero.parallel.zero import full_parameters

    return {name: tensor.clone() for name, tensor in full_parameters(model)}


def plain_losses(steps, dtype=torch.float64, max_norm=None, **options):
    """What one process computes on the whole batches: losses and the last parameters."""
    model = make(dtype=dtype, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for tokens in batches(steps):
        loss = loss_of(model, tokens)
        loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {n: p.detach().clone() for n, p in copy.deepcopy(model).named_parameters()}
