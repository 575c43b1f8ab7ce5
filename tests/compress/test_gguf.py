"""Models out of GGUF files with the files' own blocks for weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lezero.compress.quantize.gguf import kept_share, load_gguf_blocks
from lezero.compress.quantize.modules import quantized_layers
from lezero.compress.quantize.weights import PackedWeight
from lezero.core import ledger
from lezero.core.errors import FileError
from lezero.models import Transformer, TransformerConfig, load_gguf
from lezero.models.gguf_header import read_gguf_header

pytest.importorskip("gguf")
from tests.models.test_gguf import CONFIG, write

MIXED = {"attn_v": "F16", "ffn_down": "Q8_0", "token_embd": "Q8_0"}
Write = Callable[..., Path]


@pytest.fixture
def file(tmp_path: Path) -> Write:
    def make(kind: str, kinds: Any = None, **changes: object) -> Path:
        config = TransformerConfig.parse({**CONFIG.to_dict(), **changes})
        return write(tmp_path / "a.gguf", Transformer(config, seed=1), kind, kinds=kinds)

    return make


def weight_of(model: Transformer, name: str) -> torch.Tensor:
    weight: Any = model.get_submodule(name).weight
    found: torch.Tensor = (
        weight.decode(torch.float32) if hasattr(weight, "decode") else weight.detach()
    )
    return found


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_every_matrix_holds_what_the_file_does(kind: str, file: Write) -> None:
    """Queries and keys, whose rows lie in another order there, too."""
    path = file(kind, tied=False)
    plain, kept = load_gguf(path).requires_grad_(False), load_gguf_blocks(path)
    layers = quantized_layers(kept)
    assert len(layers) == 2 * 7 + 2
    assert ledger.applied(kept) == ("quantize_",)
    for name, layer in layers.items():
        assert isinstance(layer.weight, PackedWeight)
        assert (layer.weight.group, layer.weight.grid.bits) == (32, 8 if kind == "Q8_0" else 4)
        wanted = plain.get_submodule(name).weight
        error = (layer.weight.decode(torch.float32) - wanted).abs().max() / wanted.abs().max()
        assert float(error) <= (5e-4 if kind == "Q4_1" else 0)
    tokens = torch.arange(20)[None]
    assert torch.allclose(kept(tokens), plain(tokens), atol=2e-3)


@pytest.mark.parametrize("others_int8", [False, True])
def test_what_lies_in_other_types_stays_or_becomes_int8(others_int8: bool, file: Write) -> None:
    path = file("Q4_1", MIXED, attention_bias="qkv")
    plain = load_gguf(path).requires_grad_(False)
    kept = load_gguf_blocks(path, others_int8=others_int8)
    forms = {n: (x.weight.grid.bits, x.weight.group) for n, x in quantized_layers(kept).items()}  # type: ignore[attr-defined]
    assert forms["embed_tokens"] == forms["layers.0.mlp.down_proj"] == (8, 32)
    assert forms["layers.1.mlp.up_proj"] == (4, 32)
    assert forms.get("layers.0.self_attn.v_proj") == ((8, 0) if others_int8 else None)
    for name in ("layers.0.self_attn.v_proj", "layers.0.mlp.down_proj"):
        wanted = plain.get_submodule(name).weight
        error = (weight_of(kept, name) - wanted).abs().max() / wanted.abs().max()
        assert float(error) <= (5e-3 if others_int8 and "v_proj" in name else 0)
    bias = kept.get_submodule("layers.0.self_attn.v_proj").bias
    assert isinstance(bias, torch.nn.Parameter)
    assert not any(x.is_meta for x in [*kept.parameters(), *kept.buffers()])


def test_shares_of_a_file(file: Write) -> None:
    assert kept_share(file("Q4_0"), (4,)) == 1
    assert kept_share(file("Q4_0", {"ffn": "F16"}), (4, 8)) == pytest.approx(12288 / 30720)
    assert kept_share(file("Q5_1"), (4, 8)) == 0


@pytest.mark.parametrize("at", [0, 2])
def test_scales_that_are_not_finite_are_named(at: int, file: Write) -> None:
    path = file("Q4_1")
    header, data = read_gguf_header(path), bytearray(path.read_bytes())
    info = next(x for x in header.tensors if x.name == "blk.1.ffn_up.weight")
    start = header.data_start + info.offset + at
    for value in (np.inf, np.nan):
        data[start : start + 2] = np.float16(value).tobytes()
        path.write_bytes(data)
        with pytest.raises(FileError, match=r"blk\.1\.ffn_up\.weight holds NaN or infinity"):
            load_gguf_blocks(path)


def test_a_torn_file_is_told_apart(file: Write) -> None:
    path = file("Q4_1")
    whole = path.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(FileError, match=r"a\.gguf: (damaged|tensor|the file|not a GGUF)"):
            load_gguf_blocks(path)
