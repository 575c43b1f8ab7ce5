"""Reads and writes the Hugging Face layout: `config.json` and safetensors, never pickle.

A folder written here opens in transformers (`AutoModelForCausalLM`), and the folders of Llama,
Mistral, Qwen2 and Qwen3 models load here, with equal logits. Parameter names differ only by the
prefix `model.` there.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lezero.core.errors import CorruptError, FileError
from lezero.core.paths import expand_home
from lezero.data.special import (
    CHOOSING,
    GENERATION,
    TOKENIZER_FILES,
    read_object,
    stop_tokens,
)
from lezero.models.config import TransformerConfig
from lezero.models.hf_config import from_hf
from lezero.models.transformer import Transformer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_config(folder: str | os.PathLike[str]) -> TransformerConfig:
    """The shape of the model in a Hugging Face folder, without its weights."""
    path = Path(expand_home(folder)) / "config.json"
    return from_hf(read_json(path), str(path))


def load_hf(folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> Transformer:
    """The model in a Hugging Face folder, on the CPU.

    `dtype` casts the weights; without it they keep the type they have in the file. Errors:
    `FileError` for a missing file, an unsupported model type, or tensors that are missing, twice
    there, unexpected or of another shape (each is named); `CorruptError` for a torn file. A folder
    with pickled weights alone is refused, since reading them can run code.
    """
    root = Path(expand_home(folder))
    with torch.device("meta"):
        model = Transformer(read_config(root))
    fill(model, stored_tensors(weight_files(root)), dtype, str(root))
    return model


def read_weights(folder: str | os.PathLike[str], model: Transformer, take: Take) -> None:
    """Hands every weight of `model` in a Hugging Face folder to `take` (see `hand_over`), without
    ever holding more than one: for a model that is split. Errors as `load_hf`."""
    root = Path(expand_home(folder))
    hand_over(model, stored_tensors(weight_files(root)), take, str(root))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 64 MiB; `FileError` says what is wrong with it."""
    if not path.is_file():
        hint = "" if path.parent.is_dir() else " (there is no such folder)"
        raise FileError(f"{path}: no such file{hint}")
    return read_object(path)


def weight_files(root: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder; `FileError` where it holds only pickles."""
    if (root / SINGLE).is_file():
        return [root / SINGLE]
    if (root / INDEX).is_file():
        files = sorted(set(_weight_map(root / INDEX).values()))
        for name in files:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise FileError(f"{root / INDEX}: {name!r} is not a safetensors file beside it")
            if not (root / name).is_file():
                raise FileError(f"{root / name}: named in {INDEX}, but no file is there")
        return [root / name for name in files]
    for path in (root / SINGLE, root / INDEX):
        if os.path.lexists(path):
            raise no_regular_file(path)
    pickled = [p.name for p in sorted(root.glob("*")) if p.suffix in (".bin", ".pt", ".pth")]
    if pickled:
        raise FileError(
            f"{root}: holds only pickled weights ({pickled[0]}), and reading pickle can run code. "
            "Convert it once where you trust it: in transformers, "
            "model.save_pretrained(folder, safe_serialization=True)"
        )
    raise FileError(f"{root}: has neither {SINGLE} nor {INDEX}")


def no_regular_file(path: Path) -> FileError:
    """For a path at which something is; opening a pipe would wait for ever."""
    what = "not a regular file (a folder, a pipe or a link to nothing)"
    return FileError(f"{path}: {what}; copy the file of the model again")


def _weight_map(index: Path) -> dict[str, str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise FileError(f"{index}: has no weight_map")
    return {name: str(file) for name, file in names.items()}


# One stored tensor: its name here, its shape, and what brings it into memory.
Stored = tuple[str, tuple[int, ...], Callable[[], Tensor]]
Take = Callable[[str, Tensor], Tensor]


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """What `safe_open` gives; `CorruptError` for a torn file, `FileError` for an unreadable one."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise CorruptError(f"{path}: not a whole safetensors file: {error}") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error})") from None


def tensor_names(files: Sequence[Path], prefix: str = "model.") -> dict[str, tuple[Path, str]]:
    """Of each tensor, by its name without `prefix`: the file that holds it, and its name there.

    `FileError` where a tensor is there twice, or in another file than the index says.
    """
    held: dict[str, tuple[Path, str]] = {}
    for path in files:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                other, twin = held.setdefault(name.removeprefix(prefix), (path, name))
                if (other, twin) != (path, name):
                    raise FileError(
                        f"{path}: holds '{name}', which {other.name} holds too, as '{twin}'; "
                        "delete one of them, or copy the files of the model again"
                    )
    index = files[0].with_name(INDEX)
    named = _weight_map(index) if files[0].name != SINGLE and index.is_file() else {}
    for name, shard in named.items():
        there, _ = held.get(name.removeprefix(prefix), (index.with_name(shard), name))
        if there.name != shard:
            raise FileError(
                f"{index}: looks for '{name}' in {shard}, but {there.name} holds it; copy the "
                "files of the model again"
            )
    return held


