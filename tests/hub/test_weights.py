"""What a file of weights may be, and that nothing in one is ever run."""

import json
import os
import pickle
import struct
import warnings

import pytest
import torch
from torch import nn

from lezero.core.errors import FileError
from lezero.hub.weights import read_weights


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.bin", "rename it to .pt"),
        ("model.ckpt", "training checkpoint is a pickle"),
        ("model.pkl", "can run code"),
        ("model.onnx", "holds a graph"),
        ("model.h5", "HDF5"),
        ("model.gguf", "load_gguf"),
        ("model.npz", "safetensors.numpy"),
        ("model.safetensors.index.json", "load_hf"),
        ("model.xyz", "unknown kind '.xyz'"),
        ("model", "unknown kind ''"),
        ("absent.pt", "no such file"),
        ("absent.safetensors", "no such file"),
        ("empty.pt", "is empty"),
        ("empty.safetensors", "is empty"),
    ],
)
def test_refused_with_the_reason(tmp_path, name, message):
    if not name.startswith("absent"):
        (tmp_path / name).write_bytes(b"" if name.startswith("empty") else b"x" * 100)
    with pytest.raises(FileError, match=message) as caught:
        read_weights(tmp_path / name)
    assert name in str(caught.value)


def test_a_folder(tmp_path):
    with pytest.raises(FileError, match=r"is a folder.*load_hf"):
        read_weights(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(FileError, match="no regular file"):
        read_weights(tmp_path / "model.pt")


@pytest.mark.parametrize("how", ["bare pickle", "torch.save", "legacy torch.save"])
def test_a_hostile_pickle_runs_nothing(tmp_path, how):
    path, marker = tmp_path / "model.pt", tmp_path / "was-run"
    if how == "bare pickle":
        path.write_bytes(pickle.dumps({"weight": Hostile(marker)}))
    else:
        new = how == "torch.save"
        torch.save({"w": Hostile(marker)}, path, _use_new_zipfile_serialization=new)
    with pytest.raises(FileError, match="refused") as caught:
        read_weights(path)
    assert not marker.exists()
    assert "weights_only=False" not in str(caught.value)
    assert "weights_only to False" not in str(caught.value)


def test_a_whole_module_is_named(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"'torch\.nn\.modules\.linear\.Linear'"):
        read_weights(tmp_path / "model.pt")


def test_torchscript_is_named(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save(str(tmp_path / "model.pt"))
    with pytest.raises(FileError, match="TorchScript archive, which holds code"):
        read_weights(tmp_path / "model.pt")


def test_the_old_torch_format_loads_too(tmp_path):
    state = nn.Linear(2, 2).state_dict()
    torch.save(state, tmp_path / "model.PT", _use_new_zipfile_serialization=False)
    assert torch.equal(read_weights(tmp_path / "model.PT")["weight"], state["weight"])


def test_a_checkpoint_of_several_things_names_the_part(tmp_path):
    torch.save({"step": 3, "model": nn.Linear(2, 2).state_dict()}, tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"weights seem to be under 'model'.*\['model'\]"):
        read_weights(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "thing", [[1, 2], torch.zeros(2), {"a": 3}, {1: torch.zeros(2)}, {"a": {}}]
)
def test_no_state_dict(tmp_path, thing):
    torch.save(thing, tmp_path / "model.pt")
    with pytest.raises(FileError, match="state dict"):
        read_weights(tmp_path / "model.pt")


def test_a_plain_pickle_is_refused_in_our_own_words(tmp_path):
    (tmp_path / "model.pt").write_bytes(pickle.dumps({"a": [1, 2]}))
    with pytest.raises(FileError, match="a pickle of something else") as caught:
        read_weights(tmp_path / "model.pt")
    assert "weights_only" not in str(caught.value)


def _safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"x",
        b"\xff" * 64,
        struct.pack("<Q", 1 << 60) + b"{}",
        _safetensors(b"{not json"),
        _safetensors({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 8),
        _safetensors({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, b"\0" * 8),
        _safetensors({"w": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8),
        pickle.dumps({}),
    ],
)
def test_broken_safetensors(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FileError, match=r"model\.safetensors: (is no valid|holds)"):
        read_weights(tmp_path / "model.safetensors")


@pytest.mark.parametrize("keep", [0.2, 0.9])
def test_a_file_cut_short(tmp_path, keep):
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(64, 64).state_dict(), path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(FileError, match="refused"):
        read_weights(path)


def test_a_flipped_bit_is_found_by_the_checksum_that_torch_writes(tmp_path):
    path = tmp_path / "model.pt"
    state = nn.Linear(64, 64).state_dict()
    torch.save(state, path)
    whole = path.read_bytes()
    at = whole.index(state["weight"].numpy().tobytes()) + 100
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(FileError, match="is damaged: the record 'model/data/0'"):
        read_weights(path)


def test_a_file_without_checksums_loads(tmp_path):
    state, before = nn.Linear(64, 64).state_dict(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(read_weights(tmp_path / "model.pt")["weight"], state["weight"])
