"""Any module with an example input, behind a batcher."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.serve.batching.module import InferModule, module_of
from tests.serve.server.batch_running import Net


class Several(nn.Module):
    """Two named inputs of any length, two named outputs."""

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": ids.sum(1), "scaled": ids.float() * scale[:, None]}


class Crowd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Reuses(nn.Module):
    """Gives out a buffer of its own, which it writes to each time."""

    def __init__(self, of_crowd: bool) -> None:
        super().__init__()
        self.of_crowd, self.room = of_crowd, torch.empty(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.room[: len(x)]
        return torch.sub(x, x.mean(0) if self.of_crowd else 1.0, out=out)


def test_answers_stay_when_the_module_gives_out_its_own_buffer() -> None:
    model = InferModule(Reuses(of_crowd=False), torch.zeros(1, 4))
    (first,) = model.run(model.rows({"input": torch.ones(1, 4)})[0])
    model.run(model.rows({"input": torch.full((1, 4), 9.0)})[0])
    assert first["output"].tolist() == [0.0] * 4
    with pytest.raises(ConfigError, match="depend on each other"):
        InferModule(Reuses(of_crowd=True), torch.randn(1, 4))


def several() -> InferModule:
    ids, scale = torch.ones(1, 3, dtype=torch.int64), torch.ones(1)
    largest = {"ids": torch.ones(1, 8, dtype=torch.int64), "scale": scale}
    return InferModule(Several(), {"ids": ids, "scale": scale}, largest)


def test_rows_are_the_modules_own() -> None:
    net = Net()
    model = InferModule(net, torch.zeros(1, 4))
    x = torch.randn(9, 4)
    rows, is_single = model.rows({"input": x})
    assert not is_single
    for row, wanted in zip(model.run(rows), net(x), strict=True):
        torch.testing.assert_close(row["output"], wanted)
    (row,), is_single = model.rows({"input": x[0]})
    assert is_single
    assert torch.equal(model.run([row])[0]["output"], net(x[:1])[0])


def test_inputs_and_outputs_have_names_and_free_dims() -> None:
    model = several()
    for length in (1, 3, 8):
        ids = torch.arange(2 * length).view(2, length)
        rows, _ = model.rows({"ids": ids, "scale": torch.tensor([1.0, 2.0])})
        found = model.run(rows)
        assert [int(row["sum"]) for row in found] == ids.sum(1).tolist()
        assert torch.equal(found[1]["scaled"], 2.0 * ids[1])
    short, long = (model.rows({"ids": torch.ones(n).long(), "scale": torch.tensor(1.0)})[0][0]
                   for n in (2, 4))  # fmt: skip
    assert model.kind(short) != model.kind(long)
    assert model.work(short) < model.work(long)
    assert "int64 (1–8)" in model.description


def test_nan_in_one_of_several_outputs_is_no_answer() -> None:
    row = {"sum": torch.tensor(3), "scaled": torch.tensor([1.0, torch.nan])}
    assert not several().is_sound(row)


class Two(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.sum(1) + 10 * b.sum(1)


def test_the_order_of_a_clients_inputs_does_not_matter() -> None:
    names = ("a", "b")
    least, most = ({name: torch.ones(1, n) for name in names} for n in (2, 8))
    model = InferModule(Two(), least, most)

    def row(order: tuple[str, ...], **lengths: int) -> dict[str, torch.Tensor]:
        given = {name: torch.ones(lengths[name]) for name in order}
        return model.rows(given)[0][0]

    alike = [row(order, a=3, b=5) for order in (names, names[::-1])]
    assert model.kind(alike[0]) == model.kind(alike[1])
    assert [float(x["output"]) for x in model.run(alike)] == [53, 53]
    assert model.kind(alike[0]) != model.kind(row(names[::-1], b=3, a=5))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "needed are ids, scale"),
        ({"ids": torch.ones(2, 3).long()}, "needed are"),
        ({"ids": torch.ones(2, 9).long(), "scale": torch.ones(2)}, "1–8"),
        ({"ids": torch.ones(2, 0).long(), "scale": torch.ones(2)}, "1–8"),
        ({"ids": torch.ones(2, 3), "scale": torch.ones(2)}, "float32"),
        ({"ids": torch.ones(2, 3).long(), "scale": torch.ones(3)}, "rows"),
        ({"ids": torch.ones(0, 3).long(), "scale": torch.ones(0)}, "rows"),
        ({"ids": torch.ones(2, 3, 4, 5).long(), "scale": torch.ones(2)}, "batch dim"),
        ({f"{i:05}": torch.ones(1) for i in range(15000)}, "00003, 00004 and 14995 more, needed"),
        ({"x" * 10**5: torch.ones(1)}, "got x{80}…, needed are"),
        ({"ids": torch.ones([1] * 9999).long(), "scale": torch.ones(2)}, "1…, allowed is int64"),
    ],
)
def test_inputs_that_are_not_the_examples_are_named(inputs: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        several().rows(inputs)
    assert len(str(caught.value)) < 400


class Shares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.sum(0)


class Tokens(nn.Module):
    """Tokens of a small vocabulary, which attend to those of other rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(2, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.table(ids))
        return found


