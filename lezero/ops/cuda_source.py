"""Kernels in CUDA C++, compiled when first used by NVRTC, which torch's CUDA builds bring along.

For what Triton does not express: which register of which lane holds what. A source needs no header
and no compiler on the machine. What is compiled is kept in the cache folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import site
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lezero.core import device
from lezero.core.log import logger
from lezero.ops.build import kept

_INSTRUCTIONS = Path(__file__).with_name("instructions.cu")
_PRELUDE = Path(__file__).with_name("prelude.cu")
_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _Launch(ctypes.Structure):
    """CUlaunchConfig of the driver's interface."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_PROGRAMMATIC = _Attribute(id=_EARLY, value=1)


class CudaKernel:
    """One function of a compiled source, for devices of one kind."""

    def __init__(self, code: bytes, name: str) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._code, self._library, self._function = code, ctypes.c_void_p(), ctypes.c_void_p()
        self._shared: dict[torch.device, int] = {}
        none = [None, None, 0, None, None, 0]
        self._call("cuLibraryLoadData", ctypes.byref(self._library), code, *none)
        self._call("cuLibraryGetKernel", ctypes.byref(self._function), self._library, name.encode())

    def launch(
        self,
        place: torch.device,
        blocks: Sequence[int],
        threads: int,
        arguments: Sequence[Any],
        early: bool,
        shared: int = 0,
    ) -> None:
        """On the current stream of `place`. Arguments: tensors, None (a null pointer) and ctypes'
        values. early: it may begin before launches ahead of it end, and waits for them itself,
        where `begins_early` says that the device knows how. shared: bytes of shared memory beside
        what the source declares."""
        values = [_value(one) for one in arguments]
        addresses = [ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in values]
        grid = [*blocks, *[1] * (3 - len(blocks))]
        stream = device.stream_handle(place)
        attributes = ctypes.pointer(_PROGRAMMATIC)
        count = int(early and begins_early(place))
        config = _Launch(*grid, threads, 1, 1, shared, stream, attributes, count)
        with device.using(place):
            self._take_context(place)
            if shared > self._shared.get(place, 0):
                self._call(
                    "cuKernelSetAttribute", _MOST_SHARED, shared, self._function, place.index
                )
                self._shared[place] = shared
            self._call(
                "cuLaunchKernelEx",
                ctypes.byref(config),
                self._function,
                (ctypes.c_void_p * len(addresses))(*addresses),
                None,
            )

    def _take_context(self, place: torch.device) -> None:
        """A thread whose first work on the device is this has no context yet."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context:
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), place.index)
            self._call("cuCtxSetCurrent", context)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status:
            said = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(said))
            raise RuntimeError(f"{function}: {(said.value or b'unknown').decode()} ({status})")


def _value(one: Any) -> Any:
    if one is None:
        return ctypes.c_void_p(None)
    return ctypes.c_void_p(one.data_ptr()) if isinstance(one, Tensor) else one


def runs(place: torch.device) -> bool:
    """Whether kernels compile for this device and start: tried with a small one, once."""
    return place.type == "cuda" and torch.version.cuda is not None and _runs(place)


@functools.cache
def _runs(place: torch.device) -> bool:
    if device.capability_of(place) < (8, 0):
        return False
    try:
        kernel(_PRELUDE, "nothing", place, {"HALF": 0}).launch(place, (1,), 32, [], early=False)
    except (OSError, RuntimeError, AttributeError) as error:
        logger("ops").warning("CUDA kernels do not compile on %s: %s", place, error)
        return False
    return True


def kernel(source: Path, name: str, place: torch.device, given: Mapping[str, int]) -> CudaKernel:
    """`name` of `source`, compiled for `place` with the macros `given`, once a process."""
    return _kernel(source, name, device.capability_of(place), tuple(sorted(given.items())))


@functools.cache
def _kernel(
    source: Path, name: str, capability: tuple[int, int], given: tuple[tuple[str, int], ...]
) -> CudaKernel:
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in given]
    text = "".join(part.read_text("utf-8") for part in (_INSTRUCTIONS, *parts_of(source)))
    made_from = _digest(text, torch.version.cuda, *options)
    code = kept(source.stem, made_from, lambda: compiled(text, source.name, options))
    return CudaKernel(code, name)


def parts_of(source: Path) -> list[Path]:
    """The files of a source that say nothing of the machine's instructions."""
    return [_PRELUDE, source] if source != _PRELUDE else [_PRELUDE]


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def begins_early(place: torch.device) -> bool:
    """Whether launches may begin before those ahead of them end, and wait themselves."""
    return torch.version.cuda is not None and device.capability_of(place) >= (9, 0)


def compiled(text: str, name: str, options: Sequence[str]) -> bytes:
    """The machine code of a source; raises RuntimeError with what the compiler says."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    created = (ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    _check(nvrtc.nvrtcCreateProgram(*created), "nvrtcCreateProgram")
    try:
        passed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), passed)
        kind = "ProgramLog" if failed else "CUBIN"
        _check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)), kind)
        out = ctypes.create_string_buffer(size.value)
        _check(getattr(nvrtc, f"nvrtcGet{kind}")(program, out), kind)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(f"NVRTC does not compile {name}:\n{out.value.decode()}")
    return out.raw


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"NVRTC's {what} ended with status {status}")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Of the CUDA that torch was built for: that of its wheels, or the system's."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    folders = [*site.getsitepackages(), str(Path(torch.__file__).parents[1])]
    found = [path for folder in folders for path in glob.glob(f"{folder}/nvidia/*/lib/{name}")]
    for path in found:
        _load_builtins(Path(path).parent)
    for path in [*found, name]:  # the system's may be older
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise RuntimeError(f"{name} is not found: neither in the system nor beside torch")


def _load_builtins(folder: Path) -> None:
    """NVRTC opens this library by its name as it compiles; some wheels do not say where it is."""
    for path in sorted(folder.glob("libnvrtc-builtins.so.*")):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
