"""Training state split over the ranks in a plain loop, gradients sent in int8 by a wire."""

# Alone it runs on one rank; on two: lz launch -n 2 examples/zero.py

import torch

import lezero as lz
from lezero.core import groups


def main() -> None:
    groups.join()
    torch.manual_seed(0)
    config = lz.models.TransformerConfig(vocab=256, dim=64, layers=2, heads=4, context=32)
    model = lz.models.Transformer(config)
    wire = lz.Wire(codec="int8", feedback="worker")
    lz.shard_(model, lz.Zero(stage=2), wire=wire)  # before the optimizer is built
    optimizer = lz.optim.AdamW8bit(model.parameters(), lr=3e-3)
    for step in range(10):
        tokens = torch.arange(33).repeat(4, 1) + step
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        loss = lz.next_token_loss(model, batch)
        loss.backward()  # leaves the mean gradient over the ranks in this rank's shards
        lz.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if groups.is_main():
            print(f"step {step + 1}  loss {loss.item():.3f}")
    groups.leave()


if __name__ == "__main__":
    main()
