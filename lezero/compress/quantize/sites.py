"""Which weights of a model can be quantized, and who uses each.

A site is one weight and the layers that share it; nothing else of the model may hold it. Layers of
exactly the classes below count, not subclasses, whose forward could do something else: `nn.Linear`,
`nn.Embedding`, `nn.Conv1d`, `nn.Conv2d` and transformers' `Conv1D` (a linear layer with a
transposed weight).
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lezero.compress.quantize.modules import even_padding, own_names
from lezero.compress.quantize.parts import at_once
from lezero.compress.quantize.tensors import is_dense, kept_beside, overlaps
from lezero.core.errors import ConfigError, NumericsError, OrderError
from lezero.nn.blocks import blocks
from lezero.nn.wrappers import is_flattened

Kind = Literal["linear", "embedding", "conv"]
Filter = Callable[[str, nn.Module], bool] | str | Sequence[str] | None
_MOST_INPUTS = 1 << 16
_SHOWN = 5
_KINDS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class User:
    """A layer that uses a weight."""

    name: str
    module: nn.Module
    kind: Kind


@dataclass(frozen=True)
class Site:
    """One weight. `users`: the layers that share it, in the order of registration."""

    users: tuple[User, ...]
    parameter: nn.Parameter
    is_vocabulary: bool
    """Token embeddings, and the output head over the same tokens."""
    numel: int
    nbytes: int

    @property
    def name(self) -> str:
        return self.users[0].name

    @property
    def kind(self) -> Kind:
        """Of a tied weight: "linear"."""
        kinds = [user.kind for user in self.users]
        return "linear" if "linear" in kinds else kinds[0]

    @property
    def transposed(self) -> bool:
        return type(self.users[0].module).__name__ == "Conv1D"

    def weight(self) -> Tensor:
        """The weight as (N, K) or, of a convolution, (O, C / groups, …); a view."""
        data = self.parameter.detach()
        return data.T if self.transposed else data


def kind_of(module: nn.Module) -> Kind | None:
    """How `module` can be quantized; None where it cannot."""
    if type(module) is nn.Linear or _is_conv1d_of_transformers(module):
        return "linear" if _is_plain(module) else None
    if type(module) is nn.Embedding:
        return "embedding" if _is_plain(module) and module.max_norm is None else None
    if type(module) is nn.Conv1d or type(module) is nn.Conv2d:
        even = even_padding(module.padding, module.kernel_size, module.dilation) is not None
        fits = module.padding_mode == "zeros" and even
        return "conv" if fits and _is_plain(module) else None
    return None


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing of it would be lost: not a bias that is computed (`torch.nn.utils.prune`) or
    in a buffer, nor what `own_names` finds."""
    bias = getattr(module, "bias", None) is module._parameters.get("bias")
    return bias and not own_names(module)


def find_sites(model: nn.Module, filter: Filter) -> list[Site]:
    """Every weight that can be quantized and that `filter` takes; all its users must be taken.

    Raises `OrderError` for sharded weights, `NumericsError` for values that are not finite (both
    name the layer), `ConfigError` for a layer without a shape and when nothing is left.
    """
    chosen = _chooser(filter)
    users: dict[int, list[User]] = defaultdict(list)
    owners: dict[int, list[str]] = defaultdict(list)
    parameters: dict[int, nn.Parameter] = {}
    words: set[tuple[int, ...]] = set()  # whatever the filter takes
    for name, module in model.named_modules():
        if is_flattened(module):
            where = f"'{name}'" if name else "the model"
            raise OrderError(
                f"lz.quantize_: {where} is wrapped by FullyShardedDataParallel, which joins and "
                "splits all weights over ranks; quantize first, or save the model and quantize it "
                "whole"
            )
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            _check_has_shape(parameter, name)
            if key == "weight" and isinstance(module, nn.Embedding):
                words.add(tuple(parameter.shape))
            parameters[id(parameter)] = parameter
            owners[id(parameter)].append(name)
            kind = kind_of(module)
            if key == "weight" and kind is not None and chosen(name, module):
                users[id(parameter)].append(User(name, module, kind))
    inside = tuple(f"{name}." for name, _ in blocks(model))
    beside = {id(tensor) for tensor in kept_beside(model)}
    sites = []
    for key, layers in users.items():
        parameter = parameters[key]
        kinds = {(user.kind, type(user.module).__name__) for user in layers}
        shared = len(layers) < len(owners[key]) or key in beside
        if shared or not _fits(parameter, kinds):
            continue
        outside = not any(user.name.startswith(inside) for user in layers) if inside else True
        vocabulary = outside and tuple(parameter.shape) in words
        size = (parameter.numel(), parameter.nbytes)
        sites.append(Site(tuple(layers), parameter, vocabulary, *size))
    if not sites:
        for key, layers in users.items():
            taken = {user.name for user in layers}
            _check_taken_whole([x for x in owners[key] if x not in taken], layers, model, chosen)
        raise _nothing_fits(model, filter)
    for site in sites:
        _check(site)
    return sites


