"""What encoding lost, kept and added to the next tensor: error feedback (Seide et al. 2014,
Karimireddy et al. 2019, arXiv:1901.09847).

The worker side keeps, for each element that this rank sends, what the receivers did not get. The
server side keeps, for each element that this rank owns, what the second encoding of an all-reduce
lost of the sum. Both are held in the layout of the buffers that come by, and known by parameter
name and offset, so that other buffers, another sharding and another number of ranks find them
again.

[Note: another number of ranks]
What is pending is the mean over M ranks of their worker errors, plus a M-th of the server's errors
(those are of a sum). N ranks that go on each start with that mean as their worker error, and the
owners with N/M times the server's error. Taken in rank order in fp64, rounded once to fp32. With
the hierarchical topology a rank keeps the error of the sum of its host's L ranks, for its own
chunks only: they count as zero elsewhere, and a rank starts with L times the mean.

Which rank will own what is not known yet, so all of it comes to every rank as spare. A rank claims
what its buffers ask for. What stays spare is saved as such, and in the next change of ranks it
counts only where no rank has claimed it. The server's errors come so also with as many ranks as
before, where buffers may have become others. In a sum that is not encoded again the owner of a
chunk adds what the server owes of it, once.

[Note: a host's errors]
With the hierarchical topology each element is sent by one rank of a host, and other buffers (those
of another stage, or with a parameter frozen) may give it to another one. So with as many ranks as
before a rank is given the errors of all ranks of its host: it claims what it sends, its neighbours
claim the rest, and once the buffer has come by that rest is dropped. Until then a rank saves what
was its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lezero.comm.codec import Codec, codec
from lezero.comm.dither import Dither
from lezero.comm.route import Span, Spans
from lezero.comm.spans import cut, gaps, joined, overlap, scattered

WORKER, SERVER = "worker", "server"
_SPARE = ":spare"
_BLOCK = 256  # of errors in eight bits
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class _Kept:
    """The error of one buffer: element `at` of `data` belongs to the span that covers `at`."""

    spans: Spans
    numel: int
    data: torch.Tensor
    gaps: tuple[tuple[int, int], ...]
    """Where no span lies: padding, of which nothing is kept, since nobody could take it along and
    some codecs share a scale with it."""
    fresh: bool = True
    """Laid out from other buffers or a checkpoint, and not asked about since."""


@dataclass(frozen=True)
class _Piece:
    """Errors that came from a checkpoint and that no buffer has asked for yet. `mine`: whether this
    rank saved them, and not another one of its host."""

    start: int
    data: torch.Tensor
    mine: bool = True

    @property
    def stop(self) -> int:
        return self.start + self.data.numel()


_Pieces = dict[tuple[str, str], list[_Piece]]
"""By side and name of the parameter."""


class _Stored(NamedTuple):
    """A piece of a state, with the `share` and the number of ranks of who saved it."""

    side: str
    spare: bool
    share: int
    size: int
    name: str
    piece: _Piece


class Feedback:
    """The kept errors of one link. `dtype`: how they are stored: "fp32", "bf16" or "int8".

    `share`: of how many ranks' sum this rank's worker errors are (1, or the ranks of a host).
    """

    def __init__(self, rank: int, size: int, dtype: str, device: torch.device, share: int = 1):
        self._rank, self._size, self._device = rank, size, device
        self.share = share
        self._dtype = _TYPES.get(dtype)
        self._packed: Codec | None = codec(f"int8:{_BLOCK}") if self._dtype is None else None
        self._dither = Dither(_BLOCK, rank, device) if self._packed is not None else None
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._loaded: _Pieces = {}
        self._spare: _Pieces = {}
        self._host: _Pieces = {}  # see [Note: a host's errors]
        self._scratch: torch.Tensor | None = None  # for packed errors, as large as the largest
        self.loaded = False
        """Whether errors came from a checkpoint; who has looked at them clears it."""

    def error(self, side: str, key: str, numel: int, spans: Spans) -> torch.Tensor:
        """The error (numel,) of buffer `key`, to be changed in place and given to `keep` before
        the next one is asked for.

        Elements that no span covers (padding) are zero.
        """
        kept = self._kept.get((side, key))
        if kept is None or kept.spans != spans or kept.numel != numel:
            kept = self._arrange(side, key, numel, spans)
        if self._packed is None:
            return kept.data
        if self._scratch is None or self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, dtype=torch.float32, device=self._device)
        wide = self._scratch[:numel]
        self._packed.decode(kept.data, wide)
        return wide

    def keep(self, side: str, key: str, error: torch.Tensor) -> None:
        """Stores what `error` gave, once it was changed."""
        kept = self._kept[side, key]
        for begin, end in kept.gaps:
            error[begin:end].zero_()
        if self._packed is not None and self._dither is not None:
            self._dither.add(error)
            self._packed.encode(error, kept.data)

    def forget(self) -> None:
        """Owes nothing of the buffers that came by, whose sums nobody takes."""
        for kept in self._kept.values():
            kept.data.zero_()  # packed errors too: their scales are 0 then

    def fresh(self, side: str, key: str) -> bool:
        """Whether the errors of `key` came from elsewhere since this was last asked."""
        kept = self._kept[side, key]
        was, kept.fresh = kept.fresh, False
        return was

    def pay(self, key: str, flat: torch.Tensor, spans: Spans) -> None:
        """Adds what is owed of buffer `key` to `flat`, which is then summed as it is."""
        length = flat.numel() // self._size
        begin = self._rank * length
        error = self.error(WORKER, key, flat.numel(), spans)
        flat += error
        self.keep(WORKER, key, error.zero_())
        self.pay_owned(key, flat[begin : begin + length], cut(spans, begin, begin + length, 0))

    def pay_owned(self, key: str, total: torch.Tensor, spans: Spans) -> None:
        """Adds what the server owes of this rank's chunk of buffer `key` to its sum, `total`."""
        if not any(side == SERVER for side, _ in (*self._loaded, *self._spare)):
            return
        owed = torch.zeros(total.numel(), dtype=torch.float32, device=self._device)
        for span in spans:
            self._claim(SERVER, span, owed)
        total += owed
        self._leave_to_others(key)

    def _claim(self, side: str, span: Span, error: torch.Tensor) -> None:
        """Moves what is known of the elements of `span` to their place in `error`."""
        for held in (self._spare, self._host, self._loaded):  # what was claimed before wins
            for piece in _take(held, (side, span.name), span):
                at = span.at + piece.start - span.start
                error[at : at + piece.data.numel()] = piece.data

    def drop(self) -> None:
        """Forgets all errors."""
        self._kept.clear()
        self._loaded.clear()
        self._spare.clear()
        self._host.clear()
        self._scratch = None

    def nbytes(self) -> int:
        """Bytes held for errors."""
        return sum(kept.data.nbytes for kept in self._kept.values())

    def holds(self) -> bool:
        """Whether anything is held, be it zeros."""
        waiting = (self._loaded, self._spare, self._host)
        return bool(self._kept) or any(any(held.values()) for held in waiting)

    def settle(self) -> bool:
        """Gives the memory back if nothing is owed any more; returns whether something is."""
        if self._kept and not any(bool(self._wide(kept).any()) for kept in self._kept.values()):
            self._kept.clear()
            self._spare.clear()
            self._host.clear()
            self._scratch = None
        return self.holds()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's errors, flat: `side:share:size/name/start` → elements from `start`, as few
        tensors as can be; `side:share:size:spare/name/start` what is spare (see the note).

        Nothing is copied on an accelerator: most are views of what is kept, in its type, which the
        next collective changes. "int8" storage comes decoded, in fp32 on the CPU.
        """
        state = {}
        for mark, held in (("", self._gathered()), (_SPARE, self._spare)):
            for side, name in sorted(held):
                share = self.share if side == WORKER else 1
                for piece in _joined(held[side, name]):
                    state[f"{side}:{share}:{self._size}{mark}/{name}/{piece.start}"] = piece.data
        return state

    def load_state_dict(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Takes the states of all ranks of a run, in rank order, whatever their number.

        With as many ranks as now and the same topology every rank goes on with its own worker
        errors, or its host's; otherwise the pending mean is kept (see the notes). What was held
        before is dropped. In the first case worker errors of other hosts' ranks are not read.
        """
        self.drop()
        self.loaded = True
        parsed = [[_parse(key, data) for key, data in state.items()] for state in states]
        same = len(states) == self._size and all(
            one.share == self.share for state in parsed for one in state if one.side == WORKER
        )
        if same:
            first = self._rank // self.share * self.share  # of this host: ranks lie host by host
            for rank in range(first, first + self.share):
                self._take_on([one for one in parsed[rank] if one.side == WORKER], rank)
        else:
            self._spare = _mean(parsed, WORKER, self.share)
        self._spare |= _mean(parsed, SERVER, self._size)

    def _take_on(self, state: Sequence[_Stored], rank: int) -> None:
        """Worker errors that `rank` of this host saved."""
        mine = rank == self._rank
        for one in state:
            if one.spare and not mine:
                continue
            held = self._spare if one.spare else self._loaded if self.share == 1 else self._host
            piece = replace(one.piece, mine=mine)
            held.setdefault((one.side, one.name), []).append(piece)

    def _arrange(self, side: str, key: str, numel: int, spans: Spans) -> _Kept:
        """Lays the errors of a buffer out: what was loaded, or lay in buffers laid out before."""
        error = torch.zeros(numel, dtype=torch.float32, device=self._device)
        for (other_side, other), kept in list(self._kept.items()):
            if other_side == side and (other == key or overlap(kept.spans, spans)):
                self._unload(side, other, kept)
        for span in spans:
            self._claim(side, span, error)
        if side == SERVER:
            self._leave_to_others(key)
        if self._packed is not None:
            data = torch.empty(self._packed.bytes(numel), dtype=torch.uint8, device=self._device)
            self._packed.encode(error, data)
        else:
            data = error.to(self._dtype)
        self._kept[side, key] = _Kept(spans, numel, data, gaps(spans, numel))
        return self._kept[side, key]

    def _leave_to_others(self, key: str) -> None:
        """Drops what the other ranks of an all-reduce claim: whatever this rank has sent of it is
        owned by one of them."""
        sent = self._kept.get((WORKER, key))
        self.leave(sent.spans if sent is not None else ())

    def leave(self, spans: Spans) -> None:
        """Drops what is owed of these elements and this rank has not claimed: other ranks have. Of
        worker errors that is so where ranks send for their host."""
        for span in spans if self._spare or self._host else ():
            _take(self._spare, (SERVER, span.name), span)
            if self.share > 1:
                _take(self._spare, (WORKER, span.name), span)
                _take(self._host, (WORKER, span.name), span)

    def _unload(self, side: str, key: str, kept: _Kept) -> None:
        """Gives the errors of a buffer back to their names."""
        wide = self._wide(kept)
        for span in kept.spans:
            data = wide[span.at : span.at + span.stop - span.start].clone()
            self._loaded.setdefault((side, span.name), []).append(_Piece(span.start, data))
        del self._kept[side, key]

    def _wide(self, kept: _Kept) -> torch.Tensor:
        if self._packed is None:
            return kept.data.float()
        wide = torch.empty(kept.numel, dtype=torch.float32, device=self._device)
        self._packed.decode(kept.data, wide)
        return wide

    def _gathered(self) -> _Pieces:
        """All errors that this rank has claimed, by side and name."""
        found: _Pieces = {}
        for held in (self._loaded, self._host):
            for place, pieces in held.items():
                if own := [piece for piece in pieces if piece.mine]:
                    found.setdefault(place, []).extend(own)
        for (side, _), kept in self._kept.items():
            spans = joined(kept.spans)
            data = self._readable(kept, scattered(spans))
            for span in spans:
                part = data[span.at : span.at + span.stop - span.start]
                found.setdefault((side, span.name), []).append(_Piece(span.start, part))
        return found

    def _readable(self, kept: _Kept, scattered: Spans) -> torch.Tensor:
        """The errors of a buffer: itself, or on the CPU what is packed or to be joined."""
        if self._packed is None:
            return kept.data.cpu() if scattered else kept.data
        wide = torch.empty(kept.numel, dtype=torch.float32, device="cpu")
        self._packed.decode(kept.data.cpu(), wide)
        return wide


