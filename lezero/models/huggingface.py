"""Reads and writes the Hugging Face layout: `config.json` and safetensors, never pickle.

A folder written here opens in transformers (`AutoModelForCausalLM`), and the folders of Llama,
Mistral, Qwen2 and Qwen3 models load here, with equal logits. Parameter names differ only by the
prefix `model.` there.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lezero.comm.whole import whole
from lezero.core.errors import ConfigError, CorruptError, FileError
from lezero.core.paths import expand_home
from lezero.data.special import CHOOSING, GENERATION, read_object, stop_tokens
from lezero.models.config import TransformerConfig
from lezero.models.hf_config import from_hf, to_hf
from lezero.models.transformer import Transformer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)


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
    if (root / _SINGLE).is_file():
        return [root / _SINGLE]
    if (root / _INDEX).is_file():
        files = sorted(set(_weight_map(root / _INDEX).values()))
        for name in files:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise FileError(f"{root / _INDEX}: {name!r} is not a safetensors file beside it")
            if not (root / name).is_file():
                raise FileError(f"{root / name}: named in {_INDEX}, but no file is there")
        return [root / name for name in files]
    for path in (root / _SINGLE, root / _INDEX):
        if os.path.lexists(path):
            raise no_regular_file(path)
    pickled = [p.name for p in sorted(root.glob("*")) if p.suffix in (".bin", ".pt", ".pth")]
    if pickled:
        raise FileError(
            f"{root}: holds only pickled weights ({pickled[0]}), and reading pickle can run code. "
            "Convert it once where you trust it: in transformers, "
            "model.save_pretrained(folder, safe_serialization=True)"
        )
    raise FileError(f"{root}: has neither {_SINGLE} nor {_INDEX}")


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
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise CorruptError(f"{path}: not a whole safetensors file: {error}") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error})") from None


def tensor_names(files: Sequence[Path], prefix: str = "model.") -> dict[str, tuple[Path, str]]:
    """Of each tensor, by its name without `prefix`: the file that holds it, and its name there.

    `FileError` where a tensor is there twice, or not where the index says that it is.
    """
    held: dict[str, tuple[Path, str]] = {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                other, twin = held.setdefault(name.removeprefix(prefix), (path, name))
                if (other, twin) != (path, name):
                    raise FileError(
                        f"{path}: holds '{name}', which {other.name} holds too, as '{twin}'; "
                        "delete one of them, or copy the files of the model again"
                    )
    index = files[0].with_name(_INDEX)
    named = _weight_map(index) if files[0].name != _SINGLE and index.is_file() else {}
    for name, shard in named.items():
        if held.get(name.removeprefix(prefix), ("", ""))[0] != index.with_name(shard):
            raise FileError(
                f"{index}: looks for '{name}' in {shard}, which does not hold it; copy the files "
                "of the model again"
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
        with _opened(path) as file:
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
            if name == _EMBEDDING and model.config.tied:
                ends[name] = kept
    known = taken | {p.split(" ")[0] for p in problems}
    problems += [f"missing {name}" for name in wanted if name not in known]
    if len(ends) == 2:
        head, embedding = ends[_HEAD], ends[_EMBEDDING]
        if head.shape != embedding.shape or not torch.equal(head.to(embedding.dtype), embedding):
            problems.append("lm_head.weight differs from the embedding, but config.json ties them")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise FileError(f"{source}: the weights do not fit: {'; '.join(problems[:8])}{more}")


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
    first and then moved in, `config.json` last, so a failed save leaves what was there. Returns the
    folder.
    """
    state = {name_there(name): tensor for name, tensor in export(model).items()}
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}
    return write_hf(
        model.config,
        folder,
        lambda aside: _write_weights(state, aside, shard_bytes),
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
) -> Path:
    """The same for weights that `write_weights(folder aside)` writes, named by `name_there`.

    `also` is added to config.json.
    """
    root = Path(expand_home(folder)).absolute()
    if root.exists() and not root.is_dir():
        raise FileError(f"{root}: is a file; name a folder")
    data = {**to_hf(config, dtype), **(also or {})}
    copies = tokenizer_files(tokenizer_folder)
    if tokenizer_folder is not None:
        data |= token_entries(Path(expand_home(tokenizer_folder)))
    aside = root.parent / f".{root.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        for path in copies:
            shutil.copyfile(path, aside / path.name)
        write_weights(aside)
        _write_json(aside / "config.json", data)
        _move_in(aside, root)
    except OSError as error:
        raise FileError(f"{root}: could not be written ({error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return root


def name_there(name: str) -> str:
    """A parameter's name in a Hugging Face folder."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def export(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, whole, on the CPU. Meta tensors are a `ConfigError`."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(f"{name} is on the meta device: the model has no weights to save yet")
        state[name] = whole(parameter.detach(), name).to("cpu").contiguous()
    return state


def _write_weights(state: Mapping[str, Tensor], root: Path, shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [_SINGLE]
    if len(shards) > 1:
        total = f"{len(shards):05d}"
        names = [f"model-{i:05d}-of-{total}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total_size = sum(tensor.nbytes for tensor in state.values())
        _write_json(
            root / _INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        )
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, root / name, metadata={"format": "pt"})


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _move_in(aside: Path, root: Path) -> None:
    """Replaces the weights in `root`; what neither side of the layout knows is left alone."""
    fresh = {path.name for path in aside.iterdir()}
    for name in fresh:  # a disk that is full may say so here only
        with open(aside / name, "rb") as file:
            os.fsync(file.fileno())
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").unlink(missing_ok=True)  # a half-replaced folder must not open
    for path in root.glob("model*.safetensors*"):
        if path.name not in fresh:
            path.unlink()
    for name in [*sorted(fresh - {"config.json"}), "config.json"]:
        os.replace(aside / name, root / name)


def tokenizer_files(folder: str | os.PathLike[str] | None) -> list[Path]:
    """The files of the tokenizer in `folder`, and what is said beside it of how tokens are chosen
    and which of them end a text; `FileError` where it holds no tokenizer."""
    if folder is None:
        return []
    root = Path(expand_home(folder))
    found = [root / name for name in _TOKENIZER_FILES if (root / name).is_file()]
    if not found:
        raise FileError(f"{folder}: holds no tokenizer (none of {', '.join(_TOKENIZER_FILES[:2])})")
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
    if not all((folder / name).is_file() for name in _TOKENIZER_FILES[:2]):
        return {}
    tokenizer, settings = (read_json(folder / name) for name in _TOKENIZER_FILES[:2])
    added = {
        item.get("content"): item.get("id")
        for item in tokenizer.get("added_tokens") or []
        if isinstance(item, dict)
    }
    ids: dict[str, Any] = {}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        number = added.get(text)
        if isinstance(text, str) and isinstance(number, int):
            ids[f"{kind}_token_id"] = number
    return ids
