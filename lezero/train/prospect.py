"""The forecast of a run, made before its model is allocated, and what is measured against it."""

from __future__ import annotations

from dataclasses import dataclass

from lezero.comm.mesh import Mesh
from lezero.comm.probe import probe
from lezero.core import groups
from lezero.core.errors import CapacityError
from lezero.plan import StepSpec, forecast
from lezero.profiler.hardware import hardware
from lezero.train import recipe
from lezero.train.config import RunConfig
from lezero.train.run_folder import RunFolder


@dataclass(frozen=True)
class Prospect:
    """What was forecast for one rank; FLOPs and ceiling are of all ranks on this machine."""

    memory_bytes: int
    step_seconds: float
    flops: float
    ceiling: float | None

    def share_of_ceiling(self, seconds: float) -> float | None:
        """Share (0 to 1) of the measured GEMM ceiling that a step of `seconds` reached; None where
        none was measured, or what was is none: of a type that small products alone are tried in."""
        if not self.ceiling or seconds <= 0:
            return None
        share = self.flops / seconds / self.ceiling
        return share if share <= 1 else None


def _with_network(spec: StepSpec) -> StepSpec:
    """With how the ranks reach each other, as they measure it together: about a second."""
    if spec.ranks == 1:
        return spec
    with Mesh({"ranks": spec.ranks}) as mesh:
        found = probe(mesh, "ranks")
    return spec.with_(levels=found.levels, ranks_here=len(found.hosts.ranks[0]))


def foresee(config: RunConfig, vocab: int, folder: RunFolder, kept: str | None = None) -> Prospect:
    """Forecasts on rank 0, writes `forecast.json` and `hardware.json`, tells every rank.

    `kept`: the precision that a resumed run goes on in, where it is not for the config to say.
    Raises `CapacityError` on every rank, before anything is allocated, when it does not fit.
    """
    answer: dict[str, object] = {}
    build, spec = recipe.plan_inputs(config, vocab)  # the ranks agree on the precision there
    spec = _with_network(spec if kept is None else spec.with_(precision=kept))
    if groups.is_main():
        machine = hardware()
        folder.write_json("hardware.json", machine.to_dict())
        try:
            made = forecast(build, spec, machine)
            folder.write_json("forecast.json", made.to_dict())
            made.require_fit()
            answer = vars(Prospect(made.memory_bytes, made.step_seconds, made.flops, made.ceiling))
        except CapacityError as error:
            answer = {"error": str(error)}
    answer = groups.broadcast_object(answer)
    if "error" in answer:
        raise CapacityError(str(answer["error"]))
    return Prospect(**answer)  # type: ignore[arg-type]
