"""Prompts to requests, beside the event loop; and the text of single tokens.

Tokenizers bear several threads at once: two that encode (`lanes.py`), and the engine's.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

from lezero.core.errors import ConfigError
from lezero.memory.pool import give_back_free_blocks
from lezero.serve.coder import Coder, joined
from lezero.serve.embed import check_prompts, longest_prompt
from lezero.serve.llm import LLM
from lezero.serve.prompts import Prompt, fitted
from lezero.serve.request import Request
from lezero.serve.server.asked import Asked
from lezero.serve.server.lanes import Lanes, Value
from lezero.serve.server.problem import Problem, refused

_VAST = 1 << 17
"""Letters or tokens."""
_TEXT_TOKENS = 16
"""New tokens of a text completion at most where the client does not say, as with OpenAI."""
_MESSAGE = 16
"""Letters that a message counts for beyond its own: the template's words around it."""


class Encoder:
    """Makes the engine's requests of what clients ask for."""

    def __init__(self, llm: LLM, lanes: Lanes) -> None:
        self._llm, self._lanes = llm, lanes

    async def requests(self, asked: Asked, owner: str) -> list[Request]:
        """n requests for each prompt. Raises `Problem` (400) for what the model does not take.

        owner: the requests share blocks with those of the same owner alone, since what was found in
        the cache, which the answer and its time tell, shows what others have asked.
        """
        letters = sum(map(len, asked.prompts))
        for message in asked.messages:
            letters += _MESSAGE + len(joined(message["content"])) + len(message.get("name", ""))
        try:
            return await self._run(letters, lambda: self._make(asked, owner))
        except ConfigError as error:
            raise refused(error) from None

    async def prompts(self, texts: Sequence[Prompt], truncate: bool) -> list[list[int]]:
        """Tokens of what is to be embedded, cut off where asked. Raises `ConfigError`."""
        return await self._run(sum(map(len, texts)), lambda: self._prompts(texts, truncate))

    async def _run(self, letters: int, work: Callable[[], Value]) -> Value:
        """What `work` gives, beside the event loop. Finding the tokens of a megabyte takes 140 MiB,
        which would stay with the process."""

        def run() -> Value:
            try:
                return work()
            finally:
                if letters >= _VAST:
                    give_back_free_blocks()

        return await self._lanes.of(letters).run(run)

    def _prompts(self, texts: Sequence[Prompt], truncate: bool) -> list[list[int]]:
        engine = self._llm.engine
        most = longest_prompt(engine) if truncate else None
        named = ((text, f"input[{number}]") for number, text in enumerate(texts))
        found = [self._llm.passage(text, name)[:most] for text, name in named]
        check_prompts(engine, found, "input")
        return found

    def _make(self, asked: Asked, owner: str) -> list[Request]:
        prompts: list[Prompt] = list(asked.prompts)
        if asked.form == "chat":
            if self._llm.coder is None:
                raise Problem(400, "messages: this model has no tokenizer", param="messages")
            prompts = [self._llm.chat_tokens(asked.messages)]
        made = []
        for number, prompt in enumerate(prompts):
            called = "messages" if asked.form == "chat" else "prompt"
            called += f"[{number}]" if len(prompts) > 1 else ""
            first = self._llm.request(prompt, asked.params, called=called)
            tokens = list(first.prompt)
            room = self._llm.room
            usual = room if asked.form == "chat" else _TEXT_TOKENS
            params = asked.params.model_copy(update={"seed": _seed(asked)})
            params = fitted(params, room - len(tokens), usual)
            one = self._llm.request(tokens, params, 0, asked.priority, called)
            self._llm.engine.scheduler.refuse_what_never_fits(one)  # before there are n of it
            for request in (one, *(self._llm.sample_of(one, i) for i in range(1, asked.n))):
                request.salt = owner
                made.append(request)
        return made


def _seed(asked: Asked) -> int:
    """What was asked for, or else one that nobody can know and that no restart brings again."""
    return secrets.randbits(63) if asked.params.seed is None else asked.params.seed


class TokenText:
    """What single tokens read, as log-probabilities name them: behind a letter, since tokenizers as
    Llama 2's drop the space with which a text begins, and the names together are the text. Special
    tokens, which leave nothing in it, have the name that the vocabulary gives them; those that only
    the model has, for which a tokenizer may raise, have their number.

    lost: characters that a stop string took from the end of the token.
    """

    def __init__(self, coder: Coder | None) -> None:
        self._coder = coder
        self._letter = [] if coder is None else coder.encode("a")[-1:]
        self._before = 0 if coder is None else len(coder.decode(self._letter))
        self._known: dict[int, str] = {} if coder is None else dict(coder.special_tokens)

    def of(self, token: int, lost: int = 0) -> str:
        name = self._known.get(token)
        if name is None:
            name = self._known[token] = self._found(token)
        return name[: max(0, len(name) - lost)]

    def _found(self, token: int) -> str:
        with suppress(Exception):
            if self._coder is not None:
                return self._coder.decode([*self._letter, token])[self._before :]
        return f"token {token}"

    def bytes_of(self, token: int, lost: int = 0) -> bytes | None:
        """UTF-8 of the name; of half a character its own bytes, where they are known."""
        name = self.of(token)
        kept = self.of(token, lost)
        if "\ufffd" not in kept or self._coder is None:
            return kept.encode()
        data = self._coder.bytes_of(token)
        return data and data[: len(data) - len(name[len(kept) :].encode())]
