"""The plain PyTorch loop that a run is held against, on one page, to be read and believed.

Nothing of LeZero's loop is in here: no engine, loss, optimizer, groups, schedule or loader. What it
shares with the run is the model's `forward` and what the data is: rows, and their shuffle `Order`.
Everything else is written out: the global batch, the mean over all its tokens, the clipping, what
is decayed, the learning rate of each step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lezero.data.loader import Rows
from lezero.data.order import Order
from lezero.train.config import TrainConfig

_PIECE = 1 << 20


def _wide(place: torch.device) -> torch.dtype:
    return torch.float32 if place.type == "mps" else torch.float64  # which has none of 64 bits


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all of them together, summed in fp64: that of `clip_grad_norm_` is summed in
    fp32, and off by 5e-4 for a gradient of 10 million elements, by 1e-2 for one of 100 million."""
    pieces = [piece for g in gradients for piece in g.flatten().split(_PIECE)]
    squares = [piece.to(_wide(piece.device)).square().sum() for piece in pieces]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def global_batch(rows: Rows, seed: int, size: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B,T) of `step` (from 0), over all ranks: the samples step·size up to
    (step+1)·size. Sample s is row `Order(seed, len(rows)).at(s)`, whatever happened before."""
    order = Order(seed, len(rows))
    pairs = [rows.row(order.at(sample)) for sample in range(step * size, (step + 1) * size)]
    tokens = torch.stack([torch.as_tensor(tokens).long() for tokens, _ in pairs])
    return tokens, torch.stack([torch.as_tensor(targets).long() for _, targets in pairs])


def learning_rate(train: TrainConfig, step: int) -> float:
    """The learning rate of `step` (from 0); `final` of it at the last step, train.steps - 1."""
    schedule, total = train.schedule, train.steps
    if step < schedule.warmup:
        return train.lr * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return train.lr
    flat_until = schedule.warmup
    if schedule.kind == "wsd":
        flat_until = max(flat_until, total - max(1, round(schedule.decay * total)))
    if step < flat_until:
        return train.lr
    left = (total - 1 - step) / (total - flat_until)  # share of the way down that is left
    if schedule.kind == "cosine":
        left = math.sin(math.pi / 2 * left) ** 2
    return train.lr * (schedule.final + (1 - schedule.final) * left)


class PlainLoop:
    """A copy of `model`, trained plainly. `dtype` fp32 computes in fp32; fp64 in fp64; bf16 and
    fp16 under autocast, with fp32 parameters. `at_once`: sequences in one forward pass; all if 0
    (fewer need less memory; the mean is still over all tokens of the batch)."""

    def __init__(
        self,
        model: nn.Module,
        train: TrainConfig,
        dtype: torch.dtype = torch.float32,
        place: torch.device | None = None,
        at_once: int = 0,
    ) -> None:
        self.train, self.dtype, self.at_once = train, dtype, at_once
        self.place = place or next(model.parameters()).device
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.model = copy.deepcopy(model).to(self.place, wide).train().requires_grad_()
        self.parameters = dict(self.model.named_parameters())
        matrices = {n for n, p in self.parameters.items() if p.ndim >= 2 and "embed" not in n}
        decayed = [p for name, p in self.parameters.items() if name in matrices]
        others = [p for name, p in self.parameters.items() if name not in matrices]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": train.weight_decay},
                {"params": others, "weight_decay": 0.0},  # norms, biases, embeddings
            ],
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
            foreach=False,
            fused=False,
        )
        self.token_losses = torch.empty(0)

    def gradients(self, tokens: Tensor, targets: Tensor, scale: float = 1.0) -> float:
        """Gradients of the mean loss over every token that counts; returns that mean, in nats.

        `scale` multiplies the loss and divides the gradients again, which fp16 needs.
        """
        self.optimizer.zero_grad(set_to_none=True)
        tokens, targets = tokens.to(self.place), targets.to(self.place)
        count, losses = (targets != -100).sum(), []
        low = self.dtype in (torch.bfloat16, torch.float16)
        for begin in range(0, len(tokens), self.at_once or len(tokens)):
            piece = slice(begin, begin + (self.at_once or len(tokens)))
            with torch.autocast(self.place.type, self.dtype if low else None, enabled=low):
                logits = self.model(tokens[piece])
                each = F.cross_entropy(
                    logits.flatten(0, 1), targets[piece].flatten(), reduction="none"
                )
            (each.sum() / count * scale).backward()
            losses.append(each.detach())
        for parameter in self.parameters.values():
            if parameter.grad is not None and scale != 1.0:
                parameter.grad /= scale
        self.token_losses = torch.cat(losses)
        return float(self.token_losses.sum() / count)

    def update(self, step: int) -> float:
        """Clips, then steps AdamW at the learning rate of `step`; returns the norm before."""
        clip = math.inf if self.train.clip is None else self.train.clip
        norm = norm_of(self.found().values())
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train, step)
        self.optimizer.step()
        return float(norm)

    def found(self) -> dict[str, Tensor]:
        """The gradients as they are now, by parameter name."""
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}

    @torch.no_grad()
    def follow(self, parameters: Mapping[str, Tensor]) -> None:
        """Takes over the `parameters` by name; the optimizer's own state stays."""
        for name, parameter in parameters.items():
            self.parameters[name].copy_(parameter)
