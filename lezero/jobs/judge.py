"""Compares one step of the engine with plain PyTorch, link by link.

[Note: why each step is judged from the engine's own state]
Two right loops that are left alone drift apart: AdamW's first update is the sign of the gradient,
so a rounding error in a gradient near zero moves that parameter the other way, and every later
gradient is taken elsewhere. A bound wide enough for that hides real faults. So before each step the
plain loop takes over the engine's parameters (never its optimizer state), and each link of the step
is judged by itself, from what the engine did in the link before:

    samples → tokens → loss, gradients → norm → clipping → learning rate → update

When every link of every step is right, so is the run, by induction.

[Note: what is allowed]
Loss and gradients depend on the precision, and how much is *measured*, not assumed. The plain loop
runs once more with other rounding: in the run's precision (bf16 or fp16 autocast), or in fp64 when
the run is in fp32. The distance between these two plain loops, both right, is what rounding does
to this model on these samples, parameter by parameter, as a norm over the parameter. One such
distance can be small by luck, so the largest of all steps so far counts, as a share of the whole
gradient, and no parameter is held to less than the whole model's share. The engine may be `SLACK`
times as far from the fp32 loop: 4 in bf16 and fp16, where rounding reaches a per cent of a gradient
and more slack would hide faults; 32 in fp32, where rounding stays below a hundred-thousandth and
slack hides nothing. The loss is allowed `SLACK` times the mean distance of its tokens' losses.

A lossy wire is allowed what it loses (`exchange.py`, Note [a lossy wire]).

Everything after the gradients is fp32 arithmetic in every precision and gets no slack of that kind:
AdamW on the engine's gradients must give the engine's parameters to a few units in the last place
of the type that they are kept in. With 8-bit moments an update is only held to be of its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lezero.jobs import exchange
from lezero.jobs.plain_loop import PlainLoop, learning_rate
from lezero.jobs.verification import Largest, Parting, StepFigures
from lezero.parallel.zero import Sharding
from lezero.train.config import TrainConfig
from lezero.train.engine import Engine, StepResult

SLACK = {"fp32": 32.0, "bf16": 4.0, "fp16": 4.0}
_EPS = torch.finfo(torch.float32).eps
_OPTIONS = ("weight_decay", "betas", "eps")
_DTYPES = {"fp32": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Watch:
    """The gradients of the engine's last step: summed over ranks and unscaled, and then as the
    optimizer got them. Empty where the step did not come that far, and on ranks other than 0.

    `owes`: what the wire's feedback has kept, before the step and after its sums. `left_out`: the
    trainable parameters that the optimizer does not hold. `options`: AdamW's, by parameter."""

    place: torch.device
    gradients: dict[str, Tensor] = field(default_factory=dict)
    clipped: dict[str, Tensor] = field(default_factory=dict)
    owes: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    left_out: list[str] = field(default_factory=list)
    options: dict[str, dict[str, object]] = field(default_factory=dict)

    def attach(self, engine: Engine) -> None:
        """Looks at `engine` between its backward pass, its clipping and its optimizer. On every
        rank: those of a sharded model gather its gradients together."""
        measure = engine._gradient_norm
        held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
        named = engine.model.named_parameters()
        self.left_out = [name for name, p in named if p.requires_grad and id(p) not in held]

        def norm(held: list[Tensor]) -> float:
            value = measure(held)
            self.gradients = exchange.whole_gradients(engine.model, self.place)
            self.owes = (self.owes[1], exchange.owed(engine.model))
            return value

        def before_update(*_: object) -> None:
            self.clipped = exchange.whole_gradients(engine.model, self.place)
            self.options = _options(engine.model, engine.optimizer)

        setattr(engine, "_gradient_norm", norm)  # noqa: B010
        engine.optimizer.register_step_pre_hook(before_update)

    def clear(self) -> None:
        self.gradients, self.clipped = {}, {}


