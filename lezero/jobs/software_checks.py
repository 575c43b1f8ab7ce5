"""The doctor's checks of what is installed: Python, torch, packages, extras, compilers."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from lezero.core.checks import Check, Context, Finding, checks
from lezero.core.errors import ConfigError
from lezero.core.flags import FLAGS, flag

OTHER_CACHE = "export LEZERO_CACHE=/tmp/lezero-cache"
"""The command where the cache folder cannot be written."""

OLDEST_TORCH = (2, 11)
OLDEST_PYTHON = (3, 11)
# Bundles of others; `vision`, since torchvision breaks beside a CPU torch; and those that nothing
# in LeZero uses yet. Nobody is sent there.
_UNTOLD = ("all", "dev", "vision", "tune", "export", "cluster", "trust")
# Name to install → modules and a name in each that LeZero uses: what is half removed imports too.
_REQUIRED = {
    "numpy": {"numpy": "ndarray"},
    "safetensors": {"safetensors": "SafetensorError"},
    "pydantic": {"pydantic": "BaseModel"},
    "PyYAML": {"yaml": "MarkedYAMLError"},
    "typer": {"typer": "Typer"},
    "rich": {"rich.console": "Console", "rich.live": "Live", "rich.table": "Table"},
    "psutil": {"psutil": "Process"},
}


@checks.register("python")
class PythonCheck(Check):
    """The interpreter is one that LeZero runs on."""

    version: tuple[int, ...] = tuple(sys.version_info[:2])

    def run(self, context: Context) -> list[Finding]:
        known = ".".join(map(str, OLDEST_PYTHON))
        if self.version < OLDEST_PYTHON:
            found = Finding(
                severity="broken",
                title=f"Python {context.facts.python} is too old",
                cause=f"LeZero needs Python {known} or newer.",
                fix=f"make demo PYTHON=python{known}",
            )
        elif sys.maxsize < 2**32:
            found = Finding(
                severity="broken",
                title="Python is a 32-bit build",
                cause="torch has no packages for it and a process cannot use more than 4 GiB.",
                fix=f"make demo PYTHON=/path/to/a/64-bit/python{known}",
            )
        else:
            found = Finding(severity="ok", title=f"Python {context.facts.python}")
        return [found]


@checks.register("torch")
class TorchCheck(Check):
    """torch imports, computes, is new enough and shares arrays with numpy."""

    def run(self, context: Context) -> list[Finding]:
        installed = context.facts.versions.get("torch", "")
        if not context.torch:
            return [_no_torch(installed, context.torch_error)]
        version = str(context.torch.get("version", "unknown"))
        if _release(version) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            return [
                Finding(
                    severity="broken",
                    title=f"torch {version} is too old",
                    cause=f"LeZero is built on what torch {oldest} brought.",
                    fix=_pip(f"'torch>={oldest}'"),
                )
            ]
        if not context.torch.get("computes"):
            return [
                Finding(
                    severity="broken",
                    title=f"torch {version} imports, but an 8x8 product comes out wrong",
                    cause="The installed files are damaged or built for another processor.",
                    fix=_pip(f"--force-reinstall torch=={version.partition('+')[0]}"),
                )
            ]
        if not context.torch.get("numpy"):
            reason = context.torch.get("numpy_error", "numpy does not import")
            return [
                Finding(
                    severity="broken",
                    title="torch and numpy do not work together",
                    cause=f"{reason}. Data loading needs both.",
                    fix=_pip("--force-reinstall numpy"),
                )
            ]
        return [Finding(severity="ok", title=f"torch {version}")]


@checks.register("packages")
class PackagesCheck(Check):
    """Every package that LeZero always needs can be imported."""

    def run(self, context: Context) -> list[Finding]:
        found = []
        for package, used in _REQUIRED.items():
            try:
                for module, name in used.items():
                    getattr(importlib.import_module(module), name)
            except Exception as error:
                root = next(iter(used)).partition(".")[0]
                missing = isinstance(error, ModuleNotFoundError) and error.name == root
                found.append(
                    Finding(
                        severity="broken",
                        title=f"{package} is not installed"
                        if missing
                        else f"{package} cannot be imported"
                        if isinstance(error, ImportError | SyntaxError)
                        else f"{package} is damaged",
                        cause=f"{type(error).__name__}: {_first_line(error)}",
                        fix=_pip(package if missing else f"--force-reinstall {package}"),
                    )
                )
        return found or [Finding(severity="ok", title=f"{len(_REQUIRED)} required packages")]


@checks.register("extras")
class ExtrasCheck(Check):
    """Which optional parts are there; without `text` no tokenizer can be trained."""

    def run(self, context: Context) -> list[Finding]:
        extras = {name: packages for name, packages in extra_packages().items() if packages}
        missing = [n for n, packages in extras.items() if not all(map(_installed, packages))]
        present = [name for name in extras if name not in missing]
        found = []
        if "text" in missing:
            found.append(
                Finding(
                    severity="warning",
                    title="the extra 'text' is not installed",
                    cause="Training on text needs the package tokenizers.",
                    fix=_pip("'lezero[text]'"),
                )
            )
        if present:
            found.append(Finding(severity="ok", title=f"extras: {', '.join(present)}"))
        others = [name for name in missing if name != "text"]
        if others:
            found.append(
                Finding(
                    severity="note",
                    title=f"extras not installed: {', '.join(others)}",
                    cause="Only what needs them is off.",
                    fix=_pip(f"'lezero[{','.join(others)}]'"),
                )
            )
        return found


@checks.register("torchvision")
class TorchvisionCheck(Check):
    """A CUDA torchvision beside a CPU torch fails to import and takes transformers with it."""

    def run(self, context: Context) -> list[Finding]:
        version = context.facts.versions.get("torchvision")
        if version is None or not context.torch:
            return []
        if _importable("torchvision"):
            return [Finding(severity="ok", title=f"torchvision {version} imports")]
        return [
            Finding(
                severity="broken",
                title=f"torchvision {version} does not import beside this torch",
                cause="It was built for another torch (the package index has a CUDA build). "
                "transformers and timm import it when it is there, so they fail too.",
                fix=f"{python()} -m pip uninstall -y torchvision",
            )
        ]


@checks.register("compiler")
class CompilerCheck(Check):
    """torch.compile writes C++ on a CPU and Triton on a GPU."""

    def run(self, context: Context) -> list[Finding]:
        found = context.facts.compilers
        chosen = context.environment.get("CXX")  # torch takes an empty one too
        if "g++" not in found and chosen is None:
            if "clang++" in found:
                cause, fix = "torch.compile looks for g++; clang++ is here.", "export CXX=clang++"
            else:
                cause = "torch.compile on a CPU needs one; training then stays eager."
                fix = install_command("g++")
            return [Finding(severity="warning", title="no g++ compiler", cause=cause, fix=fix)]
        answer = []
        if problem := _no_cpp("g++" if chosen is None else chosen):
            answer.append(
                Finding(
                    severity="warning",
                    title=f"{'g++' if chosen is None else f'CXX={chosen}'} compiles no C++",
                    cause=f"{problem}. torch.compile on a CPU takes it; training then stays eager.",
                    fix=install_command("--reinstall g++") if chosen is None else "unset CXX",
                )
            )
        header = Path(sysconfig.get_path("include") or "/") / "Python.h"
        if not header.exists():
            answer.append(
                Finding(
                    severity="warning",
                    title="the headers of Python are missing",
                    cause=f"torch.compile on a CPU needs {header}; training then stays eager.",
                    fix=install_command(
                        f"python{platform.python_version().rpartition('.')[0]}-dev"
                    ),
                )
            )
        gpu = bool(context.facts.accelerators) and context.torch.get("accelerator") == "cuda"
        if gpu and not {"triton", "pytorch-triton"} & context.facts.versions.keys():
            answer.append(
                Finding(
                    severity="warning",
                    title="triton is not installed",
                    cause="torch.compile on a GPU needs it; training then stays eager.",
                    fix=_pip("triton"),
                )
            )
        return answer or [Finding(severity="ok", title=f"compiler {chosen or 'g++'}")]


@checks.register("environment")
class EnvironmentCheck(Check):
    """Every variable that LeZero reads has a value it understands."""

    def run(self, context: Context) -> list[Finding]:
        found = []
        for name in FLAGS:
            try:
                flag(name)
            except ConfigError as error:
                found.append(
                    Finding(
                        severity="broken",
                        title=f"the variable {name} has no value that is allowed",
                        cause=str(error),
                        fix=f"unset {name}",
                    )
                )
        return found


def extra_packages() -> dict[str, list[str]]:
    """Extra → packages it brings, from LeZero's own metadata; empty where it is not installed."""
    found: dict[str, list[str]] = {}
    for line in metadata.requires("lezero") or []:
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        name = re.match(r"[\w.-]+", line)
        if extra and name and extra[1] not in _UNTOLD and name[0] != "lezero":
            found.setdefault(extra[1], []).append(name[0])
    return found


