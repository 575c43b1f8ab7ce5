import errno
import os
import shutil
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lezero.core.errors import ConfigError, CorruptError, FileError
from lezero.files import (
    generation,
    list_generations,
    read_documents,
    read_generation,
    reading,
    tensor_bytes,
    tensorfile,
    write_generation,
    write_tensor_file,
)
from lezero.files.tensorfile import DTYPES

FILE = "tensors-00000.safetensors"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    plain = (x.resolve_conj().resolve_neg() for x in (a, b))
    a, b = (x.clone(memory_format=torch.contiguous_format) for x in plain)
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(generation, "CHUNK", 1024)
    monkeypatch.setattr(tensorfile, "CHUNK", 1024)


def tensors_of(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "model/w": torch.randn(40, 30, generator=g),
        "model/b": torch.randn(7, generator=g).bfloat16(),
        "optimizer/w/step": torch.tensor(3.0),
        "random/torch": torch.randint(0, 256, (100,), generator=g, dtype=torch.uint8),
    }


shapes = st.lists(st.integers(0, 5), max_size=3)
names = st.text(min_size=1, max_size=12)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    spec=st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=6),
    documents=st.dictionaries(names, json_values, max_size=3),
    step=st.integers(0, 10**12),
)
def test_round_trip_of_any_tensors_and_documents(tmp_path_factory, spec, documents, step):
    tensors = {}
    for name, (code, shape) in spec.items():
        count = int(torch.tensor(shape).prod()) if shape else 1
        raw = torch.randint(0, 256, (count * DTYPES[code].itemsize,), dtype=torch.uint8)
        if code == "BOOL":
            raw = raw % 2
        tensors[name] = raw.view(DTYPES[code]).view(shape)
    path = write_generation(
        tmp_path_factory.mktemp("g"), step, tensors=tensors, documents=documents
    )
    read = read_generation(path)
    assert read.step == step
    assert read.documents == documents == read_documents(path)
    assert read.tensors.keys() == tensors.keys()
    assert all(same_bits(read.tensors[name], tensors[name]) for name in tensors)


def test_views_tied_and_overlapping_tensors_keep_their_values(tmp_path):
    base, square = torch.arange(24.0).reshape(4, 6), torch.randn(4, 4)
    turned = torch.randn(3, dtype=torch.complex64)
    tensors = {
        "a": base,
        "tied": base,
        "transposed": base.t(),
        "row": base[1],
        "strided": base[::2, ::3],
        "expanded": base[:1].expand(5, 6),
        "parameter": torch.nn.Parameter(base.clone()),
        "square": square,
        "square transposed": square.t(),
        "bits": square.view(torch.int32),
        "complex": turned,
        "conjugate": turned.conj(),
        "negative": turned.conj().imag,
        "one negative": turned[:1].conj().imag,
        "one of a column": base[:1, 2],
    }
    read = read_generation(write_generation(tmp_path, 1, tensors=tensors, documents={})).tensors
    assert all(same_bits(read[name], tensors[name].detach()) for name in tensors)
    assert read["tied"].data_ptr() == read["a"].data_ptr()
    assert tensor_bytes({"a": base, "tied": base}) == 96


def test_other_programs_read_the_tensor_files(tmp_path):
    tensors = tensors_of()
    path = write_generation(tmp_path, 1, tensors=tensors, documents={})
    assert sorted(os.listdir(path)) == ["manifest.json", FILE]
    read = load_file(path / FILE)
    assert all(same_bits(read[name], tensors[name]) for name in tensors)
    write_tensor_file(tmp_path / "out.safetensors", tensors)
    read = load_file(tmp_path / "out.safetensors")
    assert all(same_bits(read[name], tensors[name]) for name in tensors)
    assert sorted(os.listdir(tmp_path)) == ["out.safetensors", "step-00000001"]


def test_many_files_chunks_and_threads(tmp_path, monkeypatch, small_chunks):
    monkeypatch.setattr(generation, "FILE_BYTES", 4000)
    monkeypatch.setattr(reading, "_INLINE", 0)
    tensors = {f"t{i}": torch.randn(i * 100) for i in range(12)}
    path = write_generation(tmp_path, 1, tensors=tensors, documents={})
    assert len(os.listdir(path)) > 4
    for threads in (1, 3):
        read = read_generation(path, threads=threads).tensors
        assert all(same_bits(read[name], tensors[name]) for name in tensors)
    picked = read_generation(path, select=lambda name: name == "t5").tensors
    assert list(picked) == ["t5"]


