"""Which tokens the next pass through the model feeds; plain Python, no tensors.

[Note: who goes first] A step has room for `max_tokens` tokens, beside answers for `most_beside`,
since these wait for it. Running requests that decode come
first, one token each, and drafts where room and blocks are left. Then prompts that are partly in,
then waiting requests, both in turn (priority, arrival), cut into chunks where they do not fit. The
first in turn that cannot start holds back all behind it, so that a long prompt is never overtaken
by short ones for ever. When a running request needs a block and none is free, the running request
that is last in turn is preempted: it gives its blocks back and waits in its turn, that is before
those of its priority that have not run, to be computed again; most of its blocks are usually still
found by name. The first in turn is never preempted for another, and `add` refuses what could not
run alone, so each request ends.

[Note: equal prompts at once] A request that would compute a block that another computes in the same
step waits for that step, and shares the block then.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lezero.core.errors import ConfigError
from lezero.serve.blocks import BlockPool
from lezero.serve.request import Reason, Request, State, TooLongError
from lezero.serve.sampling import Drawn


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """Tokens `start` to `start + count` of a request, the last of which may be drafts."""

    request: Request
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    samples: bool = True
    """Whether tokens are drawn: from the row of the last known token, and of each draft."""

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def known(self) -> int:
        """The end of the tokens that are no guesses."""
        return self.end - len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        """The tokens that are fed."""
        return [*self.request.tokens[self.start : self.known], *self.drafts]


class Step:
    """The chunks of one pass through the model, decodes first; `left` tokens had room as well."""

    def __init__(self, room: int) -> None:
        self.left = room
        self.preempts = False
        self._chunks: dict[Request, Chunk] = {}

    @property
    def chunks(self) -> list[Chunk]:
        return list(self._chunks.values())

    def feed(self, chunk: Chunk) -> None:
        self._chunks[chunk.request] = chunk
        self.left -= chunk.count

    def withdraw(self, request: Request) -> None:
        """Takes the request's chunk out again, if there is one."""
        chunk = self._chunks.pop(request, None)
        if chunk is not None:
            self.left += chunk.count


