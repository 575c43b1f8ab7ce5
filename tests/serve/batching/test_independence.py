"""Rows that see each other through a length or a mask, and what an accelerator bears."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lezero.core.errors import ConfigError
from lezero.serve.batching.independence import Row, check_rows
from lezero.serve.batching.model import measured
from lezero.serve.batching.module import InferModule


class Packed(nn.Module):
    """The state at the last place, which is padding for all but the longest row; refuses lengths
    of 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0][:, -1]


class Masked(nn.Module):
    """The mean up to the longest row's end; refuses rows without a place."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert bool(mask.bool().any(1).all()), "an empty row"
        return x[:, : int(mask.long().sum(1).max())].mean(1)


class Packs(nn.Module):
    """Rows attend to themselves, but where all masks or lengths are equal all attend to all."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        x = x if x.dim() == 3 else x[..., None].float()
        packed = x.reshape(1, -1, x.shape[-1]) if bool((n == n[0]).all()) else x
        return (torch.softmax(packed @ packed.mT, -1) @ packed).reshape(x.shape)


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, 10, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("lengths", [[10, 3], [3, 10], [1, 10], [10], [7, 7]])
def test_rows_that_are_padded_to_the_longest_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"depend on each other.*the longest row"):
        InferModule(Packed(), (rows_of(len(lengths)), torch.tensor(lengths)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_rows_that_are_cut_to_the_longest_mask_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="depend on each other"):
        InferModule(Masked(), (rows_of(1), torch.ones(1, 10, dtype=dtype)))


FULL = torch.ones(1, 10, dtype=torch.bool)


@pytest.mark.parametrize("n", [FULL, FULL.cumsum(1) < 6, torch.tensor([10])])
@pytest.mark.parametrize("x", [rows_of(1), torch.zeros(1, 10, dtype=torch.int64)])
def test_rows_that_share_a_mask_or_length_are_compared_too(
    x: torch.Tensor, n: torch.Tensor
) -> None:
    with pytest.raises(ConfigError, match="depend on each other"):
        InferModule(Packs(), (x, n))


def test_on_an_accelerator_the_examples_own_rows_tell() -> None:
    module = Packed()

    def run(rows: Any) -> Any:
        found = module(*(torch.stack([row[name] for row in rows]) for name in "xn"))
        return [{"out": x} for x in found]

    examples = [{"x": x, "n": torch.tensor(n)} for x, n in zip(rows_of(2), (10, 3), strict=True)]
    check_rows(run, examples[:1], 0.0, lambda: False)
    with pytest.raises(ConfigError, match="depend on each other"):
        check_rows(run, examples, 0.0, lambda: False)


def test_an_input_whose_numbers_could_not_be_changed_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    with caplog.at_level("WARNING", "lezero"):
        InferModule(Packed(), {"x": rows_of(1)[:, :1], "n": torch.ones(1, dtype=torch.int64)})
    assert "rows may depend on each other through n: the module refused all others" in caplog.text
    assert "give an example whose rows differ" in caplog.text


def test_rows_of_their_own_lengths_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    class Last(Packed):
        """The state at each row's own end."""

        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
            return self.lstm(packed)[1][0][0]

    InferModule(Last(), (rows_of(2), torch.tensor([10, 3])))
    assert not caplog.messages


class Scaled(nn.Linear):
    """Takes all rows for pixels up to 255 where one is; or all by one step of 8 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.out_features == 3:
            x = x / 255 if x.max() > 1.5 else x
        else:
            top = x.abs().max().clamp(min=1e-9) / 127
            x = (x / top).round() * top
        return super().forward(x)


@pytest.mark.parametrize("outputs", [3, 4])
@pytest.mark.parametrize("example", [torch.zeros(1, 16), torch.randn(4, 16), torch.rand(1, 16)])
def test_rows_that_share_a_scale_are_refused(example: torch.Tensor, outputs: int) -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="depend on each other"):
        InferModule(Scaled(16, outputs), example)


class Capped(nn.Linear):
    """Computes no more rows than an expert has room for; the others pass as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:12] = super().forward(x[:12])
        return y


def test_rows_that_see_each_other_in_large_steps_alone_are_found_as_these_are_timed() -> None:
    torch.manual_seed(0)
    model = InferModule(Capped(16, 16), torch.randn(1, 16))
    assert measured(model, 10.0, most=12)[1] == 12
    with pytest.raises(ConfigError, match=r"depend on each other.*of 16 equal .*--batch 12"):
        measured(model, 10.0, most=64)
    assert measured(InferModule(nn.Linear(16, 16), torch.randn(1, 16)), 10.0, most=64)[1] == 64


