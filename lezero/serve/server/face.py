"""What a server has behind its address: a model, the thread that runs it, and its questions.

`language.py` has that of an `LLM`, `batched.py` that of other models.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from lezero.serve.server.exchange import JSON, Exchange

Value = TypeVar("Value")
Handler = Callable[[Exchange], Awaitable[None]]


class Face(ABC):
    """A model as the server sees it. name: for clients. answered: HTTP answers by route and status.

    The host enters `alone` and calls `rehearse` within it, then in its event loop `start`, and in
    the end `cancel_all` and `stop`; the application calls the others for clients.
    """

    name: str
    answered: Counter[tuple[str, int]]
    kinds: tuple[str, ...] = (JSON,)
    """Content types of questions."""

    @property
    @abstractmethod
    def broken(self) -> str | None:
        """Why nothing can be answered any more."""

    @abstractmethod
    def stalled_s(self) -> float:
        """How long the step takes that runs now."""

    @abstractmethod
    def lane_s(self) -> float:
        """How long a text is being read or written, off the event loop."""

    def alone(self) -> AbstractContextManager[None]:
        """Within it nobody else runs the model."""
        return nullcontext()

    @abstractmethod
    def rehearse(self) -> None:
        """Runs the model before the first client is let in: that may build kernels."""

    @abstractmethod
    def start(self, alone: bool) -> None:
        """alone: the process does nothing else."""

    @abstractmethod
    async def stop(self) -> None: ...

    @abstractmethod
    def cancel_all(self) -> None:
        """Ends what is being answered, with an error."""

    @abstractmethod
    def questions(self) -> Mapping[str, Handler]:
        """Path → what answers a POST to it."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """What `/v1/models` says beside the name."""

    @abstractmethod
    def metrics_text(self) -> str:
        """The page for Prometheus."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """For the page at `/`."""


def settle(future: asyncio.Future[Value], outcome: Value | Exception) -> None:
    """Gives a future its value or error, where nobody has done so before."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
