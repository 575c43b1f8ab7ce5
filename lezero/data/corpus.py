"""Real English text that every Python ships: its language reference and its docstrings.

The sources are parsed and never imported or run, so gathering has no side effects and gives the
same documents in the same order for one Python version.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

NAME = "python-docs"
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


def identity() -> str:
    """What the corpus depends on."""
    return f"{NAME} of Python {sys.version}"


@functools.lru_cache(maxsize=1)
def python_docs() -> tuple[tuple[str, str], ...]:
    """(source, text) of each document: help topics first, then one document a module.

    Texts that occur twice are given once. Parsing takes seconds, so the result (2 MB) is kept until
    `python_docs.cache_clear()`.
    """
    unique: dict[str, str] = {}
    for source, text in _gather():
        unique.setdefault(text, source)
    return tuple((source, text) for text, source in unique.items())


def _gather() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from _topics(root / "pydoc_data" / "topics.py")
    for path in _modules(root):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in old modules
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        texts = list(_docstrings(tree))
        if texts:
            yield f"{NAME}:{path.relative_to(root).as_posix()}", "\n\n".join(texts) + "\n"


def _topics(path: Path) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            for name in sorted(topics):
                yield f"{NAME}:topic {name}", topics[name].strip() + "\n"


def _modules(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _LEFT_OUT)
        for name in sorted(files):
            if name.endswith(".py") and name != "topics.py":
                yield Path(folder, name)


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings in the order of the source; only statements can hold one."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, kinds):
        text = ast.get_docstring(node, clean=False)
        if text and text.strip():
            yield inspect.cleandoc(text)
    for field in ("body", "orelse", "finalbody"):
        for child in getattr(node, field, ()) if not isinstance(node, ast.Lambda) else ():
            if isinstance(child, ast.stmt):
                yield from _docstrings(child)
