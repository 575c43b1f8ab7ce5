"""All layers of a decoder in one call, over a cache of blocks. See `reference.py`.

Letters: T tokens of a step, C chunks (tokens of one sequence that follow each other), R rows that
logits are wanted of, V vocabulary, L layers, D width of the residual stream, H query heads, K
key-value heads, E width of a head, F width inside SwiGLU.

[Note: addresses]
A step of thirty layers reads six hundred tensors. Handing them to an op each time would cost a
tenth of a token's time, so `Decoder` writes their addresses into one tensor, once, and keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.decoder import reference
from lezero.ops.decoder.native import NATIVE
from lezero.ops.decoder.weights import Beginning, Ending, LayerWeights, Weight
from lezero.ops.draw import drawer
from lezero.ops.draw.native import NATIVE as DRAW

BLOCK = 16
"""Tokens of a cache block."""
MOST_TOKENS = 512
"""Tokens of a step at most."""
WIDEST_HEAD = 256
_NO_ROWS = torch.empty(0, dtype=torch.int32, device="cpu")
_NO_LOGITS = torch.empty(0, 0, device="cpu", dtype=torch.float32)
_NO_BEST = torch.empty(0, dtype=torch.int64, device="cpu")
_NOTHING_ASKED = torch.empty(0, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class Shape:
    """What all layers have in common. window: tokens that a token sees, itself included; 0: all."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    window: int = 0

    def problem(self) -> str:
        """Why the kernels cannot work on this shape, or ""."""
        if self.head_dim % 16 or self.head_dim > WIDEST_HEAD:
            return f"heads of width {self.head_dim}; kernels take multiples of 16 up to 256"
        return ""


Room = Callable[[int], Tensor]
"""Gives so many bytes, uint8, that nothing has been written to."""


