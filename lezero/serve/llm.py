"""`lz.LLM`: a language model that answers, from a laptop to a GPU."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lezero.core.errors import ConfigError, OrderError
from lezero.core.forked import need_threads_of
from lezero.core.interrupts import held_interrupts, let_in, letting_in
from lezero.memory.pool import give_back_free_blocks
from lezero.models import Transformer
from lezero.serve.answer import Answer, Completion, Stream
from lezero.serve.coder import Coder, Message, check_coder
from lezero.serve.draft import DraftModel
from lezero.serve.embed import embed
from lezero.serve.engine import Engine
from lezero.serve.forecast import (
    Forecast,
    beside_bytes,
    block_bytes,
    foresee,
    refuse_too_large_a_cache,
    resident_bytes,
    room_for_cache,
)
from lezero.serve.generation_config import GenerationDefaults, read_generation
from lezero.serve.kv import settle_kv
from lezero.serve.opening import open_draft, open_program
from lezero.serve.options import KV, Speculate, Weights, check_options
from lezero.serve.paying import WhilePaying
from lezero.serve.program import Program
from lezero.serve.prompts import (
    Prompt,
    check_ends,
    check_tokens,
    each_params,
    fitted,
    listed_tokens,
    several_prompts,
    sound_text,
)
from lezero.serve.request import Request
from lezero.serve.sampling import SamplingParams
from lezero.serve.speculate import PromptLookup, Speculator


class LLM:
    """A model with its tokenizer, its cache and its engine.

    model: a run, a Hugging Face folder (also a quantized one), a GGUF file, or a `Transformer`,
    which is used up. With a `Transformer`, and a folder of weights alone, prompts are tokens, or
    `coder` is given.
    coder: in the place of the model's own tokenizer, which is then not read.
    weights: "auto" keeps a quantized model as it is, where kernels read its codes, and runs others
    in bf16; "int8" and "int4" (HQQ in groups of 64 or 32) quantize now, without data; "fp32" is
    plain and slow, and exact: codes of a quantized model become the numbers that they stand for,
    and activations are not rounded. A GGUF file most of whose weights lie in Q4_0 or Q4_1 keeps
    them as they are for "int4" (what it has in Q8_0 too, and all else becomes int8) and for "auto",
    which also keeps a file in Q8_0. On a CPU "int4" and a file in Q4 round activations to int8, in
    blocks of 32, 64 or 128.
    context: tokens of a request at most, by default the model's. max_requests: at once.
    kv: what keys and values are kept in. "int8" takes a little more than half of the memory of
    "bf16", and rounds. "auto" is bf16, unless a context is given and `max_requests` requests of it
    do not fit in bf16: into `cache_bytes`, or else 30% of the memory this process may use. The
    forecast says which it is, and why.
    cache_bytes: for keys and values; by default a share of what is free. speculate: guesses of the
    next tokens, "lookup" from the text itself, or "draft" by the smaller model `draft`, which has
    the same tokens and gets the same weights; it guesses while that is faster.

    Streams and calls may overlap, and come from several threads: whoever takes a step takes it for
    all. Beside a `Server` that runs with it they are refused. priority: requests with a lower
    number run first, and give their blocks up last.

    Errors: `ConfigError` for values and requests that do not fit, `FileError` for a model that does
    not open, `OrderError` beside a server.
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
        sizes: dict[str, Any] = {"context": context, "max_requests": max_requests}
        sizes["cache_bytes"] = cache_bytes
        check_options(model, weights, kv, speculate, draft, **sizes)
        check_coder(coder)
        own = GenerationDefaults() if isinstance(model, Transformer) else read_generation(model)
        give_back_free_blocks()
        before = resident_bytes()
        self.program, read_coder = open_program(model, weights)
        own.tell()
        self._own = own
        drafts = None if draft is None else open_draft(draft, weights, self.program)
        self.coder = read_coder() if coder is None and read_coder is not None else coder
        give_back_free_blocks()  # of the weights as they were
        self._beside = beside_bytes(before, self.program, drafts)
        longest, most = self.program.longest, self.program.most_beside
        if max_requests > most:
            raise ConfigError(
                f"max_requests: got {max_requests}, allowed is 1 to {most}, a token of each in "
                "a step; more of them may wait"
            )
        if context is not None and context > longest:
            why = self.program.why_longest
            raise ConfigError(f"context: got {context}, allowed is 1 to the model's {longest}{why}")
        self.context = context or longest
        self._kv = settle_kv(kv, self.program, drafts, **sizes)
        blocks = self._blocks(cache_bytes, max_requests, drafts)
        guesser: Speculator | None = PromptLookup() if speculate == "lookup" else None
        if drafts is not None:
            guesser = DraftModel.of(drafts, self.program, blocks)
        self.engine = Engine(
            self.program,
            blocks=blocks,
            max_requests=max_requests,
            longest=self.context,
            speculator=None if guesser is None else WhilePaying(guesser),
        )
        self._numbers, self._process = itertools.count(), os.getpid()
        self._answers: dict[Request, Answer] = {}
        self._left: deque[Answer] = deque()
        self._lock, self._served = threading.Lock(), False

    def _blocks(self, cache_bytes: int | None, max_requests: int, draft: Program | None) -> int:
        """How many blocks of cache there is room for."""
        if cache_bytes is not None:
            refuse_too_large_a_cache(cache_bytes, self.program)
        each = block_bytes(self.program, draft)
        room = cache_bytes or room_for_cache(self.program, self.context, max_requests, draft)
        if room < each:
            raise ConfigError(
                f"cache_bytes: got {room}, allowed is at least one block of {each} bytes"
            )
        return room // each

    @property
    def _drafter(self) -> DraftModel | None:
        """The engine's alone, so that one that raised goes with its weights and its cache."""
        guesser = self.engine.speculator
        inner = guesser.inner if isinstance(guesser, WhilePaying) else guesser
        return inner if isinstance(inner, DraftModel) else None

    @property
    def _draft(self) -> Program | None:
        drafter = self._drafter
        return None if drafter is None else drafter.program

    @property
    def forecast(self) -> Forecast:
        """Memory, and tokens per second from measured ceilings."""
        guesser = self.engine.speculator
        return foresee(
            *(self.program, self.engine.pool.count, self.context, self._draft, self._kv),
            guesses=0 if guesser is None else guesser.most,
            beside=self._beside,
        )

    @property
    def touched(self) -> tuple[float, float]:
        """Parts of the cache, and of the draft's, that were ever written."""
        pool, drafter = self.engine.pool, self._drafter
        drafts = pool if drafter is None else drafter.pool
        return pool.touched_count / pool.count, drafts.touched_count / drafts.count

    @property
    def room(self) -> int:
        """Tokens of prompt and answer that one request can have: of context and cache the less."""
        pool = self.engine.pool
        return min(self.context, pool.count * pool.block_size + 1)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[Completion]:
        """Answers to all prompts, in order; they run together.

        A prompt is text or tokens. params: one for all, or one each.
        """
        given = several_prompts(prompts)
        every = each_params(params, len(given))
        names = [f"prompts[{i}]" for i in range(len(given))] if len(given) > 1 else ["prompt"]
        each = zip(given, every, names, strict=True)
        requests = [self.request(p, x, priority=priority, called=name) for p, x, name in each]
        answers: list[Answer] = []
        with held_interrupts():
            try:
                for request in requests:
                    answers.append(self.begin(request))
                while any(request.reason is None for request in requests):
                    self.advance()
                    let_in()
            finally:
                for answer in answers:
                    self.end(answer)
        return [self.completion(answer) for answer in answers]

    def completion(self, answer: Answer) -> Completion:
        """Of a request that has ended, perhaps in a step of another thread, whose text is taken
        before that step is over; so what `answer` says by itself may lack its end."""
        with self._alone():
            return answer.completion()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Stream:
        """Pieces of the answer to one prompt as they come. Closing the iterator cancels it."""
        (asked,) = each_params(params, 1)
        with held_interrupts():
            return Stream(
                self.begin(self.request(prompt, asked, priority=priority)),
                alone=self._alone,
                advance=self.advance,
                end=self.end,
            )

    def begin(self, request: Request) -> Answer:
        """Lets a request wait for its turn; its answer grows with each `advance`."""
        answer = Answer(request, self.coder)
        with self._alone():
            self._refuse_if_served()
            self.engine.add(request)
            self._answers[request] = answer
        return answer

    def advance(self) -> None:
        """One step of the engine, for all that has begun. Ctrl-C waits for its end."""
        need_threads_of(self._process, "this LLM")
        with self._alone():
            if self._served:  # all that had begun has ended, in steps of other threads
                return
            for request, tokens in self.engine.step().tokens.items():
                if request in self._answers:
                    self._answers[request].take(tokens, self.engine.scheduler)

    def end(self, answer: Answer) -> None:
        """Cancels what has not ended, and forgets it; while a thread runs a step, after that step.

        It never waits: the garbage collector may call it, for a stream or a generator that nobody
        holds any more, in the thread of that very step. So what the answer says is read with
        `completion`.
        """
        with held_interrupts():
            self._left.append(answer)
            self._end_left()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within it no other thread has the engine; what was to end meanwhile ends behind it.
        Ctrl-C is let in while it waits for others, and waits for its end then."""
        with held_interrupts():
            try:
                with letting_in(self._lock):
                    yield
            finally:
                self._end_left()

    @contextmanager
    def served(self) -> Iterator[None]:
        """Within it the engine is a server's, whose thread takes the steps. Raises `OrderError`
        where another one has it, or answers are under way."""
        taken = False
        try:
            with self._alone():  # which lets a Ctrl-C in at its end
                self._refuse_if_served()
                if self.engine.busy:
                    raise OrderError("this LLM has answers under way; end them before it is served")
                self._served = taken = True
            yield
        finally:
            if taken:
                self._served = False

    def _refuse_if_served(self) -> None:
        if self._served:
            raise OrderError("this LLM answers over HTTP; ask its server, or open another LLM")

    def _end_left(self) -> None:
        """Where another has the lock, it does so once it has given it back. Called where Ctrl-C
        waits."""
        while self._left and self._lock.acquire(blocking=False):
            try:
                while self._left:
                    self._end(self._left.popleft())
            finally:
                self._lock.release()

    def _end(self, answer: Answer) -> None:
        self.engine.cancel(answer.request)
        self._answers.pop(answer.request, None)

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """An embedding of each prompt: the mean of its final hidden states, with length 1.

        It is bitwise the same whatever else is embedded with it (on a CPU with the fused kernels).
        Answers that run wait meanwhile. Raises `ConfigError` for a prompt that is empty, or does
        not fit.
        """
        several = enumerate(several_prompts(prompts))
        given = [self.passage(prompt, f"prompts[{number}]") for number, prompt in several]
        with self._alone():
            self._refuse_if_served()
            return embed(self.engine, given)

    def passage(self, prompt: Prompt, name: str) -> list[int]:
        """The tokens of what is to be embedded, which errors call `name`.

        Raises `ConfigError` for a text that holds nothing, and tokens the model does not have.
        """
        tokens = self._known_tokens(prompt, name)
        if isinstance(prompt, str) and tokens == list(self._coder().start_tokens):
            raise ConfigError(f"{name}: got an empty text, which has no embedding; leave it out")
        return tokens

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Completion:
        """The assistant's answer to messages of {"role": …, "content": …}."""
        return self.generate([self.chat_tokens(messages)], params, priority=priority)[0]

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of `prompt_of`, with no start tokens but those that the template writes."""
        return self._coder().encode_chat(sound_text(self.prompt_of(messages), "messages"))

    def prompt_of(self, messages: Sequence[Message]) -> str:
        """The text that the model continues as the assistant, by its chat template."""
        return self._coder().prompt(messages)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        sample: int = 0,
        priority: int = 0,
        called: str = "prompt",
    ) -> Request:
        """A request for `begin`. Raises `ConfigError` for tokens the model does not have.

        Where `params` were not given `max_tokens`, they end where the context or the cache does. An
        empty text begins with the model's start tokens, or else its first or its end-of-text token.
        sample: tells answers apart that have the prompt and the seed in common. called: what errors
        call the prompt.
        """
        ends = self._own.end_tokens if self.coder is None else self.coder.end_tokens
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ConfigError(f"priority: got {priority!r}, allowed are whole numbers")
        check_ends(params, self.program.vocab, has_text=self.coder is not None)
        tokens = self._known_tokens(prompt, called)
        if isinstance(prompt, str) and not tokens:
            first = self._coder().first_token
            tokens = [] if first is None else self._known_tokens([first], called)
        params = fitted(self._own.added_to(params), self.room - len(tokens))
        if self.coder is not None:
            params = self.coder.with_named_ends(params)
        number = next(self._numbers)
        return Request(f"request-{number}", tokens, params, priority, ends, sample, called=called)

    def sample_of(self, request: Request, sample: int) -> Request:
        """The same question once more, for another answer."""
        asked = (request.prompt, request.params, request.priority, request.end_tokens)
        number = next(self._numbers)
        return Request(f"request-{number}", *asked, sample, called=request.called)

    def _known_tokens(self, prompt: Prompt, name: str) -> list[int]:
        """The tokens of a text, or those given, all of which the model has."""
        need_threads_of(self._process, "this LLM")
        text = isinstance(prompt, str)
        tokens = (
            self._coder().encode(sound_text(prompt, name)) if text else listed_tokens(prompt, name)
        )
        check_tokens(tokens, self.program.vocab, name)
        return tokens

    def _coder(self) -> Coder:
        if self.coder is None:
            raise ConfigError("this model has no tokenizer: give prompts as tokens, or a coder")
        return self.coder
