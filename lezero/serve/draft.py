"""Guesses of the next tokens by a smaller model, which follows the answers with a cache of its own.

A guess is drawn as the model itself would draw it, with the same parameters and the same chance for
that place, so a draft that agrees with the model is always right.

[Note: following] The draft has blocks of its own. Tokens that were refused are forgotten by feeding
over them. A request that is preempted, cancelled or done gives its blocks back; they keep their
names, so that it is soon caught up with if it comes again. Where the draft's cache has no room for
a request, or it is too far behind for one pass, the request goes on without guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch.nn.functional as F

from lezero.serve.blocks import BlockPool
from lezero.serve.program import Fed, Program
from lezero.serve.request import Request
from lezero.serve.sampler import Row, draw
from lezero.serve.sampling import SamplingParams
from lezero.serve.speculate import Speculator

_NEVER = -1e30
_MOST = 8
"""Guesses of a request at most."""
_CHECKING = 0.05
"""What a guess costs where it is checked, as a part of a step that checks none."""
_BELIEVED, _FADES = 0.8, 0.9
"""The share of right guesses that is assumed at first, and how fast older guesses count less."""


class DraftModel(Speculator):
    """Lets `program`, a smaller model with the same tokens, guess.

    tokens: that its cache holds. room: tokens of a step of the model that checks. cost: of a pass
    of the draft, as a part of a step of that model. vocab: of that model; what one of the two lacks
    is not guessed, and nothing behind it.
    """

    most = _MOST

    def __init__(
        self, program: Program, *, tokens: int, room: int, cost: float, vocab: int
    ) -> None:
        self.program, self._vocab = program, vocab
        self.pool = BlockPool.of(program, max(1, tokens // program.block_size))
        self._room, self._cost = room, cost
        self._followers: dict[Request, _Follower] = {}
        program.reserve(self.pool.count)

    @classmethod
    def of(cls, program: Program, target: Program, blocks: int) -> DraftModel:
        """The draft for a program with so many blocks of cache."""
        cost = program.read_bytes / target.read_bytes
        tokens = blocks * target.block_size
        room, vocab = target.most_beside, target.vocab
        return cls(program, tokens=tokens, room=room, cost=cost, vocab=vocab)

    def guess(self, requests: Sequence[Request]) -> None:
        alive = set(requests)
        self._leave([request for request in self._followers if request not in alive])
        followers = [self._follow(request) for request in requests]
        most = min(_MOST, self._room // max(1, len(requests)) - 1)
        going = self._catch_up([one for one in followers if self._aim(one, most) > 0])
        while going := [one for one in going if len(one.guesses) < one.aim]:
            fed = [Fed(x.guesses[-1:], x.own.computed, x.own.blocks, [0]) for x in going]
            going = self._draw(fed, going)
        for one in followers:
            one.request.drafts = tuple(one.guesses)

    def close(self) -> None:
        self._leave(list(self._followers))

    def _leave(self, requests: Sequence[Request]) -> None:
        for gone in requests:
            self.pool.release(self._followers.pop(gone).own.blocks)

    def _follow(self, request: Request) -> _Follower:
        """What is known of the request, up to its last token."""
        follower = self._followers.get(request)
        if follower is None:
            own = Request(request.id, request.prompt, salt=request.salt)
            own.tokens = list(request.tokens)
            own.blocks = self.pool.match(own)
            self.pool.share(own.blocks)
            own.computed = len(own.blocks) * self.pool.block_size
            own.published = len(own.blocks)
            params = request.params.model_copy(update={"logprobs": None})
            lost = any(token >= self.program.vocab for token in own.tokens)
            follower = self._followers[request] = _Follower(request, own, params, lost=lost)
        follower.learn(self.program.vocab)
        self.pool.publish(follower.own)
        return follower

    def _aim(self, one: _Follower, most: int) -> int:
        """How many tokens are to be guessed, so far as they can be used."""
        left = self.program.longest - len(one.own.tokens)
        best = best_count(one.right / one.tried, self._cost)
        one.aim = 0 if one.lost else max(0, min(best, most, one.request.wanted - 1, left))
        return one.aim

    def _catch_up(self, followers: Sequence[_Follower]) -> list[_Follower]:
        """Feeds what the draft has not seen, in one pass; those that are up to date then."""
        left, fed, ready = self.program.most_tokens, [], []
        for one in followers:
            own = one.own
            count = min(own.pending, left)
            missing = self.pool.blocks_for(len(own.tokens) + one.aim) - len(own.blocks)
            if count == 0 or missing > self.pool.free_count:
                continue
            own.blocks += self.pool.allocate(max(0, missing))
            tokens = own.tokens[own.computed : own.computed + count]
            rows = [count - 1] if count == own.pending else []
            prompt = max(0, len(own.prompt) - own.computed)
            fed.append(Fed(tokens, own.computed, own.blocks, rows, prompt))
            left -= count
            if rows:
                ready.append(one)
            else:
                own.computed += count
        for one in ready:
            one.own.computed = len(one.own.tokens) - 1
        return self._draw(fed, ready) if fed else []

    def _draw(self, fed: Sequence[Fed], followers: Sequence[_Follower]) -> list[_Follower]:
        """Runs the draft and takes a guess for each follower; those that may guess on."""
        logits_RV = self.program.run(fed)
        missing = self._vocab - logits_RV.shape[1]  # of what the draft lacks; it may have more
        logits_RV = F.pad(logits_RV, (0, missing), value=_NEVER) if missing else logits_RV
        drawn = draw(logits_RV, [one.row for one in followers])
        return [one for one, found in zip(followers, drawn, strict=True) if one.take(found.token)]


@dataclass(eq=False)
class _Follower:
    """A request, and the draft's own account of it. own.computed: guesses that were fed too."""

    request: Request
    own: Request
    params: SamplingParams
    aim: int = 0
    guesses: list[int] = field(default_factory=list)
    tried: float = 1.0
    right: float = _BELIEVED
    lost: bool = False
    """Its text has a token that the draft lacks."""

    @property
    def row(self) -> Row:
        """Of the token after the guesses."""
        return replace(Row.of(self.request, self.guesses), params=self.params)

    def take(self, token: int) -> bool:
        """Takes a guess whose token before is in the cache now; False: there is no use in more."""
        self.own.computed += 1
        if token < 0:
            return False
        self.guesses.append(token)
        return token not in self.request.end_tokens

    def learn(self, vocab: int) -> None:
        """Compares the guesses with the tokens that came, and forgets those that were wrong.
        vocab: of the draft."""
        own, known = self.own, len(self.own.tokens)
        new = self.request.tokens[known:]
        self.lost |= any(token >= vocab for token in new)
        right = 0
        for guess, token in zip(self.guesses, new, strict=False):
            if guess != token:
                break
            right += 1
        tested = min(len(self.guesses), len(new), right + 1)
        self.right = _FADES * self.right + right
        self.tried = _FADES * self.tried + tested
        own.tokens += new
        own.computed = min(own.computed, known + right, len(own.tokens) - 1)
        self.guesses = []


def best_count(share: float, cost: float) -> int:
    """Guesses a step that bring the most tokens for the time, at least 1.

    Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding",
    theorem 3.8: of k guesses, each right with chance `share`, a step keeps
    (1 - share^(k+1)) / (1 - share) tokens, and takes 1 + k * cost in time.
    """
    share = min(share, 0.99)

    def gain(k: int) -> float:
        return float((1 - share ** (k + 1)) / ((1 - share) * (1 + k * (cost + _CHECKING))))

    return max(range(1, _MOST + 1), key=gain)
