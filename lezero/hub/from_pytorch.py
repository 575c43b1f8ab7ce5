"""`from_pytorch`: takes a PyTorch module into use, with its weights, and checks both."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lezero.core.errors import ConfigError, LeZeroError, NumericsError, OrderError
from lezero.hub.load import Loaded, load_into, same_bits
from lezero.hub.weights import read_weights
from lezero.nn.buffers import BufferSnapshot
from lezero.nn.modes import evaluating
from lezero.nn.wrappers import why_wrapped


class NotAModuleError(LeZeroError, TypeError):
    """What was given is no `torch.nn.Module` that LeZero can work on."""


def from_pytorch(
    module: nn.Module,
    state_dict_path: str | os.PathLike[str] | None = None,
    *,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    strict: bool = True,
) -> nn.Module:
    """Returns `module` itself, checked and, where a path is given, with the weights of that file.

    LeZero works on plain modules, so nothing is converted: the parameters are the ones you had
    and so are their names, and every verb also takes a module that never came through here. What
    this adds is safe loading and checks.

    - It refuses what the verbs cannot work on: something that is no module, a TorchScript module,
      a module already wrapped by torch.compile, DDP or DataParallel (their names differ).
    - With `state_dict_path`: a `.safetensors` file, or a `.pt`/`.pth` file read with
      `weights_only=True`. Names, shapes and kinds are checked before anything is copied, so a
      failed load leaves the module as it was. Tied weights stay tied; a module on the meta device
      gets the tensors (in its own dtype) in place of its placeholders. Weights that are not
      finite, or that lose precision in the module's dtype, are named in a warning; finite ones
      that its dtype cannot hold are refused.
    - With `example_inputs` (a tensor, a sequence of positional or a mapping of keyword
      arguments): the module is run in eval mode without gradients, and its outputs must equal,
      within `torch.testing.assert_close`'s tolerance, those of a reference: with a path,
      PyTorch's own `functional_call` on the tensors of the file; without one, there is nothing
      to compare with but a second run, which finds a module whose outputs do not repeat. Where
      the file changed the weights, a run on altered ones follows: outputs that stay the same to
      the bit are told in a warning, since forward does not use what was loaded. All runs start
      from the same random state of the CPU, and have inputs of their own. Training flags, buffers
      and that random state are as before afterwards.

    Args:
        module: any `torch.nn.Module`.
        state_dict_path: file of weights, or None.
        example_inputs: as above, or None for no check.
        strict: False lets keys be missing or left over (they are named in a warning); shapes
            must agree all the same, as in torch.

    Errors: `NotAModuleError` (also a `TypeError`); `ConfigError` for a path that is none, or
    outputs without a tensor; `OrderError` for a path with a sharded module; `FileError` for a
    file that cannot be read, is refused or does not fit the module; `NumericsError` where outputs
    differ.
    """
    _check_module(module)
    if not isinstance(state_dict_path, str | os.PathLike | None):
        raise ConfigError(
            f"state_dict_path: got a {type(state_dict_path).__name__}, allowed is the path of a "
            ".safetensors, .pt or .pth file; a state dict in memory is loaded by "
            "module.load_state_dict(...)"
        )
    loaded: Loaded | None = None
    if state_dict_path is not None:
        _check_whole(module)
        loaded = load_into(module, read_weights(state_dict_path), str(state_dict_path), strict)
    if example_inputs is not None:
        _check_outputs(module, loaded, example_inputs)
    return module


def _check_module(module: object) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise NotAModuleError(f"got the class {module.__name__}; make one first: "
                              f"from_pytorch({module.__name__}(...))")  # fmt: skip
    if isinstance(module, (str, os.PathLike)):
        raise NotAModuleError(
            f"got the path '{os.fspath(module)}' as the module; a file of weights holds no "
            "architecture: from_pytorch(module, path)"
        )
    if isinstance(module, Mapping):
        raise NotAModuleError(
            f"got a {type(module).__name__} (a state dict?) as the module; build the module and "
            "call module.load_state_dict(...), or save it to a file: from_pytorch(module, path)"
        )
    if not isinstance(module, nn.Module):
        raise NotAModuleError(f"got a {type(module).__name__}; allowed is a torch.nn.Module")
    if isinstance(module, torch.jit.ScriptModule):
        raise NotAModuleError(
            "got a TorchScript module, whose layers cannot be changed; give the module it was "
            "scripted or traced from"
        )
    if wrapped := why_wrapped(module):
        raise NotAModuleError(wrapped)


def _check_whole(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "placements"):  # of a DTensor
            raise OrderError(
                f"this module is sharded (parameter '{name}' is a DTensor): call "
                "lz.from_pytorch(module, file) before lz.shard_, or module.load_state_dict(...), "
                "which takes whole tensors"
            )


def _check_outputs(module: nn.Module, loaded: Loaded | None, example_inputs: Any) -> None:
    given_inputs = _arguments(example_inputs)
    args, kwargs = _private(given_inputs)
    with _quiet(module):
        ours = _tensors(module(*args, **kwargs))
    args, kwargs = _private(given_inputs)
    with _quiet(module):
        if loaded is None:
            wanted, against = module(*args, **kwargs), "a second run of the same module"
        else:
            given = _reference(module, loaded.tensors)
            wanted = torch.func.functional_call(module, given, args, kwargs, tie_weights=False)
            against = "PyTorch's functional_call on the tensors of the file"
        theirs = _tensors(wanted)
    if len(ours) != len(theirs):
        raise NumericsError(
            f"the module gives {len(ours)} output tensors and {against} gives {len(theirs)}"
        )
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        try:
            torch.testing.assert_close(mine, other, equal_nan=True)
        except AssertionError as error:
            detail = "; ".join(line for line in str(error).splitlines() if line)
            raise NumericsError(
                f"output {index} of the module on example_inputs differs from {against}: {detail}"
            ) from None
    if loaded is not None and loaded.changed:
        args, kwargs = _private(given_inputs)
        _check_use(module, _reference(module, loaded.tensors), args, kwargs, ours)


def _check_use(
    module: nn.Module,
    given: dict[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ours: list[Tensor],
) -> None:
    """Warns where other weights in place of those `given` leave the outputs `ours` as they are."""
    telling = [
        i
        for i, x in enumerate(ours)
        if x.is_floating_point() and bool((x.isfinite() & (x != 0)).any())
    ]
    weights = [x for x in given.values() if x.is_floating_point() and x.dtype.itemsize > 1]
    if not telling or not weights:
        return
    for weight in weights:
        weight.mul_(0.75).add_(0.01)
    try:
        with _quiet(module):
            altered = _tensors(
                torch.func.functional_call(module, given, args, kwargs, tie_weights=False)
            )
    except Exception:  # a module may refuse such weights: then it looks at them
        return
    if len(altered) == len(ours) and all(same_bits(ours[i], altered[i]) for i in telling):
        warnings.warn(
            "the module's outputs on example_inputs do not depend on the loaded weights: other "
            "weights give the same bits. Its forward seems to use copies of them (made in "
            "__init__, or kept from an earlier call), which loading does not change: compute them "
            "in forward, or register them as buffers that are part of the state dict",
            stacklevel=4,
        )


def _reference(module: nn.Module, loaded: dict[str, Any]) -> dict[str, Tensor]:
    """The file's own tensors in the module's dtypes, where a name of the file is one of it."""
    state: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    state.update(module.named_buffers(remove_duplicate=False))
    return {
        name: value.detach().to(state[name].device, state[name].dtype, copy=True)
        for name, value in loaded.items()
        if name in state and isinstance(value, Tensor)
    }


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(given), {}
    return (given,), {}


def _private(inputs: Any) -> Any:
    """Inputs for one run, which may write into them."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return pytree.tree_map(copied, inputs)


def _tensors(output: Any) -> list[Tensor]:
    """Copies of all tensors of an output; `ConfigError` when nothing of it can be compared."""
    found = [leaf.clone() for leaf in _leaves(output) if isinstance(leaf, Tensor)]
    if not found:
        raise ConfigError(
            f"example_inputs: the module gives a {type(output).__name__} for them, in which no "
            "tensor is found, so that there is nothing to compare; let it return tensors (in "
            "dicts, sequences or dataclasses, too), or leave example_inputs out"
        )
    return found


def _leaves(output: Any) -> Iterator[Any]:
    """What an output consists of, also within dataclasses and kinds of dicts and sequences that
    torch's trees do not know."""
    for leaf in pytree.tree_leaves(output):
        inner: Iterable[Any] = ()
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            inner = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
        elif isinstance(leaf, Mapping):
            inner = leaf.values()
        elif isinstance(leaf, list | tuple):
            inner = leaf
        else:
            yield leaf
        for part in inner:
            yield from _leaves(part)


@contextmanager
def _quiet(module: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, one random state; all of it and the buffers put back afterwards."""
    buffers = BufferSnapshot(module)
    try:
        with evaluating(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        buffers.restore()
