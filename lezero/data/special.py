"""Special tokens of a Hugging Face folder: what they are called, and which of them end a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError
from lezero.core.paths import expand_home

EOS = "<|endoftext|>"
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
END_ID = "eos_token_id"
"""In tokenizer_config.json: the end-of-text token where it is plain vocabulary. Named as
`eos_token` it would be encoded as a special token from there on."""
ROWS = "lezero_vocab_size"
"""In tokenizer_config.json: how many tokens the model has, where settings declare more and no
config.json beside it says so."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
)
"""What a tokenizer of transformers is made of, and what goes along with it."""
GENERATION = "generation_config.json"
MODEL = ("config.json", GENERATION)
"""What is read of the model beside a tokenizer: its size, and how its texts end."""
CHOOSING = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "renormalize_logits", "remove_invalid_values"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "stop_strings"),
    *("exponential_decay_length_penalty", "guidance_scale", "penalty_alpha", "token_healing"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"),
    *("force_words_ids", "constraints", "dola_layers", "watermarking_config"),
    *("min_length", "min_new_tokens", "max_length", "max_new_tokens"),
)
"""Entries that say which tokens are chosen, and how many."""
_LIMIT = 64 << 20


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that a folder's settings name, as transformers reads them: "bos_token" to
    its text, and so on, those of a model's own too.

    As there special_tokens_map.json counts before tokenizer_config.json, unless that lists all
    added tokens, and then not at all.
    """
    named, settings = both_settings(folder)
    return special_texts(settings if "added_tokens_decoder" in settings else settings | named)


def special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that settings name, by what they are for."""
    extra = settings.get("extra_special_tokens")
    every = {**settings, **(extra if isinstance(extra, dict) else {})}
    texts = {name: _text_of(value) for name, value in every.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def all_settings(folder: Path) -> dict[str, Any]:
    """Both files as one; tokenizer_config.json, which people edit, counts first."""
    named, settings = both_settings(folder)
    return named | settings


def both_settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What special_tokens_map.json says, and tokenizer_config.json."""
    named, settings = (read_object(folder / name) for name in SETTINGS)
    return named, settings


def stop_tokens(folder: str | Path) -> tuple[int, ...]:
    """Token ids that end a generation, from `generation_config.json` or else `config.json`; none
    where neither names any. Raises `FileError` for what is no token's number."""
    for name in (GENERATION, "config.json"):
        path = Path(expand_home(folder)) / name
        found = read_object(path).get("eos_token_id")
        if found is None:
            continue
        every = found if isinstance(found, list) else [found]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in every):
            raise FileError(
                f"{path}: eos_token_id: got {repr(found)[:80]}, allowed are a token's number or a "
                "list of them; copy the file of the model again"
            )
        return tuple(item for item in every if item >= 0)  # -1 is none in old files
    return ()


def begin_token(folder: Path) -> int | None:
    """The token with which a model's own files begin a text: that of `generation_config.json` or
    else `config.json`; None where neither names one."""
    named = (read_object(folder / name).get("bos_token_id") for name in (GENERATION, "config.json"))
    return next((x for x in named if type(x) is int and x >= 0), None)


def rows_of_model(folder: Path, settings: Mapping[str, Any]) -> int | None:
    """How many tokens the model has that a tokenizer belongs to: what config.json beside it says,
    which is written anew where the model grows, or else what it was saved with; None where nothing
    does."""
    config = read_object(folder / "config.json")
    inside = config.get("text_config")
    text = inside.get("vocab_size") if isinstance(inside, dict) else None
    # That of the text first: of the whole it may be an old one.
    places = (text, config.get("vocab_size"), settings.get(ROWS))
    return next((x for x in places if isinstance(x, int) and x > 0), None)


def named_end(inner: Any, settings: Mapping[str, Any]) -> int | None:
    """The end-of-text token that a tokenizer's own files name. inner: of `tokenizers`."""
    return _id_of(inner, _text_of(settings.get("eos_token")))


def _id_of(inner: Any, text: str | None) -> int | None:
    found = None if text is None else inner.token_to_id(text)
    return None if found is None else int(found)


def end_of_model(inner: Any, folder: Path, settings: Mapping[str, Any]) -> int:
    """The token that ends a text where the tokenizer's files name none: the one with which it was
    saved, the first of the model's beside it, "<|endoftext|>", or else the one that separates
    texts (BERT's). Raises `FileError` where there is none."""
    saved = settings.get(END_ID)
    own = (saved,) if isinstance(saved, int) and saved >= 0 else ()
    for token in (*own, *stop_tokens(folder)):
        if token < 1 << 32 and inner.id_to_token(token) is not None:
            return token
    for text in (EOS, _text_of(settings.get("sep_token"))):
        if (found := _id_of(inner, text)) is not None:
            return found
    raise FileError(
        f"tokenizer {folder}: names no end-of-text token; "
        'write "eos_token" into its tokenizer_config.json'
    )


def read_object(path: Path, limit: int = _LIMIT) -> dict[str, Any]:
    """A JSON object; empty where there is no file. Raises `FileError` for anything else, and for
    more than `limit` bytes."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > limit:
            raise FileError(f"{path}: larger than {limit >> 20} MiB; copy the model's file again")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path}: not readable JSON: {error}") from None
    if not isinstance(data, dict):
        raise FileError(f"{path}: is no JSON object; copy the file of the model again")
    return data


def _text_of(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