def read_tensor(file: Any, path: Path, name: str) -> Tensor:
    """`name` in a file that `safe_open` opened from `path`."""
    try:
        return file.get_tensor(name)
    except SafetensorError as error:
        raise FileError(f"{path}: '{name}' is of a type that is not read ({error})") from None


def stored_tensors(files: Sequence[Path], prefix: str = "model.") -> Iterator[Stored]:
    held = tensor_names(files, prefix)
    for path, names in itertools.groupby(held.items(), key=lambda item: item[1][0]):
        with opened(path) as file:
            for here, (_, name) in names:
                shape = tuple(file.get_slice(name).get_shape())
                yield here, shape, functools.partial(read_tensor, file, path, name)


def fill(
    model: Transformer,
    tensors: Iterable[Stored],
    dtype: torch.dtype | None,
    source: str,
    matrices: torch.dtype | None = None,
) -> None:
    """Gives a model built on meta its weights; errors as `hand_over`. matrices: in place of
    `dtype`, for those of two dims."""
    loaded: dict[str, Tensor] = {}

    def take(name: str, tensor: Tensor) -> Tensor:
        kept = matrices if matrices is not None and tensor.dim() == 2 else dtype
        loaded[name] = tensor.to(kept or tensor.dtype, copy=True)
        return loaded[name]

    hand_over(model, tensors, take, source)
    model.load_state_dict(loaded, strict=True, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.rope.ready(1, torch.device("cpu"))


def hand_over(model: Transformer, tensors: Iterable[Stored], take: Take, source: str) -> None:
    """Hands every weight of `model` to `take(name, tensor)`, one after the other; it returns the
    tensor, or the copy that it keeps.

    Raises `FileError` afterwards, naming whatever is missing, unexpected or misshapen. A stored
    head of a tied model is accepted when it equals the embedding.
    """
    wanted = dict(model.named_parameters())
    taken: set[str] = set()
    problems: list[str] = []
    ends: dict[str, Tensor] = {}
    for name, shape, read in tensors:
        if name.endswith("rotary_emb.inv_freq"):  # old files carry these; they are derived
            continue
        if name == _HEAD and model.config.tied:
            ends[name] = read()
        elif name not in wanted:
            problems.append(f"unexpected {name} {shape}")
        elif shape != tuple(wanted[name].shape):
            expected = tuple(wanted[name].shape)
            problems.append(f"{name} has shape {shape}, config.json says {expected}")
        else:
            tensor = read()
            if tensor.dtype not in FLOATS:
                problems.append(f"{name} is {tensor.dtype}, convert it to fp32, bf16, fp16 or fp64")
                continue
            kept = take(name, tensor)
            taken.add(name)
            if name == EMBEDDING and model.config.tied:
                ends[name] = kept
    known = taken | {p.split(" ")[0] for p in problems}
    problems += [f"missing {name}" for name in wanted if name not in known]
    if len(ends) == 2:
        head, embedding = ends[_HEAD], ends[EMBEDDING]
        if head.shape != embedding.shape or not torch.equal(head.to(embedding.dtype), embedding):
            problems.append("lm_head.weight differs from the embedding, but config.json ties them")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise FileError(f"{source}: the weights do not fit: {'; '.join(problems[:8])}{more}")


def tokenizer_files(folder: str | os.PathLike[str] | None) -> list[Path]:
    """The files of the tokenizer in `folder`, and what is said beside it of how tokens are chosen
    and which of them end a text; `FileError` where it holds no tokenizer."""
    if folder is None:
        return []
    root = Path(expand_home(folder))
    found = [root / name for name in TOKENIZER_FILES if (root / name).is_file()]
    if not found:
        raise FileError(f"{folder}: holds no tokenizer (none of {', '.join(TOKENIZER_FILES[:2])})")
    return [*found, *(path for path in [root / GENERATION] if path.is_file())]


def token_entries(folder: Path) -> dict[str, Any]:
    """Entries of config.json for a tokenizer's folder: ids of its begin and padding tokens, of all
    tokens that end a text by it or by the model beside it, and how tokens are chosen, where that
    model's config.json is what says so."""
    config = {} if (folder / GENERATION).is_file() else read_object(folder / "config.json")
    found = {name: config[name] for name in CHOOSING if name in config}
    named = _named_ids(folder)
    ends = stop_tokens(folder)
    if "eos_token_id" in named and named["eos_token_id"] not in ends:
        ends = (named["eos_token_id"], *ends)
    if ends:
        named["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    return {**found, **named}


def _named_ids(folder: Path) -> dict[str, Any]:
    """Ids of the tokenizer's begin, end and padding tokens, where it names any."""
    if not all((folder / name).is_file() for name in TOKENIZER_FILES[:2]):
        return {}
    tokenizer, settings = (read_json(folder / name) for name in TOKENIZER_FILES[:2])
    added = {
        item["content"]: item.get("id")
        for item in tokenizer.get("added_tokens") or []
        if isinstance(item, dict) and isinstance(item.get("content"), str)
    }
    ids: dict[str, Any] = {}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        number = added.get(text) if isinstance(text, str) else None
        if isinstance(number, int):
            ids[f"{kind}_token_id"] = number
    return ids