class Typed(nn.Module):
    """As RoBERTa's: types of a vocabulary of 1 beside the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        assert int(kinds.max()) < 1, "an index out of range"
        found: torch.Tensor = self.tokens(ids)
        return found


class Padded(nn.Module):
    """Rows with lengths, of which none may be 0."""

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        assert bool((length > 0).all()), "an empty row"
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("module", "example"),
    [
        (Crowd(), torch.ones(1, 4)),
        (Crowd(), torch.zeros(1, 4)),
        (Crowd(), torch.zeros(1)),
        (Shares(), torch.zeros(1, 4)),
        (nn.TransformerEncoderLayer(8, 2, 16), torch.zeros(1, 5, 8)),
        (Tokens(), torch.zeros(1, 5, dtype=torch.int64)),
        (Tokens(), torch.ones(1, 5, dtype=torch.int64)),
        (Typed(), (torch.tensor([[0, 1, 1]]), torch.zeros(1, 3, dtype=torch.int64))),
        (Typed(), (torch.zeros(1, 3, dtype=torch.int64),) * 2),
        (Padded(), (torch.zeros(1, 4), torch.ones(1, dtype=torch.int64))),
        (Crowd().double(), torch.zeros(1, 4, dtype=torch.bfloat16)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_rows_that_see_each_other_are_refused(module: nn.Module, example: Any) -> None:
    with pytest.raises(ConfigError, match="depend on each other"):
        InferModule(module, example)


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lstm(x)[0]
        return found


class Total(nn.Module):
    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out[self.every :] += x[: -self.every]
        return out


@pytest.mark.parametrize("module", [Recurrent(batch_first=False), Total(1), Total(2)])
def test_rows_that_see_earlier_rows_are_refused(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match="dim 0 taken for time"):
        InferModule(module, torch.zeros(1, 4, 3))


def test_a_recurrent_module_of_batches_is_taken() -> None:
    model = InferModule(Recurrent(batch_first=True), torch.zeros(1, 4, 3))
    rows, _ = model.rows({"input": torch.randn(3, 4, 3)})
    for row, beside in zip(rows, model.run(rows), strict=True):
        torch.testing.assert_close(model.run([row])[0]["output"], beside["output"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_of_deep_modules_is_no_dependence(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layers = [nn.Linear(64, 64) for _ in range(12)]
    net = nn.Sequential(*(x for layer in layers for x in (layer, nn.LayerNorm(64)))).to(dtype)
    steps = 4 * torch.finfo(dtype).eps

    class Rounded(nn.Module):
        """As products of several rows may add in another order."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.net(x).float()
            return found + (0.5 * steps * found.abs().max() if len(x) > 1 else 0)

    InferModule(Rounded(), torch.zeros(1, 64, dtype=dtype))


def test_a_module_that_takes_only_its_example_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnlyOnes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert bool((x == 1).all()), "ones"
            return x

    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    with caplog.at_level("WARNING", "lezero"):
        InferModule(OnlyOnes(), torch.ones(1, 4))
    assert "may depend on each other" in caplog.text
    with pytest.raises(ConfigError, match=r"fails on its example.*AssertionError: ones"):
        InferModule(OnlyOnes(), torch.zeros(1, 4))


