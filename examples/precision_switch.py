"""Starts in fp32 and goes on in bf16, with weights and optimizer state as they are."""

import torch

import lezero as lz


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.GELU(), torch.nn.Linear(128, 4))
    optimizer = lz.optim.AdamW(model, lr=3e-3)
    engine = lz.Engine(
        model,
        optimizer,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        counted="samples",
        precision="fp32",
        total_steps=40,
    )
    x = torch.randn(256, 16)
    batch = (x, (x @ torch.randn(16, 4)).argmax(1))
    for step in range(40):
        if step == 20:
            engine.set_precision("bf16")  # "auto" asks the hardware
            state = optimizer.state[model[0].weight]
            print(f"now {engine.precision.name}; AdamW goes on at its step {int(state['step'])}")
        result = engine.train_step(batch)
        if result.step % 10 == 0:
            print(f"step {result.step}: loss {result.loss:.4f}")
    print(f"weights are {model[0].weight.dtype}, moments are {state['exp_avg'].dtype}")


if __name__ == "__main__":
    main()
