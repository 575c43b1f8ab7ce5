"""What a client asked for in OpenAI's JSON, as prompts and parameters of the engine.

A field that would change the answer in a way that is not built is refused by name; one that does
not touch the answer is passed over. A field with null counts as left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lezero.core.errors import ConfigError
from lezero.serve.prompts import Prompt
from lezero.serve.sampling import SamplingParams
from lezero.serve.server.problem import Problem, refused

Form = Literal["chat", "text"]
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "stop", "stop_token_ids", "ignore_eos"),
)
_BOTH = {*_SAMPLING, "model", "n", "seed", "logprobs", "max_tokens", "stream", "stream_options"}
_BOTH |= {"priority"}
_KNOWN: Mapping[Form, set[str]] = {
    "chat": _BOTH | {"messages", "top_logprobs", "max_completion_tokens"},
    "text": _BOTH | {"prompt"},
}
_NO_MATTER = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls", "prediction"),
}
# Fields that are not built, with the values that ask for nothing.
_NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "best_of": (),
    "echo": (False,),
    "suffix": ("",),
}
# Keys of a message that the model should have read, or that say how it goes on. What else lies
# beside role and content are a client's own notes, as `id`, `opts` or `provider_specific_fields`.
_MEANT = {
    *("tool_calls", "tool_call_id", "function_call", "tools", "documents"),
    *("audio", "image", "images", "image_url", "video", "videos", "file", "files", "attachments"),
    *("reasoning", "reasoning_content", "reasoning_details", "thinking", "thinking_blocks"),
    *("prefix", "prefill", "partial"),
}
_LIKELIEST_ALONE = 1e-9
"""A top_p that no likeliest token falls short of."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MOST_PROMPTS = 256
_LAST = 1000


@dataclass(frozen=True)
class Asked:
    """One HTTP request for answers: n to each prompt, or n to the messages.

    priority: 0, or more to let others go first; nobody can push ahead of those that do not ask.
    """

    form: Form
    prompts: list[Prompt]
    messages: list[dict[str, Any]]
    params: SamplingParams
    n: int
    stream: bool
    stream_usage: bool
    priority: int

    @property
    def count(self) -> int:
        """Answers that are asked for."""
        return max(1, len(self.prompts)) * self.n


def read_asked(form: Form, data: Mapping[str, Any], model: str) -> Asked:
    """Checks every field; raises `Problem` that names the one that is wrong."""
    given = {key: value for key, value in data.items() if value is not None}
    _check_names(form, given)
    check_model(given, model)
    stream = truth(given, "stream")
    return Asked(
        form,
        _prompts(given.get("prompt")) if form == "text" else [],
        _messages(given.get("messages")) if form == "chat" else [],
        _params(form, given),
        _whole(given, "n", 1, 128) or 1,
        stream,
        _stream_usage(given, stream),
        _whole(given, "priority", 0, _LAST) or 0,
    )


def check_model(data: Mapping[str, Any], own: str) -> None:
    """Raises `Problem` (404) where the client means another model than the server's own."""
    asked = data.get("model")
    if asked not in (None, own):
        problem = f"model: got {shown(asked)}, this server has {own!r}"
        raise Problem(404, problem, param="model", code="model_not_found")


def _check_names(form: Form, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _KNOWN[form] or name in _NO_MATTER:
            continue
        if name not in _NOT_BUILT:
            raise wrong(name, "this server does not know it", code="unknown_parameter")
        allowed = _NOT_BUILT[name]
        if name == "best_of":  # all that are made are given, so never more than that
            allowed = (given.get("n") or 1,)
        if not any(type(value) is type(x) and value == x for x in allowed):
            raise wrong(name, "not supported by this server", code="unsupported_parameter")


def _params(form: Form, given: Mapping[str, Any]) -> SamplingParams:
    values: dict[str, Any] = {name: given[name] for name in _SAMPLING if name in given}
    if not isinstance(values.get("top_p"), bool) and values.get("top_p") == 0:
        values["top_p"] = _LIKELIEST_ALONE  # OpenAI's range begins with 0
    for name in ("max_tokens", "max_completion_tokens"):  # the last one counts
        if (most := _whole(given, name, 1)) is not None:
            values["max_tokens"] = most
    seed = _whole(given, "seed", -(1 << 63), (1 << 63) - 1)
    if seed is not None:
        values["seed"] = seed % (1 << 63)
    if form == "text":
        values["logprobs"] = _whole(given, "logprobs", 0, 20)
    else:
        wanted, top = truth(given, "logprobs"), _whole(given, "top_logprobs", 0, 20)
        if top and not wanted:
            raise wrong("top_logprobs", "needs logprobs: true")
        values["logprobs"] = (top or 0) if wanted else None
    try:
        return SamplingParams(**values)
    except ConfigError as error:
        raise refused(error) from None


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(map(is_whole, value)):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", "required: text, a list of texts, or tokens")
    if len(value) > _MOST_PROMPTS:
        raise wrong("prompt", f"got {len(value)} prompts, allowed are {_MOST_PROMPTS}")
    for number, item in enumerate(value):
        tokens = isinstance(item, list) and all(map(is_whole, item))
        if not isinstance(item, str) and not tokens:
            raise wrong("prompt", f"item {number} is neither text nor a list of tokens")
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", "required: a list of at least one message")
    found = []
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise wrong(where, "is no object with role and content")
        for key in sorted(_MEANT & message.keys()):
            if not _is_empty(message[key]):
                raise wrong(f"{where}.{key}", "not supported by this server")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            allowed = ", ".join(_ROLES)
            raise wrong(f"{where}.role", f"got {shown(role)}, allowed are {allowed}")
        content = _content(message.get("content"), f"{where}.content")
        name = message.get("name")
        if not isinstance(name, str | None):
            raise wrong(f"{where}.name", f"got {shown(name)}, allowed is text")
        named = {} if name is None else {"name": name}
        found.append({"role": _ROLES[role], "content": content, **named})
    return found


def _is_empty(value: Any) -> bool:
    """Whether it asks for nothing: an object that holds only such does not either."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return value is None or value is False or value in ("", [])


def _content(value: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(where, "required: text, or a list of parts of type text")
    parts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            problem = f"got type {shown(kind)}, this server takes text alone"
            raise wrong(f"{where}[{number}]", problem)
        if not isinstance(part.get("text"), str):
            raise wrong(f"{where}[{number}].text", "required: text")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _stream_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options")
    if options is None:
        return False
    if not stream or not isinstance(options, dict):
        raise wrong("stream_options", "an object, and only with stream: true")
    for name in options:
        if name not in ("include_usage", "include_obfuscation", "continuous_usage_stats"):
            raise wrong(f"stream_options.{name}", "this server does not know it")
        truth(options, name)
    return truth(options, "include_usage")


def _whole(
    given: Mapping[str, Any], name: str, least: int, most: int = (1 << 31) - 1
) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not is_whole(value) or not least <= value <= most:
        raise wrong(name, f"got {shown(value)}, allowed are whole numbers from {least} to {most}")
    return int(value)


def truth(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool | None):
        raise wrong(name, f"got {shown(value)}, allowed are true and false")
    return bool(value)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def wrong(name: str, reason: str, code: str | None = None) -> Problem:
    label = name if len(name) <= 80 else f"{name[:80]}..."
    return Problem(400, f"{label}: {reason}", param=label, code=code)


def shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    text = repr(value) if not isinstance(value, list | dict) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}..."
