"""What runs a model for the engine: rows of tokens in, logits out, over a cache of blocks.

Letters: T tokens of a step, R rows that logits are wanted of, V vocabulary, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.models import TransformerConfig
from lezero.serve.flight import Flight
from lezero.serve.likeliest import best_tokens

_MOST_ROWS = 256


@dataclass(frozen=True)
class Fed:
    """Tokens of one sequence that go through the model together.

    position: of the first of them. blocks: those of the sequence, from its beginning. rows: of
    which of the tokens logits are wanted, counted from the first of these. prompt: how many of
    them, from the first, are of a prompt, not of an answer, see `Program.prompts_apart`.
    """

    tokens: Sequence[int]
    position: int
    blocks: Sequence[int]
    rows: Sequence[int] = ()
    prompt: int = 0


class Program(ABC):
    """A model made ready to run: who makes one decides on weights and cache; the engine runs it.

    Rows do not depend on each other: the same tokens of a sequence give the same logits whatever
    else is in the step and however they are cut into chunks. `invariant` says whether bit for bit.
    """

    config: TransformerConfig
    """Of a model of `lezero.models`; other programs answer in its place what is asked below."""
    block_size: int
    most_tokens: int
    """Tokens of a step at most."""
    place: torch.device = torch.device("cpu")
    """Where weights and cache lie."""
    invariant: bool = False
    flies: bool = False
    """Whether `launch` can start steps."""
    shares: bool = True
    """Whether sequences that begin with the same tokens may hold the same blocks."""
    prompts_apart: bool = False
    """Whether tokens of a prompt go through the model in other number formats than those of an
    answer, which are fed one by one. Then blocks are shared only where tokens are of equal kind."""
    slow: str = ""
    """Why it is slower than others, for people."""
    description: str
    """Weights, cache and kernel in a few words, for people."""
    origin: str = ""
    """Where the weights' codes come from, for people; "" where the engine made them, or a folder
    holds them."""
    kv: str = ""
    """What keys and values are kept in: bf16, int8; "" where the model's own code keeps them."""
    kv_forms: tuple[str, ...] = ()
    """What `keep_kv` takes."""

    def keep_kv(self, form: str) -> None:
        """Keeps keys and values in this form from the next `reserve` on.

        Raises `ConfigError` for a form that the program does not have.
        """
        if form not in self.kv_forms:
            raise ConfigError(
                f"kv: got {form!r}, which this model does not run with ({self.description}); take "
                "auto. int8 needs a CPU with kernels (lz doctor), the Llama family, and weights "
                "other than fp32"
            )
        self.kv = form

    @abstractmethod
    def reserve(self, blocks: int) -> None:
        """Makes the cache, of so many blocks; what it held is lost."""

    @abstractmethod
    def run(self, fed: Sequence[Fed]) -> Tensor:
        """fp32 logits (R, V) of the wanted rows, in order. Keys and values go into the blocks."""

    def best(self, fed: Sequence[Fed]) -> list[int]:
        """`run` where only the likeliest tokens are asked for: of each wanted row the one with the
        largest logit, the first of equals; -1 where that logit is not a finite number."""
        return best_tokens(self.run(fed))

    def steps_at_once(self, sequences: int, by_chance: bool = False) -> int:
        """How many steps of one token for each of so many sequences `follow` should take at most; 1
        where it takes none. by_chance: with `asked`."""
        return 1

    def follow(
        self, fed: Sequence[Fed], steps: int, asked: Tensor | None = None
    ) -> list[list[int]]:
        """`best` for one token of each sequence, then for the tokens that it found, and so on: of
        each step its tokens. The blocks have room for them. Fewer steps where logits are not finite
        numbers: the last one then has -1 for whose they are, of which `best` may know more.

        asked: what `lezero.ops.draw.draw_tokens` takes, fp64 (steps, sequences, 5): tokens are
        those that it draws, in place of the likeliest.
        """
        raise NotImplementedError

    def launch(
        self, fed: Sequence[Fed], after: Flight | None = None, rows: Sequence[int] = ()
    ) -> Flight | None:
        """Starts a step of one token a sequence and does not wait for it; None where this one can
        only be `run`. What is run later sees its keys and values.

        after: the flight launched right before, which may not have finished. Then sequence i takes
        its token from row `rows[i]` of it, in place of the one that is fed. Nothing was `run`
        between the two.
        """
        return None

    @abstractmethod
    def states(self, fed: Sequence[Fed]) -> Tensor:
        """The same, but for the final hidden states: fp32 (R, D), after the last norm."""

    @property
    def vocab(self) -> int:
        """Tokens that the model knows."""
        return self.config.vocab

    @property
    def dim(self) -> int:
        """Numbers of a hidden state."""
        return self.config.dim

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most. Where RoPE scaling depends on the length, all keys would be
        turned anew beyond some, so that those that are kept would be wrong."""
        return self.config.steady

    @property
    def why_longest(self) -> str:
        """What errors add about `longest`, where the model may reach further."""
        scaling = self.config.rope_scaling
        if scaling is not None and scaling.kind == "linear":
            return (
                f" (rope_scaling does not say whether its factor of {scaling.factor:g} is counted "
                "there; where it is not, raise max_position_embeddings in config.json)"
            )
        return ending(self.config)

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """What a block of the cache takes."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """What the weights take."""

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """Bytes of weights that one token reads."""

    @property
    def most_beside(self) -> int:
        """Tokens at most of a step in which answers run, which wait for it."""
        return self.most_tokens

    @property
    def product_forms(self) -> tuple[str, ...]:
        """Number formats in which products of prompts may run, as `profiler.Ceilings.gemm` names
        them."""
        return ("fp32", "bf16")

    @property
    def workspace_bytes(self) -> int:
        """What a step of most tokens takes beside weights and cache: states, and logits of as many
        rows as are wanted of it."""
        c, T = self.config, self.most_tokens
        wide = max((c.heads + 2 * c.kv_heads) * c.head_dim, 2 * c.ffn, c.dim)
        return (
            4 * T * (2 * c.dim + max(c.heads * c.head_dim, c.ffn) + 2 * wide)
            + 4 * min(T, _MOST_ROWS) * c.vocab
        )

    @property
    def products(self) -> int:
        """Weights that one token is multiplied with, the head left out."""
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return c.layers * c.dim * (2 * q + 2 * kv + 3 * c.ffn)

    @property
    def products_a_key(self) -> int:
        """Numbers of keys and values that one token is multiplied with for each token it sees."""
        c = self.config
        return 2 * c.layers * c.heads * c.head_dim

    @property
    def window(self) -> int | None:
        """How many tokens a token sees at most; None for all."""
        return self.config.sliding_window


def ending(config: TransformerConfig) -> str:
    """What a description says where sequences end before the model's own limit; else nothing."""
    if config.longest == config.steady:
        return ""
    return f", angles are others beyond {config.steady} tokens, which end it here"


