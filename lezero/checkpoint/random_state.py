"""The state of every global random generator, as tensors and JSON."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lezero.core.device import accelerator, count
from lezero.core.errors import FileError


def pack_random(
    prefix: str = "random/", places: Iterable[torch.device] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of torch's (CPU, current accelerator and those of `places`), Python's and numpy's
    global generators."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        f"{prefix}torch": torch.get_rng_state(),
        f"{prefix}python": torch.tensor(words, dtype=torch.int64, device="cpu"),
        f"{prefix}numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
    }
    device = accelerator()
    if device is not None:
        module, current = torch.get_device_module(device), torch.accelerator.current_device_index()
        tensors[f"{prefix}{device}"] = module.get_rng_state()
        for index in {place.index for place in places if place.type == device} - {None, current}:
            tensors[f"{prefix}{device}:{index}"] = module.get_rng_state(index)
    document = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "accelerator": device,
    }
    return tensors, document


def unpack_random(
    tensors: Mapping[str, Tensor], document: Mapping[str, Any], prefix: str = "random/"
) -> None:
    """Puts every generator back as `pack_random` found it; `FileError` when a state is missing.

    An accelerator's state is put back only where there is one of the same kind.
    """
    try:
        python, numpy = document["python"], document["numpy"]
        words = tuple(tensors[f"{prefix}python"].tolist())
        keys = tensors[f"{prefix}numpy"].numpy().astype(np.uint32)
        state = tensors[f"{prefix}torch"]
        random.setstate((python["version"], words, python["gauss"]))
        rest = (numpy["position"], numpy["has_gauss"], numpy["cached"])
        np.random.set_state((numpy["kind"], keys, *rest))
        torch.set_rng_state(state)
        device = accelerator()
        if device is not None and document["accelerator"] == device:
            module = torch.get_device_module(device)
            module.set_rng_state(tensors[f"{prefix}{device}"])
            for index in range(count()):
                if (other := tensors.get(f"{prefix}{device}:{index}")) is not None:
                    module.set_rng_state(other, index)
    except KeyError as error:
        raise FileError(f"the state of a random generator is missing: {error}") from None
    except (TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"the state of a random generator is damaged: {error}") from None
