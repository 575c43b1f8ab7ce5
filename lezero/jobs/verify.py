"""Holds the first steps of a configured run against plain PyTorch, and its resume against itself.

The run is built as `lz train` builds it: data, loader, model, engine, on every rank. Rank 0 walks a
plain loop beside it (`plain_loop.py`) and judges each link of each step (`judge.py`). Half-way the
run saves; afterwards a second engine and loader resume from there and must go on exactly as the
first ones did: the same samples, and on the CPU the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError
from lezero.core.tensors import flat_bytes
from lezero.data import Data, Loader
from lezero.jobs import exchange
from lezero.jobs.judge import Judge, Watch
from lezero.jobs.plain_loop import global_batch, learning_rate
from lezero.jobs.verification import Parting, Verification, read
from lezero.parallel.zero import sharding_of
from lezero.parallel.zero.held import local
from lezero.train import engine_state, recipe
from lezero.train.config import RunConfig
from lezero.train.engine import Engine, StepResult


def verify(config: RunConfig, steps: int = 10, *, at_once: int = 0) -> Verification:
    """Compares `steps` steps of the run with plain PyTorch in fp32; call it on every rank.

    at_once: sequences that the plain loop takes in one forward pass; the whole global batch if 0.
    The run's folder is not touched. Memory: the run's, and on rank 0 three more copies of the
    model, two of them with optimizer state. Raises `ConfigError` for steps below 1, and whatever
    the run itself would raise before its first step.
    """
    if steps < 1 or at_once < 0:
        raise ConfigError(
            f"steps: got {steps}, allowed is 1 or more; "
            f"at_once: got {at_once}, allowed is 0 or more"
        )
    joined = groups.active()
    groups.join()
    try:
        recipe.check(config)
        with _shared_folder() as root:
            found = _Journey(config, min(steps, config.train.steps), root).run(at_once)
        told = groups.broadcast_object(asdict(found) if found else None)
        return found or read(told or {})
    finally:
        if not joined:
            groups.leave()


@dataclass(frozen=True)
class _Step:
    """What a step of the uninterrupted run took and gave on this rank."""

    tokens: Tensor
    targets: Tensor
    result: StepResult
    parameters: dict[str, str]
    state: dict[str, str]


class _Journey:
    """The uninterrupted run, then the resumed one."""

    def __init__(self, config: RunConfig, steps: int, root: Path) -> None:
        self.config, self.steps, self.root = config, steps, root
        self.half = steps // 2
        self.data: Data = recipe.build_data(config)
        self.recorded: list[_Step] = []
        self.partings: list[Parting] = []
        self.notes: list[str] = []

    def run(self, at_once: int) -> Verification | None:
        """The verification on rank 0, None elsewhere."""
        loader, _ = recipe.loaders(self.config, self.data)
        engine = self._engine(Decisions())
        judge = None
        if groups.is_main():
            sharding = sharding_of(engine.model)
            model = engine.model if sharding is None else self._plain_model()
            judge = Judge(model, self.config.train, engine.precision.name, at_once, sharding)
        self._uninterrupted(engine, loader, judge)
        now = exchange.whole(engine.model)
        drift = judge.drift(now) if judge else 0.0
        precision = engine.precision.name
        form = engine.tuner.form.name if engine.tuner.begun else "eager"
        _close(engine)
        del engine, now
        resume = self._resume() if self.half else "Resume: not checked (it takes 2 steps or more)."
        if judge is None:
            return None
        judge.finish()
        partings = sorted([*self.partings, *judge.partings], key=lambda parting: parting.place)
        equal = judge.equal and not partings
        return Verification(
            verdict="parts" if partings else "equal" if equal else "within tolerance",
            partings=tuple(partings),
            steps=self.steps,
            resumed_after=self.half or None,
            resume=resume,
            precision=precision,
            form=form,
            ranks=groups.world_size(),
            loss=judge.loss,
            gradient=judge.gradient,
            update=judge.update,
            drift=drift,
            figures=tuple(judge.figures),
            notes=(*self.notes, *judge.notes),
        )

    def _engine(self, decisions: Decisions) -> Engine:
        model = recipe.build_model(self.config, self.data.tokenizer.vocab_size, decisions)
        return recipe.build_engine(self.config, model, decisions)

    def _plain_model(self) -> nn.Module:
        """A model of the same shape, whole, on this rank alone."""
        train = self.config.train.model_copy(update={"masters": "none"})
        plain = self.config.model_copy(update={"zero": None, "wire": Wire(), "train": train})
        return recipe.build_model(plain, self.data.tokenizer.vocab_size)

    # the uninterrupted run -------------------------------------------------------------------

    def _uninterrupted(self, engine: Engine, loader: Loader, judge: Judge | None) -> None:
        watch = Watch(judge.place if judge else torch.device("cpu"))
        watch.attach(engine)
        parameters = exchange.whole(engine.model)
        if judge is not None:
            judge.start(parameters)
        for step in range(self.steps):
            batch = next(loader)
            tokens, targets = self._plain_batch(step)
            self._part(self._other_samples(step, batch), "data order", step)
            watch.clear()
            if judge is not None:
                judge.before(parameters, tokens, targets, engine.precision.scale)
            result = engine.train_step(batch)
            parameters = exchange.whole(engine.model)
            if judge is not None:
                judge.after(step, result, parameters, watch)
            self._record(step, batch, result, engine, parameters)
            if step + 1 == self.half:
                self._save(engine, loader)

    def _record(
        self, step: int, batch: Any, result: StepResult, engine: Engine, now: dict[str, Tensor]
    ) -> None:
        parameters = _digests(now)
        state = _digests(_optimizer_state(engine)) if step + 1 == self.half else {}
        self.recorded.append(_Step(batch["tokens"], batch["targets"], result, parameters, state))
        everyone = groups.gather_objects(parameters)
        for rank, others in enumerate(everyone):
            if others != everyone[0]:
                name, more = _first_difference(others, everyone[0])
                text = f"rank {rank} has other values than rank 0"
                self._keep(Parting("ranks", step + 1, text, name, more))

    def _save(self, engine: Engine, loader: Loader) -> None:
        engine_state.save(engine, self.root, {"cursor": loader.state()})

    # the resumed run -------------------------------------------------------------------------

    def _resume(self) -> str:
        """Resumes as a run does: decisions replayed, state restored, the loader put in place."""
        found = engine_state.peek(self.root)
        engine = self._engine(Decisions.from_json(found.documents["decisions"]))
        loader, _ = recipe.loaders(self.config, self.data)
        documents = engine_state.load(engine, self.root)
        loader.seek(documents["cursor"])
        self._judge_state(engine)
        note = engine.tuner.note
        for step in range(self.half, self.steps):
            batch, was = next(loader), self.recorded[step]
            # Forms of the step are still tried: by the times there were, the same one is chosen.
            vars(engine.tuner)["note"] = lambda _, micros, was=was: note(was.result.seconds, micros)
            self._part(self._moved_samples(step, batch), "resume: data order", step)
            result = engine.train_step(batch)
            if result.lr != was.result.lr or abs(result.lr - self._lr(step)) > 1e-9 * result.lr:
                text = f"{result.lr:.9g}, uninterrupted it was {was.result.lr:.9g}"
                self._part(text, "resume: learning rate", step)
            self._judge_bits(step, result, engine)
        _close(engine)
        exact = not any(p.check.startswith("resume") for p in self.partings) and not self.notes
        where = f"Resume: saved after step {self.half}, {self.steps - self.half} steps on"
        return f"{where}, {'bit for bit as uninterrupted' if exact else 'see below'}."

    def _lr(self, step: int) -> float:
        return learning_rate(self.config.train, step)

    def _judge_state(self, engine: Engine) -> None:
        """Parameters and optimizer state right after loading."""
        was = self.recorded[self.half - 1]
        now = _digests(exchange.whole(engine.model)) | _digests(_optimizer_state(engine))
        before = was.parameters | was.state
        mine: list[Any] = list(_first_difference(now, before)) if now != before else []
        for rank, found in enumerate(groups.gather_objects(mine)):
            if found:
                text = "not what was saved" + (f" (rank {rank})" if rank else "")
                self._keep(Parting("resume: state", self.half + 1, text, found[0], found[1]))

    def _judge_bits(self, step: int, result: StepResult, engine: Engine) -> None:
        was = self.recorded[step]
        now = _digests(exchange.whole(engine.model))
        lost = math.isnan(result.loss) and math.isnan(was.result.loss)
        same_loss = result.loss == was.result.loss or lost
        if now == was.parameters and same_loss:
            return
        if engine.place.type != "cpu" and not self.partings:
            # Some kernels of accelerators add in an order that changes from call to call.
            note = "after the resume the bits differ, from the same state and samples; kernels "
            note += f"of {engine.place.type} need not repeat bit for bit"
            self.notes = [note]
            return
        if not same_loss:
            text = f"{result.loss:.9g}, uninterrupted it was {was.result.loss:.9g}"
            self._keep(Parting("resume: loss", step + 1, text))
        if now != was.parameters:
            name, more = _first_difference(now, was.parameters)
            text = "other bits than uninterrupted"
            self._keep(Parting("resume: parameters", step + 1, text, name, more))

    # samples ---------------------------------------------------------------------------------

    def _plain_batch(self, step: int) -> tuple[Tensor, Tensor]:
        config = self.config
        return global_batch(self.data.train, config.data.seed, config.train.batch, step)

    def _mine(self, whole: Tensor) -> Tensor:
        part = len(whole) // groups.world_size()
        return whole[groups.rank() * part : (groups.rank() + 1) * part]

    def _other_samples(self, step: int, batch: Any) -> str:
        """Where this rank's part of the batch is not that of the written rule; empty if nowhere."""
        tokens, targets = self._plain_batch(step)
        return self._difference(step, batch, self._mine(tokens), self._mine(targets))

    def _moved_samples(self, step: int, batch: Any) -> str:
        was = self.recorded[step]
        return self._difference(step, batch, was.tokens, was.targets)

    def _difference(self, step: int, batch: Any, tokens: Tensor, targets: Tensor) -> str:
        if batch["tokens"].shape != tokens.shape:
            return f"a batch of shape {tuple(batch['tokens'].shape)}, not {tuple(tokens.shape)}"
        for i in range(len(tokens)):
            if _is_row(batch, i, tokens[i], targets[i]):
                continue
            size = self.config.train.batch
            sample = step * size + groups.rank() * len(tokens) + i
            return f"where sample {sample} belongs, there is {self._name(batch, i)}"
        return ""

    def _name(self, batch: Any, i: int) -> str:
        """Which sample row `i` of `batch` is, if it is one of those around."""
        for step in range(self.steps + 1):
            tokens, targets = self._plain_batch(step)
            for j in range(len(tokens)):
                if _is_row(batch, i, tokens[j], targets[j]):
                    return f"sample {step * len(tokens) + j}"
        return "a row of none of these steps"

    # what was found --------------------------------------------------------------------------

    def _part(self, text: str, check: str, step: int) -> None:
        """Keeps what a rank found (empty: nothing); every rank must call this together."""
        texts = groups.gather_objects(text)
        for rank, said in enumerate(texts):
            if said:
                where = f" (rank {rank})" if len(texts) > 1 else ""
                self._keep(Parting(check, step + 1, said + where))
                return

    def _keep(self, parting: Parting) -> None:
        if all(kept.check != parting.check for kept in self.partings):
            self.partings.append(parting)


