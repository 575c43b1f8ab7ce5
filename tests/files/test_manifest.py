"""Manifests made by a stranger: the digest is right, what they say is not."""

import json
import os
import tracemalloc

import pytest
import torch

from lezero.core.errors import CorruptError, FileError
from lezero.files import read_generation, seal, write_generation

FILE = "tensors-00000.safetensors"


@pytest.fixture
def forge(tmp_path):
    path = write_generation(tmp_path, 1, tensors={"a": torch.zeros(4)}, documents={})
    body = json.loads((path / "manifest.json").read_text())
    del body["digest"]

    def forged(change, format=1):
        change(body)
        fields = {key: value for key, value in body.items() if key != "format"}
        (path / "manifest.json").write_bytes(seal(format, fields))
        return path

    return forged


def entry(body):
    return body["tensors"]["a"]


def part(body):
    return body["tensors"]["a"]["parts"][0]


FORGERIES = {
    "kind": (lambda b: entry(b).update(kind="packed"), "'a': of kind 'packed'"),
    "parts twice": (lambda b: entry(b)["parts"].append(part(b)), "overlap, leave rows out"),
    "part no object": (lambda b: entry(b).update(parts=[1]), "no JSON object"),
    "no parts": (lambda b: entry(b).update(parts=[]), "do not hold all"),
    "offset alone": (lambda b: part(b).update(offset=[0]), "'shape' should be list"),
    "negative offset": (lambda b: part(b).update(offset=[-1], shape=[4]), "lies nowhere"),
    "columns": (lambda b: part(b).update(offset=[0, 1], shape=[4, 1]), "otherwise than by rows"),
    "rows left out": (lambda b: part(b).update(offset=[1], shape=[3]), "leave rows out"),
    "too few rows": (lambda b: part(b).update(offset=[0], shape=[3]), "do not hold all"),
    "too many rows": (lambda b: part(b).update(offset=[0], shape=[2**70]), "wrong number|hold all"),
    "transform": (lambda b: b["files"][FILE].update(transforms=["aes"]), "through .'aes'"),
    "dtype": (lambda b: entry(b).update(dtype="F2"), "dtype 'F2'"),
    "negative shape": (lambda b: entry(b).update(shape=[-1]), "no list of sizes"),
    "huge shape": (lambda b: entry(b).update(shape=[2**40, 2**40]), "too large"),
    "huge empty shape": (lambda b: entry(b).update(shape=[0, 2**40, 2**40]), "too large"),
    "many dims": (lambda b: entry(b).update(shape=[1] * 100), "no list of sizes"),
    "bool shape": (lambda b: entry(b).update(shape=[True]), "no list of sizes"),
    "larger": (lambda b: entry(b).update(shape=[5]), "do not fill"),
    "begin": (lambda b: part(b).update(begin=8), "overlaps or leaves a gap"),
    "gap": (lambda b: part(b).update(begin=part(b)["begin"] + 8), "overlaps or leaves a gap"),
    "negative begin": (lambda b: part(b).update(begin=-8), "out of range"),
    "file": (lambda b: part(b).update(file="/etc/passwd"), "not listed"),
    "digest": (lambda b: part(b).update(chunks=["zz"]), "64 hexadecimal"),
    "no digest": (lambda b: part(b).update(chunks=[]), "wrong number of digests"),
    "chunk": (lambda b: b.update(chunk=0), "'chunk' is out of range"),
    "vast chunk": (lambda b: b.update(chunk=1 << 40), "'chunk' is out of range"),
    "tiny chunk": (lambda b: b.update(chunk=1), "wrong number"),
    "size": (lambda b: b["files"][FILE].update(size=10**15), "do not fill"),
    "header": (lambda b: b["files"][FILE].update(header=10**15), "header is longer"),
    "step": (lambda b: b.update(step="1"), "'step' should be int"),
    "tensors": (lambda b: b.update(tensors=[]), "'tensors' should be dict"),
    "tensor": (lambda b: b["tensors"].update(b=None), "tensor 'b': expected"),
    "no documents": (lambda b: b.pop("documents"), "'documents' should be dict"),
    "link to none": (lambda b: b["tensors"].update(b={"kind": "same", "as": "x"}), "no plain"),
    "link to link": (lambda b: b["tensors"].update(b={"kind": "same", "as": "b"}), "no plain"),
    "uncovered": (lambda b: b["tensors"].clear(), "do not fill"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_refused(forge, name):
    change, text = FORGERIES[name]
    with pytest.raises(FileError, match=text):
        read_generation(forge(change))


@pytest.mark.parametrize(
    "name",
    [
        *("../../etc/passwd", "/etc/passwd", "..", "sub/tensors-0.safetensors", "manifest.json"),
        "tensors-0.safetensors/../../etc/passwd",
    ],
)
def test_names_that_lead_elsewhere_are_never_opened(forge, name):
    def change(body):
        body["files"][name] = body["files"].pop(FILE)
        part(body)["file"] = name

    with pytest.raises(CorruptError, match="never opened"):
        read_generation(forge(change))


def test_a_later_format_is_refused_by_version(forge):
    with pytest.raises(FileError, match=r"format 2 .* read by LeZero 0\.9\.0 or newer"):
        read_generation(forge(lambda b: b.update(readable_from="0.9.0"), format=2))


def test_unknown_fields_are_left_alone(forge):
    assert read_generation(forge(lambda b: b.update(signature="x"))).step == 1


def test_too_many_tensors_are_refused_at_once(forge, monkeypatch):
    monkeypatch.setattr("lezero.files.manifest._MAX_TENSORS", 1000)

    def change(body):
        body["tensors"] = {str(i): None for i in range(1001)}

    with pytest.raises(CorruptError, match="more than 1,000 tensors"):
        read_generation(forge(change))


def test_a_manifest_may_be_larger_than_other_sealed_files(tmp_path, monkeypatch):
    """Thousands of tensors of many ranks are more than those ever hold."""
    monkeypatch.setattr("lezero.files.sealed.LIMIT", 1000)
    tensors = {f"tensor {number}": torch.zeros(1) for number in range(10)}
    path = write_generation(tmp_path, 1, tensors=tensors, documents={})
    assert len(read_generation(path).tensors) == 10
    monkeypatch.setattr("lezero.files.manifest.LIMIT", 1000)
    with pytest.raises(FileError, match=r"at most 1,000 are allowed.*from fewer ranks"):
        write_generation(tmp_path, 2, tensors=tensors, documents={})


def test_a_manifest_that_is_too_large_is_not_read(forge):
    path = forge(lambda b: None)
    os.truncate(path / "manifest.json", 2**40)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="larger than 536,870,912 bytes"):
            read_generation(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_claimed_header_of_a_terabyte_is_refused_without_allocating(forge):
    """A sparse file is as long as it likes, for nothing."""

    def change(body):
        body["files"][FILE].update(size=2**40 + 16, header=2**40)
        part(body)["begin"] = 2**40

    path = forge(change)
    os.truncate(path / FILE, 2**40 + 16)
    with pytest.raises(CorruptError, match="its header is longer than 268,435,456 bytes"):
        read_generation(path)


def test_a_claimed_terabyte_is_refused_without_allocating(forge):
    size = 2**40 // 4

    def change(body):
        entry(body)["shape"] = [size]
        part(body)["chunks"] = ["0" * 64] * (2**40 // body["chunk"])
        body["files"][FILE]["size"] = body["files"][FILE]["header"] + 2**40

    with pytest.raises(CorruptError, match="were written"):
        read_generation(forge(change))
