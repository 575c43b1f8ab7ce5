"""What a Hugging Face folder says of how its model's tokens are chosen.

transformers heeds `generation_config.json`, or where there is none the same entries of
`config.json`, even where a caller asks for the likeliest tokens. Of these the end tokens and the
repetition penalty are heeded here too; others that would change such an answer are named, once.
What asks for chance (temperature, top_p and the like) and for lengths is left to the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError
from lezero.core.log import logger
from lezero.core.paths import expand_home
from lezero.data.special import GENERATION, read_object, stop_tokens
from lezero.serve.sampling import LEAST, MOST, SamplingParams

# Entries that change which token is the likeliest, or which tokens are taken, by when they act.
_ABOVE_ZERO = (
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"),
    "penalty_alpha",
)
_OTHER_THAN_ONE = ("encoder_repetition_penalty", "guidance_scale", "num_beams")
_NOT_EMPTY = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("stop_strings", "force_words_ids", "constraints", "dola_layers", "watermarking_config"),
    "token_healing",
)
_LOG = logger("serve")


@dataclass(frozen=True)
class GenerationDefaults:
    """repetition_penalty: of requests that name none. end_tokens: those that end an answer.
    unheeded: entries that act in transformers and not here. source: the file."""

    repetition_penalty: float = 1.0
    end_tokens: frozenset[int] = frozenset()
    unheeded: tuple[str, ...] = ()
    source: str = ""

    def added_to(self, params: SamplingParams) -> SamplingParams:
        """With the repetition penalty, where nobody asks for another one."""
        if params.repetition_penalty is not None or self.repetition_penalty == 1:
            return params
        return params.model_copy(update={"repetition_penalty": self.repetition_penalty})

    def tell(self) -> None:
        """Warns of entries that are not heeded."""
        if self.unheeded:
            _LOG.warning(
                "%s: %s would change answers of transformers, and %s not heeded here",
                *(self.source, ", ".join(self.unheeded)),
                "is" if len(self.unheeded) == 1 else "are",
            )


def read_generation(place: str | os.PathLike[str]) -> GenerationDefaults:
    """What the Hugging Face folder at `place` says; nothing for a run or a GGUF file.

    Raises `FileError` for a file that cannot be read, or a repetition penalty that is none.
    """
    folder = Path(expand_home(place))
    if not (folder / "config.json").is_file():
        return GenerationDefaults()
    path = folder / GENERATION
    path = path if path.is_file() else folder / "config.json"
    data = read_object(path)
    acting = [name for name in _ABOVE_ZERO if _acts(data.get(name), lambda x: x > 0)]
    acting += [name for name in _OTHER_THAN_ONE if _acts(data.get(name), lambda x: x != 1)]
    acting += [name for name in _NOT_EMPTY if _is_there(data.get(name))]
    ends = frozenset(stop_tokens(folder))
    return GenerationDefaults(_penalty(data, path), ends, tuple(acting), str(path))


def _penalty(data: dict[str, Any], path: Path) -> float:
    found = data.get("repetition_penalty")
    if found is None:
        return 1.0
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if not number or not LEAST <= found <= MOST:
        raise FileError(
            f"{path}: repetition_penalty: got {repr(found)[:80]}, allowed is {LEAST:g} to "
            f"{MOST:g}; 1 changes nothing"
        )
    return float(found)


def _acts(value: Any, acts: Callable[[float], bool]) -> bool:
    """Whether a number acts; what is no number would be heeded, or refused, by transformers."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return acts(value) if number else value is not None


def _is_there(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], {})
