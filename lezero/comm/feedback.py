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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lezero.comm.codec import Codec, codec
from lezero.comm.route import Span, Spans

WORKER, SERVER = "worker", "server"
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class _Kept:
    """The error of one buffer: element `at` of `data` belongs to the span that covers `at`."""

    spans: Spans
    numel: int
    data: torch.Tensor
    fresh: bool = True
    """Laid out from other buffers or a checkpoint, and not asked about since."""


@dataclass(frozen=True)
class _Piece:
    """Errors that came from a checkpoint and that no buffer has asked for yet."""

    start: int
    data: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.data.numel()


class Feedback:
    """The kept errors of one link. `dtype`: how they are stored: "fp32", "bf16" or "int8".

    `share`: of how many ranks' sum this rank's worker errors are (1, or the ranks of a host).
    """

    def __init__(self, rank: int, size: int, dtype: str, device: torch.device, share: int = 1):
        self._rank, self._size, self._share, self._device = rank, size, share, device
        self._dtype = _TYPES.get(dtype)
        self._packed: Codec | None = codec("int8") if self._dtype is None else None
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._loaded: dict[tuple[str, str], list[_Piece]] = {}
        self._scratch: dict[int, torch.Tensor] = {}

    def error(self, side: str, key: str, numel: int, spans: Spans) -> torch.Tensor:
        """The error (numel,) of buffer `key`, to be changed in place and given back to `keep`.

        Elements that no span covers (padding) start from zero each time the spans change.
        """
        kept = self._kept.get((side, key))
        if kept is None or kept.spans != spans or kept.numel != numel:
            kept = self._arrange(side, key, numel, spans)
        if self._packed is None:
            return kept.data
        wide = self._scratch.get(numel)
        if wide is None:
            wide = self._scratch[numel] = torch.empty(numel, device=self._device)
        self._packed.decode(kept.data, wide)
        return wide

    def keep(self, side: str, key: str, error: torch.Tensor) -> None:
        """Stores what `error` gave, once it was changed."""
        if self._packed is not None:
            self._packed.encode(error, self._kept[side, key].data)

    def fresh(self, side: str, key: str) -> bool:
        """Whether the errors of `key` came from elsewhere since this was last asked."""
        kept = self._kept[side, key]
        was, kept.fresh = kept.fresh, False
        return was

    def nbytes(self) -> int:
        """Bytes held for errors."""
        return sum(kept.data.nbytes for kept in self._kept.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's errors, fp32, flat: `side:share:size/name/start` → elements from `start`.

        With "int8" storage these are the decoded values.
        """
        state = {}
        for (side, name), pieces in self._gathered().items():
            share = self._share if side == WORKER else 1
            for piece in pieces:
                state[f"{side}:{share}:{self._size}/{name}/{piece.start}"] = piece.data
        return state

    def load_state_dict(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Takes the states of all ranks of a run, in rank order, whatever their number.

        With as many ranks as now and the same topology every rank goes on with its own; otherwise
        the pending mean is kept (see the note). What was held before is dropped.
        """
        self._kept.clear()
        self._loaded.clear()
        parsed = [[(*_parse(key), data) for key, data in state.items()] for state in states]
        same = len(states) == self._size and all(
            share == self._share for state in parsed for side, share, *_ in state if side == WORKER
        )
        if same:
            for side, _, name, start, data in parsed[self._rank]:
                self._loaded.setdefault((side, name), []).append(_Piece(start, data))
            return
        self._loaded = _mean(parsed, WORKER, self._share)
        self._loaded |= _mean(parsed, SERVER, self._size)

    def _arrange(self, side: str, key: str, numel: int, spans: Spans) -> _Kept:
        """Lays the errors of a buffer out: what was loaded, or lay in buffers laid out before."""
        error = torch.zeros(numel, device=self._device)
        for (other_side, other), kept in list(self._kept.items()):
            if other_side == side and (other == key or _overlap(kept.spans, spans)):
                self._unload(side, other, kept)
        for span in spans:
            pieces = self._loaded.get((side, span.name), [])
            rest: list[_Piece] = []
            for piece in pieces:
                low, high = max(span.start, piece.start), min(span.stop, piece.stop)
                if low >= high:
                    rest.append(piece)
                    continue
                at = span.at + low - span.start
                error[at : at + high - low] = piece.data[low - piece.start : high - piece.start]
                if piece.start < low:
                    rest.append(_Piece(piece.start, piece.data[: low - piece.start]))
                if high < piece.stop:
                    rest.append(_Piece(high, piece.data[high - piece.start :]))
            self._loaded[side, span.name] = rest
        if self._packed is not None:
            data = torch.empty(self._packed.bytes(numel), dtype=torch.uint8, device=self._device)
            self._packed.encode(error, data)
        else:
            data = error.to(self._dtype)
        self._kept[side, key] = _Kept(spans, numel, data)
        return self._kept[side, key]

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
        wide = torch.empty(kept.numel, device=self._device)
        self._packed.decode(kept.data, wide)
        return wide

    def _gathered(self) -> dict[tuple[str, str], list[_Piece]]:
        """All errors by side and name, in order of their start."""
        found = {place: list(pieces) for place, pieces in self._loaded.items() if pieces}
        for (side, _), kept in self._kept.items():
            wide = self._wide(kept)
            for span in kept.spans:
                data = wide[span.at : span.at + span.stop - span.start].clone()
                found.setdefault((side, span.name), []).append(_Piece(span.start, data))
        return {place: sorted(found[place], key=lambda p: p.start) for place in sorted(found)}


def cut(spans: Spans, begin: int, end: int, to: int) -> Spans:
    """The spans of positions `begin` … `end` of a buffer, which lie at `to` of another one."""
    found = []
    for span in spans:
        low, high = max(span.at, begin), min(span.at + span.stop - span.start, end)
        if low < high:
            start = span.start + low - span.at
            found.append(Span(span.name, start, start + high - low, to + low - begin))
    return tuple(found)


def _overlap(some: Spans, others: Spans) -> bool:
    """Whether an element of a parameter is in both."""
    named: dict[str, list[Span]] = {}
    for span in some:
        named.setdefault(span.name, []).append(span)
    return any(
        span.start < other.stop and other.start < span.stop
        for other in others
        for span in named.get(other.name, ())
    )


def _parse(key: str) -> tuple[str, int, str, int]:
    head, rest = key.split("/", 1)
    name, start = rest.rsplit("/", 1)
    side, share, _ = head.split(":")
    return side, int(share), name, int(start)


def _mean(
    states: Sequence[Sequence[tuple[str, int, str, int, torch.Tensor]]], side: str, times: int
) -> dict[tuple[str, str], list[_Piece]]:
    """`times` the mean over the ranks, in rank order in fp64, of one side's errors, by name."""
    length: dict[str, int] = {}
    for state in states:
        for found, _, name, start, data in state:
            if found == side:
                length[name] = max(length.get(name, 0), start + data.numel())
    pieces = {}
    for name in sorted(length):
        total = torch.zeros(length[name], dtype=torch.float64)
        for state in states:
            for found, _, other, start, data in state:
                if found == side and other == name:
                    total[start : start + data.numel()] += data.double().cpu()
        pieces[side, name] = [_Piece(0, total.mul_(times).div_(len(states)).float())]
    return pieces