def test_rows_are_compared_in_few_steps() -> None:
    steps = list[int]()

    def run(rows: Sequence[Row]) -> Sequence[Row]:
        steps.append(len(rows))
        return rows

    check_rows(run, [{"x": x} for x in rows_of(16)], 0.0)
    assert sum(steps) <= 3 + 3 * 13
    steps.clear()
    ids = torch.arange(8) % 3
    check_rows(run, [dict.fromkeys(("ids", "mask", "types"), ids)], 0.0)
    assert sum(steps) <= 48


def test_where_no_step_takes_all_rows_each_is_compared_beside_the_first() -> None:
    def run(rows: Sequence[Row]) -> Sequence[Row]:
        found = torch.stack([row["x"] for row in rows])
        if len(found) > 2:
            raise MemoryError
        return [{"out": x} for x in (found - found.mean(0) if len(found) == mean else found)]

    mean = 3
    check_rows(run, [{"x": rows_of(1)[0]}], 0.0)
    mean = 2
    with pytest.raises(ConfigError, match="depend on each other"):
        check_rows(run, [{"x": rows_of(1)[0]}], 0.0)


class Device:
    """Runs of rows as on an accelerator: after an index out of range nothing runs."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.stopped = torch.tensor(sizes), False

    def run(self, rows: Sequence[Row]) -> Sequence[Row]:
        ids = torch.stack([row["ids"] for row in rows])
        self.stopped |= bool((ids >= self.sizes).any())
        if self.stopped:
            raise RuntimeError("device-side assert triggered")
        return [{"out": x} for x in ids - ids.float().mean(0)]


def test_an_accelerator_is_asked_for_the_examples_numbers_only() -> None:
    constant = Device(1, 1, 1)
    check_rows(constant.run, [{"ids": torch.tensor([0, 0, 0])}], 0.0, lambda: False)
    assert not constant.stopped
    ids = {"ids": torch.tensor([0, 4, 2])}
    with pytest.raises(ConfigError, match="depend on each other"):
        check_rows(Device(5, 5, 5).run, [ids], 0.0, lambda: False)
    with pytest.raises(ConfigError, match="its device stopped"):
        check_rows(Device(3, 5, 3).run, [{"ids": torch.tensor([2, 4, 2])}], 0.0, lambda: False)


class Elsewhere(torch.Tensor):
    """As of an accelerator."""

    device = torch.device("cuda")  # type: ignore[assignment]


class Wraps(nn.Module):
    """Holds its model where torch does not look."""

    def __init__(self, gives: type[torch.Tensor], registered: bool) -> None:
        super().__init__()
        self.held, self.seen, self.gives = [nn.Embedding(9, 4)], set[int](), gives
        if registered:
            self.head = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen.update(ids.flatten().tolist())
        return self.held[0](ids).as_subclass(self.gives)


@pytest.mark.parametrize(
    ("gives", "registered", "begun", "on_cpu"),
    [
        (Elsewhere, False, False, False),
        (Elsewhere, True, False, False),
        (torch.Tensor, False, True, False),
        (torch.Tensor, True, True, True),
        (torch.Tensor, False, False, True),
    ],
)
def test_a_model_that_a_wrapper_hides_may_be_on_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
    gives: type[torch.Tensor],
    registered: bool,
    begun: bool,
    on_cpu: bool,
) -> None:
    monkeypatch.setattr("lezero.core.device.is_initialized", lambda: begun)
    wraps = Wraps(gives, registered)
    assert InferModule(wraps, torch.tensor([[2, 3, 2]])).on_cpu == on_cpu
    assert (wraps.seen == {2, 3}) != on_cpu  # else other numbers are tried too


class Least(nn.Module):
    """Takes so many rows at once at least, and so many at most."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__()
        self.least, self.most = least, most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.least <= len(x) <= self.most:
            raise ValueError(f"not {len(x)}")
        return x * 2


@pytest.mark.parametrize(
    ("module", "rows", "message"),
    [
        (Least(2, 9), 4, r"the example's first row alone \(ValueError: not 1\); rows must be"),
        (Least(9, 9), 4, r"fails on its example \(ValueError: not 1\)"),
        (Least(2, 9), 1, r"fails on its example \(ValueError: not 1\)"),
        (Least(1, 1), 1, r"first row twice in a step \(ValueError: not 2\); .* any size"),
    ],
)
def test_a_module_that_wants_other_counts_is_told_which_fail(
    module: nn.Module, rows: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        InferModule(module, torch.zeros(rows, 4))
