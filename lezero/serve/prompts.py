"""What callers of an `LLM` may give: prompts, and parameters for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lezero.core.errors import ConfigError
from lezero.serve.sampling import SamplingParams

Prompt = str | Sequence[int]


def sound_text(text: Any, name: str = "prompt") -> str:
    """A text; `ConfigError` for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: holds half of a surrogate pair, which is no text") from None
    return str(text)


def listed_tokens(prompt: Any, name: str) -> list[int]:
    """A prompt of tokens as a list; `ConfigError` for what is none."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise ConfigError(
            f"{name}: got {type(prompt).__name__}, allowed are text or tokens{as_list(prompt)}"
        )
    return list(prompt)


def check_tokens(tokens: Sequence[Any], vocab: int, name: str) -> None:
    """`ConfigError` for what is no token of a model that has `vocab` of them."""
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(
                f"{name}: holds {token!r}, allowed are text or whole numbers{as_list(token)}"
            )
        if not 0 <= token < vocab:
            held = f"token {token}" if abs(token) < 10**30 else "a token of more than 30 digits"
            raise ConfigError(f"{name}: holds {held}, allowed is 0 to {vocab - 1}")


def check_ends(params: SamplingParams, vocab: int, has_text: bool) -> None:
    """`ConfigError` for what could never end an answer: strings where it has no text, and tokens
    that a model with `vocab` of them lacks."""
    if params.stop and not has_text:
        raise ConfigError(
            "stop: this model has no tokenizer, so that its answers have no text; give "
            "stop_token_ids, or a coder"
        )
    check_tokens(params.stop_token_ids, vocab, "stop_token_ids")


def fitted(params: SamplingParams, left: int, usual: int | None = None) -> SamplingParams:
    """Where nobody said how many new tokens at most: `usual` ones (by default as many as params
    have), or the `left` ones that there is room for; at least one, so that a prompt which leaves no
    room is refused for its own length."""
    if "max_tokens" in params.model_fields_set:
        return params
    most = min(params.max_tokens if usual is None else usual, left)
    return params.model_copy(update={"max_tokens": max(1, most)})


def as_list(value: Any) -> str:
    """What an error adds where somebody gave numbers of torch or numpy."""
    return "; make a list of it with .tolist()" if is_array(value) else ""


def is_array(value: Any) -> bool:
    """Whether these are numbers of torch or numpy; an array of texts is none."""
    kind = getattr(getattr(value, "dtype", None), "kind", "i")
    return hasattr(value, "dtype") and hasattr(value, "tolist") and kind in "biuf"


def several_prompts(prompts: Any) -> list[Prompt]:
    """The prompts of a call; where the first is a number they are the tokens of one."""
    if isinstance(prompts, str):
        return [prompts]
    unordered = isinstance(prompts, Mapping | set | frozenset)
    no_list = not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray)
    if no_list or unordered or is_array(prompts):
        raise ConfigError(
            f"prompts: got {type(prompts).__name__}, allowed are text, tokens, or a list of either"
            f"{as_list(prompts)}"
        )
    found = list(prompts)
    if not found:
        raise ConfigError("prompts: got none, give at least one")
    return [found] if isinstance(found[0], int) else found


def each_params(params: Any, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts, of one for all or one each."""
    one = params is None or isinstance(params, SamplingParams | Mapping)
    if not one and (not isinstance(params, Sequence) or isinstance(params, str)):
        raise ConfigError(
            f"params: got {type(params).__name__}, allowed are SamplingParams, one or one each"
        )
    found = [params or SamplingParams()] * count if one else list(params)
    if len(found) != count:
        raise ConfigError(f"params: got {len(found)} for {count} prompts; give one, or one each")
    return [x if isinstance(x, SamplingParams) else SamplingParams.parse(x) for x in found]