def _is_row(batch: Any, i: int, tokens: Tensor, targets: Tensor) -> bool:
    same = torch.equal(batch["tokens"][i], tokens) and torch.equal(batch["targets"][i], targets)
    return bool(same)


def _close(engine: Engine) -> None:
    """Gives back the links of a sharded model, on every rank."""
    sharding = sharding_of(engine.model)
    if sharding is not None:
        sharding.close()


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """A digest of the bits of each tensor."""
    digests = {}
    for name, tensor in tensors.items():
        flat = flat_bytes(tensor.detach().cpu().contiguous())
        digests[name] = hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()
    return digests


def _optimizer_state(engine: Engine) -> dict[str, Tensor]:
    """Every tensor of the optimizer's state that this rank has, under the parameter's name."""
    return {
        f"{name} ({key})": local(value)
        for name, parameter in engine.model.named_parameters()
        for key, value in engine.optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _first_difference(now: dict[str, str], was: dict[str, str]) -> tuple[str, int]:
    """The first name whose digest differs or is missing, and how many more there are."""
    names = [n for n in [*was, *(n for n in now if n not in was)] if now.get(n) != was.get(n)]
    return names[0], len(names) - 1


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    """A folder that every rank sees and that is gone afterwards."""
    name = tempfile.mkdtemp(prefix="lezero-verify-") if groups.is_main() else ""
    try:
        yield Path(groups.broadcast_object(name))
    finally:
        if name:
            shutil.rmtree(name, ignore_errors=True)
