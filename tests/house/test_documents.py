"""README, its translation and the site name only what exists, and stay in step."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import lezero
from lezero.cli.main import COMMANDS
from tests.house.floors import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", *PAGES, *OTHERS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)#\s]+)", text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    found = [link for link in links(path.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in found if not (path.parent / link).exists()]
    assert not missing, f"{named(path)} links to {missing}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_make_targets_commands_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text()
    code = "\n".join(
        [*re.findall(r"`([^`\n]+)`", text), *(body for _, body in FENCE.findall(text))]
    )
    for target in re.findall(r"^make (?:[A-Z]+=\S+ )*([a-z-]+)", code, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for command in re.findall(r"(?:^|/)lz ([a-z][a-z-]*)", code, re.MULTILINE):
        assert command in COMMANDS, f"lz {command} in {named(path)}"
    for file in re.findall(
        r"(?:benchmarks|tests|examples|docs|lezero)/[\w./-]+\.(?:py|md|txt|yaml)", code
    ):
        if "/" in file and not file.startswith("lezero/files/generation"):
            assert (ROOT / file).exists(), f"{file} in {named(path)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_python_that_is_shown_imports_what_there_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for body in (body for kind, body in FENCE.findall(text) if kind == "python"):
        for node in ast.walk(ast.parse(textwrap.dedent(body))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lezero"):
                exec(compile(ast.Module([node], []), named(path), "exec"), {})
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "lz" or hasattr(lezero, node.attr), f"lz.{node.attr}"


def test_every_row_of_the_table_says_how_it_is_shown() -> None:
    rows = [line.split("|")[1:-1] for line in README.splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        proofs = re.findall(r"`([^`]+)`", row[-1])
        assert proofs, f"no test or benchmark shows: {row[0].strip()}"
        assert all((ROOT / proof).exists() for proof in proofs), proofs


def test_the_translation_is_in_step() -> None:
    for pattern in (r"^#+ ", r"^- ", r"^\| ", r"^!\["):
        counts = [len(re.findall(pattern, text, re.MULTILINE)) for text in (README, CHINESE)]
        assert counts[0] == counts[1], f"README.zh-CN.md differs in {pattern!r}: {counts}"
    assert FENCE.findall(README) == FENCE.findall(CHINESE)
    assert links(README)[1:] == links(CHINESE)[1:]
    code = [
        sorted(re.findall(r"`([^`\n]+)`", re.sub(FENCE, "", text))) for text in (README, CHINESE)
    ]
    assert code[0] == code[1]


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 120
    (example,) = [body for language, body in FENCE.findall(README) if language == "python"]
    assert len(example.strip().splitlines()) <= 16


def test_the_site_lists_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = [page for entry in site["nav"] for page in entry.values()]
    assert sorted(listed) == [str(path.relative_to(ROOT / "docs")) for path in PAGES]


def test_the_first_page_names_every_page() -> None:
    named_there = links((ROOT / "docs/index.md").read_text(encoding="utf-8"))
    pages = {str(path.relative_to(ROOT / "docs")) for path in PAGES} - {"index.md"}
    assert pages <= set(named_there), sorted(pages - set(named_there))


def test_the_table_of_extras_has_each_with_what_it_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))
    assert table.keys() >= project["optional-dependencies"].keys()
    for extra, packages in project["optional-dependencies"].items():
        if extra not in ("all", "dev"):
            assert table[extra].split(", ") == [re.split("[<>=]", each)[0] for each in packages]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_cli", ROOT / "docs/generate_cli.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_page_is_what_the_code_says() -> None:
    written = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert written == generator().page(), "run: make docs"


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == lezero.__version__
    assert f"## {lezero.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert project["requires-python"] == ">=3.11"
    scripts = dict.fromkeys(("lezero", "lz"), "lezero.cli.main:main")
    scripts["lz-dist-test"] = "lezero.cli.dist_test:main"
    assert project["scripts"] == scripts
    assert "lezero.plugins" in project["entry-points"]


def test_constraints_name_one_exact_version_each() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    known = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in needed:
        name = re.split(r"[\[><=~! ]", requirement)[0]
        assert name == "lezero" or re.sub(r"[-_.]+", "-", name).lower() in known, name


def test_every_command_has_one_line_of_help() -> None:
    for name, entry in COMMANDS.items():
        assert entry.help.endswith("."), name
        assert len(entry.help) < 70, name
