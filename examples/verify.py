"""Holds a run against plain PyTorch, then breaks it on purpose: the fault is found and named."""

import lezero as lz
from lezero.jobs.verify import verify


def main():
    config = lz.RunConfig.parse(
        {
            "run": "runs/verify",
            "model": {"layers": 2, "dim": 32, "heads": 2},
            "data": {"train": "python-docs", "tokenizer": "bytes", "sequence": 32},
            "train": {"steps": 20, "batch": 4, "accumulate": 2, "precision": "bf16"},
        }
    )
    print(verify(config, steps=4).table())

    # A mistake that changes no loss and hardly any weight in the first steps: decay on every norm.
    build = lz.train.recipe.build_optimizer
    lz.train.recipe.build_optimizer = lambda config, model: lz.optim.AdamW(
        model.parameters(), lr=config.train.lr, betas=config.train.betas, weight_decay=0.1
    )
    try:
        print(verify(config, steps=4).summary)
    finally:
        lz.train.recipe.build_optimizer = build


if __name__ == "__main__":
    main()
