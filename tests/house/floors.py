"""Reads the floors table of the documentation and every import of a source file."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lezero"
MODULE_NAME = re.compile(r"lezero(\.[A-Za-z_]\w*)+(:\w+)?")
# What the root holds itself; everything else of it would lead to any floor.
ROOT_NAMES = {"__version__"}


def floors(text: str) -> dict[str, int]:
    """Package → floor, from the Markdown table of docs/floors.md."""
    found: dict[str, int] = {}
    for number, packages in re.findall(r"^\| (\d+) \| ([^|]+) \|", text, flags=re.MULTILINE):
        for package in re.findall(r"`(\w+)`", packages):
            assert package not in found, f"{package} stands on two floors"
            found[package] = int(number)
    return found


@dataclass(frozen=True)
class Import:
    line: int
    target: str


def imports(source: str, module: str, *, is_package: bool) -> list[Import]:
    """Every module of LeZero that `source` names: import statements at any depth, and strings."""
    found: list[Import] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package=is_package)
            found += [Import(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Constant) and MODULE_NAME.fullmatch(str(node.value)):
            found.append(Import(node.lineno, str(node.value).partition(":")[0]))
    return [item for item in found if item.target.split(".")[0] == PACKAGE]


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    up = node.level - 1 if is_package else node.level
    parts = parts[: len(parts) - up]
    return ".".join([*parts, node.module] if node.module else parts)


def violations(
    source: str, module: str, table: dict[str, int], *, is_package: bool = False
) -> list[str]:
    """Imports of `module` that lead beside it or above it, as readable lines."""
    parts = module.split(".")
    if module == PACKAGE:
        return []
    mine = "cli" if module == f"{PACKAGE}.__main__" else parts[1]
    if mine not in table:
        return [f"{module}: its package is missing from the table in docs/floors.md"]
    lines = []
    for item in imports(source, module, is_package=is_package):
        target = item.target.split(".")
        theirs = target[1] if len(target) > 1 else ""
        where = f"{module}:{item.line}: {item.target}"
        if theirs in ROOT_NAMES or theirs == mine:
            continue
        if theirs == "plugins":  # the name of the entry-point group, not a module
            continue
        if theirs not in table:
            lines.append(f"{where}: import a name from where it lives, not from the root")
        elif table[theirs] >= table[mine]:
            lines.append(
                f"{where}: floor {table[mine]} ({mine}) must not import floor {table[theirs]}"
            )
    return lines


def modules() -> list[tuple[str, Path]]:
    """(dotted name, path) of every source file of the package."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found
