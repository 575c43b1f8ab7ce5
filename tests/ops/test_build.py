"""The builder of native libraries: once, whole, and with a clear message when it cannot."""

import ctypes
import errno
import json
import multiprocessing
import os
import re
import shutil
import stat
import subprocess
import sys
from collections import Counter

import pytest

from lezero.ops import build as builder
from lezero.ops.build import BuildError, Source, build

needs_compiler = pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("c++")), reason="no C and C++ compiler here"
)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "number.h").write_text("#define NUMBER 42\n")
    (folder / "answer.h").write_text('#include "../shared/number.h"\n#define ANSWER NUMBER\n')
    (folder / "answer.c").write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    return Source(folder / "answer.c")


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A function that gives the machine other compilers, of this text."""

    def given(text):
        folder = tmp_path / "tools"
        folder.mkdir(exist_ok=True)
        for name in ("cc", "c++"):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return given


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def answer(path):
    return ctypes.CDLL(str(path)).answer()


@needs_compiler
@pytest.mark.parametrize(
    ("header", "text"),
    [("sources/answer.h", "#define ANSWER 43\n"), ("shared/number.h", "#define NUMBER 43\n")],
)
def test_builds_once_and_again_when_a_header_changes(source, tmp_path, monkeypatch, header, text):
    cache = tmp_path / "cache"
    first = build("answer", [source], cache)
    assert answer(first) == 42
    compiled = []
    real = builder._compile
    monkeypatch.setattr(builder, "_compile", lambda *a: compiled.append(1) or real(*a))
    assert build("answer", [source], cache) == first
    assert not compiled
    (tmp_path / header).write_text(text)
    second = build("answer", [source], cache)
    assert second != first
    assert answer(second) == 43
    assert Counter(p.suffix for p in cache.iterdir()) == {".json": 4, ".lock": 3, ".so": 2, ".o": 2}


@needs_compiler
def test_libraries_share_what_is_compiled(source, tmp_path, monkeypatch):
    cache, compiled = tmp_path / "cache", []
    real = builder._write
    monkeypatch.setattr(builder, "_write", lambda c, out: compiled.append(out) or real(c, out))

    def times(name, *sources):
        compiled.clear()
        assert answer(build(name, sources, cache)) == 42
        return sum(out.endswith(".o") for out in compiled)

    more = source.path.with_name("more.c")
    more.write_text("int more(void) { return 1; }\n")
    assert times("answer", source) == 1
    assert times("longer", source, Source(more)) == 1
    assert times("others", source, Source(more, ("-DX=1",))) == 1
    kept = next(cache.glob("object-answer-*.o"))
    kept.write_bytes(b"not what was compiled")
    assert times("damaged", source) == 1
    kept.chmod(0o666)
    assert times("open", source) == 1
    assert mode(kept) & 0o022 == 0


@needs_compiler
def test_flags_and_torch_are_part_of_the_key(source, tmp_path, monkeypatch):
    one = build("answer", [source], tmp_path)
    other = build("answer", [Source(source.path, ("-DX=1",))], tmp_path)
    monkeypatch.setattr(builder.torch, "__version__", "9.9.9")
    third = build("answer", [source], tmp_path)
    assert len({one, other, third}) == 3


def _build_in_child(source, cache, results):
    calls = []
    real = builder._compile
    builder._compile = lambda *a: calls.append(1) or real(*a)
    results.put((str(build("answer", [source], cache)), len(calls)))


@needs_compiler
def test_of_several_processes_one_builds(source, tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    children = [
        context.Process(target=_build_in_child, args=(source, tmp_path / "cache", results))
        for _ in range(3)
    ]
    for child in children:
        child.start()
    found = [results.get() for _ in children]
    for child in children:
        child.join()
    assert len({path for path, _ in found}) == 1
    assert sum(count for _, count in found) == 1


@needs_compiler
def test_a_compilers_error_is_told_and_leaves_nothing(source, tmp_path):
    source.path.write_text("int answer(void) { return nonsense; }\n")
    with pytest.raises(BuildError, match="nonsense"):
        build("answer", [source], tmp_path / "cache")
    assert {p.suffix for p in (tmp_path / "cache").iterdir()} == {".lock"}


@needs_compiler
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_library_that_was_cut_off_is_built_again(source, tmp_path, share):
    path = build("answer", [source], tmp_path / "cache")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert build("answer", [source], tmp_path / "cache") == path
    assert answer(path) == 42


def test_without_a_compiler(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C compiler found"):
        build("answer", [source], tmp_path)


@needs_compiler
def test_what_was_built_serves_where_the_compilers_have_gone(source, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    path = build("answer", [source], cache)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build("answer", [source], cache) == path
    with pytest.raises(BuildError, match="no C compiler found"):
        build("answer", [Source(source.path, ("-DX=1",))], cache)
    path.write_bytes(b"")
    with pytest.raises(BuildError, match="no C compiler found"):
        build("answer", [source], cache)


@needs_compiler
def test_what_was_built_serves_from_a_folder_that_is_only_read(
    source, tmp_path, tools, monkeypatch
):
    path = build("answer", [source], tmp_path / "cache")
    tools(f'#!/bin/sh\nexec {shutil.which("cc")} "$@"\n')  # another compiler, by its place

    def locked(place):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(place))

    monkeypatch.setattr(builder, "_lock", locked)
    assert build("answer", [source], tmp_path / "cache") == path
    with pytest.raises(BuildError, match=r"cannot keep .* \(Read-only file system"):
        build("answer", [Source(source.path, ("-DX=1",))], tmp_path / "cache")


@needs_compiler
def test_a_folder_that_cannot_be_made(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"library answer in .* \(File exists: .*/file\)$"):
        build("answer", [source], tmp_path / "file" / "cache")


@needs_compiler
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not a program\n", r"cc cannot be started \(Exec format error\)"),
        ("#!/nowhere/python\n", r"cc cannot be started \(No such file or directory\)"),
        ("#!/bin/sh\necho 'error: damaged' >&2\nexit 3\n", "cc ended with status 3: .*damaged"),
    ],
)
def test_a_compiler_that_cannot_start_is_none(source, tmp_path, tools, text, said):
    cache = tmp_path / "cache"
    path = build("answer", [source], cache)
    tools(text)
    assert build("answer", [source], cache) == path
    with pytest.raises(BuildError, match=said):
        build("answer", [Source(source.path, ("-DX=1",))], cache)


@needs_compiler
def test_a_compiler_that_writes_nothing_is_named(source, tmp_path, tools, caplog):
    cache = tmp_path / "cache"
    path = build("answer", [source], cache)
    tools("#!/bin/sh\necho 'cc 1.0'\n")
    assert build("answer", [source], cache) == path  # what another compiler built serves
    said = r"wrote no object-answer-\w+\.o; what was built before, of the same, serves"
    assert re.search(said, caplog.text)
    with pytest.raises(BuildError, match=r"tools/cc ended without an error, but wrote no object-"):
        build("answer", [Source(source.path, ("-DX=1",))], cache)


def test_a_source_that_is_not_there(source, tmp_path):
    source.path.unlink()
    with pytest.raises(BuildError, match=r"sources of answer \(No such file .*answer\.c\)"):
        build("answer", [source], tmp_path / "cache")


@needs_compiler
def test_a_header_may_be_in_any_encoding(source, tmp_path):
    header = source.path.parent / "answer.h"
    header.write_bytes(b"/* caf\xe9 */\n" + header.read_bytes())
    assert answer(build("answer", [source], tmp_path / "cache")) == 42


@needs_compiler
def test_what_lies_in_the_way_is_removed(source, tmp_path):
    cache = tmp_path / "cache"
    path = build("answer", [source], cache)
    for place in (path, path.with_suffix(".json")):
        place.unlink()
        (place / "full").mkdir(parents=True)
        (cache / "answer.building").write_text("")
        assert build("answer", [source], cache) == path
        assert answer(path) == 42
    assert Counter(p.suffix for p in cache.iterdir()) == {".json": 2, ".lock": 2, ".so": 1, ".o": 1}


@needs_compiler
def test_a_lock_that_cannot_be_taken_is_named(source, tmp_path):
    (tmp_path / "cache" / "answer.lock").mkdir(parents=True)
    with pytest.raises(BuildError, match=r"\(Is a directory: .*answer\.lock\)"):
        build("answer", [source], tmp_path / "cache")


needs_users = pytest.mark.skipif(not hasattr(os, "getuid"), reason="no user ids here")


@needs_compiler
@needs_users
def test_a_strangers_folder_is_refused(source, tmp_path, monkeypatch):
    owner = tmp_path.stat().st_uid
    if owner == 0:
        owner = 12345
        os.chown(tmp_path, owner, -1)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(BuildError, match="belongs to another user"):
        build("answer", [source], tmp_path)


@needs_compiler
@needs_users
def test_what_is_made_is_not_open_to_others(source, tmp_path):
    before = os.umask(0)
    try:
        path = build("answer", [source], tmp_path / "cache" / "native")
    finally:
        os.umask(before)
    made = [path, path.with_suffix(".json"), path.parent, path.parent.parent]
    assert [mode(one) & 0o022 for one in made] == [0] * 4


@needs_compiler
@needs_users
def test_a_folder_of_ours_is_closed_to_others(source, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    path = build("answer", [source], cache)
    monkeypatch.setattr(builder, "_compile", lambda *a: pytest.fail("built"))
    cache.chmod(0o2775)
    assert build("answer", [source], cache) == path
    assert mode(cache) == 0o2755
    cache.chmod(0o1777)
    assert build("answer", [source], cache) == path
    assert mode(cache) == 0o1777


@needs_compiler
@needs_users
@pytest.mark.parametrize("there", [0o775, 0o757])
def test_a_folder_that_stays_open_to_others_is_refused(source, tmp_path, monkeypatch, there):
    cache = tmp_path / "cache"
    build("answer", [source], cache)
    cache.chmod(there)
    monkeypatch.setattr(os, "chmod", lambda *a, **more: None)  # as some disks take it
    for path in (os.environ["PATH"], str(tmp_path)):
        monkeypatch.setenv("PATH", path)
        with pytest.raises(BuildError, match=rf"cache .*mode 0{there:o}.*chmod go-w.*LEZERO_CACHE"):
            build("answer", [source], cache)


def a_strangers(path):
    if os.getuid():
        pytest.skip("only root gives files away")
    os.chown(path, 12345, -1)


def opened(path):
    path.chmod(mode(path) | stat.S_IWGRP)


def linked(path):
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


@needs_compiler
@needs_users
@pytest.mark.parametrize("kind", [".so", ".json"])
@pytest.mark.parametrize("change", [a_strangers, opened, linked])
def test_a_file_that_others_can_have_written_is_not_loaded(
    source, tmp_path, monkeypatch, change, kind
):
    """Whoever writes both can make the note fit."""
    cache = tmp_path / "cache"
    path = build("answer", [source], cache)
    whole = path.read_bytes()
    path.write_bytes(b"foreign")
    note = json.loads(path.with_suffix(".json").read_bytes())
    note["sha256"] = builder._hash(b"foreign")
    path.with_suffix(".json").write_text(json.dumps(note))
    change(path.with_suffix(kind))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(BuildError, match="no C compiler found"):
            build("answer", [source], cache)
    assert build("answer", [source], cache).read_bytes() == whole
    assert build("answer", [source], cache).stat().st_uid == os.getuid()


@needs_compiler
@needs_users
def test_a_lock_that_is_a_link_spoils_nothing(source, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (tmp_path / "mine").write_text("kept")
    (cache / "answer.lock").symlink_to(tmp_path / "mine")
    build("answer", [source], cache)
    assert (tmp_path / "mine").read_text() == "kept"


def test_bytes_are_made_once_for_each_origin(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "cache_folder", lambda: tmp_path)
    made = []
    for _ in range(3):
        for origin in ("one", "other"):
            found = builder.kept("kernel", origin, lambda o=origin: made.append(o) or o.encode())
            assert found == origin.encode()
    assert made == ["one", "other"]
    for path in (tmp_path / "native").glob("*.bin"):
        path.write_bytes(b"damaged")
    assert builder.kept("kernel", "one", lambda: b"again") == b"again"


def test_bytes_that_cannot_be_kept_are_made_each_time(tmp_path, monkeypatch, caplog):
    (tmp_path / "native").write_text("in the way")
    monkeypatch.setattr(builder, "cache_folder", lambda: tmp_path)
    assert [builder.kept("kernel", "one", lambda: b"x") for _ in range(2)] == [b"x", b"x"]
    assert "built in each process" in caplog.text


def test_sources_are_read_as_they_are_written():
    """They hold "·" and "…", which the encoding of a locale may not."""
    code = (
        "from pathlib import Path\n"
        "from lezero.ops import build, decoder\n"
        "folder = Path(decoder.__file__).parent\n"
        "print(len(build._read([folder / 'avx512_layers.c', folder / 'registration.cpp'])))\n"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **plain}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) > 10
