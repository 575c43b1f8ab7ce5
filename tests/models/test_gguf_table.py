"""Tables of a GGUF file's keys and tensors that no writer makes."""

import struct
from pathlib import Path

import pytest

from lezero.core.errors import CorruptError, FileError
from lezero.models import Transformer, load_gguf
from lezero.models.gguf_header import read_gguf_header

pytest.importorskip("gguf")
from tests.models import test_gguf
from tests.models.test_gguf import CONFIG, write

Q, K = "blk.1.attn_q.weight", "blk.1.attn_k.weight"


@pytest.fixture
def model() -> Transformer:
    return Transformer(CONFIG, seed=0)


@pytest.fixture
def file(model: Transformer, tmp_path: Path) -> Path:
    return write(tmp_path / "a.gguf", model, "Q8_0")


def renamed(file: Path, old: str, new: str) -> None:
    data = file.read_bytes()
    assert len(old) == len(new)
    assert data.count(old.encode()) == 1
    file.write_bytes(data.replace(old.encode(), new.encode()))


def change(file: Path, name: str, *, kind: int | None = None, offset: int | None = None) -> None:
    """Writes to a matrix's entry: name, two dims, kind, offset."""
    data = bytearray(file.read_bytes())
    at = data.index(name.encode()) + len(name) + 4 + 2 * 8
    if kind is not None:
        struct.pack_into("<I", data, at, kind)
    if offset is not None:
        struct.pack_into("<Q", data, at + 4, offset)
    file.write_bytes(data)


def offset_of(file: Path, name: str) -> int:
    return next(info.offset for info in read_gguf_header(file).tensors if info.name == name)


def test_a_tensor_that_comes_twice_is_named(file: Path) -> None:
    renamed(file, "blk.0.attn_q.weight", Q)
    with pytest.raises(CorruptError, match=rf"tensor {Q} for the second time"):
        read_gguf_header(file)


def test_a_key_that_comes_twice_is_named(file: Path) -> None:
    renamed(file, "llama.rope.freq_base", "general.architecture")
    with pytest.raises(CorruptError, match=r"the key general\.architecture for the second time"):
        read_gguf_header(file)


def test_a_tensor_beside_the_alignment_is_named(file: Path) -> None:
    offset = offset_of(file, K) + 4
    change(file, K, offset=offset)
    with pytest.raises(CorruptError, match=rf"{K} has offset {offset}, no multiple of 32"):
        load_gguf(file)


def test_tensors_that_share_bytes_are_named(file: Path) -> None:
    for offset in (offset_of(file, Q), offset_of(file, Q) + 32):
        change(file, K, offset=offset)
        with pytest.raises(CorruptError, match=rf"{K} begins at byte {offset} .*{Q} ends"):
            load_gguf(file)


def test_a_tensor_of_unknown_type_shares_no_bytes(file: Path) -> None:
    """How many it has is not known; whoever reads it says so."""
    change(file, K, kind=999, offset=offset_of(file, Q))
    with pytest.raises(FileError, match=rf"{K} has the unknown type 999"):
        load_gguf(file)


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj.weight", "norm.weight"])
def test_names_of_hugging_face_are_refused(
    name: str, model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of heads lie in another order there."""
    there = test_gguf.name_there
    monkeypatch.setattr(test_gguf, "name_there", lambda x: x if x == name else there(x))
    with pytest.raises(FileError, match=rf"unexpected '{name}' \(64,"):
        load_gguf(write(tmp_path / "a.gguf", model))
