"""The C kernels of an op: one row for each instruction set, found, built and loaded at run time.

    native = Native(
        "codec",
        [Kernel("avx2", frozenset({"avx2"}), (folder / "avx2.c",), ("-mavx2",)), generic],
        registration=folder / "registration.cpp",
        otherwise="codecs run their reference",
    )
    if native.available():
        native.ops.int8_encode(...)

[Note: one library a kernel]
Each kernel is a library of its own: its C files and the op's `registration.cpp`, which registers
under the namespace that the macro `LEZERO_OPS` names (`lezero_codec_avx2`). Kernels of one op can
so live side by side in a process, and the conformance suite holds each of them to the reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lezero.core.facts import instruction_sets
from lezero.core.log import logger
from lezero.ops.build import BuildError, Source, build


@dataclass(frozen=True)
class Kernel:
    """One instruction set's C files: `needs` are names of `instruction_sets()`, `flags` gcc's.

    `trial` is called once with the loaded ops and raises `BuildError` where they must not be used.
    `slow` says whether those after it are faster here all the same; then it is the last resort.
    """

    name: str
    needs: frozenset[str]
    files: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    trial: Callable[[Any], None] | None = None
    slow: Callable[[], bool] | None = None


def each_width(
    files: tuple[Path, ...], *, also: Sequence[str] = (), flags: Sequence[str] = ()
) -> tuple[Kernel, ...]:
    """Kernels of one source, whose vectors are the compiler's: with AVX-512, with AVX2, and for any
    processor. also: instruction sets that the first two need besides, named as gcc names them."""
    wide, more = ("avx512f", "avx512bw", "avx512vl", "avx512dq"), tuple(also)

    def kernel(name: str, *sets: str) -> Kernel:
        options = [f"-m{one}" for one in sets]
        options += ["-mprefer-vector-width=512"] if name == "avx512" else []
        return Kernel(name, frozenset(sets), files, (*flags, *options))

    return kernel("avx512", *wide, *more), kernel("avx2", "avx2", *more), kernel("generic")


class Native:
    """The native side of one op. `kernels`: the fastest first. `otherwise`: what runs without it.

    Making one reads and builds nothing.
    """

    def __init__(
        self, name: str, kernels: Sequence[Kernel], *, registration: Path, otherwise: str
    ) -> None:
        self.name, self.kernels, self.otherwise = name, tuple(kernels), otherwise
        self.registration = registration
        self.problem = ""
        """Why nothing was loaded, once `available()` said so."""
        # Plain attributes, not functools.cache, which torch.compile cannot trace.
        self._loaded: bool | None = None
        self._kernel: Kernel | None = None
        self._ops: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}

    def able(self) -> tuple[Kernel, ...]:
        """The kernels that this processor's instruction sets run, in the order of their rows: the
        same in every process."""
        has = set(instruction_sets())
        return tuple(kernel for kernel in self.kernels if kernel.needs <= has)

    def suited(self) -> tuple[Kernel, ...]:
        """The same, the fastest first as measured here."""
        return tuple(
            sorted(self.able(), key=lambda kernel: kernel.slow is not None and kernel.slow())
        )

    def kernel_name(self) -> str:
        """The kernel that runs, or before the first use the one that suits; "" without any."""
        if self._loaded is not None:
            return self._kernel.name if self._kernel else ""
        suited = self.suited()
        return suited[0].name if suited else ""

    def available(self) -> bool:
        """True where a kernel runs: builds it (a few seconds, once a machine) and loads it.

        A compiler too old for the fastest one leads to the next, and so does a trial that fails.
        Where no kernel is left, one line of the log says why and what runs instead.
        """
        if self._loaded is None:
            self._loaded = self._load_best()
        return self._loaded

    @property
    def ops(self) -> Any:
        """The namespace of `torch.ops` that holds the ops of the kernel that runs."""
        assert self._kernel is not None, f"ask {self.name}'s available() first"
        return self._ops[self._kernel.name]

    def load(self, kernel: Kernel) -> Any:
        """Builds, loads and tries one kernel; its namespace of `torch.ops`. Raises `BuildError`."""
        if kernel.name not in self._ops:
            namespace, path = self._namespace(kernel), self.build(kernel)
            try:
                torch.ops.load_library(path)
            except OSError as error:
                why = error.__cause__ or error  # torch names the file only
                raise BuildError(f"its library does not load: {why}") from None
            ops = getattr(torch.ops, namespace)
            if kernel.trial is not None:
                kernel.trial(ops)
            self._ops[kernel.name] = ops
        return self._ops[kernel.name]

    def build(self, kernel: Kernel) -> Path:
        """The library of one kernel, built where it is not there yet. Raises `BuildError`."""
        if kernel.name not in self._paths:
            sources = [Source(file, kernel.flags) for file in kernel.files]
            named = f"-DLEZERO_OPS={self._namespace(kernel)}"
            sources.append(Source(self.registration, (named,)))
            self._paths[kernel.name] = build(f"{self.name}-{kernel.name}", sources)
        return self._paths[kernel.name]

    def _namespace(self, kernel: Kernel) -> str:
        return f"lezero_{self.name}_{kernel.name}"

    def _load_best(self) -> bool:
        problems = []
        for kernel in self.suited():
            try:
                self.load(kernel)
            except BuildError as error:
                problems.append(str(error))
                continue
            self._kernel = kernel
            if problems:
                log = logger("ops")
                log.warning("%s runs its %s kernel: %s", self.name, kernel.name, problems[0])
            return True
        if problems:
            self.problem = problems[0]
            logger("ops").warning("%s: %s", self.otherwise, self.problem)
        return False


def build_together(several: Iterable[Native], *others: Callable[[], object]) -> None:
    """Builds what each of `several` will load, side by side, since a compiler uses one core.

    Loads nothing, and what cannot be built is left to `available()`, which tries others and tells.
    others: what builds something else.
    """
    wanted = [(native, native.suited()) for native in several if native._loaded is None]
    with ThreadPoolExecutor() as pool:
        for native, kernels in wanted:
            if kernels:
                pool.submit(native.build, kernels[0])
        for other in others:
            pool.submit(other)


def natives() -> list[Native]:
    """The native side of every op of this package that has one (a `native.py` with `NATIVE`)."""
    found = sorted(path.parent.name for path in Path(__file__).parent.glob("*/native.py"))
    return [importlib.import_module(f"{__package__}.{name}.native").NATIVE for name in found]
