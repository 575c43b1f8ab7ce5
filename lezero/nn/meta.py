"""Modules built without memory for their weights, and with all else real.

Under `torch.device("meta")` every tensor that a module makes has no values: its parameters, and
also buffers that it computes and never saves (rotary frequencies, position numbers), which nothing
restores afterwards. Here only parameters go to meta.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, parameters of modules that are built (in any thread) are on the meta device.

    Each is made as ever and then dropped, so only one at a time holds memory. For models whose
    tensors come from a file: `lz.load_quantized`, `load_state_dict(assign=True)`. Parameters of
    classes of their own (lazy ones) stay as they are.
    """

    def emptied(module: nn.Module, name: str, made: nn.Parameter | None) -> nn.Parameter | None:
        if type(made) is not nn.Parameter or made.is_meta:
            return None  # stays, so a parameter that is given to a second module is one there too
        return nn.Parameter(made.detach().to("meta"), requires_grad=made.requires_grad)

    hook = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