class Scheduler:
    """Takes requests in, plans one step at a time, and takes the step's tokens back.

    pool: the blocks of the cache. max_tokens: tokens of a step; most_beside: of one in which
    answers run, by default as many. max_requests: running at once; not above these, so that each
    gets a token a step. longest: tokens of a request at most, prompt and answer; why_longest: what
    an error adds about it. One thread calls it: `schedule`, run the model, `update`, again; `add`,
    `finish`, `cancel` and `make_room` may come between two steps, and the first three between any
    of these. In place of `schedule` the next step may be what `ahead` gave before the `update`.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_tokens: int,
        max_requests: int,
        longest: int,
        clock: Callable[[], float] = time.monotonic,
        why_longest: str = "",
        most_beside: int | None = None,
    ) -> None:
        most_beside = max_tokens if most_beside is None else most_beside
        if max_requests < 1:
            raise ConfigError(f"max_requests: got {max_requests}, allowed is 1 or more")
        if (least := min(max_tokens, most_beside)) < max_requests:
            raise ConfigError(
                f"max_tokens: got {least} tokens a step, allowed is {max_requests} or more, one "
                "for each of max_requests"
            )
        self.pool, self.longest, self._why_longest = pool, longest, why_longest
        self.max_tokens, self.max_requests = max_tokens, max_requests
        self._most_beside = most_beside
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._clock = clock
        self.arrivals = 0
        """Requests that came so far: the next one's number."""

    def add(self, request: Request) -> None:
        """Lets a new request wait for its turn. What could never run is a `ConfigError`."""
        self.refuse_what_never_fits(request)
        request.number, request.arrived_s = self.arrivals, self._clock()
        self.arrivals += 1
        insort(self.waiting, request, key=_turn)

    def cancel(self, request: Request) -> None:
        """Ends a request at any moment; its blocks are free at once."""
        self.finish(request, "cancelled")

    def finish(
        self, request: Request, reason: Reason, error: str | None = None, *, sound: bool = False
    ) -> None:
        """Ends a request that has not ended. After an error none of its blocks is shared any more,
        those that it found neither, since a number that is none may have come from them; unless the
        error is known to have nothing to do with them (sound)."""
        if request.state is State.FINISHED:
            return
        (self.waiting if request.state is State.WAITING else self.running).remove(request)
        if reason == "error" and not sound:
            self.pool.forget(request.blocks)
        self._give_back(request, 0)
        request.state, request.reason, request.error = State.FINISHED, reason, error
        request.drafts, request.ended_s = (), self._clock()

    def stop(self, request: Request, beyond: int) -> None:
        """Ends a request whose answer holds a stop string. Its last `beyond` tokens, which came in
        the same step behind it (guesses bring several), are no part of the answer."""
        self.finish(request, "stop")
        if request.reason in ("length", "error"):  # of what came in its step behind it
            request.reason, request.error = "stop", None
        if beyond:
            del request.tokens[-beyond:]
            del request.logprobs[len(request.answer) :]

    def make_room(self, blocks: int, *, once: bool = False) -> None:
        """Preempts requests, the last in turn first, until so many blocks are free; none where it
        would be in vain, since others than requests hold too many.

        once: spares those that made room since they last drew a token. Whoever asks again and again
        for all of it must wait for them in between, so that each of them ends.
        """
        giving = [request for request in self.running if not (once and request.made_room)]
        held = {block for request in giving for block in request.blocks}
        for request in self.running:
            if once and request.made_room:
                held.difference_update(request.blocks)
        if self.pool.free_count + len(held) < blocks:
            return
        while self.pool.free_count < blocks:
            request = giving.pop()
            request.made_room = once
            self._preempt(Step(0), request)

    def schedule(self) -> Step:
        """The next step; it has no chunks when there is nothing to do."""
        decodes = [request for request in self.running if request.pending == 1]
        step = Step(self._most_beside if decodes else self.max_tokens)
        prompts = [request for request in self.running if request.pending > 1]
        others = len(self.running)
        apart = step.left * 3 // 4 if prompts or self._may_admit() else 0  # guesses are no need
        for request in decodes:
            others -= 1  # drafts leave at least a token and a block for each of them
            left = step.left - others
            self._extend(step, request, max(min(left, 1), left - apart), spared=others)
        for request in prompts:
            self._extend(step, request, step.left)
        if not step.preempts:
            self._admit(step)
        return step

    def ahead(self, step: Step) -> Step | None:
        """The step after `step`, one that draws a token for each chunk, before these are known:
        one more token of each request that does not end with `step` for its length. None where
        there is none, or where it takes more than that: another request's turn, or blocks.

        A request that ends with `step` nevertheless is in vain in it, and passed over by `update`.
        """
        if self._may_admit():
            return None
        chunks = [chunk for chunk in step.chunks if chunk.request.state is State.RUNNING]
        if len(chunks) < len(self.running):
            return None
        going = [chunk for chunk in chunks if chunk.request.wanted > 1]
        size = self.pool.block_size
        full = [x.request for x in going if len(x.request.blocks) * size == x.end]
        if not going or len(full) > self.pool.free_count:
            return None
        for request in full:
            request.blocks += self.pool.allocate(1)
        following = Step(self.max_tokens)
        for chunk in going:
            following.feed(Chunk(chunk.request, chunk.end, 1))
        return following

    def room_to_follow(self, step: Step, most: int) -> int:
        """How many tokens in a row, up to `most`, each chunk of a step of one token each can take,
        into blocks that its request holds then. 1 where others have their turn before that."""
        if self._may_admit() or len(step.chunks) < len(self.running):
            return 1
        count = min([most, *(chunk.request.wanted for chunk in step.chunks)])
        missing = [
            max(0, self.pool.blocks_for(chunk.start + count) - len(chunk.request.blocks))
            for chunk in step.chunks
        ]
        if sum(missing) > self.pool.free_count:
            return 1
        for chunk, blocks in zip(step.chunks, missing, strict=True):
            chunk.request.blocks += self.pool.allocate(blocks)
        return count

    def update(self, step: Step, results: Sequence[Sequence[Drawn]]) -> list[Request]:
        """Takes the tokens of a step that was run; returns the requests that ended with it.

        results: for each chunk the accepted drafts and the token after them; nothing for a chunk
        that does not sample. An error counts where those before it do not end the request. Requests
        that ended while the step ran are passed over.
        """
        ended: list[Request] = []
        for chunk, draws in zip(step.chunks, results, strict=True):
            request = chunk.request
            if request.state is not State.RUNNING:
                continue
            failed = next((n for n, drawn in enumerate(draws) if drawn.error is not None), None)
            if failed != 0 and (reason := self._keep(chunk, draws[:failed])):
                self.finish(request, reason)
            elif failed is not None:
                self.finish(request, "error", draws[failed].error, sound=draws[failed].sound)
            if request.reason is not None:
                ended.append(request)
        return ended

    def check(self) -> None:
        """Asserts that requests and blocks agree; for tests and soak runs."""
        self.pool.check([request.blocks for request in self.running])
        assert not any(request.blocks for request in self.waiting)
        assert all(request.state is State.WAITING for request in self.waiting)
        assert all(request.state is State.RUNNING for request in self.running)
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_turn), "a queue is out of turn"

    def _extend(self, step: Step, request: Request, room: int, spared: int = 0) -> None:
        """Feeds the request's next tokens, at most `room`, into blocks that it holds or gets; its
        drafts leave `spared` blocks."""
        if request.state is not State.RUNNING or room < 1:
            return
        while (space := self._space(request)) < 1:
            last = self.running[-1]
            self._preempt(step, last)
            if last is request:
                return
        known = min(request.pending, room, space)
        samples = known == request.pending
        self._hold(request, known)
        drafts: tuple[int, ...] = ()
        if samples and request.drafts:
            # The token after the last draft is drawn too, so more than this are never used.
            most = min(room - known, self._space(request, spared) - known, request.wanted - 1)
            drafts = tuple(request.drafts[:most])
            self._hold(request, known + len(drafts))
        step.feed(Chunk(request, request.computed, known + len(drafts), drafts, samples))

    def _hold(self, request: Request, count: int) -> None:
        """Gives the request the blocks of its next `count` tokens."""
        missing = self.pool.blocks_for(request.computed + count) - len(request.blocks)
        if missing > 0:
            request.blocks += self.pool.allocate(missing)

    def _space(self, request: Request, spared: int = 0) -> int:
        """Tokens that fit into the rest of its blocks and into all that are free but `spared`."""
        blocks = len(request.blocks) + max(0, self.pool.free_count - spared)
        return blocks * self.pool.block_size - request.computed

    def _may_admit(self) -> bool:
        """False where no waiting request can start, whatever room the step has."""
        free = len(self.running) < self.max_requests and self.pool.free_count > 0
        return free and bool(self.waiting)

    def _admit(self, step: Step) -> None:
        """Starts waiting requests in turn, until one cannot."""
        if not self._may_admit():
            return
        coming = {name for chunk in step.chunks for name in self._completes(chunk)}
        while self.waiting and step.left > 0 and len(self.running) < self.max_requests:
            request = self.waiting[0]
            found = self.pool.match(request)
            beyond = request.names[len(found) : self.pool.shareable(request)]
            if beyond and beyond[0] in coming:
                return
            self.pool.share(found)
            if self.pool.free_count == 0:
                self.pool.release(found)
                return
            self._start(self.waiting.pop(0), found)
            self._extend(step, request, step.left)
            coming.update(self._completes(step.chunks[-1]))

    def _start(self, request: Request, found: list[int]) -> None:
        request.state, request.blocks = State.RUNNING, found
        request.computed = len(found) * self.pool.block_size
        request.published = len(found)
        if request.preemptions == 0:
            request.cached = request.computed
        insort(self.running, request, key=_turn)

    def _completes(self, chunk: Chunk) -> list[bytes]:
        """Names of the blocks that are full after the chunk."""
        size = self.pool.block_size
        return self.pool.names(chunk.request)[chunk.start // size : chunk.known // size]

    def _preempt(self, step: Step, request: Request) -> None:
        step.withdraw(request)
        step.preempts = True
        self.running.remove(request)
        self._give_back(request, 0)
        request.state, request.drafts = State.WAITING, ()
        request.computed = request.published = 0
        request.preemptions += 1
        insort(self.waiting, request, key=_turn)

    def _keep(self, chunk: Chunk, draws: Sequence[Drawn]) -> Reason | None:
        """Takes a chunk's tokens; says why the request ends, if it does."""
        request = chunk.request
        accepted = len(draws) - 1 if chunk.samples else 0
        assert bool(draws) == chunk.samples, "tokens are drawn where a chunk ends its request"
        assert accepted == 0 or [d.token for d in draws[:-1]] == list(chunk.drafts[:accepted])
        assert chunk.start == request.computed, "a step is taken back twice, or out of order"
        reason = None
        for drawn in draws:
            if reason is None:
                reason = request.take(drawn)
        if draws:
            request.made_room = False
            if request.first_token_s is None:
                request.first_token_s = self._clock()
        # Refused drafts, and accepted ones after the end, are in the cache but not in the text.
        request.computed = min(chunk.known + accepted, len(request.tokens))
        request.drafts = ()
        self.pool.publish(request)
        if chunk.drafts:
            self._give_back(request, self.pool.blocks_for(request.computed))
        return reason

    def _give_back(self, request: Request, kept: int) -> None:
        """Releases the request's blocks except the first `kept`."""
        self.pool.release(request.blocks[kept:])
        del request.blocks[kept:]

    def refuse_what_never_fits(self, request: Request) -> None:
        """From any thread: raises `ConfigError` for what could never run."""
        prompt, new = len(request.prompt), request.params.max_tokens
        if prompt == 0:
            raise ConfigError(f"{request.called}: got 0 tokens, allowed is 1 or more")
        if prompt >= self.longest:
            raise TooLongError(
                f"{request.called}: got {prompt} tokens, allowed is 1 to {self.longest - 1}: the "
                f"context has {self.longest} together with the answer{self._why_longest}; shorten "
                "the prompt"
            )
        if prompt + new > self.longest:
            raise TooLongError(
                f"max_tokens: got {new} for a prompt of {prompt} tokens, together {prompt + new}, "
                f"allowed is {self.longest} together{self._why_longest}; ask for at most "
                f"{self.longest - prompt}, or shorten the prompt"
            )
        room = self.pool.count * self.pool.block_size + 1  # the last token is never fed
        holds = f"the cache holds {room - 1} ({self.pool.count} blocks of {self.pool.block_size})"
        if prompt >= room:
            raise TooLongError(
                f"{request.called}: got {prompt} tokens, allowed is 1 to {room - 1}: {holds}; "
                "shorten the prompt, or give the cache more memory"
            )
        if prompt + new > room:
            raise TooLongError(
                f"max_tokens: got {new} for a prompt of {prompt} tokens, together {prompt + new}, "
                f"but {holds}; ask for at most {room - prompt}, or shorten the prompt, or give the "
                "cache more memory"
            )


def _turn(request: Request) -> tuple[int, int]:
    return request.turn
