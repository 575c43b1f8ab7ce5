"""Fake tensors for a trace, and what is said of a step that does not run on them."""

from __future__ import annotations

import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.overrides import TorchFunctionMode

from lezero.core.errors import ConfigError, LeZeroError
from lezero.core.flags import flag
from lezero.plan.constants import Constants
from lezero.profiler.untouched import restored, untouched, untouched_random

_ONE = threading.RLock()
_FREEZE = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_TRUNCATED = "_no_grad_trunc_normal_"
_NUMBERS = ("DataDependentOutputException", "DynamicOutputShapeException")


@contextmanager
def faking() -> Iterator[Any]:
    """A fake mode; what the caller set for gradients, and random numbers, do not meet the trace."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    caught = warnings.catch_warnings()
    gradients = torch.enable_grad()
    with torch.inference_mode(False), gradients, fake, untouched_random(), _quiet_torch(), caught:
        # a fake tensor's address is 0 everywhere, which is what is asked for
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield fake


@contextmanager
def stage(name: str) -> Iterator[None]:
    """What goes wrong inside is a `ConfigError` that names this part of the step."""
    try:
        yield
    except LeZeroError:
        raise
    except Exception as error:
        kind = type(error).__name__
        first = (str(error).splitlines() or ["no message"])[0]
        why = "It reads numbers" if kind in _NUMBERS else "Try it on real tensors: it may fail too"
        raise ConfigError(
            f"no forecast: {name} does not run on tensors without values ({kind}: {first}). {why}."
        ) from error


@contextmanager
def built(build: Callable[[], nn.Module], device: str, fake: Any) -> Iterator[nn.Module]:
    """The model that `build()` returns, on fake tensors; what the caller holds of it is afterwards
    what it was."""
    # The converter's weak references to new tensors would keep `Module.to` from swapping them.
    converter = fake.fake_tensor_converter
    converter.set_tensor_memo = lambda *_: None
    with ExitStack() as stack:
        try:
            frozen, kept, numbers = _Freezing(stack), _remembering(stack), Constants()
            with stage("build()"), torch.device(device), kept, _undrawn(), frozen, numbers:
                model = build()
        finally:
            del converter.set_tensor_memo
        if not isinstance(model, nn.Module):
            raise ConfigError(f"build: returned a {type(model).__name__}, allowed is a module")
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise ConfigError(
                    f"build: parameter '{name}' is on meta; build() is on fake tensors already: "
                    "leave out device('meta')"
                )
        stack.enter_context(_as_before(model))
        yield model


@contextmanager
def _remembering(stack: ExitStack) -> Iterator[None]:
    """Modules whose tensors `build()` casts or moves, so that they become fake, are what they were
    when the stack is left."""
    seen = set[nn.Module]()
    thread = threading.get_ident()

    def before(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                new = [x for x in module.modules() if x not in seen and not _is_fake(x)]
                seen.update(new)
                stack.enter_context(restored(new))
            return change(module, *args, **kwargs)

        return changed

    with _ONE:
        of_torch = {n: f for n, f in vars(nn.Module).items() if "_apply" in _names(f)}
        for name, change in of_torch.items():  # to(), half() and so on
            setattr(nn.Module, name, before(change))
        try:
            yield
        finally:
            for name, change in of_torch.items():
                setattr(nn.Module, name, change)


@contextmanager
def _undrawn() -> Iterator[None]:
    """`nn.init.trunc_normal_` of fake tensors draws nothing: it would look whether all numbers lie
    within the bounds."""
    draw = getattr(nn.init, _TRUNCATED, None)  # a part of it that other libraries' names lead to

    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert draw is not None
        if _is_fake_tensor(tensor):
            with torch.no_grad():
                return tensor.zero_()
        return draw(tensor, *args, **kwargs)

    with _ONE:
        if draw is not None:
            setattr(nn.init, _TRUNCATED, drawn)
        try:
            yield
        finally:
            if draw is not None:
                setattr(nn.init, _TRUNCATED, draw)


class _Freezing(TorchFunctionMode):
    """Parameters that `build()` freezes, or thaws, are what they were when the stack is left."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FREEZE and _is_real(args[0]):
            self._stack.callback(args[0].requires_grad_, args[0].requires_grad)
        return func(*args, **(kwargs or {}))


def _is_real(x: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, nn.Parameter) and not isinstance(x, FakeTensor)


def _is_fake_tensor(x: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def _names(function: Any) -> tuple[str, ...]:
    return function.__code__.co_names if inspect.isfunction(function) else ()


def _is_fake(module: nn.Module) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return isinstance(module, ScriptModule) or any(isinstance(x, FakeTensor) for x in own)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """A model that the caller holds is afterwards what it was; a fake one is nobody's."""
    from torch._subclasses.fake_tensor import FakeTensor

    held = [p for p in model.parameters() if not isinstance(p, FakeTensor)]
    kinds = [(module, type(module)) for module in model.modules()]
    kept = [(p, vars(p).copy(), [dict(hooks or {}) for hooks in _hooks(p)]) for p in held]
    with untouched(None, model if held else None):
        model.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            for module, kind in kinds:
                module.__class__ = kind
            for parameter, attributes, before in kept:
                vars(parameter).clear()
                vars(parameter).update(attributes)
                for hooks, old in zip(_hooks(parameter), before, strict=True):
                    if hooks is not None:
                        hooks.clear()
                        hooks.update(old)


def _hooks(parameter: Any) -> tuple[Any, Any]:
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Torch logs the traceback of what it cannot run on fake tensors; our error says it in a line.

    With `--debug` the traceback stays.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    if flag("LEZERO_DEBUG"):
        yield
        return
    log.addFilter(_nothing)
    try:
        yield
    finally:
        log.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False
