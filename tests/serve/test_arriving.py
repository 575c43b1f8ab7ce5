"""Models that are read block by block: what comes out, and what is in memory meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lezero.core import device, facts
from lezero.core.errors import ConfigError, CorruptError, FileError, NumericsError
from lezero.models import Transformer, TransformerConfig, arriving, load_gguf, load_hf, save_hf
from lezero.models.arriving import arriving_hf
from lezero.ops.decoder import native
from lezero.serve import fused, opening
from lezero.serve.arriving import room_for
from lezero.serve.fused import FusedProgram
from lezero.serve.opening import _scheme, open_program, program_of
from tests.serve.models import small
from tests.serve.test_opening import logits, written

pytestmark = [
    pytest.mark.skipif(not native.NATIVE.available(), reason="no kernel runs here"),
    pytest.mark.skipif(device.accelerator() is not None, reason="weights go to the accelerator"),
]
WEIGHTS: tuple[Any, ...] = ("auto", "bf16", "int8", "int4")
NAMES: dict[int, Any] = {16: "bf16", 8: "int8", 4: "int4"}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "qwen2": {"attention_bias": "qkv"},
    "qwen3": {"qk_norm": True},
    "one layer": {"layers": 1},
}


def same(found: Any, expected: Any) -> None:
    """The same weights, bit for bit, and so the same answers."""
    assert isinstance(found, FusedProgram)
    assert found.description == expected.description
    assert found.read_bytes == expected.read_bytes
    assert found.weight_bytes == expected.weight_bytes
    for one, two in zip(found._tensors(), expected._tensors(), strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    assert torch.equal(logits(found), logits(expected))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_folder_becomes_what_the_whole_model_does(
    tmp_path: Path, weights: Any, dtype: torch.dtype
) -> None:
    for name, changes in MODELS.items():
        save_hf(small(**changes).to(dtype), tmp_path / name)
        found, _ = open_program(tmp_path / name, weights)
        same(found, program_of(load_hf(tmp_path / name), weights))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_bf16_is_the_same_whatever_type_the_file_has(tmp_path: Path, name: str) -> None:
    """The table of words too, which was kept in fp32 where the head is another matrix."""
    model = small(**MODELS[name])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    save_hf(model, tmp_path / "fp32")
    save_hf(model.bfloat16(), tmp_path / "bf16")
    found, _ = open_program(tmp_path / "fp32", "bf16")
    same(found, open_program(tmp_path / "bf16", "bf16")[0])


@pytest.mark.parametrize(
    ("kind", "weights"),
    [*(("F16", x) for x in WEIGHTS), *(("Q8_0", x) for x in WEIGHTS[1:]), ("Q4_1", "int8")],
)
def test_a_file_becomes_what_the_whole_model_does(tmp_path: Path, weights: Any, kind: str) -> None:
    path = written(tmp_path, kind, tied=kind != "F16")
    assert not opening._keeps_blocks(path, weights)
    found, _ = open_program(path, weights)
    wide = None if weights.startswith("int") else torch.bfloat16
    same(found, program_of(load_gguf(path, matrices=wide), weights))


def test_weights_in_several_files_and_of_several_types(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_hf(small(layers=3), tmp_path / "one")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one").bfloat16()
    model.model.norm.float()
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for weights in WEIGHTS:
        found, _ = open_program(tmp_path / "many", weights)
        same(found, program_of(load_hf(tmp_path / "many"), weights))


def test_a_block_is_read_when_its_turn_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hf(small(layers=3), tmp_path)
    read: list[str] = []
    real = arriving._copy

    def copy(path: Path, name: str, mark: Any) -> Tensor:
        read.append(name)
        return real(path, name, mark)

    monkeypatch.setattr(arriving, "_copy", copy)
    there: list[list[int]] = []

    taken = fused._layer

    def layer(block: Any, x_blocks: bool) -> Any:
        names = [name.split(".")[2] for name in read if ".layers." in name]
        there.append(sorted({int(name) for name in names}))
        return taken(block, x_blocks)

    monkeypatch.setattr(fused, "_layer", layer)
    open_program(tmp_path, "int4")
    assert there == [[0], [0, 1], [0, 1, 2]]
    assert len(read) == len(set(read))


def _broken(root: Path, change: Any) -> None:
    tensors = load_file(root / "model.safetensors")
    change(tensors)
    save_file(tensors, root / "model.safetensors", {"format": "pt"})


LAST = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (lambda x: x.pop(LAST), FileError, "missing layers.1.mlp.down_proj.weight"),
        (lambda x: x.update({LAST: torch.zeros(3, 4)}), FileError, r"has shape \(3, 4\), config"),
        (lambda x: x.update(more=torch.zeros(2)), FileError, "unexpected more"),
        (lambda x: x.update({LAST: x[LAST].to(torch.int8)}), FileError, "convert it to fp32"),
        (
            lambda x: x[LAST].view(-1)[5:6].fill_(torch.nan),
            NumericsError,
            "'layers.1.mlp.down_proj'",
        ),
        (
            lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"] + 1}),
            FileError,
            "lm_head.weight differs from the embedding",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, kind: Any, told: str
) -> None:
    save_hf(small(tied=True), tmp_path)
    _broken(tmp_path, change)
    if kind is FileError:
        monkeypatch.setattr(arriving, "_copy", lambda *_: pytest.fail("values were read"))
    with pytest.raises(kind, match=told):
        open_program(tmp_path, "int8")


@pytest.mark.parametrize("part", ["embed_tokens", "layers.1"])
def test_a_part_in_fp64_comes_with_the_whole(tmp_path: Path, part: str) -> None:
    model = small(tied=True).bfloat16()
    model.get_submodule(part).double()
    save_hf(model, tmp_path)
    for weights in WEIGHTS:
        found, _ = open_program(tmp_path, weights)
        same(found, program_of(load_hf(tmp_path), weights))


def _replaced(path: Path) -> None:
    save_file(load_file(path), path.with_suffix(".new"), {"format": "pt"})
    path.with_suffix(".new").replace(path)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize("change", [_replaced, _cut, Path.unlink])
def test_a_file_that_changes_meanwhile_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    save_hf(small(), tmp_path)
    real, left = arriving._copy, [change]

    def copy(path: Path, name: str, mark: Any) -> Tensor:
        if ".layers.1." in name and left:
            left.pop()(path)
        return real(path, name, mark)

    monkeypatch.setattr(arriving, "_copy", copy)
    with pytest.raises(FileError, match=r"model\.safetensors: was replaced or removed while"):
        open_program(tmp_path, "int8")


def test_a_torn_file_is_said(tmp_path: Path) -> None:
    save_hf(small(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptError, match="not a whole safetensors file"):
        open_program(tmp_path, "int4")


def test_room_is_asked_for_before_values_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hf(small().bfloat16(), tmp_path)
    source = arriving_hf(tmp_path)
    schemes = {bits: _scheme(source.model, name) for bits, name in NAMES.items()}
    needs = {bits: room_for(source, bits, schemes[bits]) for bits in NAMES}
    assert needs[4] < needs[8] < needs[16]
    free = SimpleNamespace(available=0, limit=1 << 60)
    monkeypatch.setattr(facts, "memory", lambda: free)
    real = arriving._copy
    for weights, bits, smaller in (
        ("auto", 16, r"weights='int8' or 'int4', a smaller"),
        ("bf16", 16, r"weights='int8' or 'int4', a smaller"),
        ("int8", 8, r"weights='int4', a smaller"),
        ("int4", 4, r"a smaller"),
    ):
        free.available = needs[bits]
        monkeypatch.setattr(arriving, "_copy", real)
        open_program(tmp_path, weights)  # type: ignore[arg-type]
        free.available = needs[bits] - 1
        monkeypatch.setattr(arriving, "_copy", lambda *_: pytest.fail("values were read"))
        with pytest.raises(ConfigError, match=rf"'{weights}'; those of .* free; take {smaller}"):
            open_program(tmp_path, weights)  # type: ignore[arg-type]


DEEP = {"layers": 24, "ffn": 2048, "vocab": 8192}
WORDS = {"vocab": 98_304, "tied": True}
MEASURE = """
import re, sys
from lezero.memory.pool import give_back_free_blocks
from lezero.models.arriving import arriving_hf
from lezero.serve.arriving import room_for
from lezero.serve.opening import _scheme, open_program

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

