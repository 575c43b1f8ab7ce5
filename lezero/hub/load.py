"""Puts named tensors into a module: everything is checked before the first value is copied.

[Note: The rehearsal] What a module accepts is decided by its own load hooks (renamed keys of old
files, lazily sized layers), so key lists alone cannot tell. The load is therefore rehearsed on a
twin without memory: a deep copy whose parameters and buffers are on the meta device. Only a load
that the twin accepts is made on the module.
"""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lezero.core.errors import FileError
from lezero.core.tensors import flat_bytes
from lezero.hub.overlaps import check_overlaps
from lezero.nn.unsized import UnsizedParameter
from lezero.nn.versions import Versions, versioned, versions_in, versions_of

_SHOWN = 5


@dataclass(frozen=True)
class Loaded:
    """tensors: what was loaded, by name, with the names that ties complete. changed: whether a
    floating-point number of the module is now another than before."""

    tensors: dict[str, Any]
    changed: bool


def load_into(module: nn.Module, tensors: dict[str, Any], source: str, strict: bool) -> Loaded:
    """Loads `tensors` in place; `source` names them in errors.

    Raises `FileError` naming missing, left-over, misshapen and mistyped keys, tensors that are not
    plain dense ones, and numbers beyond the range of the module's type; the module is then as it
    was.
    """
    _check_plain(tensors, source)
    tied = _complete_ties(module, tensors, source)
    given = tensors | tied
    versions, missing, unexpected = _accepted(module, given, source, versions_in(tensors))
    _check_keys(missing, unexpected, given, source, strict)
    state = _state(module)
    _check_kinds(state, given, source)
    check_overlaps(state, given, source)
    _check_finite(tensors, source)
    meta = any(tensor.is_meta for tensor in state.values())
    if meta:
        _check_meta(module, state, given, missing, source)
    changed = _changes(state, given)
    values = _assignable(module, given) if meta else given
    module.load_state_dict(versioned(values, versions), strict=False, assign=meta)
    return Loaded(given, changed)


def _changes(state: dict[str, Tensor], given: dict[str, Any]) -> bool:
    """Whether any of the module's floating-point tensors will hold other numbers."""
    for name, value in given.items():
        old = state.get(name)
        if old is None or not isinstance(value, Tensor) or not old.is_floating_point():
            continue
        unset = old.is_meta or nn.parameter.is_lazy(old)
        if unset or not same_bits(old.detach(), value.detach().to(old.device, old.dtype)):
            return True
    return False


def _check_plain(tensors: dict[str, Any], source: str) -> None:
    """Every tensor can be copied into a dense one: torch finds out in the middle of a load."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        kind = str(tensor.layout).removeprefix("torch.")
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else kind
        kind = "quantized" if tensor.is_quantized else kind
        if kind != "strided":
            remedy = {
                "meta": "it has no values; save a model that is not on the meta device",
                "quantized": "save tensor.dequantize() instead",
            }.get(kind, "save it as a dense tensor: tensor.to_dense()")
            raise FileError(f"{source}: '{name}' is a {kind} tensor, not a plain one; {remedy}")
        try:
            corner = tensor[(slice(0, 1),) * tensor.dim()]
            torch.empty(corner.shape).copy_(corner.real)
        except (RuntimeError, NotImplementedError) as error:
            text = str(error).splitlines()[0]
            raise FileError(
                f"{source}: '{name}' is of type {tensor.dtype}, which cannot be loaded ({text})"
            ) from None


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by every name it has, those not saved included."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


def _complete_ties(module: nn.Module, tensors: dict[str, Any], source: str) -> dict[str, Any]:
    """Keys that the file leaves out because the module ties them to one that it holds."""
    groups: dict[int, list[str]] = {}
    for name, tensor in _state(module).items():
        groups.setdefault(id(tensor), []).append(name)
    added: dict[str, Any] = {}
    for names in groups.values():
        held = [name for name in names if name in tensors]
        for name in held[1:]:
            if not same_bits(tensors[held[0]], tensors[name]):
                raise FileError(
                    f"{source}: '{held[0]}' and '{name}' differ in the file, but the module ties "
                    "them, so it can hold only one. Build the module without the tie, or remove "
                    "the wrong one from the file"
                )
        if held:
            added |= {name: tensors[held[0]] for name in names if name not in tensors}
    return added


def same_bits(a: object, b: object) -> bool:
    """Whether two tensors are equal to the bit, type and shape included."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(flat_bytes(a.contiguous()), flat_bytes(b.contiguous()))


def _accepted(
    module: nn.Module, given: dict[str, Any], source: str, held: Versions | None
) -> tuple[Versions | None, list[str], list[str]]:
    """The versions to load by, and `_rehearse` with them. Where the file holds none (safetensors):
    the module's own, unless only a state from before there were any gives all that it needs."""
    found, refused = None, None
    for versions in [versions_of(module), None] if held is None else [held]:
        try:
            here = (versions, *_rehearse(module, given, source, versions))
        except FileError as error:
            refused = refused or error
            continue
        if not here[1]:
            return here
        found = found or here
    if found is None:
        assert refused is not None
        raise refused
    return found


