"""`lz.LLM`: a language model that answers, from a laptop to a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lezero.core.errors import ConfigError
from lezero.models import Transformer
from lezero.serve.coder import Coder, Message
from lezero.serve.draft import DraftModel
from lezero.serve.embed import embed
from lezero.serve.engine import Engine
from lezero.serve.forecast import Forecast, block_bytes, foresee, room_for_cache
from lezero.serve.kv import KV, check_kv, settle_kv
from lezero.serve.opening import Speculate, Weights, check_speculation, open_draft, open_program
from lezero.serve.paying import WhilePaying
from lezero.serve.request import Reason, Request
from lezero.serve.sampling import SamplingParams, TokenLogprob
from lezero.serve.scheduler import Scheduler
from lezero.serve.speculate import PromptLookup, Speculator
from lezero.serve.text import Detokenizer, StopStrings

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """An answer. reason: "stop", "length", "cancelled" or "error" (then `error` says why).

    cached_tokens: of the prompt, found in the cache. first_token_s: from arrival to it.
    """

    text: str
    tokens: list[int]
    reason: Reason | None
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    first_token_s: float | None = None


@dataclass(frozen=True)
class Piece:
    """Text that is certain now, and the tokens that came with it; the last one has the reason."""

    text: str
    tokens: list[int]
    reason: Reason | None = None


class LLM:
    """A model with its tokenizer, its cache and its engine.

    model: a run, a Hugging Face folder (also a quantized one), a GGUF file, or a `Transformer`,
    which is used up (then prompts are tokens, or `coder` is given).
    weights: "auto" keeps a quantized model as it is and runs others in bf16; "int8" and "int4" (HQQ
    in groups of 64 or 32) quantize now, without data; "fp32" is plain and slow, and exact.
    context: tokens of a request at most, by default the model's. max_requests: at once.
    kv: what keys and values are kept in. "int8" takes a little more than half of the memory of
    "bf16", and rounds. "auto" is bf16, unless a context is given and `max_requests` requests of it
    do not fit in bf16: into `cache_bytes`, or else 30% of the memory this process may use. The
    forecast says which it is, and why.
    cache_bytes: for keys and values; by default a share of what is free. speculate: guesses of the
    next tokens, "lookup" from the text itself, or "draft" by the smaller model `draft`, which has
    the same tokens and gets the same weights; it guesses while that is faster.

    Errors: `ConfigError` for values and requests that do not fit, `FileError` for a model that does
    not open.
    """

    def __init__(
        self,
        model: str | Path | Transformer,
        *,
        weights: Weights = "auto",
        kv: KV = "auto",
        context: int | None = None,
        max_requests: int = 32,
        cache_bytes: int | None = None,
        speculate: Speculate = "off",
        draft: str | Path | Transformer | None = None,
        coder: Coder | None = None,
    ) -> None:
        check_speculation(speculate, draft)
        check_kv(kv)
        self.program, own = open_program(model, weights)
        self._draft = None if draft is None else open_draft(draft, weights, self.program)
        self.coder = coder or own
        longest = self.program.longest
        if context is not None and not 1 <= context <= longest:
            raise ConfigError(f"context: got {context}, allowed is 1 to the model's {longest}")
        self.context = context or longest
        self._kv = settle_kv(
            *(kv, self.program, self._draft),
            context=context,
            max_requests=max_requests,
            cache_bytes=cache_bytes,
        )
        each = block_bytes(self.program, self._draft)
        room = cache_bytes or room_for_cache(self.program, self.context, max_requests, self._draft)
        blocks = room // each
        if blocks < 1:
            raise ConfigError(
                f"cache_bytes: got {room}, allowed is at least one block of {each} bytes"
            )
        speculator: Speculator | None = PromptLookup() if speculate == "lookup" else None
        if self._draft is not None:
            speculator = WhilePaying(DraftModel.of(self._draft, self.program, blocks))
        self.engine = Engine(
            self.program,
            blocks=blocks,
            max_requests=max_requests,
            longest=self.context,
            speculator=speculator,
        )
        self._numbers = itertools.count()

    @property
    def forecast(self) -> Forecast:
        """Memory, and tokens per second from measured ceilings."""
        return foresee(self.program, self.engine.pool.count, self.context, self._draft, self._kv)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers to all prompts, in order; they run together.

        A prompt is text or tokens. params: one for all, or one each.
        """
        given = _several(prompts)
        every = _each(params, len(given))
        requests = [
            self.request(p, x, sample=i) for i, (p, x) in enumerate(zip(given, every, strict=True))
        ]
        answers = [Answer(request, self.coder) for request in requests]
        by_request = dict(zip(requests, answers, strict=True))
        for request in requests:
            self.engine.add(request)
        try:
            while any(request.reason is None for request in requests):
                for request, tokens in self.engine.step().tokens.items():
                    if request in by_request:
                        by_request[request].take(tokens, self.engine.scheduler)
        finally:
            for request in requests:
                self.engine.cancel(request)
        return [answer.completion() for answer in answers]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Pieces of the answer to one prompt as they come. Closing the iterator cancels it."""
        request = self.request(prompt, params or SamplingParams())
        self.engine.add(request)
        return self._pieces(request)

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """An embedding of each prompt: the mean of its final hidden states, with length 1.

        It is bitwise the same whatever else is embedded with it (on a CPU with the fused kernels).
        Answers that run wait meanwhile. Raises `ConfigError` for a prompt that does not fit.
        """
        given = [self.request(prompt, SamplingParams()).prompt for prompt in _several(prompts)]
        return embed(self.engine, given)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The assistant's answer to messages of {"role": …, "content": …}."""
        return self.generate([self.prompt_of(messages)], params)[0]

    def prompt_of(self, messages: Sequence[Message]) -> str:
        """The text that the model continues as the assistant, by its chat template."""
        return self._coder().prompt(messages)

    def request(self, prompt: Prompt, params: SamplingParams, sample: int = 0) -> Request:
        """A request for `engine.add`. Raises `ConfigError` for tokens the model does not have."""
        ends: frozenset[int] = frozenset() if self.coder is None else self.coder.end_tokens
        tokens = self._coder().encode(prompt) if isinstance(prompt, str) else list(prompt)
        if isinstance(prompt, str) and not tokens:
            tokens = sorted(ends)[:1]
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ConfigError(f"prompt: holds {token!r}, allowed are text or whole numbers")
            if not 0 <= token < self.program.vocab:
                raise ConfigError(
                    f"prompt: holds token {token}, allowed is 0 to {self.program.vocab - 1}"
                )
        number = next(self._numbers)
        return Request(f"request-{number}", tokens, params, end_tokens=ends, sample=sample)

    def _coder(self) -> Coder:
        if self.coder is None:
            raise ConfigError("this model has no tokenizer: give prompts as tokens, or a coder")
        return self.coder

    def _pieces(self, request: Request) -> Iterator[Piece]:
        answer = Answer(request, self.coder)
        try:
            while request.reason is None:
                tokens: Sequence[int] = self.engine.step().tokens.get(request, ())
                shown = len(answer.text)
                tokens = answer.take(tokens, self.engine.scheduler)
                if request.reason is None and tokens:
                    yield Piece(answer.text[shown:], list(tokens))
            found = answer.completion()
            yield Piece(found.text[shown:], list(tokens), found.reason)
        finally:
            self.engine.cancel(request)


