"""What `verify` found: a verdict, the first places where engine and plain PyTorch part, figures."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lezero.core import groups
from lezero.core.errors import NumericsError
from lezero.core.log import logger
from lezero.train.run_folder import write_aside

log = logger("verify")
FORMAT = 1
CHECKS = (
    "data order", "tokens", "loss", "gradient", "optimizer", "gradient norm", "skipped step",
    "clipping", "learning rate", "update", "ranks", "resume: state", "resume: data order",
    "resume: learning rate", "resume: loss", "resume: parameters",
)  # fmt: skip
"""The links of the chain, in the order in which a step depends on them."""


@dataclass(frozen=True)
class Parting:
    """The first place where one check failed. `step` counts from 1; `parameter` is the first one
    beyond tolerance, in the model's order, and `others` says how many more there are."""

    check: str
    step: int
    text: str
    parameter: str | None = None
    others: int = 0

    def __str__(self) -> str:
        where = f"step {self.step}, {self.check}"
        if self.parameter is not None:
            where += f" of {self.parameter}"
            where += f" (and {self.others} more)" if self.others else ""
        return f"{where}: {self.text}"

    @property
    def place(self) -> tuple[int, int]:
        return self.step, CHECKS.index(self.check)


@dataclass(frozen=True)
class Largest:
    """The largest difference of one kind, as a share of what is allowed, and where it was."""

    difference: float = 0.0
    allowed: float = 0.0
    share: float = 0.0
    step: int = 0
    parameter: str | None = None

    def of_two(self, other: Largest) -> Largest:
        return other if other.share > self.share or math.isnan(other.share) else self


@dataclass(frozen=True)
class StepFigures:
    """One step: the loss of the engine, and that of a plain loop that was left alone; why the
    engine skipped it, None where it did not."""

    step: int
    loss: float
    plain_loss: float
    gradient: Largest
    update: Largest
    skipped: str | None = None


@dataclass(frozen=True)
class Verification:
    """What came out. `loss`, `gradient` and `update` are the largest differences found;
    `drift` the largest distance, in any parameter, from a plain loop that was left alone."""

    verdict: Literal["equal", "within tolerance", "parts"]
    partings: tuple[Parting, ...]
    steps: int
    resumed_after: int | None
    resume: str
    precision: str
    form: str
    ranks: int
    loss: Largest
    gradient: Largest
    update: Largest
    drift: float
    figures: tuple[StepFigures, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.verdict != "parts"

    @property
    def first(self) -> Parting | None:
        """Where they part first."""
        return self.partings[0] if self.partings else None

    @property
    def skipped(self) -> int:
        """How many steps the engine skipped: of them the loss alone is compared."""
        return sum(one.skipped is not None for one in self.figures)

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        if self.first is not None:
            return f"Parts from plain PyTorch at {self.first}."
        compared = self.steps - self.skipped
        many = compared != 1
        what = f"{compared} {'steps' if many else 'step'} in {self.precision}"
        what += " are" if many else " is"
        those = ("those" if many else "that") + " of plain PyTorch in fp32"
        if self.skipped:
            those += f" ({self.skipped} of {self.steps} steps were skipped and are not compared)"
        if self.verdict == "equal":
            return f"Equal: {what} bit for bit {those}."
        return (
            f"Within tolerance: {what} {those}; gradients differ by at "
            f"most {self.gradient.difference:.2g} of their size where "
            f"{self.gradient.allowed:.2g} is allowed, parameters after one update by "
            f"{self.update.difference:.2g}."
        )

    def require(self) -> Verification:
        """Itself. Raises `NumericsError` with the place when engine and plain PyTorch part."""
        if not self.ok:
            raise NumericsError(self.summary[0].lower() + self.summary[1:].rstrip("."))
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain data; `RUN/verify.json` holds it and the run's report shows it."""
        data = asdict(self)
        del data["figures"]
        data["partings"] = [str(parting) for parting in self.partings]
        first = asdict(self.first) if self.first else {}
        losses = {"losses": [f.loss for f in self.figures], "skipped_steps": self.skipped}
        plain = {"plain_losses": [f.plain_loss for f in self.figures]}
        return _finite(
            {
                "format": FORMAT, "ok": self.ok, "verdict": self.summary, "outcome": self.verdict,
                **{k: v for k, v in data.items() if k != "verdict"}, **losses, **plain,
                "first": first,
            }
        )  # fmt: skip

    def table(self) -> str:
        """The figures of every step, and what was found, for a terminal."""
        lines = [f"{'step':>5} {'loss':>10} {'plain':>10}  gradient, update: difference (allowed)"]
        for one in self.figures:
            both = f"{_against(one.gradient)}, {_against(one.update)}"
            lines.append(
                f"{one.step:>5} {one.loss:>10.5f} {one.plain_loss:>10.5f}  "
                + (f"skipped: {one.skipped}" if one.skipped else both)
            )
        lines.append(self.resume)
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"parts: {parting}" for parting in self.partings]
        return "\n".join([*lines, self.summary])

    def write(self, run: str | Path) -> Path | None:
        """Writes `verify.json` into a run's folder, where there is one; rank 0 alone does.

        A folder that cannot be written is told and changes nothing about the verdict.
        """
        place = Path(run) / "verify.json"
        if not groups.is_main() or not place.parent.is_dir():
            return None
        try:
            write_aside(place, json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            log.warning("%s was not written: %s", place, error.strerror or error)
            return None
        return place


def read(data: dict[str, Any]) -> Verification:
    """A `Verification` from `asdict` of one that travelled as JSON between ranks."""
    largest = {key: Largest(**data[key]) for key in ("loss", "gradient", "update")}
    steps = tuple(
        StepFigures(**{**one, **{k: Largest(**one[k]) for k in ("gradient", "update")}})
        for one in data["figures"]
    )
    partings = tuple(Parting(**one) for one in data["partings"])
    kept = {**data, "figures": steps, "partings": partings, "notes": tuple(data["notes"])}
    return Verification(**{**kept, **largest})


def _against(largest: Largest) -> str:
    mark = " !" if not largest.share <= 1 else ""
    return f"{largest.difference:.1e} ({largest.allowed:.1e}){mark}"


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