def _joined(pieces: Sequence[_Piece]) -> Iterator[_Piece]:
    """In order of their start, neighbours as one: a checkpoint lists every tensor of every rank."""
    runs: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if runs and runs[-1][-1].stop == piece.start:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    for first, *others in runs:
        if others:
            data = torch.cat([piece.data.cpu() for piece in (first, *others)])
            first = replace(first, data=data)
        yield first


def _take(held: _Pieces, place: tuple[str, str], span: Span) -> list[_Piece]:
    """Takes out of `held` what it has of the elements of `span`."""
    inside: list[_Piece] = []
    outside: list[_Piece] = []
    for piece in held.get(place, ()):
        low, high = max(span.start, piece.start), min(span.stop, piece.stop)
        if low >= high:
            outside.append(piece)
            continue
        cuts = ((piece.start, low, outside), (low, high, inside), (high, piece.stop, outside))
        for begin, end, where in cuts:
            if begin < end:
                data = piece.data[begin - piece.start : end - piece.start]
                where.append(replace(piece, start=begin, data=data))
    if outside:
        held[place] = outside
    else:
        held.pop(place, None)
    return inside


def _parse(key: str, data: torch.Tensor) -> _Stored:
    head, rest = key.split("/", 1)
    name, start = rest.rsplit("/", 1)
    side, share, size = head.removesuffix(_SPARE).split(":")
    piece = _Piece(int(start), data)
    return _Stored(side, head.endswith(_SPARE), int(share), int(size), name, piece)


def _mean(states: Sequence[Sequence[_Stored]], side: str, times: int) -> _Pieces:
    """`times` the mean over the ranks, in rank order in fp64, of one side's errors, by name."""
    named: dict[str, list[_Stored]] = {}
    for state in states:
        for one in state:
            if one.side == side:
                named.setdefault(one.name, []).append(one)
    found = {}
    for name in sorted(named):
        length = max(one.piece.stop for one in named[name])
        total = torch.zeros(length, dtype=torch.float64, device="cpu")
        claimed = torch.zeros(length, dtype=torch.bool, device="cpu")
        for one in named[name]:
            if not one.spare:
                total[one.piece.start : one.piece.stop] += one.piece.data.double().cpu()
                claimed[one.piece.start : one.piece.stop] = True
        total.mul_(times).div_(len(states))
        for one in named[name]:
            if one.spare:
                place = slice(one.piece.start, one.piece.stop)
                was = one.share if side == WORKER else one.size  # how often it is the mean
                other = one.piece.data.double().cpu() * times / was
                total[place] = torch.where(claimed[place], total[place], other)
                claimed[place] = True
        found[side, name] = [_Piece(0, total.float())]
    return found
