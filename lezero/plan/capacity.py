"""What would fit when a step does not: smaller micro-batches, a higher stage, less of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from lezero.parallel.zero import Zero
from lezero.plan.calls import Call
from lezero.plan.copies import Course
from lezero.plan.spec import Build, StepSpec
from lezero.plan.trace import trace_step

_STAGE = "zero.stage="
Courses = Callable[[Iterable[Call]], Mapping[str, Course]]


def suggest(
    build: Build,
    spec: StepSpec,
    limit_bytes: int,
    scratch_bytes: int = 0,
    courses: Courses | None = None,
) -> tuple[str, ...]:
    """Changes of the config that fit into `limit_bytes`, the least intrusive first.

    Micro-batches keep the global batch, by accumulating. Each kind of change is named once, with
    the largest value that fits; a change that alone does not help is tried with the ones before.
    scratch_bytes: what the library of matrix products keeps for the step as it is; changed ones
    are taken to need as much. courses: `OpTimes.courses`; without, no copies count.
    """
    found: list[str] = []
    for change, text in _one_change_each(spec):
        if text.startswith(_STAGE) and any(line.startswith(_STAGE) for line in found):
            continue
        smaller = _largest_micro_batch(build, change, limit_bytes - scratch_bytes, courses)
        if smaller is not None:
            lines = [text] if text else []
            if smaller.batch != change.batch:
                lines.append(
                    f"train.accumulate={smaller.accumulate} (micro-batches of {smaller.batch}; "
                    "the same batch)"
                )
            found.append(" with ".join(lines))
        if len(found) == 2:
            break
    return tuple(found)


def can_shard_more(spec: StepSpec) -> bool:
    """Whether there is a higher stage of ZeRO than the step has; fp16 goes with none."""
    more = spec.zero is None or spec.zero.stage < 3
    return spec.ranks > 1 and more and spec.precision != "fp16"


def _one_change_each(spec: StepSpec) -> Iterator[tuple[StepSpec, str]]:
    yield spec, ""
    if can_shard_more(spec):
        zero = spec.zero or Zero(stage=0, compute="bf16" if spec.precision == "bf16" else "fp32")
        for stage in range(zero.stage + 1, 4):
            higher = zero.model_copy(update={"stage": stage})
            yield spec.with_(zero=higher), f"{_STAGE}{stage}"
    if spec.precision == "fp32":
        half = spec.zero and spec.zero.model_copy(update={"compute": "bf16"})
        yield spec.with_(precision="bf16", zero=half), "train.precision=bf16"
    if spec.pool and spec.device == "cpu":
        yield spec.with_(pool=False), "train.pool=false"
    tokens = spec.tokens // 2
    while tokens >= 64:
        yield spec.with_(tokens=tokens), f"data.sequence={tokens}"
        tokens //= 2


def _largest_micro_batch(
    build: Build, spec: StepSpec, limit: int, courses: Courses | None
) -> StepSpec | None:
    """The step with the largest micro-batch that fits, the batch kept by accumulating."""
    from lezero.plan.forecast import memory_of

    def fits(batch: int) -> bool:
        candidate = spec.with_(batch=batch, accumulate=spec.accumulate * spec.batch // batch)
        trace = trace_step(build, candidate)
        if courses is not None:
            trace = trace.with_copies(courses(call for _, _, call in trace.holders))
        if trace.peak()[0] > limit:
            return False
        return memory_of(trace, candidate, {})[0] <= limit

    sizes = [b for b in range(1, spec.batch + 1) if spec.batch % b == 0]
    if not fits(sizes[0]):
        return None
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle - 1)
    return spec.with_(batch=sizes[low], accumulate=spec.accumulate * spec.batch // sizes[low])
