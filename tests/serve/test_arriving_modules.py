"""Models that are read block by block for programs that run modules: on accelerators, and where the
fused program does not suit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lezero.compress.quantize.gguf import load_gguf_blocks
from lezero.compress.quantize.modules import quantized_layers
from lezero.compress.quantize.weights import PackedWeight
from lezero.core import device
from lezero.core.errors import ConfigError, NumericsError
from lezero.models import arriving, load_gguf, load_hf, save_hf
from lezero.models.arriving import Arriving, arriving_hf
from lezero.serve import opening
from lezero.serve.arriving import Fetch, room_on
from lezero.serve.opening import _scheme, open_program, program_of
from lezero.serve.plain import PlainProgram
from tests.serve.models import small
from tests.serve.test_opening import logits, written

CPU = torch.device("cpu")


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    found = {name: x.detach() for name, x in model.named_parameters()}
    for name, layer in quantized_layers(model).items():
        parts = layer.weight.parts()
        found |= {f"{name}/{i}": x for i, x in enumerate(parts) if x is not None}
    return found


def same(found: Any, expected: Any) -> None:
    """The same weights, bit for bit, where they should be, and so the same answers."""
    assert type(found) is type(expected)
    assert found.description == expected.description
    assert found.weight_bytes == expected.weight_bytes
    ours, theirs = weights_of(found._model), weights_of(expected._model)
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert one.dtype == theirs[name].dtype
        assert one.device == theirs[name].device == found.place
        assert torch.equal(one, theirs[name]), name
    assert torch.equal(logits(found), logits(expected))


@pytest.fixture
def in_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused program suits no model, as on an accelerator."""
    monkeypatch.setattr(opening, "_fuses", lambda *_: False)


@pytest.mark.usefixtures("in_modules", "without_accelerator")
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_folder_becomes_what_the_whole_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any, dtype: torch.dtype
) -> None:
    for name, changes in {"tied": {"tied": True}, "qwen2": {"attention_bias": "qkv"}}.items():
        save_hf(small(**changes).to(dtype), tmp_path / name)
        expected = program_of(load_hf(tmp_path / name), weights)
        with monkeypatch.context() as patch:
            patch.setattr(opening, "open_model", lambda *_: pytest.fail("read as a whole"))
            found, _ = open_program(tmp_path / name, weights)
        assert isinstance(found, PlainProgram)
        same(found, expected)


@pytest.mark.usefixtures("in_modules", "without_accelerator")
def test_a_file_becomes_what_the_whole_model_does(tmp_path: Path) -> None:
    path = written(tmp_path, "F16", tied=False)
    for weights in ("int8", "int4"):
        found, _ = open_program(path, weights)
        same(found, program_of(load_gguf(path), weights))


@pytest.mark.usefixtures("in_modules", "without_accelerator")
@pytest.mark.parametrize("weights", ["auto", "bf16", "fp32"])
def test_what_does_not_become_smaller_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any
) -> None:
    save_hf(small(), tmp_path)
    monkeypatch.setattr(arriving, "_copy", lambda *_: pytest.fail("read in parts"))
    found, _ = open_program(tmp_path, weights)
    assert isinstance(found, PlainProgram)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_parts_are_cast_as_they_come(
    tmp_path: Path, given: torch.dtype, dtype: torch.dtype | None
) -> None:
    save_hf(small(qk_norm=True).to(given), tmp_path)
    found = Fetch(arriving_hf(tmp_path), None, CPU, dtype).whole()
    expected = load_hf(tmp_path, dtype)
    same(PlainProgram(found), PlainProgram(expected))
    assert found.rope.cos_TP.dtype == torch.float32
    ids = torch.arange(40)[None] % 50
    assert torch.equal(found(ids), expected(ids))


def _held(model: Any) -> int:
    """Bytes that the model's weights take now."""
    wide = sum(x.nbytes for x in model.parameters() if not x.is_meta)
    packed = [x.weight for x in quantized_layers(model).values()]
    return wide + sum(x.nbytes for x in packed if isinstance(x, PackedWeight))


@pytest.mark.parametrize(
    ("weights", "bits", "dtype"),
    [
        ("bf16", 16, torch.bfloat16),
        ("fp32", 32, torch.float32),
        ("int8", 8, None),
        ("int4", 4, None),
    ],
)
def test_room_for_what_is_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any, bits: int, dtype: Any
) -> None:
    save_hf(small(layers=6, dim=128, ffn=512, vocab=64).bfloat16(), tmp_path)
    source = arriving_hf(tmp_path)
    seen: list[int] = []
    real = Fetch.__call__

    def call(self: Fetch, index: int | None) -> None:
        before = _held(source.model)
        inside = "layers." if index is None else f"layers.{index}."
        part = [
            x
            for name, x in source.model.named_parameters()
            if name.startswith(inside) == (index is not None)
        ]
        one = dtype.itemsize if dtype is not None else 2
        seen.append(before + sum(x.numel() * one for x in part))
        real(self, index)

    monkeypatch.setattr(Fetch, "__call__", call)
    scheme = _scheme(source.model, weights)
    asked = room_on(source, bits, scheme, dtype)
    model = Fetch(source, scheme, CPU, dtype).whole()
    one = 128 * 512  # numbers of the largest matrix, of which two become one
    most = max(*seen, _held(model))
    # 16 bits: what becomes one; fewer: codes, packed twice
    beside = {4: one + 2 * 0.5625 * one, 8: one + 2 * one, 16: 2 * 2 * one, 32: 0}[bits]
    assert len(seen) == 7
    assert most <= asked < 1.01 * (most + beside)


