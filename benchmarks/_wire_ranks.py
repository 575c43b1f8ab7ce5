"""One rank of `benchmarks/wires.py`: trains a GPT over one wire and prints its figures.

    python benchmarks/_wire_ranks.py '{"kind": "lezero", "wire": {"codec": "int4"}, …}'

The model, the data and the optimizer are plain PyTorch and the same for every kind. DDP and
DeepSpeed run in a bare bf16 loop, LeZero in its Engine as it ships (`no codec` shows what that
alone gives); compiling is off, since 20 steps would not earn its trial. Peers run in their own
environment, so LeZero is imported only where it is used.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import sysconfig
import time

import torch
import torch.distributed as dist
from engine_overhead import VOCAB, build
from torch.nn import functional as F

LEARNING_RATE, SEED = 3e-4, 0


def text() -> torch.Tensor:
    """Bytes of Python's standard library: on every machine, and enough for 300 steps."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return torch.frombuffer(bytearray(b"\n".join(found)), dtype=torch.uint8).long()


def batches(data: torch.Tensor, job: dict, part: str):
    """Endless (tokens, targets), other ones on each rank; validation is the last tenth."""
    cut = len(data) * 9 // 10
    data = data[:cut] if part == "train" else data[cut:]
    generator = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
    while True:
        at = torch.randint(len(data) - job["length"] - 1, (job["batch"],), generator=generator)
        rows = torch.stack([data[i : i + job["length"] + 1] for i in at.tolist()])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def loss_of(model, tokens: torch.Tensor, targets: torch.Tensor, cast: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Plain:
    """`model`, `step(tokens, targets)`, and what the wire did."""

    def __init__(self, model, job: dict) -> None:
        self.model, self.cast = model, True
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self, tokens, targets) -> None:
        loss_of(self.model, tokens, targets, self.cast).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def figures(self) -> dict:
        return {}


class DDP(Plain):
    def __init__(self, model, job: dict) -> None:
        super().__init__(model, job)
        self.model = torch.nn.parallel.DistributedDataParallel(model)


class LeZero(Plain):
    def __init__(self, model, job: dict) -> None:
        import lezero as lz
        from lezero.comm import Wire
        from lezero.parallel.zero import sharding_of

        lz.shard_(model, lz.Zero(**job["zero"]), wire=Wire(**job["wire"]))
        super().__init__(model, job)
        self.engine = lz.Engine(model, self.optimizer, loss=lz.next_token_loss, compile="off")
        lines = sharding_of(model).lines
        self.links = [link for link in (lines.shard, lines.replicate) if link is not None]
        self.formula = 0
        for link in self.links:
            link._launch = self.counting(link, link._launch)

    def step(self, tokens, targets) -> None:
        self.engine.train_step({"tokens": tokens, "targets": targets})

    def counting(self, link, launch):
        """Adds up what the formula says of every collective."""

        def counted(steps, operation, key, x, *others):
            self.formula += link.sent_bytes(operation, x.numel(), x.dtype)
            return launch(steps, operation, key, x, *others)

        return counted

    def figures(self) -> dict:
        sent = sum(sum(link.account.total.values()) for link in self.links)
        made = [link.chooser.decisions.records for link in self.links if link.chooser]
        said = [f"{one.chosen}: {one.reason}" for records in made for one in records.values()]
        return {
            "wire": "/".join(f"{link.codec} {link.topology}" for link in self.links),
            "said": "; ".join(said),
            "sent": sent,
            "exact": sent == self.formula,
            "waited": sum(link._queue.waited_s for link in self.links),
        }


class DeepSpeed(Plain):
    def __init__(self, model, job: dict) -> None:
        import deepspeed

        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": job["batch"],
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
        }
        parameters = list(model.parameters())
        self.model, *_ = deepspeed.initialize(
            model=model, model_parameters=parameters, config=config
        )
        self.cast = False

    def step(self, tokens, targets) -> None:
        self.model.backward(loss_of(self.model, tokens, targets, False))
        self.model.step()


KINDS = {"alone": Plain, "ddp": DDP, "lezero": LeZero, "deepspeed": DeepSpeed}


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if job["kind"] == "lezero":
        from lezero.core import groups

        groups.join(timeout_s=600, backend="gloo")
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model, _ = build(job["quick"])
    trained = KINDS[job["kind"]](model, job)
    data = text()
    assert int(data.max()) < VOCAB
    feed = batches(data, job, "train")
    for _ in range(job["warm"]):
        trained.step(*next(feed))
    before = trained.figures()
    seconds, cpu = [], time.process_time()
    for _ in range(job["steps"]):
        began = time.perf_counter()
        trained.step(*next(feed))
        seconds.append(time.perf_counter() - began)
    tokens = job["batch"] * job["length"] * 2
    found = trained.figures()
    found |= {
        "tokens_s": tokens * len(seconds) / sum(seconds),
        "step_s": statistics.median(seconds),
        "cpu_s": (time.process_time() - cpu) / len(seconds),
        "sent_mb": (found.pop("sent", 0) - before.get("sent", 0)) / len(seconds) / 1e6,
        "waited_s": (found.pop("waited", 0) - before.get("waited", 0)) / len(seconds),
    }
    if job["validate"]:
        checked = batches(data, job, "validation")
        with torch.no_grad():
            losses = [
                loss_of(trained.model, *next(checked), trained.cast).item()
                for _ in range(job["validate"])
            ]
        mean = torch.tensor(statistics.fmean(losses), dtype=torch.float64)
        dist.all_reduce(mean)
        found["loss"] = mean.item() / 2
    dist.barrier()
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