def test_some_rows_are_read_of_a_tensor_in_parts(tmp_path, small_chunks):
    """120 bytes a row: chunks begin in the middle of rows."""
    whole, made, path = torch.randn(50, 30), tmp_path / "made", tmp_path / "step-00000001"
    made.mkdir()
    parts = [
        generation.write_part(
            *(made, f"{start}-", {"w": whole[start:stop]}),
            {"w": generation.Slice((50, 30), start)},
        )
        for start, stop in ((0, 20), (20, 50))
    ]
    generation.commit_parts(made, path, 1, parts, {})
    for rows in ((0, 50), (3, 17), (13, 29), (20, 21), (41, 50), (7, 7)):
        read = read_generation(path, rows=lambda name, shape, rows=rows: rows).tensors["w"]
        assert same_bits(read, whole[slice(*rows)])
    for rows in ((2, 51), (-3, -1), (5, 2)):
        with pytest.raises(ConfigError, match=f"rows: got {rows[0]} to {rows[1]} of 'w'"):
            read_generation(path, rows=lambda name, shape, rows=rows: rows)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        ([1, 2], "got list"),
    ],
)
def test_what_cannot_be_stored_is_named_and_leaves_nothing(tmp_path, value, text):
    with pytest.raises(FileError, match=f"'model/x'.*{text}"):
        write_generation(tmp_path, 1, tensors={"model/x": value}, documents={})
    with pytest.raises(FileError, match=r"document 'state'\.lr: nan"):
        write_generation(tmp_path, 1, tensors={}, documents={"state": {"lr": float("nan")}})
    with pytest.raises(FileError, match="step -1"):
        write_generation(tmp_path, -1, tensors={}, documents={})
    assert os.listdir(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    write_generation(tmp_path, 5, tensors=tensors_of(1), documents={"n": 1})
    path = write_generation(tmp_path, 5, tensors=tensors_of(2), documents={"n": 2})
    read = read_generation(path)
    assert read.documents == {"n": 2}
    assert same_bits(read.tensors["model/w"], tensors_of(2)["model/w"])
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_list_ignores_everything_else(tmp_path):
    for step in (100, 3, 123456789):
        write_generation(tmp_path, step, tensors={}, documents={})
    (tmp_path / "step-00000007").write_text("a file")
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-00000008").symlink_to(tmp_path / "step-00000003")
    found = [path.name for path in list_generations(tmp_path)]
    assert found == ["step-00000003", "step-00000100", "step-123456789"]
    assert list_generations(tmp_path / "none") == []


def test_leftovers_of_dead_writers_go_and_living_ones_stay(tmp_path):
    from lezero.files import folder

    dead = tmp_path / f".tmp-step-00000001-{folder._machine()}-{folder._boot()}-1-0123abcd"
    dead.mkdir()
    (dead / "part").write_text("x")
    with folder.aside(tmp_path, "alive") as alive:
        write_generation(tmp_path, 2, tensors={}, documents={})
        assert alive.is_dir()
        assert not dead.exists()
    assert os.listdir(tmp_path) == ["step-00000002"]


# Damage: one flipped bit anywhere, cut, grown, zeroed, missing, swapped.


@pytest.fixture
def two(tmp_path, small_chunks):
    first = write_generation(tmp_path, 1, tensors=tensors_of(1), documents={"state": {"a": 1}})
    second = write_generation(tmp_path, 2, tensors=tensors_of(2), documents={"state": {"a": 2}})
    return first, second


def test_any_flipped_bit_is_detected(two):
    _, path = two
    generator = torch.Generator().manual_seed(7)
    for name in ("manifest.json", FILE):
        raw = (path / name).read_bytes()
        for at in torch.randint(len(raw) * 8, (300,), generator=generator).tolist():
            flipped = bytearray(raw)
            flipped[at // 8] ^= 1 << at % 8
            (path / name).write_bytes(flipped)
            with pytest.raises(FileError, match=name):
                read_generation(path)
        (path / name).write_bytes(raw)
    read_generation(path)


def test_damage_names_file_tensor_and_place(two):
    _, path = two
    raw = bytearray((path / FILE).read_bytes())
    at = raw.index(tensors_of(2)["model/w"][20, 0].numpy().tobytes())
    raw[at] ^= 1
    (path / FILE).write_bytes(raw)
    with pytest.raises(CorruptError, match=rf"{FILE}: tensor 'model/w' is damaged .*chunk 3 of 5"):
        read_generation(path)
    assert "random/torch" in read_generation(path, select=lambda n: "random" in n).tensors


def test_truncated_grown_and_zeroed_files(two):
    _, path = two
    raw = (path / FILE).read_bytes()
    for size in (0, 1, 7, 100, len(raw) // 2, len(raw) - 1):
        (path / FILE).write_bytes(raw[:size])
        with pytest.raises(CorruptError, match=f"{FILE}.*tensor '.*cut off"):
            read_generation(path)
    (path / FILE).write_bytes(raw + b"\0")
    with pytest.raises(CorruptError, match="changed afterwards"):
        read_generation(path)
    (path / FILE).write_bytes(raw[:-64] + bytes(64))
    with pytest.raises(CorruptError, match="tensor 'random/torch'"):
        read_generation(path)
    with open(path / FILE, "wb") as file:
        file.truncate(len(raw))
    with pytest.raises(CorruptError, match="header"):
        read_generation(path)


def test_missing_and_swapped_files(two):
    first, second = two
    for name in (FILE, "manifest.json"):
        kept = (second / name).read_bytes()
        (second / name).write_bytes((first / name).read_bytes())
        with pytest.raises(CorruptError, match=name):
            read_generation(second)
        (second / name).unlink()
        with pytest.raises(CorruptError, match=f"{name}.*missing"):
            read_generation(second)
        (second / name).write_bytes(kept)
    shutil.rmtree(second)
    shutil.copytree(first, second)
    with pytest.raises(CorruptError, match="belongs to step 1, not to 2"):
        read_generation(second)


@pytest.mark.parametrize("begin", [0, 1])
def test_a_disk_that_fails_to_read_is_damage(two, monkeypatch, begin):
    """So that an older generation, which may be good, is tried."""
    real = os.preadv

    def failing(descriptor, buffers, at):
        if (at > 0) == begin:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CorruptError, match=rf"{FILE}.*cannot be read \(Input/output error"):
        read_generation(two[1])


def test_links_and_devices_are_never_opened(two):
    _, path = two
    (path / FILE).rename(path / "real")
    (path / FILE).symlink_to("real")
    with pytest.raises(CorruptError, match="symbolic link"):
        read_generation(path)
    (path / FILE).unlink()
    os.mkfifo(path / FILE)
    with pytest.raises(CorruptError, match="not a regular file"):
        read_generation(path)
    with pytest.raises(FileError, match="no such generation"):
        read_generation(path.parent / "step-00000099")


def test_everything_is_on_the_disk_before_the_generation_has_its_name(tmp_path, monkeypatch):
    done = []

    def noted(call, name):
        def wrapped(first, *rest):
            done.append(name(first))
            return call(first, *rest)

        return wrapped

    def opened(descriptor):
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noted(os.fsync, opened))
    monkeypatch.setattr(os, "rename", noted(os.rename, lambda source: "named"))
    write_generation(tmp_path, 1, tensors=tensors_of(), documents={})
    before, after = done[: done.index("named")], done[done.index("named") + 1 :]
    assert {FILE, "manifest.json"} <= set(before[:-1])
    assert before[-1].startswith(".tmp-")
    assert after == [tmp_path.name]


# Disk full.


def test_disk_full_before_writing_says_so(tmp_path, monkeypatch):
    write_generation(tmp_path, 1, tensors=tensors_of(), documents={})
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize, f_blocks = 0, real.f_frsize, real.f_blocks

    monkeypatch.setattr(generation.os, "statvfs", lambda path: Full)
    with pytest.raises(FileError, match="disk is full: 4,918 bytes"):
        write_generation(tmp_path, 2, tensors=tensors_of(), documents={})
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize(("number", "text"), [(errno.ENOSPC, "disk is full"), (errno.EIO, "error")])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_write_that_fails_midway_leaves_nothing(tmp_path, monkeypatch, number, text, call):
    write_generation(tmp_path, 1, tensors=tensors_of(), documents={})

    def fail(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(FileError, match=text):
        write_generation(tmp_path, 2, tensors=tensors_of(), documents={})
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["step-00000001"]
    read_generation(tmp_path / "step-00000001")


def test_a_really_full_disk(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small disk needs root")
    try:
        monkeypatch.setattr(generation, "check_space", lambda root, needed: None)
        small = {"model/w": torch.randn(30_000)}
        write_generation(disk, 1, tensors=small, documents={})
        with pytest.raises(FileError, match="disk is full"):
            write_generation(disk, 2, tensors={"model/w": torch.randn(60_000)}, documents={})
        assert os.listdir(disk) == ["step-00000001"]
        assert same_bits(
            read_generation(disk / "step-00000001").tensors["model/w"], small["model/w"]
        )
        write_generation(disk, 3, tensors={"model/w": torch.randn(10_000)}, documents={})
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="cannot be made"):
        write_generation(tmp_path / "file" / "root", 1, tensors={}, documents={})
