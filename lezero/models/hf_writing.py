"""Writes a `Transformer` as a Hugging Face folder: aside first, and then moved in."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from lezero.comm.whole import whole
from lezero.core.errors import ConfigError, FileError, OrderError
from lezero.core.interrupts import held_interrupts
from lezero.core.paths import expand_home
from lezero.files.folder import aside, held_alone, sync_files
from lezero.models.config import TransformerConfig
from lezero.models.hf_config import UNFINISHED, to_hf
from lezero.models.huggingface import INDEX, SINGLE, token_entries, tokenizer_files
from lezero.models.transformer import Transformer

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def save_hf(
    model: Transformer,
    folder: str | os.PathLike[str],
    tokenizer_folder: str | os.PathLike[str] | None = None,
    shard_bytes: int = 5 << 30,
) -> Path:
    """Writes `config.json` and safetensors that transformers opens with equal logits.

    The weights keep the type they have in the model; more than `shard_bytes` are split over files
    with an index. Files of a tokenizer are copied from `tokenizer_folder`, and what is said there
    of which tokens end a text and how tokens are chosen. Everything is written to a folder aside
    first and then moved in, `config.json` last, so a failed save leaves what was there, and Ctrl-C
    comes before or after. Returns the folder.
    """
    state = {name_there(name): tensor for name, tensor in export(model).items()}
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}
    return write_hf(
        model.actual_config,
        folder,
        lambda made: _write_weights(state, made, shard_bytes),
        dtypes.pop() if len(dtypes) == 1 else "float32",
        tokenizer_folder,
    )


def write_hf(
    config: TransformerConfig,
    folder: str | os.PathLike[str],
    write_weights: Callable[[Path], object],
    dtype: str = "float32",
    tokenizer_folder: str | os.PathLike[str] | None = None,
    also: Mapping[str, Any] | None = None,
    gone: Collection[str] = (),
) -> Path:
    """The same for weights that `write_weights(folder aside)` writes, named by `name_there`.

    `also` is added to config.json; files named in `gone` leave the folder as the others come.
    """
    root = Path(expand_home(folder)).absolute()
    if root.exists() and not root.is_dir():
        raise FileError(f"{root}: is a file; name a folder")
    if (root / "manifest.json").exists():
        raise FileError(
            f"{root}: holds manifest.json, by which other weights would be opened (those of "
            "lz.save_quantized, or a checkpoint's); name a new folder"
        )
    data = {**to_hf(config, dtype), **(also or {})}
    copies = tokenizer_files(tokenizer_folder)
    if tokenizer_folder is not None:
        data |= token_entries(Path(expand_home(tokenizer_folder)))
    try:
        with aside(root if root.is_dir() else root.parent, root.name) as made:
            for path in copies:
                shutil.copyfile(path, made / path.name)
            write_weights(made)
            _write_json(made / "config.json", data)
            sync_files(made)
            root.mkdir(parents=True, exist_ok=True)
            # Two at once would leave the configuration of one over the other's weights.
            with held_alone(root), held_interrupts():
                _move_in(made, root, data, gone)
    except SafetensorError as error:
        raise FileError(f"{root}: could not be written ({error})") from None
    except OSError as error:
        raise FileError(f"{root}: could not be written ({error})") from error
    return root


def _move_in(made: Path, root: Path, data: Mapping[str, Any], gone: Collection[str]) -> None:
    """Replaces the weights in `root`; what neither side of the layout knows is left alone. Until
    the last file is there the folder does not open, but can be saved to again."""
    fresh = {path.name for path in made.iterdir()}
    about = {key: value for key, value in data.items() if key == "quantization_config"}
    _write_json(made / UNFINISHED, {**about, UNFINISHED: True})
    os.replace(made / UNFINISHED, root / "config.json")
    for path in root.iterdir():
        old = _WEIGHTS.fullmatch(path.name) or path.name in gone
        if old and path.name not in fresh:
            path.unlink()
    for name in [*sorted(fresh - {"config.json"}), "config.json"]:
        os.replace(made / name, root / name)


def name_there(name: str) -> str:
    """A parameter's name in a Hugging Face folder."""
    return name if name.partition(".")[0] == "lm_head" else f"model.{name}"


def export(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, whole, on the CPU. Meta tensors are a `ConfigError`, buffers
    that are part of the model's state an `OrderError`: the layout has no place for them."""
    state: dict[str, Tensor] = {}
    if kept := _kept_buffers(model):
        raise OrderError(
            f"{kept[0]} is no parameter, so that this folder would lack it: a quantized model is "
            "written by lz.save_quantized, or is plain again after lz.dequantize_"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(f"{name} is on the meta device: the model has no weights to save yet")
        state[name] = whole(parameter.detach(), name).to("cpu").contiguous()
    return state


def _kept_buffers(model: nn.Module) -> list[str]:
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _write_weights(state: Mapping[str, Tensor], root: Path, shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [SINGLE]
    if len(shards) > 1:
        total = f"{len(shards):05d}"
        names = [f"model-{i:05d}-of-{total}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total_size = sum(tensor.nbytes for tensor in state.values())
        _write_json(
            root / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        )
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, root / name, metadata={"format": "pt"})


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
