"""What sentence-transformers writes beside an encoder's weights, as files that go where it goes.

`modules.json` names the stages that a text goes through. How hidden states become one vector is in
a folder of its own, `1_Pooling/config.json` as a rule; how long a text may be and what is put
before it lie beside `modules.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError
from lezero.core.paths import expand_home, read_regular

STAGES = "modules.json"
LENGTHS = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
_LIMIT = 16 << 20
_WEIGHTS = (".json", ".safetensors")
"""Ends of names that are files of a model's folder, and so no stage's."""


def listed_stages(path: Path) -> list[tuple[str, object]]:
    """(type, folder) of each stage that `modules.json` lists, as it says them; `FileError` for what
    is no list of them."""
    try:
        listed: Any = json.loads(read_regular(path, _LIMIT))
    except FileError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: not readable JSON: {error}") from None
    if not isinstance(listed, list) or not listed:
        raise FileError(f"{path}: is no list of a model's stages; copy the model's file again")
    told = [item if isinstance(item, dict) else {} for item in listed]
    return [(str(item.get("type")), item.get("path")) for item in told]


def kind_of(stage: str) -> str:
    """The last name of a stage's type, which lies in other modules from version to version."""
    return stage.rpartition(".")[2]


def stays_within(place: object) -> bool:
    """Whether a stage's folder is right in the model's, or the model's own: it is a name that
    somebody else wrote."""
    return isinstance(place, str) and place != ".." and Path(place).name == place


def sentence_files(folder: str | os.PathLike[str] | None) -> list[tuple[Path, str]]:
    """The files in `folder` that say how texts become vectors, each with its place in there; none
    where it is no sentence encoder's. What cannot be read is left to who reads it."""
    if folder is None:
        return []
    root = Path(expand_home(folder))
    names = [name for name in (STAGES, LENGTHS, PROMPTS) if (root / name).is_file()]
    if STAGES in names:
        names += [f"{place}/config.json" for place in _poolings(root)]
    return [(root / name, name) for name in names]


def _poolings(root: Path) -> list[str]:
    """Folders of the stages that pool, each once."""
    try:
        stages = listed_stages(root / STAGES)
    except FileError:
        return []
    places = (place for kind, place in stages if kind_of(kind) == "Pooling" and stays_within(place))
    return [
        place
        for place in dict.fromkeys(map(str, places))
        if place and place[0] != "." and not place.endswith(_WEIGHTS)
        if (root / place / "config.json").is_file()
    ]
