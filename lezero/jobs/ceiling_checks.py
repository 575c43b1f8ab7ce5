"""The doctor's checks of what was measured: is it there, and is it what such a machine reaches."""

from __future__ import annotations

from lezero.core.checks import Check, Context, Finding, checks
from lezero.report import units

SLOW_MEMORY = 2e9
AGAIN = "lz doctor --refresh"
# A fifth of what one thread does at 2 GHz with two vector units, in FLOP/s of fp32.
_LEAST_FP32 = {"avx512f": 25.6e9, "avx2": 12.8e9, "neon": 3.2e9}


@checks.register("ceilings")
class CeilingsCheck(Check):
    """The measured ceilings exist, were measured undisturbed, and fit the processor."""

    def run(self, context: Context) -> list[Finding]:
        ceilings = context.ceilings
        if ceilings is None:
            return _nothing_measured(context)
        found = []
        if ceilings.disturbed:
            found.append(
                Finding(
                    severity="warning",
                    title="the ceilings were measured beside other programs",
                    cause=f"The measurement got {ceilings.cpu_share:.0%} of the processor time it "
                    "asked for, so the machine can do better than these figures.",
                    fix=f"{AGAIN}   # when nothing else runs",
                )
            )
        elif ceilings.device == "cpu":
            found += _too_slow(context)
        read = ceilings.memory_read
        if ceilings.device == "cpu" and read is not None and read < SLOW_MEMORY:
            found.append(
                Finding(
                    severity="warning",
                    title=f"memory reads at only {units.rate(read, 'B/s')}",
                    cause="The machine swaps, or other programs use its memory.",
                    fix="vmstat 1 5",
                )
            )
        missing = [name for name in ("fp32", "bf16") if ceilings.gemm(name) is None]
        if missing:
            names = ", ".join(f"gemm_{name}" for name in missing)
            why = "; ".join(f"{name}: {reason}" for name, reason in ceilings.failed.items())
            found.append(
                Finding(
                    severity="warning",
                    title=f"could not be measured: {names}",
                    cause=why or "The products took too long.",
                    fix=AGAIN,
                )
            )
        return found or [Finding(severity="ok", title="ceilings as expected of this machine")]


def _nothing_measured(context: Context) -> list[Finding]:
    if context.ceilings_error:
        return [
            Finding(
                severity="broken",
                title="the ceilings could not be measured",
                cause=context.ceilings_error,
                fix=AGAIN,
            )
        ]
    if not context.torch:
        return []
    title = "no ceilings measured yet"
    return [Finding(severity="note", title=title, cause="Forecasts need them.", fix="lz doctor")]


def _too_slow(context: Context) -> list[Finding]:
    """Figures far below what the instruction sets promise."""
    ceilings, sets = context.ceilings, context.facts.cpu.instruction_sets
    found = []
    least = next((rate for name, rate in _LEAST_FP32.items() if name in sets), 0.0)
    reached = ceilings.gemm_fp32
    if reached is not None and reached < least * ceilings.threads:
        found.append(
            Finding(
                severity="warning",
                title=f"fp32 products reach only {units.rate(reached, 'FLOP/s')}",
                cause=f"Such a processor does {units.rate(least * ceilings.threads, 'FLOP/s')} and "
                "more: it is throttled, shared with other machines, or torch lacks its kernels.",
                fix=AGAIN,
            )
        )
    fast = ceilings.gemm_bf16
    if context.facts.cpu.native_bf16 and reached and fast and fast < 1.1 * reached:
        found.append(
            Finding(
                severity="note",
                title="bf16 products are no faster than fp32 ones",
                cause="Such are Intel's processors with AVX512-BF16 where a virtual machine hides "
                "AMX, and versions of torch without kernels for it. Precision 'auto' measures "
                "both and takes the faster.",
            )
        )
    return found
