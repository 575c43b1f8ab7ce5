"""Trains with the engine in a loop of your own: accumulation, clipping, a schedule, validation."""

import tempfile
from pydoc_data.topics import topics

import torch

import lezero as lz

STEPS, SEQUENCE = 20, 64


def batches(text, size):
    """Random windows of the text; the targets are the next bytes."""
    while True:
        window = text[torch.randint(len(text) - SEQUENCE, (size, 1)) + torch.arange(SEQUENCE + 1)]
        yield {"tokens": window[:, :-1], "targets": window[:, 1:]}


def main():
    torch.manual_seed(0)
    text = torch.tensor(list(" ".join(topics.values()).encode()))
    training, held_out = batches(text[:-50_000], 16), batches(text[-50_000:], 16)
    validation = [next(held_out) for _ in range(4)]

    config = lz.models.TransformerConfig(vocab=256, dim=64, layers=2, heads=4, context=SEQUENCE)
    model = lz.models.Transformer(config)
    optimizer = lz.optim.AdamW(model, lr=3e-3, weight_decay=0.1)  # norms, embeddings: no decay
    engine = lz.Engine(
        model,
        optimizer,
        loss=lz.next_token_loss,
        accumulate=2,
        clip=1.0,
        schedule=lz.optim.Schedule(kind="cosine", warmup=5),
        total_steps=STEPS,
    )
    for batch in training:
        result = engine.train_step(batch)
        if result.step % 5 == 0:
            loss = engine.evaluate(validation)
            if loss is None:  # a signal handler of yours, say, has called engine.request_stop()
                break
            print(
                f"step {result.step}: loss {result.loss:.3f}, validation {loss:.3f}, "
                f"lr {result.lr:.2g}, gradient norm {result.grad_norm:.2f}, "
                f"{result.tokens_per_s:,.0f} tokens/s"
            )
        if result.stop or result.step == STEPS:
            break

    with tempfile.TemporaryDirectory() as folder:
        path = engine.save(folder)
        print(f"saved {path.name}: {', '.join(sorted(p.name for p in path.iterdir()))}")
    for decision in engine.decisions.records.values():
        print(f"{decision.topic}: {decision.chosen} ({decision.reason})")


if __name__ == "__main__":
    main()
