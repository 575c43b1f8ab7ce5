"""The plain program on an accelerator, with steps of one token a sequence replayed from graphs.

A step of so little work waits for the host, which launches hundreds of kernels. A graph launches
all of them at once, but always with the same shapes and addresses: so there is one for each number
of sequences and of blocks a sequence, both rounded up to a power of two, made when first needed.
Where one cannot be made, for want of memory or because another thread waits for the device
meanwhile, steps of its size run as the plain program runs them.
Rows and blocks that are too many point at a block that belongs to nobody. Where kernels of
`decoding.py` suit the model, they are what is captured, unless Triton cannot build them here (no
compiler, no headers of Python, too little shared memory), or NVRTC. Where both have attention, the
first step of each number of blocks is made with both, and the faster one is taken for all of it.

A graph ends with each row's best token, which the next one can take in without the host.

Shapes: B sequences, W blocks of the longest, S = W · 16 places, H heads, E numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lezero.core import device
from lezero.core.log import logger
from lezero.models import Transformer
from lezero.ops import cuda_source
from lezero.ops.decoder import cuda_step
from lezero.ops.linear.cuda_few import MOST_TOKENS
from lezero.serve.decoding import Decoder
from lezero.serve.flight import Flight
from lezero.serve.plain import PlainProgram, projected
from lezero.serve.program import Fed
from lezero.serve.replayed import Step, seconds_of

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
_LOG = logger("serve")
_SOME, _MOST = 4, 64
"""Sequences of a replayed step: at least beside others (by arithmetic, not measured), at most."""
_PIECES = 64
_CLEARLY = 0.95
"""Of our attention's time: Triton's is taken only below it. Their bits differ, and near figures
would choose by chance."""


class CapturedProgram(PlainProgram):
    """capture: runs a function and returns what repeats it, and its output, which stays there."""

    flies = True

    def __init__(self, model: Transformer, capture: Capture | None = None) -> None:
        super().__init__(model)
        self.description += ", single tokens from captured graphs"
        self._capture, self._nobody = capture or device.Graphs(), 0
        self._decoder = Decoder(model) if Decoder.suits(model) else None
        self._best_B = torch.zeros(_MOST, dtype=torch.int64, device=self.place)
        self._steps: dict[tuple[int, int], Step | None] = {}
        self._launches, self._many_plainly = cuda_source.runs(self.place), False
        self.tried: dict[int, dict[str, float]] = {}
        """By number of blocks: seconds of a step by "cuda" attention and by "triton"'s; none where
        Triton's did not run."""

    @staticmethod
    def suits(model: Transformer) -> bool:
        """False where angles depend on the length of the step, which a graph cannot know."""
        on_graphs = model.norm.weight.device.type == "cuda"
        return on_graphs and model.config.steady == model.config.longest

    def reserve(self, blocks: int) -> None:
        super().reserve(blocks + 1)
        self._nobody = blocks
        self._steps = {}
        # Graphs keep the addresses of the tables, which must not grow later.
        self._model.rope.ready(min(self.longest, blocks * self.block_size), self.place)

    @torch.no_grad()
    def run(self, fed: Sequence[Fed]) -> Tensor:
        """Single tokens by their graph, also beside prompts and drafts, which run after it: no
        sequence of a step reads what another writes. Then weights are read twice, and nothing is
        launched for each single token, which pays where there are some."""
        single = [one for one in fed if _is_single(one)]
        worth = len(single) == len(fed) or len(single) >= _SOME
        with device.using(self.place):
            logits_BV = self._replayed(single) if worth else None
            if logits_BV is None:
                return super().run(fed)
            if len(single) == len(fed):
                return logits_BV
            rest_RV = super().run([one for one in fed if not _is_single(one)])
            row_R = device.sent(_rows_of_both(fed, len(single)), self.place)
            return torch.cat([logits_BV, rest_RV]).index_select(0, row_R)

    def _replayed(self, single: Sequence[Fed]) -> Tensor | None:
        """Logits (B, V) of single tokens from graphs, of as many at once as one can have; None
        where there is no graph for some of them. The plain program would launch the kernels of
        attention for each."""
        parts = [single[at : at + _MOST] for at in range(0, len(single), _MOST)]
        steps = [step for part in parts if (step := self._step(part)) is not None]
        if not parts or len(steps) < len(parts):
            return None
        found = []
        for step, part in zip(steps, parts, strict=True):  # two may be of one graph
            step.fill(part, self._nobody)
            step.replay()
            found.append(step.logits_BV[: len(part)].to(torch.float32, copy=True))
        return torch.cat(found) if len(found) > 1 else found[0]

    @torch.no_grad()
    def launch(
        self, fed: Sequence[Fed], after: Flight | None = None, rows: Sequence[int] = ()
    ) -> Flight | None:
        with device.using(self.place):
            step = self._step(fed)
            if step is None:
                return None
            step.fill(fed, self._nobody, rows if after is not None else ())
            step.replay()
            return step.flight(len(fed), self._best_B)

    def _step(self, fed: Sequence[Fed]) -> Step | None:
        """The graph for these sequences, where there is one."""
        if not 0 < len(fed) <= _MOST or not all(map(_is_single, fed)):
            return None
        width = max(one.position for one in fed) // self.block_size + 1
        sizes = _up(len(fed)), _up(width)
        if sizes not in self._steps:
            self._steps[sizes] = self._settled(self._made(sizes), sizes)
        return self._steps[sizes]

    def _made(self, sizes: tuple[int, int]) -> Step | None:
        """The step of so many sequences and blocks, or None where it cannot be captured."""
        step: Step | None = None
        self._take_faster(sizes)
        try:
            step = Step(*sizes, self.place)
            self._capture_into(step)
        except Exception as error:  # Triton's own are of many types
            # Kernels that ran before were built: then the capture failed, as it does where another
            # thread waits for the device meanwhile, and the next one may not.
            of_cuda = isinstance(error, torch.AcceleratorError) or "out of memory" in str(error)
            built = step is None or step.ran or of_cuda
            if sizes[0] > MOST_TOKENS and self._decodes(sizes[0]) and not built:
                # These are Triton's alone, so that it says nothing of what fewer sequences take.
                plainly = "steps of %d sequences and more run as plain operations: %s"
                _LOG.warning(plainly, MOST_TOKENS + 1, error)
                self._many_plainly = True
                return self._made(sizes)
            if self._attends(sizes) and not built:
                _LOG.warning("our attention does not run here, Triton's is tried: %s", error)
                assert self._decoder is not None
                self._decoder.attends = False
                return self._made(sizes)
            if self._launches and not built:
                kinds = (
                    "CUDA kernels do not run here, or Triton's beside them; others are tried: %s"
                )
                _LOG.warning(kinds, error)
                self._launches = self._many_plainly = False
                if self._decoder is not None:
                    self._decoder.slices = False
                return self._made(sizes)
            if self._decoder is None or built:
                without = "steps of %d sequences, %d blocks run without a graph: %s"
                _LOG.warning(without, *sizes, error)
                return None
            _LOG.warning("Triton's kernels do not run here, plain operations do instead: %s", error)
            self._decoder = None
        else:
            return step
        return self._made(sizes)

    def _capture_into(self, step: Step) -> None:
        flying_B = self._best_B.clone()  # the step's first run writes there
        step.kept = self._model.rope.cos_TP, self._model.rope.sin_TP
        try:
            step.fill([], self._nobody)
            step.replay, step.logits_BV = self._capture(lambda: self._decode(step))
        finally:
            self._best_B.copy_(flying_B)

    def _decodes(self, sequences: int) -> bool:
        """Whether a step of so many takes the decoder's kernels."""
        plainly = self._many_plainly and sequences > MOST_TOKENS
        return self._decoder is not None and not plainly

    def _attends(self, sizes: tuple[int, int]) -> bool:
        """Whether steps of these sizes can take our attention."""
        return self._decoder is not None and self._decoder.attends_to(sizes[0])

    def _take_faster(self, sizes: tuple[int, int]) -> None:
        if self._decoder is not None:
            took = self.tried.get(sizes[1], {})
            faster = bool(took) and took["triton"] < _CLEARLY * took["cuda"]
            self._decoder.prefers_triton = faster

    def _settled(self, ours: Step | None, sizes: tuple[int, int]) -> Step | None:
        """The same step by the attention that is faster with so many blocks: tried once."""
        if ours is None or not self._attends(sizes) or sizes[1] in self.tried:
            return ours
        decoder, (B, W) = self._decoder, sizes
        assert decoder is not None
        flying_B = self._best_B.clone()
        decoder.prefers_triton = True
        took: list[float] = []
        try:
            theirs = Step(*sizes, self.place)
            self._capture_into(theirs)
            last = min(W, self._nobody) * self.block_size - 1
            fed = [self._read_only(b, W, min(last, self.longest - 1)) for b in range(B)]
            took = seconds_of([ours, theirs], fed, self._nobody)
        except torch.AcceleratorError as error:  # another thread's capture, say
            decoder.prefers_triton = False
            _LOG.info("attention is ours for this step: %s", error)
            return ours
        except Exception as error:
            _LOG.info("attention is ours: %s", error)
        finally:
            self._best_B.copy_(flying_B)
        self.tried[W] = dict(zip(("cuda", "triton"), took, strict=True)) if took else {}
        self._take_faster(sizes)
        if took:
            _LOG.info("seconds of a step of %d blocks by each attention: %s", W, self.tried[W])
        return theirs if decoder.prefers_triton else ours

    def _read_only(self, row: int, width: int, last: int) -> Fed:
        """A sequence that ends at place `last`: others' blocks are read, nobody's is written."""
        blocks = [(row * width + i) % max(1, self._nobody) for i in range(width)]
        blocks[last // self.block_size] = self._nobody
        return Fed([0], last, blocks, [0])

    def _decode(self, step: Step) -> Tensor:
        """Logits (B, V) of one token for each sequence, with nothing that waits for the host."""
        if self._launches:
            token_B = cuda_step.chosen(step.token_B, step.row_B, self._best_B)
        else:
            last_B = self._best_B[step.row_B.clamp(min=0)]
            token_B = torch.where(step.row_B < 0, step.token_B, last_B.clamp(min=0))
        if not self._decodes(len(token_B)):
            logits_BV = self._plainly(step, token_B)
        else:
            assert self._decoder is not None
            assert self._keys is not None
            assert self._values is not None
            places = (step.position_B, step.table_BW, self._keys, self._values)
            logits_BV = self._decoder.logits(token_B, *places)
        if self._launches:
            cuda_step.best(logits_BV, self._best_B)
        else:
            self._best_B[: len(logits_BV)] = best_token(logits_BV)
        step.ran = True
        return logits_BV

    def _plainly(self, step: Step, token_B: Tensor) -> Tensor:
        model, size = self._model, self.block_size
        position_B = step.position_B
        cos, sin = model.rope.gather(position_B[:, None])
        block_B = step.table_BW.gather(1, (position_B // size)[:, None])[:, 0]
        place_B = block_B * size + position_B % size
        seen_S = torch.arange(step.table_BW.shape[1] * size, device=self.place)
        mask_BS = seen_S <= position_B[:, None]
        if self.config.sliding_window is not None:
            mask_BS &= position_B[:, None] - seen_S < self.config.sliding_window
        x = model.embed_tokens(token_B[:, None])
        for index, block in enumerate(model.layers):
            normed = block.input_layernorm(x)
            x = x + self._look(block.self_attn, normed, cos, sin, index, step, place_B, mask_BS)
            x = x + block.mlp(block.post_attention_layernorm(x))
        x_BD = model.norm(x[:, 0])
        head = model.embed_tokens.weight if model.lm_head is None else None
        logits: Tensor = F.linear(x_BD, head) if head is not None else model.lm_head(x_BD)
        return logits

    def _look(
        self,
        attention: Any,
        x_B1D: Tensor,
        cos: Tensor,
        sin: Tensor,
        index: int,
        step: Step,
        place_B: Tensor,
        mask_BS: Tensor,
    ) -> Tensor:
        assert self._keys is not None
        assert self._values is not None
        q, k, v = projected(attention, x_B1D, cos, sin)
        keys, values = self._keys[index], self._values[index]
        keys[place_B], values[place_B] = k[:, 0], v[:, 0]
        blocks = (-1, self.block_size)
        # What other requests left in places behind the mask may be no number, and 0 · NaN is NaN.
        unseen_BS11 = ~mask_BS[:, :, None, None]
        k_BSHE, v_BSHE = (
            x.unflatten(0, blocks)[step.table_BW].flatten(1, 2).masked_fill(unseen_BS11, 0)
            for x in (keys, values)
        )
        q, k, v = (x.transpose(1, 2) for x in (q, k_BSHE, v_BSHE))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_BS[:, None, None], enable_gqa=True
        )
        out: Tensor = attention.o_proj(y.transpose(1, 2).flatten(2))
        return out


def _is_single(one: Fed) -> bool:
    return len(one.tokens) == 1 and len(one.rows) == 1


def _rows_of_both(fed: Sequence[Fed], singles: int) -> Tensor:
    """Where each wanted row is, behind each other the rows of single tokens and of the rest."""
    found: list[int] = []
    single, rest = 0, singles
    for one in fed:
        if _is_single(one):
            found.append(single)
            single += 1
        else:
            found += range(rest, rest + len(one.rows))
            rest += len(one.rows)
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def best_token(logits_BV: Tensor) -> Tensor:
    """Where each row's largest logit is, the first of equals; -1 where it is not a finite number.

    In two steps, since a device looks through one row with a small part of its processors.
    """
    B, V = logits_BV.shape
    pieces = _PIECES if V % _PIECES == 0 else 1
    top_BP, inside_BP = logits_BV.view(B, pieces, -1).max(2)
    piece_B1 = top_BP.argmax(1, keepdim=True)
    best_B1 = piece_B1 * (V // pieces) + inside_BP.gather(1, piece_B1)
    return torch.where(top_BP.gather(1, piece_B1).isfinite(), best_B1, -1)[:, 0]


def _up(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
