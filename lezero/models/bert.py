"""BERT encoders from Hugging Face folders, run without padding.

The tokens of all texts lie in one row (N, D), so that no layer sees a token of padding; attention
alone knows texts (`ops/packed_attention`). Parameters have the names of transformers' `BertModel`,
so its files and quantized folders of it load. Source: Devlin et al., 2018 (arXiv:1810.04805).

Shapes: N tokens of all texts, D width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lezero.core.errors import FileError
from lezero.core.paths import expand_home
from lezero.models.huggingface import FLOATS, read_json, stored_tensors, weight_files
from lezero.ops.packed_attention import packed_attention

_FIELDS = {
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "context": "max_position_embeddings",
    "types": "type_vocab_size",
}
_LIMITS = {"vocab": 1 << 24, "context": 1 << 20, "layers": 1000}
_ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


@dataclass(frozen=True)
class BertConfig:
    """Shape of an encoder. approximate: of GELU, as torch names it."""

    vocab: int
    dim: int
    layers: int
    heads: int
    ffn: int
    context: int
    types: int
    eps: float
    approximate: str

    def to_dict(self) -> dict[str, Any]:
        """As `config.json` has it."""
        named = {theirs: getattr(self, ours) for ours, theirs in _FIELDS.items()}
        act = "gelu" if self.approximate == "none" else "gelu_new"
        rest = {"layer_norm_eps": self.eps, "hidden_act": act, "architectures": ["BertModel"]}
        return {"model_type": "bert", **named, **rest}


def bert_config(data: dict[str, Any], source: str) -> BertConfig:
    """The shape that a `config.json` tells; `FileError` for what is missing or not built."""
    if data.get("model_type") != "bert":
        raise FileError(f"{source}: model_type {data.get('model_type')!r}, supported is bert")
    found: dict[str, int] = {}
    for ours, theirs in _FIELDS.items():
        value = data.get(theirs, 2 if ours == "types" else None)
        most = _LIMITS.get(ours, 1 << 16)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise FileError(f"{source}: {theirs} is {value!r}, allowed is 1 to {most}")
        found[ours] = value
    if found["dim"] % found["heads"]:
        raise FileError(f"{source}: hidden_size is no multiple of num_attention_heads")
    act, kind = data.get("hidden_act", "gelu"), data.get("position_embedding_type", "absolute")
    if data.get("is_decoder"):
        raise FileError(f"{source}: is_decoder is set, but supported are encoders alone")
    if act not in _ACTIVATIONS or kind != "absolute":
        raise FileError(
            f"{source}: hidden_act {act!r} with {kind!r} positions is not supported; supported are "
            f"encoders with absolute positions and {', '.join(_ACTIVATIONS)}"
        )
    eps = data.get("layer_norm_eps", 1e-12)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise FileError(f"{source}: layer_norm_eps is {eps!r}, allowed is between 0 and 1")
    return BertConfig(**found, eps=eps, approximate=_ACTIVATIONS[act])


class Bert(nn.Module):
    """The encoder. `forward` takes packed texts. has_pooler: whether files of it hold a pooler,
    which is not used."""

    def __init__(self, config: BertConfig, has_pooler: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        if has_pooler:
            self.pooler = nn.ModuleDict({"dense": nn.Linear(config.dim, config.dim)})

    def forward(self, tokens_N: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states (N, D) of texts that lie one after the other; lengths: tokens of each."""
        lengths = [int(n) for n in lengths]
        each = [torch.arange(n, device=tokens_N.device) for n in (0, *lengths)]
        positions_N = torch.cat(each)
        x_ND = self.embeddings(tokens_N, positions_N)
        layers: Any = self.encoder.layer
        for layer in layers:
            x_ND = layer(x_ND, lengths)
        return x_ND


class _Embeddings(nn.Module):
    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab, c.dim)
        self.position_embeddings = nn.Embedding(c.context, c.dim)
        self.token_type_embeddings = nn.Embedding(c.types, c.dim)
        self.LayerNorm = nn.LayerNorm(c.dim, c.eps)

    def forward(self, tokens_N: Tensor, positions_N: Tensor) -> Tensor:
        kind = self.token_type_embeddings(torch.zeros_like(tokens_N[:1]))
        x = self.word_embeddings(tokens_N) + kind + self.position_embeddings(positions_N)
        normed: Tensor = self.LayerNorm(x)
        return normed


class _SelfAttention(nn.Module):
    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.query, self.key, self.value = (nn.Linear(c.dim, c.dim) for _ in range(3))

    def forward(self, x_ND: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = self.query(x_ND), self.key(x_ND), self.value(x_ND)
        return packed_attention(q, k, v, lengths, self.heads)


class _Projected(nn.Module):
    """A linear layer, the residual and its norm."""

    def __init__(self, inputs: int, c: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, c.dim)
        self.LayerNorm = nn.LayerNorm(c.dim, c.eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dense(x) + residual)
        return normed


class _Layer(nn.Module):
    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.approximate = c.approximate
        self.attention = nn.ModuleDict({"self": _SelfAttention(c), "output": _Projected(c.dim, c)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(c.dim, c.ffn)})
        self.output = _Projected(c.ffn, c)

    def forward(self, x_ND: Tensor, lengths: Sequence[int]) -> Tensor:
        mixed = self.attention["self"](x_ND, lengths)
        x_ND = self.attention["output"](mixed, x_ND)
        wide = F.gelu(self.intermediate["dense"](x_ND), approximate=self.approximate)
        found: Tensor = self.output(wide, x_ND)
        return found


def flops(config: BertConfig, tokens: int) -> float:
    """Floating-point operations of one text of so many tokens."""
    c = config
    linear = 2.0 * (4 * c.dim * c.dim + 2 * c.dim * c.ffn)
    return tokens * c.layers * (linear + 4.0 * c.dim * tokens)


def load_bert(folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> Bert:
    """The encoder in a Hugging Face folder, on the CPU; `dtype` casts its weights.

    Heads and poolers in the file are passed over; norms may have the names of the first release
    (`gamma`, `beta`). Errors: `FileError` for a shape that is not
    built, and for tensors that are missing or misshapen; `CorruptError` for a torn file.
    """
    root = Path(expand_home(folder))
    path = root / "config.json"
    with torch.device("meta"):
        model = Bert(bert_config(read_json(path), str(path)))
    wanted = {name: tuple(x.shape) for name, x in model.named_parameters()}
    loaded: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, shape, read in stored_tensors(weight_files(root), "bert."):
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name not in wanted:
            continue
        tensor = read()
        if shape != wanted[name] or tensor.dtype not in FLOATS:
            found = f"{tensor.dtype} {shape}"
            problems.append(f"{name} is {found}, expected floats of {wanted[name]}")
        loaded[name] = tensor.to(dtype or tensor.dtype, copy=True)
    problems += [f"missing {name}" for name in wanted if name not in loaded]
    if problems:
        raise FileError(f"{root}: the weights do not fit: {'; '.join(problems[:8])}")
    model.load_state_dict(loaded, assign=True)
    return model.eval()
