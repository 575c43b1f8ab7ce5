"""How the source is written: small files, honest names, no pickle, one place for accelerators."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

from tests.house.floors import ROOT, modules

FOLDERS = ("lezero", "tests", "benchmarks", "examples", "peers", "docs")
FILE_LINES, FUNCTION_LINES, FUNCTION_LIMIT = 400, 60, 90
VAGUE = {"utils", "util", "helpers", "helper", "misc", "common", "tools", "stuff"}
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "joblib", "marshal"}
PICKLING_CALLS = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
}
DEVICE_FILE = "lezero/core/device.py"


def sources() -> list[Path]:
    return [path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py"))]


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    long = [f"{path.relative_to(ROOT)}: {n}" for path, n in lengths.items() if n > FILE_LINES]
    assert not long, long


def test_no_function_is_too_long() -> None:
    long: list[tuple[int, str]] = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long.append((lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    for lines, where in sorted(long, reverse=True):
        warnings.warn(f"{where} has {lines} lines; about {FUNCTION_LINES} is the aim", stacklevel=1)
    assert all(lines <= FUNCTION_LIMIT for lines, _ in long), long


def test_every_file_is_named_for_its_responsibility() -> None:
    vague = [str(path.relative_to(ROOT)) for path in sources() if path.stem in VAGUE]
    assert not vague, vague


def test_no_pickle_anywhere_in_the_package() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for _, path in modules()
        for line, what in pickles(path.read_text(encoding="utf-8"))
    ]
    assert not found, found


def pickles(source: str) -> list[tuple[int, str]]:
    """Uses of pickle, in the open or behind torch and numpy."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(node.module or "").split(".")[0]]
        found += [(node.lineno, f"import {name}") for name in names if name in PICKLES]
        if isinstance(node, ast.Attribute) and node.attr in PICKLING_CALLS:
            found.append((node.lineno, node.attr))
        if isinstance(node, ast.Call):
            found += _pickling_call(node)
    return found


def _pickling_call(node: ast.Call) -> list[tuple[int, str]]:
    keywords = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
    if keywords.get("allow_pickle"):
        return [(node.lineno, "allow_pickle")]
    called = ast.unparse(node.func)
    if called == "torch.save":
        return [(node.lineno, "torch.save")]
    if called == "torch.load" and keywords.get("weights_only") is not True:
        return [(node.lineno, "torch.load without weights_only=True")]
    return []


def test_accelerators_are_spoken_to_in_one_file() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] in ("lezero", "examples", "benchmarks")
        and str(path.relative_to(ROOT)) != DEVICE_FILE
        for line in cuda_lines(path.read_text(encoding="utf-8"))
    ]
    assert not found, found


def cuda_lines(source: str) -> list[int]:
    """Lines that reach for `.cuda`, as an attribute or by import."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if node.attr == "cuda" and ast.unparse(node) != "torch.version.cuda":
                lines.append(node.lineno)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", "") or ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            if any("torch.cuda" in f"{name}." or name == "torch.cuda" for name in names):
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "source",
    [
        "x.cuda()",
        "torch.cuda.synchronize()",
        "import torch.cuda",
        "from torch import cuda",
        "def f():\n    from torch.cuda import Stream",
    ],
)
def test_each_way_to_write_cuda_is_caught(source: str) -> None:
    assert cuda_lines(source)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import cloudpickle",
        "torch.save(x, f)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "dist.all_gather_object(a, b)",
    ],
)
def test_each_way_to_pickle_is_caught(source: str) -> None:
    assert pickles(source)


def test_what_is_no_pickle_passes() -> None:
    assert pickles("torch.load(f, weights_only=True)\nimport json\nnp.load(f)") == []
    assert cuda_lines("device = 'cuda'\nversion = torch.version.cuda") == []


def test_the_tests_mirror_the_packages() -> None:
    packages = {
        path.name for path in (ROOT / "lezero").iterdir() if (path / "__init__.py").exists()
    }
    tested = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert packages <= tested, f"no tests for {sorted(packages - tested)}"