class Answer:
    """The text of a request, as its tokens come."""

    def __init__(self, request: Request, coder: Coder | None) -> None:
        self.request, self.text = request, ""
        self._ends = request.end_tokens | set(request.params.stop_token_ids)
        self._text = None if coder is None else Detokenizer(coder.decode, request.prompt)
        self._stops = StopStrings(request.params.stop)

    def take(self, tokens: Sequence[int], scheduler: Scheduler) -> Sequence[int]:
        """Takes new tokens and gives those that belong to the answer: up to a stop string, which
        ends the request."""
        for number, token in enumerate(tokens, 1):
            last = token == self.request.tokens[-1] and self.request.reason == "stop"
            if self._text is not None and not (last and token in self._ends):
                self.text += self._stops.add(self._text.add(token))
            if self._stops.found is not None:
                scheduler.stop(self.request, beyond=len(tokens) - number)
                return tokens[:number]
        return tokens

    def completion(self) -> Completion:
        """The whole answer, once the request has ended."""
        request = self.request
        if self._text is not None and self._stops.found is None:
            self.text += self._stops.add(self._text.finish())
            self.text += self._stops.finish()
        first = request.first_token_s
        return Completion(
            *(self.text, request.answer, request.reason, len(request.prompt), request.cached),
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            error=request.error,
            first_token_s=None if first is None else first - (request.arrived_s or 0.0),
        )


def _several(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    found = list(prompts)
    if found and all(isinstance(item, int) for item in found):
        return [found]
    if not found:
        raise ConfigError("prompts: got none, give at least one")
    return found


def _each(params: Any, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, Mapping):
        return [SamplingParams.parse(params)] * count
    found = list(params)
    if len(found) != count:
        raise ConfigError(f"params: got {len(found)} for {count} prompts; give one, or one each")
    return found