def _check_taken_whole(
    rest: list[str],
    taken: list[User],
    model: nn.Module,
    chosen: Callable[[str, nn.Module], bool],
) -> None:
    """Raises `ConfigError` where the filter alone keeps a shared weight from being quantized.

    rest: the layers that hold it beside the `taken` ones.
    """
    others = [(name, model.get_submodule(name)) for name in rest]
    if others and all(kind_of(x) is not None and not chosen(name, x) for name, x in others):
        named = " and ".join(f"'{name}'" for name in rest)
        raise ConfigError(
            f"filter: takes '{taken[0].name}', which shares its weight with {named}, and leaves "
            f"{named} out; take all the layers of a weight, or none"
        )


def _nothing_fits(model: nn.Module, filter: Filter) -> ConfigError:
    found = sorted({type(m).__name__ for m in model.modules() if not list(m.children())})
    asked = ""
    if filter is not None:
        names = [name for name, module in model.named_modules() if kind_of(module) is not None]
        some = ", ".join(map(repr, names[:_SHOWN])) + (", …" if len(names) > _SHOWN else "")
        given = "" if callable(filter) else f" {filter!r}"[:200]
        asked = f" the filter{given} (layers are named {some or 'otherwise'})"
    return ConfigError(
        "lz.quantize_: no layer fits"
        + asked
        + f"; the model's layers are {', '.join(found) or 'none'}, its weights "
        f"{_dtypes(model)}. What can be quantized is Linear, Embedding, Conv1D, and Conv1d and "
        "Conv2d padded with as many zeros at both ends, of weights in float32, bfloat16 or float16 "
        "that nothing else holds, each value in memory of its own, biases that are parameters, and "
        f"no attributes of their own that quantized layers have too{_named(model)}"
    )


def _named(model: nn.Module) -> str:
    """The first layer that has such attributes."""
    for name, module in model.named_modules():
        if isinstance(module, _KINDS) and (own := own_names(module)):
            return f" ('{name}' has {', '.join(own)})"
    return ""


def left_over(model: nn.Module, sites: list[Site]) -> dict[str, int]:
    """What no site holds: "Class.parameter" → weights, of parameters of two dims and more. Of a
    layer that its own attributes keep back, these too."""
    held = {id(site.parameter) for site in sites}
    found: dict[str, int] = defaultdict(int)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() > 1 and id(parameter) not in held:
                held.add(id(parameter))
                own = own_names(module) if key == "weight" else []
                beside = f" beside its own {', '.join(own)}" if own else ""
                found[f"{type(module).__name__}.{key}{beside}"] += parameter.numel()
    return dict(found)


def _dtypes(model: nn.Module) -> str:
    found = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    return ", ".join(sorted(found)) or "none"


def _fits(parameter: nn.Parameter, kinds: set[tuple[Kind, str]]) -> bool:
    """Whether users can share one quantized weight."""
    shared = len(kinds) == 1 or kinds == {("linear", "Linear"), ("embedding", "Embedding")}
    inputs = parameter.shape[1:].numel()
    floats = parameter.dtype in (torch.float32, torch.bfloat16, torch.float16)
    plain = is_dense(parameter) and not overlaps(parameter)
    return shared and floats and plain and parameter.numel() > 0 and inputs <= _MOST_INPUTS


def _check_has_shape(parameter: nn.Parameter, layer: str) -> None:
    if is_lazy(parameter):
        raise ConfigError(
            f"lz.quantize_: '{layer}' has no shape yet; call the model once with a batch, so that "
            "its lazy layers take theirs"
        )


def _check(site: Site) -> None:
    parameter = site.parameter
    if isinstance(parameter, DTensor):
        raise OrderError(
            f"lz.quantize_: the weight of '{site.name}' is split over ranks; quantize first, or "
            "save the model and quantize it whole"
        )
    if parameter.is_meta:
        raise OrderError(
            f"lz.quantize_: the weight of '{site.name}' is on the meta device and has no values; "
            "load the model first"
        )
    biases = [user.module._parameters.get("bias") for user in site.users]
    checked = [("weights", parameter), *(("biases", x) for x in biases if x is not None)]
    for what, values in checked:
        bad = not_finite(values.detach())
        if bad:
            raise NumericsError(
                f"lz.quantize_: {bad} of {values.numel()} {what} of '{site.name}' are NaN or "
                "infinite; mend the model, or leave the layer out with filter="
            )


def not_finite(values: Tensor) -> int:
    """How many; in parts, since torch makes a copy in fp64 to sum up, eight bytes a value."""
    parts = values.flatten().split(at_once(values.device))
    sums = [part.sum(dtype=torch.float64) for part in parts]
    if bool(torch.stack(sums).isfinite().all()):  # the host waits once
        return 0
    return sum(int((~torch.isfinite(part)).sum()) for part in parts)


def _chooser(filter: Filter) -> Callable[[str, nn.Module], bool]:
    if filter is None:
        return lambda name, module: True
    if callable(filter):
        return filter
    patterns = (
        [filter] if isinstance(filter, str) or not isinstance(filter, Iterable) else [*filter]
    )
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(
            f"filter: got {filter!r}, allowed is a pattern of layer names such as '*.mlp.*', a "
            "sequence of them, or a function of (name, module)"
        )
    left = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    taken = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]

    def fits(name: str, some: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in some)

    return lambda name, module: fits(name, taken) and not fits(name, left)


def _is_conv1d_of_transformers(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