def _rehearse(
    module: nn.Module, given: dict[str, Any], source: str, versions: Versions | None
) -> tuple[list[str], list[str]]:
    """Missing and unexpected keys as the module's own loading sees them; shapes must agree."""
    memo: dict[int, Any] = {}
    for tensor in _state(module).values():
        if isinstance(tensor, UnsizedParameter):
            memo[id(tensor)] = tensor.again(torch.empty(0, device="meta", dtype=tensor.dtype))
        elif nn.parameter.is_lazy(tensor):  # the load sizes it where it lies
            lazy: Any = type(tensor)
            memo[id(tensor)] = lazy(tensor.requires_grad, device="meta", dtype=tensor.dtype)
        else:
            twin: Tensor = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = twin
    try:
        twin_module = copy.deepcopy(module, memo)
        shapes = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in given.items()}
    except Exception:  # a module that holds a lock or a file cannot be copied: compare names
        state = dict.fromkeys(module.state_dict(keep_vars=True))
        _check_shapes(_state(module), given, source)
        return [k for k in state if k not in given], [k for k in given if k not in state]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # copying into meta tensors is a no-op: intended
            result = twin_module.load_state_dict(versioned(shapes, versions), strict=False)
    except Exception as error:  # a module's own loading raises what it wants
        _check_shapes(_state(module), given, source)
        text = " ".join(str(error).split())
        raise FileError(f"{source}: does not fit the module: {text}") from None
    return list(result.missing_keys), list(result.unexpected_keys)


def _check_shapes(state: dict[str, Tensor], given: dict[str, Any], source: str) -> None:
    wrong = []
    for name, value in given.items():
        wanted = state.get(name)
        if wanted is None or nn.parameter.is_lazy(wanted) or not isinstance(value, Tensor):
            continue
        if wanted.shape != value.shape:
            wrong.append(f"'{name}' is {tuple(value.shape)}, the module's {tuple(wanted.shape)}")
    if wrong:
        raise FileError(
            f"{source}: {len(wrong)} of {len(given)} tensors have another shape than the module: "
            f"{_some(wrong)}. The file is of another size of this model, or the module was built "
            "with other settings"
        )


def _check_keys(
    missing: list[str], unexpected: list[str], given: dict[str, Any], source: str, strict: bool
) -> None:
    if not missing and not unexpected:
        return
    parts = []
    if missing:
        parts.append(f"missing in the file: {_some(_nearest(missing, unexpected))}")
    if unexpected:
        parts.append(f"not in the module: {_some(_nearest(unexpected, missing))}")
    text = f"{source}: {'; '.join(parts)}"
    if missing and len(unexpected) == len(given):
        raise FileError(f"{text}. No key of the file fits.{_prefix(missing, unexpected)}")
    if strict:
        raise FileError(f"{text}. Use strict=False to load the rest anyway")
    warnings.warn(text, stacklevel=4)


def _nearest(keys: list[str], others: list[str]) -> Iterable[str]:
    for index, key in enumerate(keys):
        near = difflib.get_close_matches(key, others, n=1) if index < _SHOWN else []
        yield f"'{key}' (nearest there: '{near[0]}')" if near else f"'{key}'"


def _prefix(missing: list[str], unexpected: list[str]) -> str:
    for key in missing[:1]:
        for other in unexpected:
            prefix = other.removesuffix(key)
            if other.endswith("." + key) and all(k.startswith(prefix) for k in unexpected):
                return (
                    f" Its keys start with '{prefix}', as a wrapper's do: save the state dict of "
                    f"the module inside it, or rename: {{k.removeprefix({prefix!r}): v for k, v "
                    "in state.items()}"
                )
            prefix = key.removesuffix(other)
            if key.endswith("." + other) and all(k.startswith(prefix) for k in missing):
                return (
                    f" The module's keys start with '{prefix}': load into "
                    f"module.{prefix.removesuffix('.')} instead"
                )
    return ""


def _check_finite(tensors: dict[str, Any], source: str) -> None:
    bad = []
    for name, tensor in tensors.items():
        floating = isinstance(tensor, Tensor) and tensor.is_floating_point()
        if floating and tensor.dtype.itemsize > 1 and tensor.layout == torch.strided:
            count = tensor.numel() - int(torch.isfinite(tensor).sum())
            if count:
                bad.append(f"'{name}' ({count} of {tensor.numel()})")
    if bad:
        warnings.warn(
            f"{source}: {len(bad)} tensors hold NaN or infinite values: {_some(bad)}; "
            "the model will most likely give NaN",
            stacklevel=4,
        )


