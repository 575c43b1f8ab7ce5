"""The doctor's check of LeZero's own kernels."""

from __future__ import annotations

from lezero.core.checks import Check, Context, Finding, checks
from lezero.jobs.software_checks import OTHER_CACHE, install_command, python


@checks.register("native-ops")
class NativeOpsCheck(Check):
    """The C kernels of LeZero's ops are built; where one cannot be, what runs instead."""

    def run(self, context: Context) -> list[Finding]:
        ops = context.torch.get("native", [])
        found = []
        by_fix: dict[str, list[dict[str, str]]] = {}
        for op in ops:
            if op["problem"]:
                by_fix.setdefault(_fix_of_build(op["problem"]), []).append(op)
            elif not op["kernel"]:
                found.append(
                    Finding(
                        severity="note",
                        title=f"no kernel of '{op['name']}' suits this machine",
                        cause=f"There is none for its processor or its system; {op['otherwise']}.",
                    )
                )
        for fix, failed in by_fix.items():
            names = ", ".join(f"'{op['name']}'" for op in failed)
            instead = "; ".join(dict.fromkeys(op["otherwise"] for op in failed))
            kernels = "kernel" if len(failed) == 1 else "kernels"
            found.append(
                Finding(
                    severity="warning",
                    title=f"the {kernels} of {names} cannot be built: {instead}",
                    cause=f"{failed[0]['problem']}.",
                    fix=fix,
                )
            )
        if "native_error" in context.torch:
            found.append(
                Finding(
                    severity="warning",
                    title="a native library ends the process that loads it",
                    cause=f"{context.torch['native_error']}.",
                    fix=f"rm -r {context.cache / 'native'}",
                )
            )
        running = [f"{op['name']} ({op['kernel']})" for op in ops if op["kernel"]]
        if running:
            found.append(Finding(severity="ok", title=f"native ops: {', '.join(running)}"))
        return found


def _fix_of_build(problem: str) -> str:
    """The command against what kept a kernel from being built."""
    if "compiler found" in problem:
        return install_command("gcc g++")
    if problem.startswith("cannot keep"):
        return OTHER_CACHE
    return f"LEZERO_LOG=debug {python()} -m lezero doctor"
