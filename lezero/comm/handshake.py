"""How the ranks of one host tell each other what they have done, through shared memory.

Every rank has a block that it alone writes: one word a lane, the number of the last collective
whose step it has taken there, and a slot for each collective in flight that says what it is and
where its data lies. Others read the slot after the word says so (`ops.signal` orders the two).
"""

from __future__ import annotations

import os
import select
import struct
import time
from typing import NamedTuple

import torch

from lezero.comm.account import OPERATIONS
from lezero.comm.pending import IN_FLIGHT
from lezero.comm.shared_memory import Place, SharedMemory, available
from lezero.core import groups, observer
from lezero.core.errors import DistributedError
from lezero.ops import signal

LANES = 5
_WORDS = 16  # int32 words to a cache line: lanes do not share one
_HEAD = LANES * _WORDS * 4
_SLOT = struct.Struct("<8q64s")
_LOOK_S = 0.1


class Call(NamedTuple):
    """What a rank does in one collective."""

    number: int
    operation: int
    dtype: int
    numel: int
    place: Place
    key: str

    def pack(self) -> bytes:
        numbers = (self.number, self.operation, self.dtype, self.numel, *self.place)
        return _SLOT.pack(*numbers, self.key.encode()[-64:])

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Call:
        number, operation, dtype, numel, *place, key = _SLOT.unpack(data)
        return cls(
            *(number, operation, dtype, numel),
            Place(*place),
            key.rstrip(b"\0").decode(errors="replace"),
        )


class Handshake:
    """The blocks of all ranks of `group`, made together. `names`: the rank of each in the world."""

    def __init__(
        self, group: torch.distributed.ProcessGroup, names: list[int], memory: SharedMemory
    ) -> None:
        if not all(groups.gather_objects(available(), group)):
            raise DistributedError(
                "ranks share memory only on Linux, with a compiler (lz doctor) and where os has "
                "memfd_create and pidfd_open, and the kernel allows them; set wire.topology: flat"
            )
        self.rank, self.size, self.names = group.rank(), group.size(), names
        self._number = 0
        own = memory.make(_HEAD + IN_FLIGHT * _SLOT.size)
        places = [Place(*place) for place in groups.gather_objects(list(own.place), group)]
        blocks = [memory.open(place).data for place in places]
        groups.gather_objects(0, group)  # nobody may close its block before all have opened it
        self._words = [block[:_HEAD].view(torch.int32) for block in blocks]
        self._slots = [block[_HEAD:].numpy().data for block in blocks]
        self._alive = {
            rank: os.pidfd_open(memory.pid(rank)) for rank in range(self.size) if rank != self.rank
        }

    def begin(self, operation: int, dtype: int, numel: int, place: Place, key: str) -> int:
        """Tells the others of the next collective and where this rank's data lies; its number."""
        self._number += 1
        call = Call(self._number, operation, dtype, numel, place, key)
        at = self._number % IN_FLIGHT * _SLOT.size
        self._slots[self.rank][at : at + _SLOT.size] = call.pack()
        self.tell(0, self._number)
        return self._number

    def tell(self, lane: int, number: int) -> None:
        """This rank has taken its step of collective `number` on `lane`, and of all before it."""
        signal.write(self._words[self.rank], lane * _WORDS, number)

    def calls(self, number: int) -> list[Call]:
        """What each rank does in collective `number`; `DistributedError` where they differ."""
        at = number % IN_FLIGHT * _SLOT.size
        found = [Call.unpack(slots[at : at + _SLOT.size]) for slots in self._slots]
        mine = found[self.rank]
        for rank, call in enumerate(found):
            if call._replace(place=mine.place) != mine:
                raise DistributedError(
                    f"rank {self.names[rank]} calls {describe(call)}, where rank "
                    f"{self.names[self.rank]} calls {describe(mine)}; every rank must call the "
                    "same collectives in the same order"
                )
        return found

    def others(self, lane: int, number: int) -> Others:
        """What to wait for until every other rank has told `number` on `lane`."""
        return Others(self, lane, number)

    def reached(self, rank: int, lane: int, number: int) -> bool:
        return signal.reached(self._words[rank], lane * _WORDS, number)

    def wait(self, rank: int, lane: int, number: int, deadline: float) -> None:
        """Sleeps until `rank` has told `number`; `DistributedError` when it died or hangs."""
        words, at = self._words[rank], lane * _WORDS
        while not signal.wait(words, at, number, _LOOK_S):
            gone = _ended(self._alive[rank])
            if self.reached(rank, lane, number):
                return
            watcher = observer.current()
            if watcher is not None:
                watcher.check()
            if gone:
                lost = DistributedError(f"rank {self.names[rank]} died or left")
                text = watcher.explain(lost) if watcher is not None else None
                raise DistributedError(text) if text else lost
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"rank {self.names[rank]} lives, but has not come to this collective in time; "
                    "where it rightly takes longer, join with lezero.core.groups.join(timeout_s=…)"
                )

    def close(self) -> None:
        for fd in self._alive.values():
            os.close(fd)
        self._alive.clear()
        self._slots.clear()
        self._words.clear()


class Others:
    """Waits for every other rank on one lane."""

    def __init__(self, handshake: Handshake, lane: int, number: int) -> None:
        self._handshake, self._lane, self._number = handshake, lane, number
        self._missing = [rank for rank in range(handshake.size) if rank != handshake.rank]

    def done(self) -> bool:
        reached = self._handshake.reached
        self._missing = [r for r in self._missing if not reached(r, self._lane, self._number)]
        return not self._missing

    def block(self, deadline: float) -> None:
        while self._missing:
            self._handshake.wait(self._missing[0], self._lane, self._number, deadline)
            del self._missing[0]


def _ended(process: int) -> bool:
    """Whether the process of a descriptor has ended; `select` takes none from 1024 on."""
    ending = select.poll()
    ending.register(process, select.POLLIN)
    return bool(ending.poll(0))


DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)


def describe(call: Call) -> str:
    return (
        f"{OPERATIONS[call.operation]} '{call.key}' of {call.numel} "
        f"{str(DTYPES[call.dtype]).removeprefix('torch.')}"
    )
