"""Damaged libraries in torch's cache of compiled code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.train import compile_cache, speed, tuning
from lezero.train.compile_cache import drop_damaged
from lezero.train.engine import Engine


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setattr(compile_cache, "_seen", set())
    return folder


def refused(path, said="file too short"):
    """What the loader raises, as torch passes it on."""
    error = RuntimeError("backend='inductor' raised:")
    error.inner_exception = ImportError(f"{path}: {said}", path=str(path))
    return error


def test_a_damaged_library_is_removed_once(cache):
    library = cache / "a.so"
    library.touch()
    assert drop_damaged(refused(library))
    assert not library.exists()
    library.touch()
    assert not drop_damaged(refused(library))
    assert library.exists()
    assert drop_damaged(refused(cache / "gone.so"))  # another rank was first


@pytest.mark.parametrize("kind", ["outside", "link", "folder", "linked folder", "whole", "other"])
def test_nothing_else_is_removed(cache, tmp_path, kind):
    library, said = cache / "a.so", "file too short"
    if kind in ("outside", "link", "linked folder"):
        (tmp_path / "a.so").touch()
    if kind == "outside":
        library = cache / ".." / "a.so"
    elif kind == "link":
        library.symlink_to(tmp_path / "a.so")
    elif kind == "folder":
        library.mkdir()
    elif kind == "linked folder":
        (cache / "to").symlink_to(tmp_path)
        library = cache / "to" / "a.so"
    else:
        library.touch()
        said = "undefined symbol: f"
    error = refused(library, said)
    assert not drop_damaged(ValueError(f"{library}: file too short") if kind == "other" else error)
    assert library.exists()


@pytest.fixture
def poisoned(cache, monkeypatch):
    """A compiler whose code is in two libraries, both of which are damaged."""
    libraries = [cache / "forward.so", cache / "backward.so"]
    for library in libraries:
        library.touch()

    def compiled(function, options=None):
        def run(*given):
            for library in libraries:
                if library.exists():
                    raise refused(library)
            return function(*given)

        return run

    monkeypatch.setattr(speed.torch, "compile", compiled)
    return libraries


def test_a_form_is_tried_again_without_it(poisoned, monkeypatch, caplog):
    monkeypatch.setattr(tuning, "compiler_problem", lambda place: "")
    monkeypatch.setattr(tuning, "check_compiler", lambda *given: None)
    results = []
    for compile in ("off", "step"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1))
        engine = Engine(
            model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", counted="samples",
            loss=lambda m, x: m(x).square().mean(), compile=compile, attention="torch",
        )  # fmt: skip
        x = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
        losses = [engine.train_step(x).loss for _ in range(2)]
        results.append([losses, *(each.tolist() for each in model.state_dict().values())])
    assert results[0] == results[1]
    assert engine.tuner.form.name == "step"
    assert not any(library.exists() for library in poisoned)
    told = [r.getMessage() for r in caplog.records if "was damaged" in r.getMessage()]
    assert [str(library) in text for library, text in zip(poisoned, told, strict=True)] == [
        True
    ] * 2


def test_a_compiler_works_where_a_library_was_damaged(poisoned):
    assert speed.compiler_problem(torch.device("cpu")) == ""
    assert not any(library.exists() for library in poisoned)
