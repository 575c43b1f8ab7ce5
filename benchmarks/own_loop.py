"""One's own networks in the Engine as it ships, beside the faster of two plain loops.

Eight kinds of network, from a step of one millisecond to one of some hundreds. Three sides of each,
every one in its own process, take turns: a plain loop in fp32, one under bf16 autocast, and the
Engine with what it chooses by itself. All clip gradients to a norm of 1 and use torch's AdamW. A
turn lasts 0.2 s at least, since a step of a small network is over before caches are warm. Last, the
milliseconds that the Engine itself adds to a step in fp32 of 12 layers that hardly compute, without
compiling or memory pool.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from _table import arguments, columns, emit, finish, side
from _turns import compare_in_turns, turns

SIDES = ("bare fp32", "bare bf16", "engine")
STEPS = 3_000
TURN_S = 0.2

Built = tuple[Any, dict[str, Any], Callable[[Any, Any], Any] | None]
"""A network, one batch, and its loss; None where the network returns it."""


def perceptron() -> Built:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, {"x": torch.randn(64, 784), "y": torch.randint(0, 10, (64,))}, _classes


def recommender() -> Built:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Recommender(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(100_000, 32), nn.Embedding(50_000, 32)
            self.inner = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

        def forward(self, users, items):
            return self.inner(torch.cat([self.users(users), self.items(items)], -1))[:, 0]

    def loss(model, batch):
        scores = model(batch["users"], batch["items"])
        return F.binary_cross_entropy_with_logits(scores.float(), batch["y"])

    ids = {"users": torch.randint(0, 100_000, (256,)), "items": torch.randint(0, 50_000, (256,))}
    return Recommender(), {**ids, "y": torch.rand(256)}, loss


def recurrent() -> Built:
    import torch
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10_000, 128)
            self.inner = nn.LSTM(128, 256, 2, batch_first=True)
            self.head = nn.Linear(256, 5)

        def forward(self, x):
            return self.head(self.inner(self.embed(x))[0][:, -1])

    batch = {"x": torch.randint(0, 10_000, (32, 64)), "y": torch.randint(0, 5, (32,))}
    return Recurrent(), batch, _classes


def resnet() -> Built:
    import torch
    from torch import nn
    from torch.nn import functional as F

    def conv(a, b, size, stride):
        return nn.Conv2d(a, b, size, stride, size // 2, bias=False)

    class Block(nn.Module):
        def __init__(self, a, b, stride):
            super().__init__()
            self.one = nn.Sequential(conv(a, b, 3, stride), nn.BatchNorm2d(b), nn.ReLU())
            self.two = nn.Sequential(conv(b, b, 3, 1), nn.BatchNorm2d(b))
            past = nn.Sequential(conv(a, b, 1, stride), nn.BatchNorm2d(b))
            self.past = past if a != b else nn.Identity()

        def forward(self, x):
            return F.relu(self.two(self.one(x)) + self.past(x))

    widths = ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2))
    model = nn.Sequential(
        conv(3, 32, 3, 1), nn.BatchNorm2d(32), nn.ReLU(), *(Block(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    return model, {"x": torch.randn(32, 3, 32, 32), "y": torch.randint(0, 10, (32,))}, _classes


def unet() -> Built:
    import torch
    from torch import nn
    from torch.nn import functional as F

    def twice(a, b):
        first = (nn.Conv2d(a, b, 3, 1, 1), nn.GroupNorm(8, b), nn.SiLU())
        return nn.Sequential(*first, nn.Conv2d(b, b, 3, 1, 1), nn.GroupNorm(8, b), nn.SiLU())

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = twice(3, 32), twice(32, 64), twice(64, 128)
            self.four, self.five, self.head = twice(192, 64), twice(96, 32), nn.Conv2d(32, 1, 1)

        def forward(self, x):
            one = self.one(x)
            two = self.two(F.max_pool2d(one, 2))
            x = F.interpolate(self.three(F.max_pool2d(two, 2)), scale_factor=2.0)
            x = F.interpolate(self.four(torch.cat([x, two], 1)), scale_factor=2.0)
            return self.head(self.five(torch.cat([x, one], 1)))

    def loss(model, batch):
        return F.mse_loss(model(batch["x"]).float(), batch["y"])

    return UNet(), {"x": torch.randn(4, 3, 64, 64), "y": torch.rand(4, 1, 64, 64)}, loss


def bert(**change: int) -> Built:
    import torch
    import transformers as tf

    shape = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
    shape |= {"intermediate_size": 1024, "vocab_size": 8_000} | change
    ids = torch.randint(0, shape["vocab_size"], (16, 96) if not change else (2, 8))
    there = torch.ones_like(ids)
    there[::2, ids.shape[1] // 2 :] = 0
    batch = {
        "input_ids": ids,
        "attention_mask": there,
        "labels": torch.randint(0, 3, ids.shape[:1]),
    }
    return tf.BertForSequenceClassification(tf.BertConfig(**shape, num_labels=3)), batch, None


def thin_bert() -> Built:
    """Of 12 layers and 200 parameters, which hardly compute: what there is is the Engine's own."""
    return bert(hidden_size=16, num_hidden_layers=12, num_attention_heads=2, intermediate_size=32)


