"""Kernels are chosen by instruction set, and one that cannot be built is told once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lezero.core import facts
from lezero.ops import build as builder
from lezero.ops import native as ops_native
from lezero.ops.build import BuildError, Source
from lezero.ops.native import Kernel, Native, natives

FAST = Kernel("fast", frozenset({"avx2", "fma"}), (Path("fast.c"),), ("-mavx2",))
GENERIC = Kernel("generic", frozenset(), (Path("generic.c"),))


def native(*kernels: Kernel, folder: Path = Path(".")) -> Native:
    return Native("trial", kernels, registration=folder / "r.cpp", otherwise="the formula runs")


def test_kernels_are_written_for_compilers_of_ubuntu_22_and_debian_11() -> None:
    """gcc before 12 and clang before 15 know no _Float16 on x86."""
    files = {file for one in natives() for kernel in one.kernels for file in kernel.files}
    texts = {file: file.read_text() for each in files for file in each.parent.glob("*.[ch]")}
    assert not [file for file, text in texts.items() if "_Float16" in text]


def test_the_fastest_kernel_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_native, "instruction_sets", lambda: ("avx2", "fma", "avx512f"))
    assert native(FAST, GENERIC).kernel_name() == "fast"
    monkeypatch.setattr(ops_native, "instruction_sets", lambda: ("avx2",))
    assert native(FAST, GENERIC).kernel_name() == "generic"
    assert native(FAST).kernel_name() == ""


def test_a_kernel_that_is_slow_here_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_native, "instruction_sets", lambda: ("avx2", "fma"))
    for slow in (True, False):
        one = native(replace(FAST, slow=lambda slow=slow: slow), GENERIC)
        assert [kernel.name for kernel in one.suited()][slow] == "fast"
        # A list that is the same in every process, for tests that run several workers.
        assert [kernel.name for kernel in one.able()] == ["fast", "generic"]
    monkeypatch.setattr(ops_native, "instruction_sets", lambda: ("avx2",))
    assert native(replace(FAST, slow=lambda: pytest.fail("asked")), GENERIC).suited()


@pytest.mark.parametrize("bf16", [2.0, 0.5])
def test_bf16_weights_are_multiplied_in_the_type_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, bf16: float
) -> None:
    from lezero.ops.decoder import native as decoder
    from lezero.ops.linear import native as linear

    has = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16")
    monkeypatch.setattr(ops_native, "instruction_sets", lambda: has)
    monkeypatch.setattr(linear, "product_seconds", lambda: {"fp32": 1.0, "bf16": bf16})
    first = "avx512_vnni" if bf16 > 1 else "avx512_bf16"
    for one in (linear.NATIVE, decoder.NATIVE):
        assert one.suited()[0].name == first


def test_nothing_is_built_without_the_instructions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ops_native, "instruction_sets", lambda: ("avx2",))
    monkeypatch.setattr(ops_native, "build", lambda *a: pytest.fail("built"))
    one = native(FAST)
    assert not one.available()
    assert one.kernel_name() == one.problem == ""
    assert not caplog.records


def test_a_failed_build_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str, sources: list[Source]) -> Path:
        raise BuildError("no C compiler found")

    monkeypatch.setattr(ops_native, "instruction_sets", lambda: ("avx2", "fma"))
    monkeypatch.setattr(ops_native, "build", fail)
    one = native(FAST, GENERIC)
    with caplog.at_level("WARNING"):
        assert not one.available()
        assert not one.available()
    assert [r.getMessage() for r in caplog.records] == ["the formula runs: no C compiler found"]
    assert (one.problem, one.kernel_name()) == ("no C compiler found", "")


REGISTRATION = """#include <torch/csrc/stable/library.h>
extern "C" int lezero_answer(void);
int64_t answer() { return lezero_answer(); }
STABLE_TORCH_LIBRARY_FRAGMENT(LEZERO_OPS, m) { m.def("answer() -> int"); }
STABLE_TORCH_LIBRARY_IMPL(LEZERO_OPS, CompositeExplicitAutograd, m) {
  m.impl("answer", TORCH_BOX(&answer));
}"""


def refuse(ops: Any) -> None:
    assert ops.answer() == 42
    raise BuildError("its answer is wrong")


@pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("c++")), reason="no C and C++ compiler here"
)
def test_a_compiler_too_old_for_the_fastest_or_a_failed_trial_takes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.c").write_text("int lezero_answer(void) { return 42; }\n")
    (tmp_path / "r.cpp").write_text(REGISTRATION)
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path / "cache"))
    too_new = Kernel("too_new", frozenset(), (tmp_path / "good.c",), ("-mno-such-instructions",))
    refused = Kernel("refused", frozenset(), (tmp_path / "good.c",), trial=refuse)
    good = Kernel("good", frozenset(), (tmp_path / "good.c",))
    one = native(too_new, good, folder=tmp_path)
    assert one.kernel_name() == "too_new"
    with caplog.at_level("WARNING"):
        assert one.available()
    assert one.kernel_name() == "good"
    assert one.ops.answer() == torch.ops.lezero_trial_good.answer() == 42
    (record,) = caplog.records
    assert "trial runs its good kernel" in record.getMessage()
    assert "no-such-instructions" in record.getMessage()

    one = native(refused, good, folder=tmp_path)
    assert one.available()
    assert one.kernel_name() == "good"
    assert caplog.messages[1:] == ["trial runs its good kernel: its answer is wrong"]


def test_every_native_op_is_found() -> None:
    found = {one.name: one for one in natives()}
    assert "attention" in found
    for one in found.values():
        assert one.registration.exists()
        assert all(file.exists() for kernel in one.kernels for file in kernel.files)
        assert one.otherwise
        needs = {name for kernel in one.kernels for name in kernel.needs}
        assert needs <= set(facts._SETS), "a set that nobody looks for leaves its kernel out"


@pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("c++")), reason="no C and C++ compiler here"
)
def test_several_are_built_side_by_side_and_a_file_of_both_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = "".join(f"int f{i}(int x) {{ return x * {i} + f{i - 1}(x); }}\n" for i in range(1, 200))
    (tmp_path / "good.c").write_text(
        f"int f0(int x) {{ return x; }}\n{slow}int lezero_answer(void) {{ return 42; }}\n"
    )
    (tmp_path / "r.cpp").write_text(REGISTRATION)
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path / "cache"))
    compiled: list[str] = []
    real = builder._write

    def write(command: list[str], out: str) -> None:
        compiled.append(Path(out).name.rpartition("-")[0])
        real(command, out)

    monkeypatch.setattr(builder, "_write", write)
    good = Kernel("good", frozenset(), (tmp_path / "good.c",))
    broken = Kernel("broken", frozenset(), (tmp_path / "none.c",))
    made = [
        ops_native.Native(name, [kernel], registration=tmp_path / "r.cpp", otherwise="none")
        for name, kernel in (("one", good), ("two", good), ("three", broken))
    ]
    ops_native.build_together(made)
    assert compiled.count("object-good") == 1
    assert compiled.count("object-r") == 2
    monkeypatch.setattr(ops_native, "build", lambda *a: pytest.fail("built again"))
    assert [one.available() for one in made[:2]] == [True, True]
    assert [one.ops.answer() for one in made[:2]] == [42, 42]
    assert not caplog.records
    monkeypatch.undo()
    assert not made[2].available()  # which tells
    assert "cannot read the sources of three" in made[2].problem
