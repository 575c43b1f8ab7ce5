"""Numbers of JSON as tensors, and the form of an answer."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import pytest
import torch

from lezero.core.errors import ConfigError
from lezero.serve.batching.module import InferModule
from lezero.serve.server.exchange import JSON
from lezero.serve.server.inference import (
    TENSORS,
    _from_tensors,
    answer_kind,
    read_inputs,
    told_outputs,
)
from lezero.serve.server.problem import Problem


class Sum(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def read(dtype: torch.dtype, value: Any) -> torch.Tensor:
    """The row of 3 numbers that a body holds."""
    model = InferModule(Same(), torch.zeros(1, 3, dtype=dtype))
    (row,), is_single = read_inputs(json.dumps({"inputs": value}).encode(), JSON, model, "m")
    assert is_single
    return row["input"]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float64, [1e308, 1e308, 1]),
        (torch.float64, [2**60 + 1, 0.1, -0.0]),
        (torch.float32, [3.4028235e38, -3.4028235e38, 0]),
        (torch.bfloat16, [3.3e38, 1.00001, 1e-45]),
        (torch.float8_e4m3fn, [448, 0.5, -2]),
        (torch.uint64, [2**63, 2**64 - 1, 0]),
        (torch.int64, [-(2**63), 2**63 - 1, 0]),
        (torch.uint8, [0, 255, 1]),
        (torch.bool, [True, False, True]),
    ],
)
def test_numbers_that_a_type_has_are_taken(dtype: torch.dtype, value: list[Any]) -> None:
    wide = torch.float64 if dtype.is_floating_point else dtype
    found, wanted = read(dtype, value), torch.tensor(value, dtype=wide).to(dtype)
    assert found.dtype == dtype
    assert found.tolist() == wanted.tolist()


def test_a_byte_order_mark_is_passed_over() -> None:
    model = InferModule(Same(), torch.zeros(1, 3))
    body = b"\xef\xbb\xbf" + b'{"inputs": [1, 2, 3]}'
    ((row,), _) = read_inputs(body, JSON, model, "m")
    assert row["input"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        (torch.float32, [1, True, 3], "got true or false, allowed are numbers of float32"),
        (torch.float32, [1e39, 1, 1], "got 1e+39, allowed are numbers of float32, to ±3.4028"),
        (torch.float64, [10**400, 1, 1], "got a number of more than 30 digits, allowed are"),
        (
            torch.float8_e4m3fn,
            [1, -1000, 1],
            "got -1000, allowed are numbers of float8_e4m3fn, to ±448",
        ),
        (torch.float32, [None, "a", {}], "got an object and null and text"),
        (torch.int64, [1, True, 3], "got true or false, allowed are whole numbers of int64"),
        (torch.int64, [1.0, 2, 3], "got numbers with a fraction or exponent"),
        (
            torch.int64,
            [2**63, 2, 3],
            "got 9223372036854775808, allowed are whole numbers of int64, -9",
        ),
        (torch.uint64, [2**64, 2, 3], "whole numbers of uint64, 0 to 18446744073709551615"),
        (torch.uint8, [-1, 2, 3], "got -1, allowed are whole numbers of uint8, 0 to 255"),
        (torch.bool, [1, 0, 1], "got numbers, allowed are true and false"),
        (torch.int64, [], r"got int64 (0,), allowed is int64 (3)"),
        (torch.int64, [[1, 2, 3], [1]], "got lists of 1 to 3 side by side"),
        (torch.int64, [[1, 2, 3], 1], "got numbers and lists side by side"),
        (torch.int64, [1, [1, 2, 3]], "got a list beside numbers"),
    ],
)
def test_what_is_wrong_with_a_number_is_told(dtype: torch.dtype, value: Any, words: str) -> None:
    with pytest.raises(Problem) as found:
        read(dtype, value)
    assert words in found.value.message
    assert (found.value.status, found.value.param) == (400, "inputs")


def test_a_number_beyond_those_of_python_is_told() -> None:
    model = InferModule(Same(), torch.zeros(1, 3))
    with pytest.raises(Problem, match="got a number beyond those of float64, allowed are"):
        read_inputs(b'{"inputs": [1, -1e400, 1]}', JSON, model, "m")


@pytest.mark.parametrize(("given", "words"), [(5, "a number"), ([1], "a list"), ("x", "text")])
def test_of_several_inputs_each_has_its_name(given: Any, words: str) -> None:
    model = InferModule(Sum(), {"a": torch.zeros(1, 3), "b": torch.zeros(1, 3)})
    with pytest.raises(Problem, match=f"inputs: got {words}, needed is an object with a, b$"):
        read_inputs(json.dumps({"inputs": given}).encode(), JSON, model, "m")


@pytest.mark.parametrize(
    ("accept", "asked", "kind"),
    [
        ("", TENSORS, TENSORS),
        ("*/*", TENSORS, TENSORS),
        ("text/html, application/*", JSON, JSON),
        (f"{TENSORS}, {JSON}", JSON, TENSORS),
        (f"{JSON};q=0.1, {TENSORS};q=1.0", JSON, TENSORS),
        (f"{TENSORS}; q=0, {JSON}", TENSORS, JSON),
        (f"{TENSORS};q=0, */*", TENSORS, JSON),
        (f"*/*;q=0.5, {JSON};v=1;q=0.4", JSON, TENSORS),
        (f"{JSON};q=nonsense", TENSORS, JSON),
        (f"{JSON};q=0", JSON, None),
        ("*/*;q=0.0", JSON, None),
        ("text/html", JSON, None),
    ],
)
def test_an_answer_has_the_form_that_is_weighed_most(
    accept: str, asked: str, kind: str | None
) -> None:
    if kind is None:
        with pytest.raises(Problem, match="accept"):
            answer_kind(accept, asked)
    else:
        assert answer_kind(accept, asked) == kind


def test_a_shape_beyond_64_bits_is_refused() -> None:
    about = {"input": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}
    header = json.dumps(about).encode()
    with pytest.raises(Problem, match="the body is no safetensors") as caught:
        _from_tensors(len(header).to_bytes(8, "little") + header)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)


def test_outputs_whose_shape_follows_the_batch_are_refused() -> None:
    class Trims(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return x[:, : int(n.max())]

    with pytest.raises(ConfigError, match="depend on each other"):
        InferModule(Trims(), {"x": torch.randn(2, 6), "n": torch.tensor([2, 5])})


@pytest.mark.parametrize("shape", [(), (3,), (0,), (5000,), (2, 4096), (2, 5000), (70, 70), (2, 0)])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_answers_in_json_are_the_numbers(
    shape: tuple[int, ...], count: int, dtype: torch.dtype
) -> None:
    rows = [{"y": (9 * torch.randn(shape)).to(dtype), 'z"': torch.ones(())} for _ in range(count)]
    wanted = [row["y"].tolist() for row in rows]
    assert json.loads(told_outputs(rows, False, JSON)) == {
        "outputs": {"y": wanted, 'z"': [1.0] * count}
    }
    assert json.loads(told_outputs(rows[:1], True, JSON))["outputs"]["y"] == wanted[0]


@pytest.mark.parametrize("shape", [(1 << 16,), (32, 2048), (16, 1)])
def test_what_is_taken_while_an_answer_is_written_is_what_counts(shape: tuple[int, ...]) -> None:
    rows = [{"y": torch.rand(shape)} for _ in range((1 << 16) // math.prod(shape))]
    told_outputs(rows[:1], False, JSON)
    tracemalloc.start()
    try:
        told = told_outputs(rows, False, JSON)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.25 * len(told) + (1 << 20)


def test_rows_of_unlike_shapes_are_told_of() -> None:
    rows = [{"y": torch.zeros(4)}, {"y": torch.zeros(8)}]
    with pytest.raises(Problem, match=r"rows of output y are \(4,\) and \(8,\)") as found:
        told_outputs(rows, False, JSON)
    assert found.value.status == 500


@pytest.mark.parametrize(
    ("kind", "size", "says"),
    [("F4", 1, "inputs: .* of type 'F4', which"), ("other", 2, "no safetensors: .*other")],
)
def test_a_tensor_of_a_type_that_is_not_read_is_told(kind: str, size: int, says: str) -> None:
    head = json.dumps({"a": {"dtype": kind, "shape": [2], "data_offsets": [0, size]}}).encode()
    with pytest.raises(Problem, match=says):
        _from_tensors(len(head).to_bytes(8, "little") + head + size * b"1")
