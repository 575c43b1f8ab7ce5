"""The flat topology with codecs: what travels is encoded, what is summed is decoded, in fp32.

reduce-scatter   each rank encodes its chunk for each other, all-to-all; each decodes what came
                 and sums in rank order, its own chunk as it is
all-gather       each rank encodes its shard (codec `gather`); all decode all, their own too, so
                 that every rank ends with the same bits
all-reduce       a reduce-scatter; the sum is encoded again, gathered and decoded by all
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from lezero.comm.account import Account
from lezero.comm.buffers import Buffers
from lezero.comm.codec import Codec
from lezero.comm.feedback import SERVER, WORKER, Feedback
from lezero.comm.flat import Flat, chunks
from lezero.comm.pending import Steps
from lezero.comm.route import Spans
from lezero.comm.spans import cut


class Coded(Flat):
    """`codec` for gradients, `gather` for parameters; None: as they are.

    `worker`, `server`: whose errors `feedback` keeps.
    """

    def __init__(
        self,
        lanes: tuple[dist.ProcessGroup, dist.ProcessGroup],
        buffers: Buffers,
        account: Account,
        codec: Codec | None,
        gather: Codec | None,
        feedback: Feedback | None,
        server: bool,
    ) -> None:
        super().__init__(lanes, buffers, account)
        self._codec, self._gather_codec = codec, gather
        self._feedback, self._server = feedback, server

    def use(self, codec: Codec | None, feedback: Feedback | None, server: bool) -> None:
        """Encodes gradients otherwise from the next collective on. Nothing is in flight."""
        self._codec, self._feedback, self._server = codec, feedback, server

    @contextlib.contextmanager
    def without_feedback(self) -> Iterator[None]:
        """Errors are neither added nor kept inside. Nothing is in flight."""
        before, self._feedback = self._feedback, None
        try:
            yield
        finally:
            self._feedback = before

    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, key: str, spans: Spans
    ) -> Steps:
        if self._codec is None:
            yield from super().reduce_scatter(flat, out, key, spans)
            return
        yield from self._reduce(self._codec, flat, out, key, spans, "reduce_scatter")

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, key: str) -> Steps:
        codec = self._gather_codec
        if codec is None:
            yield from super().all_gather(shard, out, key)
            return
        sent = self._buffers.take(codec.bytes(shard.numel()), torch.uint8)
        codec.encode(shard, sent)
        yield from self._spread(codec, sent, out, 0, "all_gather")

    def all_reduce(self, flat: torch.Tensor, key: str, spans: Spans) -> Steps:
        codec = self._codec
        if codec is None:
            yield from super().all_reduce(flat, key, spans)
            return
        length = flat.numel() // self._size
        total = self._buffers.take(length, torch.float32)
        yield from self._reduce(codec, flat, total, key, spans, "all_reduce")
        sent = self._buffers.take(codec.bytes(length), torch.uint8)
        if self._feedback is None or not self._server:
            codec.encode(total, sent)
        else:
            begin = self._rank * length
            mine = cut(spans, begin, begin + length, 0)
            error = self._feedback.error(SERVER, key, length, mine)
            codec.encode(total, sent, error)
            self._feedback.keep(SERVER, key, error)
        self._buffers.give(total)
        yield from self._spread(codec, sent, flat, 1, "all_reduce")

    def leave(self, spans: Spans) -> None:
        if self._codec is not None and self._feedback is not None:
            self._feedback.leave(spans)

    def _reduce(
        self, codec: Codec, flat: torch.Tensor, out: torch.Tensor, key: str, spans: Spans, what: str
    ) -> Steps:
        length = flat.numel() // self._size
        sent = self._buffers.take(self._size * codec.bytes(length), torch.uint8)
        received = self._buffers.take(sent.numel(), torch.uint8)
        parts = chunks(flat, self._size)
        pending = self._encode(codec, flat, sent, key, spans)
        yield self._exchange(sent, received, 0, what)
        aliased = out.data_ptr() == parts[self._rank].data_ptr()
        scratch = aliased or out.dtype != torch.float32
        total = self._buffers.take(length, torch.float32) if scratch else out
        for rank, payload in enumerate(chunks(received, self._size)):
            if rank != self._rank:
                codec.decode(payload, total, add=rank > 0)
            elif rank:
                total += parts[rank]
            else:
                total.copy_(parts[rank])
            if rank == self._rank and pending is not None:
                total += pending
        if self._feedback is not None and not (self._server and what == "all_reduce"):
            begin = self._rank * length
            self._feedback.pay_owned(key, total, cut(spans, begin, begin + length, 0))
        if scratch:
            out.copy_(total)
            self._buffers.give(total)
        self._buffers.give(sent, received)

    def _encode(
        self, codec: Codec, flat: torch.Tensor, sent: torch.Tensor, key: str, spans: Spans
    ) -> torch.Tensor | None:
        """Encodes the chunks for the others. Returns what is pending of this rank's own, if any.

        An own chunk is not encoded, so nothing is ever lost of it; errors that another number of
        ranks left there are added once.
        """
        error = pending = None
        if self._feedback is not None:
            error = self._feedback.error(WORKER, key, flat.numel(), spans)
        errors = [None] * self._size if error is None else chunks(error, self._size)
        work = zip(chunks(flat, self._size), chunks(sent, self._size), errors, strict=True)
        for rank, (part, payload, lost) in enumerate(work):
            if rank != self._rank:
                codec.encode(part, payload, lost)
            elif lost is not None and self._feedback and self._feedback.fresh(WORKER, key):
                pending = lost.float().clone()
                lost.zero_()
        if self._feedback is not None and error is not None:
            self._feedback.keep(WORKER, key, error)
        return pending

    def _spread(
        self, codec: Codec, sent: torch.Tensor, out: torch.Tensor, lane: int, what: str
    ) -> Steps:
        """Gathers the payloads of all ranks and decodes them into `out`."""
        received = self._buffers.take(self._size * sent.numel(), torch.uint8)
        yield self._gather(sent, received, lane, what)
        for payload, part in zip(
            chunks(received, self._size), chunks(out, self._size), strict=True
        ):
            codec.decode(payload, part)
        self._buffers.give(sent, received)