def llama() -> Built:
    import torch
    import transformers as tf

    shape = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = tf.LlamaConfig(**shape, num_key_value_heads=4, intermediate_size=704, vocab_size=4096)
    ids = torch.randint(0, 4096, (8, 128))
    there, labels = torch.ones_like(ids), ids.clone()
    there[::2, 100:] = 0
    labels[there == 0] = -100
    batch = {"input_ids": ids, "attention_mask": there, "labels": labels}
    return tf.LlamaForCausalLM(config), batch, None


def vit() -> Built:
    import torch
    import transformers as tf

    shape = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3}
    config = tf.ViTConfig(
        **shape, intermediate_size=768, image_size=64, patch_size=8, num_labels=10
    )
    batch = {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(0, 10, (16,))}
    return tf.ViTForImageClassification(config), batch, None


NETWORKS = {
    "perceptron": perceptron, "recommender": recommender, "LSTM": recurrent, "ResNet": resnet,
    "U-Net": unet, "ViT": vit, "BERT": bert, "Llama": llama,
}  # fmt: skip
THIN = "thin BERT"
QUICK = ("perceptron",)


def _classes(model: Any, batch: dict[str, Any]) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def measure(name: str, network: str) -> None:
    """One side: the median seconds of a step."""
    import torch

    torch.manual_seed(0)
    model, batch, loss = thin_bert() if network == THIN else NETWORKS[network]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    chosen: dict[str, Any] = {}
    if name == "engine":
        import lezero as lz

        # The thin one shows what a step of the Engine costs, whatever its choices gain.
        alone: Any = {"compile": "off", "precision": "fp32", "pool": False}
        form = alone if network == THIN else {}
        engine = lz.Engine(model, optimizer, loss=loss, clip=1.0, total_steps=STEPS, **form)

        def step() -> None:
            engine.train_step(batch)

        while "compile" not in engine.decisions.records:
            step()  # the form of a step is found in the run's first steps
        chosen = {topic: made.chosen for topic, made in engine.decisions.records.items()}
    else:

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "bare bf16"):
                found = model(**batch).loss if loss is None else loss(model, batch)
            found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.item()

    for _ in range(5):
        step()
    medians = []
    for _ in turns():
        seconds: list[float] = []
        while sum(seconds) < TURN_S:
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        medians.append(statistics.median(seconds))
    emit(step_ms=1e3 * statistics.median(medians), form=str(chosen.get("compile", "")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", help=argparse.SUPPRESS)
    options = arguments(__doc__, parser)
    if options.side:
        measure(options.side, options.network)
        return
    rounds = options.rounds or (1 if options.quick else 3)
    rows = [["network", *(f"{name} ms" for name in SIDES), "× faster plain", "form"]]
    ratios, own_ms = [], 0.0
    for network in (*(QUICK if options.quick else NETWORKS), THIN):
        sides = [side(__file__, name, "--network", network) for name in SIDES]
        steps = 3 if options.quick else 15
        found = compare_in_turns(sides, rounds=rounds, steps=steps, threads=options.threads)
        if found.failed:
            raise SystemExit("; ".join(f"{network}, {k}: {v}" for k, v in found.failed.items()))
        ms = [found.median(name, "step_ms") for name in SIDES]
        faster = min(SIDES[:2], key=lambda name: found.median(name, "step_ms"))
        ratio = found.ratio("step_ms", SIDES[2], faster)
        rows.append([network, *(f"{each:.2f}" for each in ms), f"{ratio:.3f}"])
        rows[-1].append(str(found.figures["engine"][-1]["form"]))
        if network == THIN:
            own_ms = ms[2] - ms[0]
        else:
            ratios.append(ratio)
    finish(
        columns(rows),
        {
            "networks": len(ratios),
            "worst_ratio": max(ratios),
            "mean_ratio": statistics.geometric_mean(ratios),
            "engine_own_ms": own_ms,
        },
    )


if __name__ == "__main__":
    main()
