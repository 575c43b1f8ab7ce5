"""A script under `lz launch` is the program that it is under `python`."""

from __future__ import annotations

from pathlib import Path

from lezero.elastic import LaunchConfig, launch

SCRIPT = """
import dataclasses, sys
@dataclasses.dataclass
class Options:
    rate: float = 1e-3
sys.exit(0 if dataclasses.fields(Options)[0].type is float else 3)
"""


def test_annotations_are_what_they_are_in_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert launch(LaunchConfig(ranks=1, quiet=True), [str(script)]) == 0