def empty_room(size: int) -> Tensor:
    """As torch takes it."""
    return torch.empty(size, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class BlockCache:
    """Keys and values of all layers in blocks of 16 tokens, bf16 or int8.

    Both are (L, blocks, K, 16 E) in bf16, (L, blocks, K, 16 (E + 2)) in int8: codes, then the 16
    scales in bf16; [Note: blocks of keys and values] in cache.h. bits: 16 or 8.
    """

    keys: Tensor
    values: Tensor
    bits: int = 16

    @classmethod
    def empty(cls, layers: int, blocks: int, shape: Shape, bits: int = 16) -> BlockCache:
        """Memory is taken as blocks are used."""
        dtype = torch.bfloat16 if bits == 16 else torch.int8
        last = block_bytes(shape.head_dim, bits) // dtype.itemsize
        sizes = (layers, blocks, shape.kv_heads, last)
        keys, values = (torch.empty(sizes, dtype=dtype, device="cpu") for _ in range(2))
        return cls(keys, values, bits)


def block_bytes(head_dim: int, bits: int) -> int:
    """What a block of keys (and one of values) takes, a head: a scale of two bytes with codes."""
    return BLOCK * (2 * head_dim if bits == 16 else head_dim + 2)


class Decoder:
    """The layers of one model. Keeps the weights, whose addresses it hands to the kernels.

    ending: what `logits` needs; `follow` needs a beginning too. room: for scratch. Raises
    `ConfigError` for matrices that do not fit the shape, and for one with a `problem`.
    """

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[LayerWeights],
        ending: Ending | None = None,
        beginning: Beginning | None = None,
        room: Room = empty_room,
    ) -> None:
        if shape.problem():
            raise ConfigError(shape.problem())
        self.shape, self.layers = shape, tuple(layers)
        for index, layer in enumerate(self.layers):
            _check(shape, layer, index)
        rows = [layer.row() for layer in self.layers]
        self._table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self.ending = ending
        if ending is not None:
            V = ending.head.out_features
            _check_matrix("head", ending.head, V, shape.dim)
        end = [] if ending is None else ending.row()
        self._end = torch.tensor(end, dtype=torch.int64, device="cpu")
        self.beginning = beginning
        begin = [] if beginning is None else beginning.rows.row()
        self._begin = torch.tensor(begin, dtype=torch.int64, device="cpu")
        self.panels = 0
        """How kernels read the weights of few tokens, see `settle_panels`."""
        self._sizes: dict[tuple[int, int, int, bool], int] = {}
        self._take_room, self._room = room, torch.empty(0, dtype=torch.uint8, device="cpu")

    def run(
        self,
        x_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        chunks: Tensor,
        table: Tensor,
        cache: BlockCache,
        rounded: bool = False,
    ) -> None:
        """Takes x_TD, the residual stream of at most `MOST_TOKENS` tokens, through all layers.

        x_TD: fp32 (T, D), changed in place. rounded: layers of 8 and 4 bits multiply as
        `linear_rounded` does, inputs rounded to bf16; only where `rounds`.
        cos, sin: fp32 (positions, E / 2). chunks: int32 (C, 3), each the first row, how many, and
        the position of the first; rows follow each other. table: int32 (C, blocks), the cache
        blocks of each sequence from its beginning. Keys and values of these tokens go into them.
        """
        if not NATIVE.available():
            reference.run(self.shape, self.layers, x_TD, cos, sin, chunks, table, cache, rounded)
            return
        given = (x_TD, self._table, cos, sin, chunks, table, cache.keys, cache.values)
        self._run(given, _NO_ROWS, _NO_LOGITS, _NO_BEST, cache.bits, rounded)

    def logits(
        self,
        x_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        chunks: Tensor,
        table: Tensor,
        cache: BlockCache,
        rows: Tensor,
        best: bool = False,
        rounded: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """fp32 logits (R, V) of rows of x_TD (int32, each once), by the `ending`.

        best: also where each row's largest logit is, the first of equals, int64 (R,); -1 where any
        logit is not finite. The rest as `run`; what is left in x_TD is nobody's.
        """
        assert self.ending is not None
        if not NATIVE.available():
            reference.run(self.shape, self.layers, x_TD, cos, sin, chunks, table, cache, rounded)
            return reference.logits(self.shape, self.ending, x_TD[rows], best)
        logits_RV = torch.empty(
            len(rows), self.ending.head.out_features, dtype=torch.float32, device="cpu"
        )
        given = (x_TD, self._table, cos, sin, chunks, table, cache.keys, cache.values)
        best_R = torch.empty(len(rows) if best else 0, dtype=torch.int64, device="cpu")
        self._run(given, rows, logits_RV, best_R, cache.bits, rounded)
        return logits_RV, best_R

    def follow(
        self,
        tokens: Sequence[int],
        steps: int,
        cos: Tensor,
        sin: Tensor,
        chunks: Tensor,
        table: Tensor,
        cache: BlockCache,
        asked: Tensor | None = None,
    ) -> list[list[int]]:
        """The most likely token after each of `tokens`, the one after that, and so on: for each
        step its tokens, in one call. A step with a -1, which `logits` explains, is the last one.

        chunks: of one token each, in order; table: blocks for `steps` tokens more. asked: what
        `draw_tokens` takes, fp64 (steps, tokens, 5); tokens are then those that it would draw. The
        rest as `logits`. Only where `follows`, and with `asked` where `draws`.
        """
        assert self.beginning is not None
        assert self.ending is not None
        T, V = len(tokens), self.ending.head.out_features
        x_TD = torch.empty(T, self.shape.dim, dtype=torch.float32, device="cpu")
        best = torch.empty(steps, T, dtype=torch.int64, device="cpu")
        logits_TV = torch.empty(T, V, dtype=torch.float32, device="cpu")
        tokens_T = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        rows_T = torch.arange(T, dtype=torch.int32, device="cpu")
        aside = -(-T * self.shape.dim * 2 // 64) * 64
        taken = NATIVE.ops.follow(
            *(tokens_T, self._begin, x_TD, self._table, cos, sin, chunks, table),
            *(cache.keys, cache.values, self._room_for(T, T, V, aside), self._end),
            *(rows_T, logits_TV, best),
            *((_NOTHING_ASKED, 0) if asked is None else (asked.contiguous(), drawer())),
            *self._numbers(cache.bits),
            self.beginning.dtype == torch.bfloat16,
        )
        found: list[list[int]] = best[:taken].tolist()
        return found

    @property
    def follows(self) -> bool:
        """Whether `follow` works here."""
        kinds = (torch.float32, torch.bfloat16)
        known = self.beginning is not None and self.beginning.dtype in kinds
        return known and self.ending is not None and NATIVE.available()

    @property
    def rounds(self) -> bool:
        """Whether `rounded` works here, and differs: with AMX, and layers of 8 or 4 bits."""
        matrices = (w for y in self.layers for w in (y.qkv, y.out, y.gate_up, y.down))
        few = any(weight.bits != 16 for weight in matrices)
        return few and self._by_amx

    @property
    def most_tokens(self) -> int:
        """Tokens of a step that suit this machine. With AMX workers take their own tokens where
        there are many (`workers.h`); for other kernels no more than before were tried."""
        return MOST_TOKENS if self._by_amx else MOST_TOKENS // 2

    @property
    def _by_amx(self) -> bool:
        return NATIVE.available() and NATIVE.kernel_name() == "amx"

    @property
    def draws(self) -> bool:
        """Whether `follow` can draw by chance here."""
        return self.follows and DRAW.available()

    def _run(
        self,
        given: tuple[Tensor, ...],
        rows: Tensor,
        logits_RV: Tensor,
        best_R: Tensor,
        cache_bits: int,
        rounded: bool,
    ) -> None:
        room = self._room_for(len(given[0]), len(rows), logits_RV.shape[1], rounded=rounded)
        NATIVE.ops.run(
            *(*given, room, self._end, rows, logits_RV, best_R), *self._numbers(cache_bits), rounded
        )

    def _numbers(self, cache_bits: int) -> tuple[Any, ...]:
        s = self.shape
        return s.heads, s.head_dim, s.ffn, s.eps, s.window, cache_bits, self.panels

    def _room_for(self, T: int, R: int, V: int, aside: int = 0, *, rounded: bool = False) -> Tensor:
        """Scratch, aligned to 64 bytes, that every call takes anew."""
        s = self.shape
        key = (T, R, torch.get_num_threads(), rounded)
        if key not in self._sizes:
            sizes = (s.dim, s.heads, s.kv_heads, s.head_dim, s.ffn, V)
            given = (T, R, self._table, self._end, *sizes, rounded)
            self._sizes[key] = NATIVE.ops.scratch(*given) + 64
        size = self._sizes[key] + aside
        if self._room.numel() < size:
            self._room = self._take_room(size)
        return self._room[-self._room.data_ptr() % 64 :]


def _check(shape: Shape, layer: LayerWeights, index: int) -> None:
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    wanted = {
        "qkv": (layer.qkv, qkv, shape.dim),
        "out": (layer.out, shape.dim, shape.heads * shape.head_dim),
        "gate_up": (layer.gate_up, 2 * shape.ffn, shape.dim),
        "down": (layer.down, shape.dim, shape.ffn),
    }
    for name, (weight, N, K) in wanted.items():
        _check_matrix(f"layer {index}, {name}", weight, N, K)


def _check_matrix(what: str, weight: Weight, N: int, K: int) -> None:
    if (weight.out_features, weight.in_features) != (N, K):
        raise ConfigError(
            f"{what}: {weight.out_features} × {weight.in_features}, expected {N} × {K}"
        )
    weight.check(what)