def _check_kinds(state: dict[str, Tensor], given: dict[str, Any], source: str) -> None:
    """Integers must not turn into floats unseen, and rounding is said."""
    wrong, rounded = [], []
    for name, value in given.items():
        wanted = state.get(name)
        if wanted is None or not isinstance(value, Tensor) or wanted.dtype == value.dtype:
            continue
        kinds = f"'{name}' is {value.dtype}, the module's {wanted.dtype}"
        if _kind(wanted.dtype) != _kind(value.dtype):
            wrong.append(kinds)
        elif not _holds(wanted.dtype, value.dtype):
            rounded.append(kinds)
    if wrong:
        raise FileError(
            f"{source}: {_some(wrong)}: integers, floating-point and complex numbers are not "
            "converted into each other. If the file is quantized, dequantize it first"
        )
    _check_range(state, given, source)
    if rounded:
        warnings.warn(
            f"{source}: {len(rounded)} tensors are rounded to the module's type: {_some(rounded)}",
            stacklevel=4,
        )


def _kind(dtype: torch.dtype) -> str:
    """Of numbers that may become each other; bool is an integer of 0 and 1."""
    floating = "floating-point" if dtype.is_floating_point else "integer"
    return "complex" if dtype.is_complex else floating


def _check_range(state: dict[str, Tensor], given: dict[str, Any], source: str) -> None:
    """Numbers of the file must not become infinite, or wrap around, in the module's type."""
    beyond, remedy = [], ""
    for name, value in given.items():
        wanted = state.get(name)
        if wanted is None or not isinstance(value, Tensor) or _reaches(wanted.dtype, value.dtype):
            continue
        if count := _count_beyond(value.detach(), wanted.dtype):
            which = f"{count} of {value.numel()}, {value.dtype} into {wanted.dtype}"
            beyond.append(f"'{name}' ({which})")
            integer = _kind(value.dtype) == "integer"
            wider = f"a buffer of {value.dtype}" if integer else f"module.to({value.dtype})"
            remedy = remedy or wider
    if beyond:
        raise FileError(
            f"{source}: {len(beyond)} tensors hold numbers that overflow the module's type: "
            f"{_some(beyond)}. Give the module the file's type before loading ({remedy}), or "
            "repair the file"
        )


def _reaches(wanted: torch.dtype, given: torch.dtype) -> bool:
    """Whether the largest numbers of type `given` are within the range of `wanted`."""
    if wanted.is_floating_point or wanted.is_complex:
        return torch.finfo(wanted).max >= torch.finfo(given).max
    return _holds(wanted, given)


def _count_beyond(value: Tensor, wanted: torch.dtype) -> int:
    """How many finite numbers of `value` are none of type `wanted`, rounding apart."""
    if not value.is_floating_point() and not value.is_complex():
        cast = value.to(wanted)
        lost = cast.to(value.dtype) != value
        return int((lost | (_negative(cast) != _negative(value))).sum())
    if wanted.itemsize == 1:  # a cast to eight bits ends at the largest number
        return int((torch.isfinite(value) & (value.abs() > torch.finfo(wanted).max)).sum())
    return int((torch.isfinite(value) & ~torch.isfinite(value.to(wanted))).sum())


def _negative(value: Tensor) -> Tensor:
    return value < 0 if value.dtype.is_signed else torch.zeros_like(value, dtype=torch.bool)


def _holds(wanted: torch.dtype, given: torch.dtype) -> bool:
    """Whether every number of type `given` is one of type `wanted`, of the same kind."""
    if wanted.is_floating_point:
        ours, theirs = torch.finfo(wanted), torch.finfo(given)
        return ours.eps <= theirs.eps and ours.max >= theirs.max
    if torch.bool in (wanted, given):  # which every kind holds, and which holds no other
        return given == torch.bool
    if wanted.is_complex:
        return torch.promote_types(wanted, given) == wanted
    mine, other = torch.iinfo(wanted), torch.iinfo(given)
    return mine.min <= other.min and mine.max >= other.max


def _assignable(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Values to put in place of a module's own tensors: its dtype, copies of their own (the file
    may be mapped, and may be replaced later), one object where the module ties names."""
    state, made = _state(module), {}
    values: dict[str, Any] = {}
    for name, value in given.items():
        old = state.get(name)
        if old is None or not isinstance(value, Tensor) or nn.parameter.is_lazy(old):
            values[name] = value
            continue
        if id(old) not in made:
            device = "cpu" if old.is_meta else old.device
            new = value.detach().to(device, old.dtype, copy=True)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            made[id(old)] = new
        values[name] = made[id(old)]
    return values


def _check_meta(
    module: nn.Module,
    state: dict[str, Tensor],
    given: dict[str, Any],
    missing: list[str],
    source: str,
) -> None:
    saved = module.state_dict(keep_vars=True)
    left = [
        name
        for name, tensor in state.items()
        if tensor.is_meta and name not in given and (name in missing or name not in saved)
    ]
    if left:
        raise FileError(
            f"{source}: the module is on the meta device, and the file does not hold "
            f"{_some(map(repr, left))}, which would stay without values. Build the module on the "
            "CPU, or fill these yourself before the call"
        )


def _some(items: Iterable[str]) -> str:
    listed = list(items)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
