"""Who holds which block of the paged key-value cache; plain bookkeeping, no tensors.

[Note: a block's name] A full block is named by a chain hash: its parent's name and its own tokens,
so that equal names mean equal tokens from the first one on, and thus equal keys and values (where
a program takes prompts apart, how many of the tokens are of the prompt is part of the name). A
request that starts with the same tokens shares the block in place of computing it again. Blocks
that nobody holds keep their name, and are found by it until the room is needed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from lezero.core.errors import ConfigError
from lezero.serve.request import Request

if TYPE_CHECKING:
    from lezero.serve.program import Program


@runtime_checkable
class Forgets(Protocol):
    """A program that keeps more of a sequence than lies in blocks, by a block of it."""

    def forget(self, block: int) -> None:
        """Nobody holds this block any more."""


class BlockPool:
    """`count` blocks of `block_size` tokens each, with reference counts and names.

    A block is held (by one request or several), or free; a free one may still have a name. Free
    blocks without a name are handed out first, then the least recently used named ones. shares:
    False gives no names, so that no two requests ever hold the same block. freed: called with each
    block that nobody holds any more and that has no name. prompts_apart: of the program.
    """

    def __init__(
        self,
        count: int,
        block_size: int,
        shares: bool = True,
        freed: Callable[[int], None] | None = None,
        prompts_apart: bool = False,
    ) -> None:
        if count < 1:
            raise ConfigError(f"count: got {count} blocks, allowed is 1 or more")
        if block_size < 1:
            raise ConfigError(f"block_size: got {block_size} tokens, allowed is 1 or more")
        self.count, self.block_size, self.shares, self._freed = count, block_size, shares, freed
        self._apart = prompts_apart
        self._holders = [0] * count
        self._name: list[bytes | None] = [None] * count
        self._content: list[tuple[int, ...]] = [()] * count
        self._named: dict[bytes, int] = {}
        self._blank = list(reversed(range(count)))
        self._idle: dict[int, None] = {}  # free but named, least recently used first
        self.touched_count = 0
        """Blocks that were ever held: the first ones, since blank ones are handed out in order."""

    @classmethod
    def of(cls, program: Program, count: int) -> Self:
        """The blocks of a program's cache, which hears of those that are free again if it wants."""
        freed = program.forget if isinstance(program, Forgets) else None
        return cls(count, program.block_size, program.shares, freed, program.prompts_apart)

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blank) + len(self._idle)

    @property
    def used_count(self) -> int:
        """Blocks that somebody holds."""
        return self.count - self.free_count

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def names(self, request: Request) -> list[bytes]:
        """The names of the request's full blocks, remembered in `request.names`."""
        names, size = request.names, self.block_size
        for index in range(len(names), len(request.tokens) // size):
            parent = names[-1] if names else _digest(request.salt.encode())
            names.append(_digest(parent + array("q", self._held(request, index)).tobytes()))
        return names

    def match(self, request: Request) -> list[int]:
        """The longest run of blocks that hold the request's first tokens; not yet held for it.

        At least one token is left to compute, since the next one is drawn from its logits. The
        tokens are compared too: a name is only a hash.
        """
        found: list[int] = []
        names = self.names(request)
        for index in range(self.shareable(request)):
            block = self._named.get(names[index])
            if block is None or self._content[block] != self._held(request, index):
                break
            found.append(block)
        return found

    def shareable(self, request: Request) -> int:
        """Blocks that a request could share at most."""
        return (len(request.tokens) - 1) // self.block_size if self.shares else 0

    def allocate(self, count: int) -> list[int]:
        """Holds `count` free blocks, which lose their names; there must be as many."""
        assert count <= self.free_count, f"{count} blocks asked for, {self.free_count} are free"
        return [self._take() for _ in range(count)]

    def share(self, blocks: Iterable[int]) -> None:
        """Holds blocks once more, whether others hold them or not."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives blocks back, in the order of their tokens.

        The last becomes the least recently used, so that the beginnings, which others are more
        likely to share, stay longest.
        """
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} was given back twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._put_down(block)

    def publish(self, request: Request) -> None:
        """Names the request's blocks that became full, so that others can share them.

        Call it after a step, when keys and values of the first `computed` tokens are in the cache.
        Where another block has the name already, this one stays without.
        """
        full = request.computed // self.block_size
        if not self.shares or full <= request.published:
            return
        names = self.names(request)
        for index in range(request.published, full):
            name, block = names[index], request.blocks[index]
            if name not in self._named and self._name[block] is None:
                self._named[name], self._name[block] = block, name
                self._content[block] = self._held(request, index)
        request.published = full

    def forget(self, blocks: Iterable[int]) -> None:
        """Takes the names of blocks away: what they hold is not to be trusted."""
        for block in blocks:
            self._unname(block)
            if block in self._idle:
                del self._idle[block]
                self._blank.append(block)

    def check(self, held: Iterable[Sequence[int]] | None = None) -> None:
        """Asserts that no block is lost, held and free at once, or named twice.

        held: the blocks of every request, to compare the reference counts with.
        """
        free = [*self._blank, *self._idle]
        assert len(set(free)) == len(free), "a block is free twice"
        assert {b for b, n in enumerate(self._holders) if n == 0} == set(free), "a block is lost"
        assert all(self._name[block] is None for block in self._blank), "a blank block has a name"
        assert all(self._name[block] is not None for block in self._idle), "an idle block has none"
        named = {name: block for block, name in enumerate(self._name) if name is not None}
        assert named == self._named, "names and blocks differ"
        size = self.block_size + self._apart
        assert all(len(self._content[b]) == size for b in named.values())
        if held is not None:
            counted = [0] * self.count
            for blocks in held:
                assert len(set(blocks)) == len(blocks), "a request holds a block twice"
                for block in blocks:
                    counted[block] += 1
            assert counted == self._holders, "reference counts are not those of the requests"

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
            self.touched_count = max(self.touched_count, block + 1)
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._unname(block)
        self._holders[block] = 1
        return block

    def _put_down(self, block: int) -> None:
        if self._name[block] is None:
            self._blank.append(block)
            if self._freed is not None:
                self._freed(block)
        else:
            self._idle[block] = None

    def _unname(self, block: int) -> None:
        name = self._name[block]
        if name is not None:
            del self._named[name]
            self._name[block], self._content[block] = None, ()

    def _held(self, request: Request, index: int) -> tuple[int, ...]:
        """What makes the block's keys and values: tokens, and how many of them are prompt."""
        start = index * self.block_size
        tokens = tuple(request.tokens[start : start + self.block_size])
        prompt = min(max(len(request.prompt) - start, 0), self.block_size)
        return (*tokens, prompt) if self._apart else tokens


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