def test_inputs_of_clients_are_put_where_the_example_is() -> None:
    places = set()

    class Elsewhere(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places.add(x.device.type)
            return torch.ones(len(x), 2)

    model = InferModule(Elsewhere(), torch.zeros(1, 4, device="meta"))
    rows, _ = model.rows({"input": torch.ones(3, 4)})
    assert len(model.run(rows)) == 3
    assert places == {"meta"}


def test_modules_that_cannot_be_batched_are_refused() -> None:
    with pytest.raises(ConfigError, match="not the batch"):
        InferModule(nn.Flatten(0), torch.ones(1, 4))
    with pytest.raises(ConfigError, match="allowed is an nn"):
        InferModule(torch.relu, torch.ones(1, 4))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch in dim 0"):
        InferModule(Net(), torch.tensor(1.0))
    with pytest.raises(ConfigError, match="no smaller in any dim"):
        InferModule(Net(), torch.ones(1, 4), torch.ones(1, 3))


def test_a_factory_is_named_by_its_place() -> None:
    made = module_of("tests.serve.server.batch_running:factory")
    assert "Net" in made.description
    for words, message in (
        ("x", "PACKAGE.MODULE:FUNCTION"),
        ("no.such.place:f", "cannot be imported"),
        ("tests.serve.server.batch_running:nothing", "cannot be imported"),
        ("tests.serve.server.batch_running:Net", "must give"),
    ):
        with pytest.raises(ConfigError, match=message):
            module_of(words)


def test_a_factory_lies_in_the_working_folder_and_its_errors_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_users_model.py").write_text(
        "import torch\n"
        "def make(): return torch.nn.Linear(2, 1), torch.zeros(1, 2)\n"
        "def broken(): raise RuntimeError('no weights here')\n"
    )
    for name, text in (("typo", "def make(:"), ("slip", "no_such_name"), ("key", "{}['x']")):
        (tmp_path / f"a_users_{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "Linear" in module_of("a_users_model:make").description
    with pytest.raises(ConfigError, match="RuntimeError: no weights here"):
        module_of("a_users_model:broken")
    for words in ("a_users_typo:make", "a_users_slip:make", "a_users_key:make", ".a:make"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            module_of(words)
    sys.modules.pop("a_users_model")


class Gives(nn.Module):
    """What a function makes of its input."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


def test_outputs_within_outputs_have_dotted_names(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    given = Gives(lambda x: {"y": x, "hidden": (x, [{"a": x + 1}]), "n": 3, "none": None})
    with caplog.at_level("WARNING", "lezero"):
        model = InferModule(given, torch.zeros(1, 4))
        (row,) = model.run([{"input": torch.ones(4)}])
    assert {name: x.tolist() for name, x in row.items()} == {
        "y": [1] * 4,
        "hidden.0": [1] * 4,
        "hidden.1.0.a": [2] * 4,
    }
    assert caplog.messages == ["output n is left out of answers: int is no tensor"]
    several = InferModule(Gives(lambda x: (x, (x, x))), torch.zeros(1, 4))
    (row,) = several.run([{"input": torch.ones(4)}])
    assert list(row) == ["output_0", "output_1.0", "output_1.1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: 3, "gives a int, in .* a tensor, mapping, list or tuple"),
        (lambda x: {"a": None}, "gives a dict"),
        (lambda x: {"a": {"b": x}, "a.b": x}, "two outputs that are called a.b"),
        (lambda x: {"y": x.to(torch.complex128)}, "output y: got complex128, allowed are real"),
        (lambda x: {"a": [x, x.sum()]}, r"output a.1: dim 0 of \(\) is not the batch; give it one"),
    ],
)
def test_outputs_that_are_no_answers_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferModule(Gives(make), torch.zeros(1, 4))


def test_sparse_answers_are_refused() -> None:
    class Sparse(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_sparse()

    with pytest.raises(ConfigError, match="output: got the layout sparse_coo, allowed are dense"):
        InferModule(Sparse(), torch.ones(1, 4))


def test_the_largest_row_is_larger_in_every_dim() -> None:
    with pytest.raises(ConfigError, match=r"largest: a row of input is \(8, 3\), .* \(2, 8\)"):
        InferModule(nn.Identity(), torch.ones(1, 2, 8), torch.ones(1, 8, 3))
