"""Saves in the middle, goes on in a new engine, and gets the same bits as without the break."""

import tempfile

import torch

import lezero as lz


def build():
    """A small network with dropout, as a new process would build it: with other first weights."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
    )
    return lz.Engine(
        model,
        lz.optim.AdamW(model, lr=1e-2),
        loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]),
        schedule=lz.optim.Schedule(kind="linear", warmup=2),
        total_steps=20,
        seed=7,
    )


def batch_of(step):
    """The data of a step is a function of the step, so nothing repeats and nothing is skipped."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=generator)
    return {"x": x, "y": x.sum(1, keepdim=True)}


def train(engine, until):
    while engine.step < until:
        result = engine.train_step(batch_of(engine.step))
    return result.loss


def main():
    with tempfile.TemporaryDirectory() as folder:
        whole = build()
        train(whole, 10)
        whole.save(folder)
        print(f"without a break: loss {train(whole, 20):.6f}")

        resumed = build()
        resumed.load(folder)  # the newest good generation; each byte is checked
        print(f"resumed from step {resumed.step}: loss {train(resumed, 20):.6f}")

    ours, theirs = whole.model.state_dict(), resumed.model.state_dict()
    same = all(torch.equal(ours[name], theirs[name]) for name in ours)
    print(f"the same weights, bit for bit: {same}")


if __name__ == "__main__":
    main()