warm, place, weights, bits = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
open_program(warm, weights)
give_back_free_blocks()
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
found, _ = open_program(place, weights)
peak = status("VmHWM") - before
source = arriving_hf(place)
print(peak, found.weight_bytes, room_for(source, bits, _scheme(source.model, weights)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("weights", "bits", "shape"), [("bf16", 16, WORDS), ("int8", 8, WORDS), ("int4", 4, DEEP)]
)
def test_the_peak_of_memory_is_what_stays_and_a_block(
    tmp_path: Path, weights: str, bits: int, shape: dict[str, Any]
) -> None:
    wide = {"dim": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 512}
    config = TransformerConfig.parse({**small().config.model_dump(), **wide, **shape})
    model = Transformer(config, seed=1).bfloat16()
    save_hf(model, tmp_path / "large")
    save_hf(small().bfloat16(), tmp_path / "small")
    whole = sum(x.nbytes for x in model.parameters())  # 209 and 99 MiB
    del model
    given = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    out = subprocess.run([*given, weights, str(bits)], capture_output=True, text=True, check=True)
    peak, stays, asked = map(int, out.stdout.split())
    slack = 32 << 20  # of the heap, of slabs of 32 MiB, of files' pages
    print(f"{weights}: stays {stays >> 20}, peak {peak >> 20}, asked {asked >> 20} MiB")
    assert stays < peak < asked + slack
    if bits < 16 and "layers" in shape:
        assert peak < whole