@pytest.mark.usefixtures("in_modules", "without_accelerator")
def test_room_is_asked_for_before_values_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hf(small().bfloat16(), tmp_path)
    source = arriving_hf(tmp_path)
    needed = room_on(source, 4, _scheme(source.model, "int4"), None)
    monkeypatch.setattr(opening.room, "free_memory", lambda: needed)
    open_program(tmp_path, "int4")
    monkeypatch.setattr(opening.room, "free_memory", lambda: needed - 1)
    monkeypatch.setattr(arriving, "_copy", lambda *_: pytest.fail("values were read"))
    with pytest.raises(ConfigError, match=r"'int4'; those of .* as they arrive, but only .* free;"):
        open_program(tmp_path, "int4")


@pytest.mark.usefixtures("without_accelerator")
@pytest.mark.parametrize(
    ("weights", "kinds"), [("fp32", None), ("int4", {"attn_v": "Q8_0", "ffn_up": "F16"})]
)
def test_room_for_a_file_that_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any, kinds: Any
) -> None:
    path = written(tmp_path, "Q4_1", kinds=kinds, tied=False, dim=256, heads=4, head_dim=64)
    asked: list[int] = []
    monkeypatch.setattr(opening, "_need", lambda needed, *_: asked.append(needed))
    open_program(path, weights)
    if weights == "fp32":
        model: Any = load_gguf(path)
        takes, beside = sum(x.nbytes for x in model.parameters()), 4
    else:
        model = load_gguf_blocks(path)
        takes, beside = _held(model), 3
    takes += beside * 256 * 256  # numbers of the largest matrix
    assert takes * 0.98 < asked[-1] < takes * 1.02


@pytest.mark.usefixtures("in_modules", "without_accelerator")
def test_a_layer_that_cannot_be_rounded_is_named(tmp_path: Path) -> None:
    model = small()
    model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    save_hf(model, tmp_path)
    with pytest.raises(NumericsError, match=r"'layers\.1\.mlp\.down_proj'"):
        open_program(tmp_path, "int8")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_each_part_goes_to_the_device_before_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A device whose numbers are nowhere stands in for one."""
    if kind == "folder":
        save_hf(small(layers=3), tmp_path)
    path = tmp_path if kind == "folder" else written(tmp_path, "F16", tied=False)
    monkeypatch.setattr(device, "device", lambda: torch.device("meta"))
    free = 1 << 40
    monkeypatch.setattr(device, "memory_free", lambda _=None: free)
    here: list[int] = []
    real = Arriving.fill_

    def fill_(self: Arriving, part: Any) -> None:
        real(self, part)
        here.append(sum(x.numel() for x in self.model.parameters() if not x.is_meta))
        assert here[-1] == sum(x.numel() for x in part.parameters())

    monkeypatch.setattr(Arriving, "fill_", fill_)
    program, _ = open_program(path, "auto")
    assert isinstance(program, PlainProgram)
    assert program.place.type == "meta"
    assert len(here) == 1 + program.config.layers
    assert {x.dtype for x in program._model.parameters()} == {torch.bfloat16}
    assert program._model.rope.cos_TP.dtype == torch.float32
    free = 2 * sum(here) - 1
    with pytest.raises(
        ConfigError, match=r"'auto'; .* free on meta; take weights='int8' or 'int4', a smaller"
    ):
        open_program(path, "auto")
    assert len(here) == 1 + program.config.layers


@pytest.mark.skipif(device.accelerator() is None, reason="needs an accelerator")
@pytest.mark.parametrize("weights", ["auto", "bf16", "fp32", "int8", "int4"])
def test_an_accelerator_gets_what_it_got_from_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        save_hf(small(tied=True).to(dtype), tmp_path / str(dtype))
        loaded = load_hf(tmp_path / str(dtype), torch.float32 if weights == "fp32" else None)
        expected = program_of(opening._placed(loaded, weights), weights)
        with monkeypatch.context() as patch:
            patch.setattr(opening, "open_model", lambda *_: pytest.fail("read as a whole"))
            found, _ = open_program(tmp_path / str(dtype), weights)
        same(found, expected)


@pytest.mark.skipif(device.accelerator() is None, reason="needs an accelerator")
def test_an_accelerator_without_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hf(small().bfloat16(), tmp_path)
    needed = room_on(arriving_hf(tmp_path), 8, None, None)
    monkeypatch.setattr(device, "memory_free", lambda _=None: needed - 1)
    with pytest.raises(ConfigError, match=r"'int8'; .* are free on .*; take weights='int4'"):
        open_program(tmp_path, "int8")
