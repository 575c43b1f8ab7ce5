"""What the engine costs with everything off, and what it gains as it ships, on a GPT of 26M.

8 layers, d=512, T=256, batch 8. Four sides, each in its own process, take their steps in turns: a
bare fp32 eager loop, a bare bf16 autocast loop, the Engine with everything off (same loss function,
no compile, no pool, no clipping) and the Engine as it ships. The model is plain PyTorch and the
same on all sides.

What the engine costs is a ratio near 1, and rounds of that pair lie between 0.90 and 1.16: it takes
three times as many of them, by itself.
"""

from __future__ import annotations

import statistics
import time

from _table import arguments, emit, finish, side
from _turns import compare_in_turns, turns

SIDES = ("bare fp32", "bare bf16", "engine off", "engine shipped")
VOCAB = 2048


def build(quick: bool):
    """A GPT as PyTorch users write it: LayerNorm, GELU, learned positions, tied head."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width, layers, heads, length = (128, 2, 4, 64) if quick else (512, 8, 8, 256)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            B, T, D = x.shape
            qkv = self.qkv(self.norm1(x)).view(B, T, 3, heads, D // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.places = nn.Embedding(VOCAB, width), nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
            self.head.weight = self.embed.weight
            nn.init.normal_(self.embed.weight, std=0.02)

        def forward(self, tokens):
            x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return GPT(), length


def measure(name: str, quick: bool) -> None:
    """One side: the median seconds of a step."""
    import torch
    from torch.nn import functional as F

    model, length = build(quick)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (8, length + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    if name.startswith("engine"):
        import lezero as lz

        if name == "engine off":
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
            engine = lz.Engine(
                model,
                optimizer,
                loss=plain_loss,
                precision="bf16",
                compile="off",
                attention="torch",
                pool=False,
            )
        else:
            optimizer = lz.optim.AdamW(model, lr=3e-4)
            engine = lz.Engine(model, optimizer, loss=lz.next_token_loss, total_steps=2000)

        def step() -> float:
            return engine.train_step(batch).loss
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

        def step() -> float:
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "bare bf16"):
                logits = model(batch["tokens"])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

    first = time.perf_counter()
    for _ in range(2 if quick else 3):
        step()
    while name == "engine shipped" and "compile" not in engine.decisions.records:
        step()  # the form of a step is found in the run's first steps
    ready = time.perf_counter() - first
    seconds = []
    for _ in turns():
        began = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - began)
    chosen = {}
    if name == "engine shipped":
        chosen = {topic: made.chosen for topic, made in engine.decisions.records.items()}
    emit(step_s=statistics.median(seconds), ready_s=ready, loss=loss, chosen=str(chosen))


def plain_loss(model, batch):
    """What the bare loop computes."""
    from torch.nn import functional as F

    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())


def main() -> None:
    options = arguments(__doc__)
    if options.side:
        measure(options.side, options.quick)
        return
    extra = ["--quick"] if options.quick else []
    sides = [side(__file__, name, *extra) for name in SIDES]
    rounds = options.rounds or (1 if options.quick else 5)
    steps = 4 if options.quick else 10
    threads = options.threads
    result = compare_in_turns(sides, rounds=rounds, steps=steps, threads=threads)
    near = compare_in_turns(sides[1:3], rounds=3 * rounds, steps=steps, threads=threads)
    if failed := result.failed | near.failed:
        raise SystemExit("; ".join(f"{k}: {v}" for k, v in failed.items()))
    print(f"GPT, {threads} threads, medians of {rounds} rounds; ready_s: first steps, with")
    print(
        f"what the engine measures and compiles. It chose {result.figures[SIDES[3]][-1]['chosen']}"
    )
    finish(
        f"{result.table(['step_s', 'ready_s', 'loss'], base='bare bf16')}\n\n"
        f"{near.table(['step_s'], base='bare bf16')}",
        {
            "engine_overhead_ratio": near.ratio("step_s", "engine off", "bare bf16"),
            "engine_default_ratio": result.ratio("step_s", "engine shipped", "bare bf16"),
            "speedup_vs_fp32": result.ratio("step_s", "bare fp32", "engine shipped"),
        },
    )


if __name__ == "__main__":
    main()
