"""A sentence encoder from a Hugging Face folder: the model, and how its texts become vectors.

What is beside the model is what sentence-transformers writes: `modules.json` names the stages,
`1_Pooling/config.json` says how the hidden states of a text become one vector.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from lezero.compress.quantize import is_quantized_folder, load_quantized
from lezero.core.errors import FileError
from lezero.core.paths import expand_home
from lezero.files import read_generation
from lezero.models import Bert, bert_config, load_bert
from lezero.models.huggingface import read_json
from lezero.models.sentence_files import (
    LENGTHS,
    PROMPTS,
    STAGES,
    kind_of,
    listed_stages,
    stays_within,
)

Pooling = Literal["mean", "cls", "max"]
_POOLINGS = get_args(Pooling)
_OLD_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
_BUILT = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class EncoderFolder:
    """How the texts of an encoder become vectors. longest: tokens of a text at most. prompt: what
    is put before a text. lower: whether texts are put in lower case before the tokenizer."""

    path: Path
    pooling: Pooling
    normalize: bool
    longest: int
    is_quantized: bool
    prompt: str = ""
    lower: bool = False


def is_encoder(place: str | Path) -> bool:
    """Whether a folder holds an encoder that `open_encoder` opens, as far as `config.json` says."""
    path = Path(expand_home(place)) / "config.json"
    return path.is_file() and read_json(path).get("model_type") == "bert"


def describe_encoder(place: str | Path) -> EncoderFolder:
    """Reads what the folder says; `FileError` for a stage or pooling that is not built.

    A folder without `modules.json` is pooled by the mean and normalised, as sentence-transformers
    does with the first, and its vectors' users nearly always with the second.
    """
    root = Path(expand_home(place))
    config = bert_config(read_json(root / "config.json"), str(root / "config.json"))
    pooling, normalize, prompt = _POOLINGS[0], True, _prompt(root)
    settings = _read_if_there(root / LENGTHS)
    longest = min(config.context, _longest(root, settings))
    if os.path.lexists(root / STAGES):
        stages = _stages(root / STAGES)
        normalize = "Normalize" in stages
        if "Pooling" in stages:
            pooling = _pooling(root / stages["Pooling"] / "config.json", prompt)
    lower = settings.get("do_lower_case") is True
    return EncoderFolder(
        root, pooling, normalize, longest, is_quantized_folder(root), prompt, lower
    )


def open_encoder(folder: EncoderFolder, dtype: torch.dtype | None = None) -> Bert:
    """The model of a folder; dtype: of weights that are not quantized."""
    if not folder.is_quantized:
        return load_bert(folder.path, dtype)
    if not (folder.path / "manifest.json").is_file():
        raise FileError(f"{folder.path}: quantized encoders are those of lz.save_quantized")
    known = read_generation(folder.path, select=lambda name: False)
    has_pooler = any(name.startswith("model/pooler.") for name in known.forms)
    path = folder.path / "config.json"
    with torch.device("meta"):
        model = Bert(bert_config(read_json(path), str(path)), has_pooler)
    return load_quantized(folder.path, model)


def _stages(path: Path) -> dict[str, str]:
    """Stage → folder, of `modules.json`, which is a list."""
    stages: dict[str, str] = {}
    for kind, place in listed_stages(path):
        if kind_of(kind) not in _BUILT or not stays_within(place):
            raise FileError(f"{path}: stage {kind!r} is not built; built are {', '.join(_BUILT)}")
        stages[kind_of(kind)] = str(place)
    return stages


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _longest(root: Path, settings: dict[str, Any]) -> int:
    """Tokens of a text at most. sentence-transformers keeps them beside the tokenizer since 5.4,
    and before that in settings of its own, which go before the tokenizer's."""
    for data, key in (
        (settings, "max_seq_length"),
        (_read_if_there(root / "tokenizer_config.json"), "model_max_length"),
    ):
        given = data.get(key)
        if isinstance(given, int) and given > 2:
            return given
    return sys.maxsize


def _prompt(root: Path) -> str:
    """The prompt that sentence-transformers puts before a text where its user names none."""
    path = root / PROMPTS
    settings = _read_if_there(path)
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    if name is None:
        return ""
    found = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(found, str):
        raise FileError(f"{path}: default_prompt_name {name!r} is none of its prompts")
    return found


def _pooling(path: Path, prompt: str) -> Pooling:
    """`pooling_mode` names one or a list; before 5.4 each had a key of its own."""
    data = read_json(path)
    given = data.get("pooling_mode")
    if given is None:
        keys = [key for key in data if key.startswith("pooling_mode_") and data[key] is True]
        given = [_OLD_KEYS.get(key, key) for key in keys]
    named = given if isinstance(given, list) else [given]
    chosen = [name for name in _POOLINGS if named == [name]]
    if not chosen:
        raise FileError(
            f"{path}: pools by {named or 'nothing'}; built is one of {', '.join(_POOLINGS)}"
        )
    if prompt and data.get("include_prompt") is False:
        raise FileError(f"{path}: include_prompt false is not built, and texts have a prompt")
    return chosen[0]
