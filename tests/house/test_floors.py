"""A package imports only packages on lower floors: the rule of docs/floors.md."""

from __future__ import annotations

import pytest

from tests.house.floors import ROOT, floors, modules, violations

TABLE = floors((ROOT / "docs" / "floors.md").read_text(encoding="utf-8"))


def test_the_table_names_every_package_and_counts_from_core() -> None:
    folders = {path.name for path in (ROOT / "lezero").iterdir() if (path / "__init__.py").exists()}
    assert folders <= TABLE.keys()
    assert TABLE["core"] == 0
    assert TABLE["cli"] == max(TABLE.values()) == 9
    assert set(TABLE.values()) == set(range(10))


def test_no_import_leads_sideways_or_up() -> None:
    found: list[str] = []
    for name, path in modules():
        source = path.read_text(encoding="utf-8")
        found += violations(source, name, TABLE, is_package=path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import lezero.train",
        "from lezero.train import Engine",
        "from lezero import train",
        "from lezero import Engine",
        "import lezero",
        "def f():\n    from lezero.train.engine import Engine",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lezero.plan import Plan",
        "import importlib\nimportlib.import_module('lezero.train.engine')",
        "TABLE = {'x': 'lezero.jobs.demo:run'}",
        "from ..train import Engine",
        "from .. import train",
        "from lezero.hub import load",
        "from lezero.checkpoint import Saver",
    ],
)
def test_every_way_to_write_an_upward_import_is_caught(source: str) -> None:
    assert violations(
        source, "lezero.checkpoint.saver" if ".hub" in source else "lezero.files.a", TABLE
    )


def test_neighbours_are_as_forbidden_as_floors_above() -> None:
    assert violations("from lezero.report import Page", "lezero.files.a", TABLE)
    assert violations("from ..report import Page", "lezero.files.a", TABLE)
    assert violations("from ..report import Page", "lezero.files", TABLE, is_package=True)


@pytest.mark.parametrize(
    "source",
    [
        "import torch, os",
        "from lezero.core.errors import FileError",
        "from lezero import __version__",
        "from .manifest import Manifest",
        "from . import manifest",
        "from lezero.files.manifest import Manifest",
        '"""Text that speaks of lezero.train in a sentence."""',
        "GROUP = 'lezero.plugins'",
    ],
)
def test_what_is_allowed_passes(source: str) -> None:
    assert violations(source, "lezero.files.a", TABLE) == []


def test_a_package_without_a_floor_is_named() -> None:
    (line,) = violations("", "lezero.utils.a", TABLE)
    assert "missing from the table" in line
