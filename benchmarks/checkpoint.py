"""Claim: a checkpoint is never silently wrong, and saving one stalls training for a copy only.

Three parts, each in processes of its own:
  corruption  one checkpoint of a small trained model in LeZero's form, torch.save, DCP and
              safetensors; the same kinds of damage to each; how often a load succeeds with values
              that differ from those saved. LeZero is also asked for the newest good generation.
  stall       model and AdamW state of a 26M-parameter GPT: how long a save holds up the training
              loop, how long until it is on disk, and how long a load into existing tensors takes;
              interleaved rounds, medians.
  resume      bitwise resume after SIGKILL.

Run: python benchmarks/checkpoint.py [--quick] [--parts corruption,stall,resume] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checkpoint_parts.corruption import KINDS, corrupt
from checkpoint_parts.forms import FORMATS
from checkpoint_parts.resume import resume
from checkpoint_parts.stall import stalls


def child(part: str, form: str, folder: Path, quick: bool, count: int) -> dict[str, Any] | None:
    """Runs one part for one format in its own process; None when that process died."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="lezero-bench-") as place:
        command = [sys.executable, __file__, "--child", part, form, place, str(count)]
        run = subprocess.run(
            command + ["--quick"] * quick, capture_output=True, text=True, check=False
        )
    if form == "lezero":
        print(run.stderr, end="", file=sys.stderr)
    return json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else None


def show_corruption(folder: Path, quick: bool) -> tuple[int, int]:
    tries = 10 if quick else 300
    print(f"Silently wrong loads of {tries} damages each (the rest was refused or harmless)")
    print(f"{'':14}" + "".join(f"{kind:>10}" for kind in KINDS) + f"{'all':>14}")
    result = (0, 0)
    for form in FORMATS:
        outcomes = child("corruption", form, folder, quick, tries)
        if outcomes is None:
            print(f"{form:14}  its process died")
            continue
        wrong = [outcomes[kind].get("silently wrong", 0) for kind in KINDS]
        total = sum(sum(counts.values()) for counts in outcomes.values())
        row = "".join(f"{count:>10}" for count in wrong)
        print(f"{form:14}{row}{f'{sum(wrong)} of {total}':>14}")
        if form == "lezero":
            result = (total, sum(wrong))
    if not result[0]:
        raise SystemExit("the corruption part did not run")
    return result


def show_stall(folder: Path, quick: bool) -> float:
    rounds, repeats = (1, 1) if quick else (3, 3)
    forms = (*FORMATS, "DCP async")
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in forms}
    for _ in range(repeats):
        for form in forms:  # interleaved
            result = child("stall", form, folder, quick, rounds)
            if result is not None:
                found[form].append(result)
    print(f"\nSaving and loading {found['lezero'][0]['bytes'] / 1e6:,.0f} MB (medians)")
    print(f"{'':14}{'stall ms':>10}{'save ms':>10}{'load ms':>10}{'load GB/s':>11}")
    stall_ms = 0.0
    for form, results in found.items():
        if not results:
            print(f"{form:14}  its process died")
            continue
        stall, save, load = (
            1e3 * statistics.median(x for r in results for x in r[key])
            for key in ("stall", "save", "load")
        )
        speed = results[0]["bytes"] / load / 1e6
        print(f"{form:14}{stall:>10.1f}{save:>10.1f}{load:>10.1f}{speed:>11.2f}")
        if form == "lezero":
            stall_ms = stall
    return stall_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few tries, for CI")
    parser.add_argument("--parts", default="corruption,stall,resume")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        part, form, folder, count = args.child
        logging.disable(logging.CRITICAL)  # a refused load is counted, not told
        if part == "corruption":
            result = corrupt(form, int(count), Path(folder))
        else:
            result = stalls(form, int(count), Path(folder), args.quick)
        print(json.dumps(result))
        return
    parts = args.parts.split(",")
    line: dict[str, Any] = {"resume_bitwise": None, "resume_cases": 0, "save_stall_ms": None}
    line |= {"corruptions_tried": 0, "silently_wrong": None}
    if "corruption" in parts:
        line["corruptions_tried"], line["silently_wrong"] = show_corruption(args.folder, args.quick)
    if "stall" in parts:
        line["save_stall_ms"] = round(show_stall(args.folder, args.quick), 1)
    if "resume" in parts:
        line["resume_bitwise"], line["resume_cases"] = resume(args.quick)
    print(json.dumps(line))
    if line["silently_wrong"] or line["resume_bitwise"] is False:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