class Judge:
    """Holds the plain loops and what they found. Call `before` and `after` around each step.

    model: a plain one like the engine's. `alone` starts as the engine does and is never corrected;
    `beside` takes over the engine's parameters before each step; `other` does too, and rounds
    otherwise. sharding: the engine's, None where its model is whole on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        train: TrainConfig,
        precision: str,
        at_once: int,
        sharding: exchange.AnySharding | None = None,
    ) -> None:
        place = next(model.parameters()).device
        self.sharding = sharding
        if place.type == "mps":  # it has no fp64
            place = torch.device("cpu")
        self.train, self.precision, self.place = train, precision, place
        self.slack = SLACK[precision]
        self._rounding: dict[str, float] = {}
        self.alone = PlainLoop(model, train, place=place, at_once=at_once)
        self.beside = PlainLoop(model, train, place=place, at_once=at_once)
        self.other = PlainLoop(model, train, _DTYPES[precision], place, at_once)
        self.partings: list[Parting] = []
        self.figures: list[StepFigures] = []
        self.loss, self.gradient, self.update = Largest(), Largest(), Largest()
        self.loose: list[int] = []
        self.notes: list[str] = []
        self.equal = True
        self._losses = (math.nan, math.nan, math.nan)
        self._masters: dict[str, Tensor] = {}

    def start(self, parameters: Mapping[str, Tensor]) -> None:
        """The loop that is left alone begins where the engine does."""
        self.alone.follow(parameters)

    def before(
        self, parameters: Mapping[str, Tensor], tokens: Tensor, targets: Tensor, scale: float
    ) -> None:
        """Loss and gradients of the plain loops at the parameters that the engine starts from."""
        self.tokens = int((targets != -100).sum())
        if self.sharding is not None:  # what computes is not what is updated
            self._masters = {name: value.clone() for name, value in parameters.items()}
        computed = exchange.as_computed(self.sharding, parameters)
        self.beside.follow(computed)
        self.other.follow(computed)
        at_engine = self.beside.gradients(tokens, targets)
        scale = scale if self.precision == "fp16" else 1.0
        rounded = self.other.gradients(tokens, targets, scale)
        self._losses = (at_engine, rounded, self.alone.gradients(tokens, targets))

    def after(
        self, step: int, result: StepResult, parameters: Mapping[str, Tensor], watch: Watch
    ) -> None:
        """Judges what the engine did in `step` (from 0)."""
        plain, _, alone = self._losses
        self.equal &= result.loss == plain
        if result.tokens != self.tokens:
            text = f"{result.tokens} counted, plain PyTorch counts {self.tokens}"
            self._part("tokens", step, text)
        self._judge_loss(step, result.loss)
        gradient = Largest(step=step + 1)
        if result.skipped is None:
            gradient = self._judge_gradients(step, result.loss, watch)
            if watch.left_out:
                text = "the optimizer does not hold it, so that it is never updated"
                self._part("optimizer", step, text, watch.left_out[0], len(watch.left_out) - 1)
            self._judge_options(step, watch.options)
            self._judge_norm(step, result.grad_norm, watch.gradients)
            self._judge_clipping(step, watch)
            self._judge_lr(step, result.lr)
        else:
            self._judge_skip(step, result)
        update = self._judge_update(step, parameters)
        if result.skipped is None and math.isfinite(alone):
            self.alone.update(step)
        self.figures.append(
            StepFigures(step + 1, result.loss, alone, gradient, update, result.skipped)
        )

    def finish(self) -> None:
        """Says what the steps do not prove, after the last one."""
        reasons = [one.skipped for one in self.figures if one.skipped is not None]
        last, compared = len(self.figures) - 1, len(self.figures) - len(reasons)
        if not compared:
            text = f"every step was skipped ({reasons[-1]}), nothing was compared; give more steps"
            self._part("skipped step", last, f"{text}, or mend what makes the engine skip")
        if not self.loose:
            return
        text = f"rounding in {self.precision} may be as large as the gradient, so that a missing "
        text += f"one would pass, in {len(self.loose)} of {compared} steps that were compared"
        if len(self.loose) == compared:
            self._part("gradient", last, text)
        else:
            self.notes.append(f"{text}; the first is step {self.loose[0]}")

    @torch.no_grad()
    def drift(self, mine: Mapping[str, Tensor]) -> float:
        """The largest distance, in any parameter, from the plain loop that was left alone."""
        return max(
            float((parameter - mine[name].to(parameter.device)).abs().max())
            for name, parameter in self.alone.parameters.items()
        )

    # the links -------------------------------------------------------------------------------

    def _judge_loss(self, step: int, loss: float) -> None:
        plain = self._losses[0]
        rounding = (self.other.token_losses - self.beside.token_losses).abs().sum() / self.tokens
        allowed = self.slack * float(rounding) + 8 * _EPS * abs(plain)
        difference = abs(loss - plain)
        self.loss = self.loss.of_two(
            Largest(difference, allowed, _share(difference, allowed), step + 1)
        )
        if not (difference <= allowed or _same_nonfinite(loss, plain)):
            text = f"{loss:.7g} here, {plain:.7g} in plain PyTorch; {allowed:.2g} is allowed"
            self._part("loss", step, text)

    def _judge_gradients(self, step: int, loss: float, watch: Watch) -> Largest:
        plain, other = self.beside.found(), self.other.found()
        found, wire = self._sent(watch)
        lost = exchange.encoding_loss(self.sharding, plain)
        size = {name: _norm(value) for name, value in plain.items()}
        length = math.hypot(*size.values()) or 1.0
        spread = {name: _distance(other.get(name), value) for name, value in plain.items()}
        whole = max(math.hypot(*spread.values()) / length, _EPS)
        if not self.slack * whole < 1:
            self.loose.append(step + 1)
        for name, distance in spread.items():
            self._rounding[name] = max(self._rounding.get(name, 0.0), distance / length)
        worst, beyond = Largest(), []
        for name in self.beside.parameters:
            self.equal &= _same(found.get(name), plain.get(name))
            difference = _distance(found.get(name), plain.get(name))
            unit = size.get(name, 0.0)
            allowed = self.slack * max(self._rounding.get(name, 0.0) * length, whole * unit)
            allowed += exchange.LOSS_SLACK * lost.get(name, 0.0) + wire.get(name, 0.0)
            share, unit = _share(difference, allowed), unit or 1.0
            one = Largest(difference / unit, allowed / unit, share, step + 1, name)
            worst = worst.of_two(one)
            if not share <= 1:
                beyond.append((name, one))
        self.gradient = self.gradient.of_two(worst)
        if beyond:
            name, one = beyond[0]
            mine = _norm(found[name]) if name in found else None
            text = (
                f"{one.difference:.2g} of its size away, {one.allowed:.2g} is allowed; its norm is "
                f"{'missing' if mine is None else f'{mine:.6g}'} here and {size.get(name, 0):.6g} "
                f"in plain PyTorch; loss difference {abs(loss - self._losses[0]):.2g}"
            )
            self._part("gradient", step, text, name, len(beyond) - 1)
        return worst

    def _sent(self, watch: Watch) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The gradients that were to be sent (what arrived and what is owed since), and by how much
        the storage of what is owed may have changed them."""
        before, after = watch.owes
        if not after:
            return watch.gradients, {}
        assert isinstance(self.sharding, Sharding)  # nobody else keeps what encoding lost
        kind = self.sharding.lines.wire.feedback_dtype
        largest = max(float(one.abs().max()) for owes in (before, after) for one in owes.values())
        sent, stored = {}, {}
        for name, arrived in watch.gradients.items():
            now, then = after[name], before.get(name, torch.zeros_like(after[name]))
            sent[name] = arrived.double() + (now - then).view(arrived.shape).to(arrived.device)
            kept = _norm(now) + _norm(then)
            if kind == "int8":  # a block rounds by its largest, of whichever parameter
                kept = 2 * largest * math.sqrt(now.numel())
            stored[name] = exchange.STORED[kind] * kept
        return sent, stored

    def _judge_norm(self, step: int, norm: float, found: dict[str, Tensor]) -> None:
        own = math.hypot(*(_norm(value) for value in found.values()))
        if not abs(norm - own) <= 1e-4 * own:
            self._part("gradient norm", step, f"{norm:.7g} is reported, but it is {own:.7g}")

    def _judge_skip(self, step: int, result: StepResult) -> None:
        plain = self._losses[0]
        finite = math.isfinite(plain) and all(
            bool(g.isfinite().all()) for g in self.beside.found().values()
        )
        if finite and self.precision != "fp16":
            text = f"the engine skipped it ({result.skipped}), plain PyTorch is finite there"
            self._part("skipped step", step, text)

    def _judge_options(self, step: int, found: dict[str, dict[str, object]]) -> None:
        """Weight decay, betas and eps as configured: in a warm-up the update's room hides them."""
        right = _options(self.beside.model, self.beside.optimizer)
        other = [(n, key) for n in right for key in _OPTIONS if n in found
                 and found[n][key] != right[n][key]]  # fmt: skip
        if other:
            name, key = other[0]
            text = f"its {key} is {found[name][key]} here, {right[name][key]} by the config"
            self._part("optimizer", step, text, name, len({n for n, _ in other}) - 1)

    def _judge_clipping(self, step: int, watch: Watch) -> None:
        """Clipping and AdamW of the plain loop, on the gradients that the engine had."""
        for name, parameter in self.beside.parameters.items():
            found = watch.gradients.get(name)
            parameter.grad = None if found is None else found.clone().to(parameter.dtype)
        if self.sharding is not None:
            self.beside.follow(self._masters)
        self.beside.update(step)
        expected, beyond = self.beside.found(), []
        for name, value in expected.items():
            given = watch.clipped.get(name)
            self.equal &= _same(given, value)
            rounding = 1e-5 if given is None else max(1e-5, torch.finfo(given.dtype).eps / 2)
            if not _distance(given, value) <= rounding * _norm(value):
                beyond.append(name)
        if beyond:
            name = beyond[0]
            mine = _norm(watch.clipped[name]) if name in watch.clipped else 0.0
            right = _norm(expected[name])
            text = f"the optimizer got a norm of {mine:.6g}, it should be {right:.6g}"
            self._part("clipping", step, text, name, len(beyond) - 1)

    def _judge_lr(self, step: int, lr: float) -> None:
        expected = learning_rate(self.train, step)
        if not math.isclose(lr, expected, rel_tol=1e-9):
            self._part("learning rate", step, f"{lr:.9g} here, {expected:.9g} by its formula")

    @torch.no_grad()
    def _judge_update(self, step: int, parameters: Mapping[str, Tensor]) -> Largest:
        """Parameters after the step: a few units in the last place of the parameter, and of the
        update, which is at most some ten times the learning rate."""
        moved = 640 * _EPS * learning_rate(self.train, step)
        if self.train.optimizer == "adamw8bit":
            moved = 2 * learning_rate(self.train, step)
        worst, beyond = Largest(), []
        for name, parameter in parameters.items():
            expected = self.beside.parameters[name]
            found = parameter.to(expected.device)
            self.equal &= torch.equal(found, expected)
            if not found.numel():
                continue
            difference = (found - expected).abs()
            eps = torch.finfo(parameter.dtype).eps
            rounded = 8 * eps * learning_rate(self.train, step)  # of gradients of that type
            share = difference / (4 * eps * expected.abs() + max(moved, rounded))
            share = torch.where(difference == 0, 0.0, share)  # where nothing is allowed either
            at = int(share.argmax())
            gap, part = float(difference.flatten()[at]), float(share.flatten()[at])
            one = Largest(gap, gap / part if part else moved, part, step + 1, name)
            worst = worst.of_two(one)
            if not part <= 1:
                beyond.append((name, one))
        self.update = self.update.of_two(worst)
        if beyond:
            name, one = beyond[0]
            text = (
                f"after AdamW on the same gradients {one.difference:.2g} away, "
                f"{one.allowed:.2g} is allowed"
            )
            self._part("update", step, text, name, len(beyond) - 1)
        return worst

    def _part(
        self, check: str, step: int, text: str, parameter: str | None = None, others: int = 0
    ) -> None:
        if all(parting.check != check for parting in self.partings):
            self.partings.append(Parting(check, step + 1, text, parameter, others))


def _options(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, object]]:
    """What each parameter is updated with, by its name."""
    held = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {
        name: {key: tuple(held[id(p)][key]) if key == "betas" else held[id(p)][key]
               for key in _OPTIONS}
        for name, p in model.named_parameters() if id(p) in held
    }  # fmt: skip


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64)) if value.numel() else 0.0


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """Norm of the difference; a gradient that is not there is zero."""
    if a is None or b is None:
        present = a if a is not None else b
        return 0.0 if present is None else _norm(present)
    return _norm(a.to(torch.float64) - b.to(torch.float64))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _share(difference: float, allowed: float) -> float:
    if difference == 0:
        return 0.0
    return difference / allowed if allowed > 0 else math.inf


def _same_nonfinite(a: float, b: float) -> bool:
    return not math.isfinite(a) and not math.isfinite(b)
