"""What LeZero's own AdamW kernels keep for each parameter, and how a step runs over it.

[Note: rows]
Every state tensor but `step` has the parameter's dim 0 as its dim 0: for a DTensor parameter it is
a DTensor on the same mesh with the same placements, so rows of state belong to the rank that has
the rows of the parameter, and another number of ranks cuts both alike. Results do not depend on the
cut.

| state | shape | type | when |
|---|---|---|---|
| `step` | () on the CPU | fp32 | always |
| `exp_avg`, `exp_avg_sq` | the parameter's | fp32, or uint8 codes | always |
| `exp_avg_scale`, `exp_avg_sq_scale` | (rows, blocks in a row) | fp32 | with codes |
| `master` | the parameter's | fp32 | bf16 parameters, masters "fp32" |
| `remainder` | the parameter's | int16 | bf16 parameters, masters "remainder" |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lezero.core.errors import ConfigError
from lezero.ops.adamw import eight_bit, reference
from lezero.ops.adamw import masters as exact
from lezero.ops.adamw.op import adamw_all, check_state
from lezero.optim.groups import parameter_groups

Masters = Literal["none", "fp32", "remainder"]
_MOMENTS = ("exp_avg", "exp_avg_sq")
_KEYS = {"fp32": "master", "remainder": "remainder"}
"""What a master is called in the state."""
_PIECE = 1 << 20  # elements encoded at once: the plain operations take many times their memory
_TORCHS_OWN = ("maximize", "amsgrad")
_TYPES = (torch.float32, torch.bfloat16)
_WHOLE = (Tensor, nn.Parameter, type(None))


class WeightOptimizer(Optimizer):
    """AdamW on LeZero's kernels: a base of `AdamW` (with masters) and `AdamW8bit`."""

    _masters: Masters = "none"
    _eight_bit: bool = False

    @property
    def steps_on_host(self) -> bool:
        """Whether `step` stays on the CPU, whatever the groups say (`fused`, from a checkpoint of
        torch's kernels): LeZero's read it there."""
        return self._masters != "none" or self._eight_bit

    @property
    def keeps_masters(self) -> bool:
        return self._masters != "none"

    def masters(self, model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The exact fp32 value of each parameter that this optimizer updates, by its name.

        `model`, or its parameters by name. New tensors; DTensors stay DTensors.
        """
        named = dict(model.named_parameters()) if isinstance(model, nn.Module) else model
        held = {id(p) for group in self.param_groups for p in group["params"]}
        found = {}
        for name, parameter in named.items():
            if id(parameter) in held:
                state = self.state.get(parameter, {})
                extra = state.get("master", state.get("remainder"))
                value = _copied(reference.read(_local(parameter), _local(extra)))
                found[name] = _placed(value, parameter, parameter.shape)
        return found

    @torch.no_grad()
    def take_exact(self, parameter: Tensor, value: Tensor) -> None:
        """Makes the fp32 `value` that of a parameter in bf16 which this optimizer updates, in full
        where it keeps masters; other parameters stay as they are."""
        held = any(parameter is p for group in self.param_groups for p in group["params"])
        if held and self._masters != "none" and parameter.dtype == torch.bfloat16:
            local = _local(value).to(_local(parameter).device, copy=True)
            self._keep(parameter, self.state[parameter], local)

    def check_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for state of a file that cannot belong to `parameter`."""
        coded = "exp_avg_scale" in state
        if coded and not self._eight_bit:
            raise ConfigError(
                f"the state holds moments of 8 bits, which {type(self).__name__} does not update; "
                "build an AdamW8bit"
            )
        for key, value in state.items():
            if key == "step" or not isinstance(value, Tensor):
                continue
            if key in _KEYS.values():
                self._check_master(parameter)
            shape: tuple[int, ...] = tuple(parameter.shape)
            allowed: tuple[torch.dtype, ...] = (parameter.dtype, torch.float32)
            if key.endswith("_scale"):
                shape, allowed = eight_bit.scales_shape(parameter.shape), (torch.float32,)
            elif key == "remainder":
                allowed = (torch.int16,)
            elif coded:
                allowed = (torch.uint8,) if key in _MOMENTS else (torch.float32,)
            right = value.dtype if value.dtype in allowed else allowed[0]
            check_state(key, value, shape, right)

    def _check_master(self, parameter: Tensor) -> None:
        if parameter.dtype != torch.bfloat16:
            raise ConfigError(
                f"the state holds the master of a weight in bfloat16, this one is in "
                f"{str(parameter.dtype).removeprefix('torch.')}; load it into a model in bfloat16, "
                "or by Engine.load into one in float32, whose weights the masters then are"
            )
        if self._masters == "none":
            raise ConfigError(
                "the state holds fp32 masters, which masters='none' would lose; build the "
                "optimizer with masters='fp32' or 'remainder'"
            )

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and pickle take; torch knows of the rest alone."""
        own = {"_masters": self._masters, "_eight_bit": self._eight_bit}
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; `ConfigError` for options of the group that LeZero's kernels lack."""
        self._check_group(param_group)
        super().add_param_group(param_group)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Asked at each step too, since groups are plain dicts that anyone writes to."""
        if not self.steps_on_host:
            return
        for option in _TORCHS_OWN:
            if group.get(option):
                raise ConfigError(
                    f"{type(self).__name__}: '{option}' of a parameter group is not known "
                    "here; leave it out, or use AdamW with masters='none'"
                )
        if group.get("weight_decay") and group.get("decoupled_weight_decay") is False:
            raise ConfigError(
                f"{type(self).__name__}: weight_decay of a parameter group is added to gradients, "
                "as by torch.optim.Adam; allowed is decoupled_weight_decay=True"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps the types that it was saved with."""
        for group in state_dict["param_groups"]:
            self._check_group(group)
        super().load_state_dict(state_dict)
        held = [p for group in self.param_groups for p in group["params"]]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for parameter, index in zip(held, saved, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if self.steps_on_host and isinstance(value, Tensor):
                    place = "cpu" if key == "step" else parameter.device
                    self.state[parameter][key] = value.to(place, copy=True)
            self.check_state(parameter, self.state.get(parameter, {}))

    def _step_all(self) -> None:
        calls: dict[str, list[tuple[Any, ...]]] = {"adamw_": [], "adamw8bit_": []}
        steps: list[Tensor] = []
        for group in self.param_groups:
            self._check_group(group)
            options = float(group["lr"]), *map(float, group["betas"]), group["eps"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    op, arguments = self._call(parameter)
                    calls[op].append((*arguments, *options, group["weight_decay"]))
                    steps.append(arguments[-1])
        if steps:  # a tenth of the time that `+= 1` on each takes
            torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1.0)
        for op, every in calls.items():
            adamw_all(op, every)

    def _call(self, parameter: Tensor) -> tuple[str, tuple[Any, ...]]:
        """The op that updates a parameter, and its arguments but for the options; the last is the
        number of its steps, which is one behind."""
        grad = parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise ConfigError("AdamW: a gradient is sparse; use sparse=False in nn.Embedding")
        state = self.state[parameter]
        if "exp_avg" not in state:
            self._begin(parameter, state)
        self._fit_moments(parameter, state)
        self._fit_master(parameter, state)
        extra = state.get("master", state.get("remainder"))
        weight = tuple(map(_local, (parameter, extra, grad)))
        coded = "exp_avg_scale" in state
        keys = [k for m in _MOMENTS for k in ((m, f"{m}_scale") if coded else (m,))]
        moments = (_local(state[key]) for key in keys)
        return "adamw8bit_" if coded else "adamw_", (*weight, *moments, state["step"])

    def _begin(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """State of a parameter that was never updated: zeros."""
        local = _local(parameter)
        coded = self._codes(parameter)
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        for moment in _MOMENTS:
            kind = torch.uint8 if coded else torch.float32
            zeros = torch.zeros(local.shape, dtype=kind, device=local.device)
            state[moment] = _placed(zeros, parameter, parameter.shape)
            if coded:
                shape = eight_bit.scales_shape(local.shape)
                scales = torch.zeros(shape, dtype=torch.float32, device=local.device)
                whole = eight_bit.scales_shape(parameter.shape)
                state[f"{moment}_scale"] = _placed(scales, parameter, torch.Size(whole))

    def _codes(self, parameter: Tensor) -> bool:
        """Whether this parameter's moments are kept in 8 bits; `ConfigError` where they cannot."""
        coded = self._eight_bit and parameter.dim() > 0 and eight_bit.suits(parameter.shape)
        if coded:
            _refuse_columns(parameter)
        return coded

    def _fit_moments(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Gives state the kind of moments that this optimizer keeps, whatever it was loaded with:
        codes of 8 bits, or fp32."""
        if "exp_avg_scale" in state:
            return
        coded = self._codes(parameter)
        for moment in _MOMENTS:
            if not coded:
                state[moment] = state[moment].float()
                continue
            local = _local(state[moment])
            rows, columns = local.shape[0], parameter.shape[1:].numel()
            codes = torch.empty(rows, columns, dtype=torch.uint8, device=local.device)
            shape = eight_bit.scales_shape(local.shape)
            scales = torch.empty(shape, dtype=torch.float32, device=local.device)
            several = max(_PIECE // columns, 1)
            for first in range(0, rows, several):
                part = slice(first, first + several)
                values = local[part].float().reshape(-1, columns)
                codes[part], scales[part] = eight_bit.encode(values, moment == "exp_avg")
            whole = torch.Size(eight_bit.scales_shape(parameter.shape))
            state[moment] = _placed(codes.view(local.shape), parameter, parameter.shape)
            state[f"{moment}_scale"] = _placed(scales, parameter, whole)

    def _fit_master(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Gives state the kind of master asked for, exactly, whatever kind it was loaded with."""
        wanted = _KEYS.get(self._masters) if parameter.dtype == torch.bfloat16 else None
        found = next((key for key in _KEYS.values() if key in state), None)
        if found == wanted:
            return
        value = reference.read(_local(parameter), _local(state.pop(found) if found else None))
        if wanted is not None:
            self._keep(parameter, state, value)

    def _keep(self, parameter: Tensor, state: dict[str, Any], value: Tensor) -> None:
        """Writes an fp32 value as a weight in bf16 and its master."""
        weight, remainder = exact.split(value)
        _local(parameter).copy_(weight)
        extra = value if self._masters == "fp32" else remainder
        state[_KEYS[self._masters]] = _placed(extra, parameter, parameter.shape)


def listed(params: nn.Module | Iterable[Any], weight_decay: float, what: str) -> list[Any]:
    """Parameters or groups as a list, and those of a group, which may be a generator, too;
    `ConfigError` when there is none. As in torch some groups may be empty."""
    if isinstance(params, nn.Module):
        params = parameter_groups(params, weight_decay)
    found = [_group(item) if isinstance(item, dict) else item for item in params]
    if all(isinstance(item, dict) and not item["params"] for item in found):
        raise ConfigError(f"{what}: the model has no trainable parameter (all are frozen?)")
    return found


def _group(group: dict[str, Any]) -> dict[str, Any]:
    inner = group["params"]
    if isinstance(inner, Tensor):
        inner = [inner]
    elif not isinstance(inner, set):  # which torch refuses
        inner = list(inner)
    return {**group, "params": inner}


def checked_masters(masters: str) -> Masters:
    if masters not in get_args(Masters):
        raise ConfigError(
            f"masters: got {masters!r}, allowed is {', '.join(map(repr, get_args(Masters)))}"
        )
    return masters  # type: ignore[return-value]


def check_options(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """Raises `ConfigError` for the first that is no number in its range; tensors of one number may
    stand for numbers, as in torch."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"betas: got {betas!r}, allowed are two numbers, such as (0.9, 0.999)")
    for name, value, below in (
        ("lr", lr, math.inf),
        ("betas[0]", betas[0], 1.0),
        ("betas[1]", betas[1], 1.0),
        ("eps", eps, math.inf),
        ("weight_decay", weight_decay, math.inf),
    ):
        single = isinstance(value, torch.Tensor) and value.numel() == 1
        number = single or (isinstance(value, Real) and not isinstance(value, bool))
        if not number or not 0 <= value < below:
            raise ConfigError(
                f"{name}: got {value!r}, allowed is a number from 0"
                + (f" and below {below:g}" if below < math.inf else "")
            )


def check_parameters(optimizer: WeightOptimizer) -> None:
    """Raises `ConfigError` unless all parameters have a type that the kernels update, and for
    remainders where none has any."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype not in _TYPES:
                raise ConfigError(
                    f"{type(optimizer).__name__}: a parameter of shape {tuple(parameter.shape)} is "
                    f"{parameter.dtype}; allowed is float32 or bfloat16"
                )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer._masters == "remainder" and all(p.dtype == torch.float32 for p in held):
        raise ConfigError(
            "masters: got 'remainder', but every parameter is float32, which lacks no bits; use "
            "masters='none', or make the weights bfloat16 before the optimizer"
        )


def _local(tensor: Any) -> Any:
    """This rank's part of a DTensor (a view); anything else as it is."""
    if type(tensor) in _WHOLE:  # to ask for an attribute that is not there takes longer
        return tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _placed(local: Tensor, like: Tensor, shape: torch.Size) -> Tensor:
    """`local` as a DTensor of the whole `shape`, cut as `like` is; itself where `like` is plain."""
    if not hasattr(like, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def _refuse_columns(parameter: Tensor) -> None:
    for placement in getattr(parameter, "placements", ()):
        if placement.is_partial() or (placement.is_shard() and not placement.is_shard(0)):
            raise ConfigError(
                f"AdamW8bit: a parameter is cut as {placement}; allowed is Shard(0), since the "
                "blocks of its state are pieces of rows"
            )