def wanted_rows(fed: Sequence[Fed], dtype: torch.dtype = torch.int64) -> Tensor:
    """The rows of the step that logits are wanted of: (R,)."""
    found: list[int] = []
    first = 0
    for one in fed:
        found += [first + row for row in one.rows]
        first += len(one.tokens)
    return torch.tensor(found, dtype=dtype, device="cpu")


def split_prompts(fed: Sequence[Fed]) -> tuple[list[Fed], list[Fed], list[int]]:
    """What is of prompts, the rest, and where each wanted row, in order, lies among those of both,
    first of prompts, then of the rest."""
    parts: tuple[list[Fed], list[Fed]] = [], []
    wanted: list[tuple[int, int]] = []  # which part, and the row within it
    counts = [0, 0]
    for one in fed:
        cut = min(one.prompt, len(one.tokens))
        for kind, (first, last) in enumerate(((0, cut), (cut, len(one.tokens)))):
            if first == last:
                continue
            rows = [row - first for row in one.rows if first <= row < last]
            wanted += [(kind, counts[kind] + index) for index in range(len(rows))]
            counts[kind] += len(rows)
            tokens, position = one.tokens[first:last], one.position + first
            parts[kind].append(Fed(tokens, position, one.blocks, rows))
    return *parts, [row + counts[0] * kind for kind, row in wanted]


def block_table(fed: Sequence[Fed]) -> Tensor:
    """Blocks of each sequence, filled up with 0: int32 (sequences, most blocks)."""
    width = max(len(one.blocks) for one in fed)
    rows = [[*one.blocks, *[0] * (width - len(one.blocks))] for one in fed]
    return torch.tensor(rows, dtype=torch.int32, device="cpu")