def python() -> str:
    """How the user starts this interpreter: relative to where they stand, if that is shorter."""
    try:
        near = os.path.relpath(sys.executable)
    except (OSError, ValueError):
        return sys.executable
    return sys.executable if near.startswith("..") else near


def _no_torch(installed: str, error: str) -> Finding:
    oldest = ".".join(map(str, OLDEST_TORCH))
    if not installed and "No module named 'torch'" in error:
        return Finding(
            severity="broken",
            title="torch is not installed",
            cause="LeZero stands on torch.",
            fix=_pip(f"'torch>={oldest}'"),
        )
    version = f"torch {installed}" if installed else "torch"
    wanted = f"torch=={installed.partition('+')[0]}" if installed else f"'torch>={oldest}'"
    return Finding(
        severity="broken",
        title=f"{version} cannot be imported",
        cause=error or "It gave no reason.",
        fix=_pip(f"--force-reinstall {wanted}"),
    )


def _importable(module: str) -> bool:
    """Tried in a process of its own: a failing import of torch's companions can leave torch half
    changed."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _no_cpp(compiler: str) -> str:
    """Why a command, without arguments as torch takes it, is no C++ compiler; empty when it is."""
    asked = ["-x", "c++", "-dM", "-E", os.devnull]  # what it defines for an empty file
    try:
        done = subprocess.run(
            [compiler, *asked], capture_output=True, timeout=60, check=False, text=True
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"It cannot be run ({getattr(error, 'strerror', None) or error})"
    if done.returncode:
        return f"It ends with status {done.returncode}"
    return "" if "__cplusplus" in done.stdout else "It does not answer as a compiler does"


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except Exception:
        return False
    return True


def _release(version: str) -> tuple[int, ...]:
    return tuple(_numbers(version))[:2]


def _numbers(version: str) -> Iterator[int]:
    for part in version.partition("+")[0].split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            return
        yield int(digits[0])


def _pip(what: str) -> str:
    return f"{python()} -m pip install {what}"


def install_command(package: str) -> str:
    return f"sudo apt-get install {package}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
