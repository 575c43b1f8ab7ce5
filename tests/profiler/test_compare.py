"""Comparison says where two tensors part and by how much, NaN and infinity included."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lezero.core.errors import ConfigError
from lezero.profiler import compare as module
from lezero.profiler.compare import compare_states, compare_tensors

nan, inf = math.nan, math.inf


def test_equal_tensors_have_no_difference() -> None:
    x = torch.tensor([0.0, -0.0, 1.5, nan, inf, -inf])
    y = torch.tensor([-0.0, 0.0, 1.5, nan, inf, -inf])
    assert compare_tensors(x, y) is None
    assert compare_tensors(torch.empty(0, 3), torch.empty(0, 3)) is None
    assert compare_tensors(torch.tensor(1), torch.tensor(1)) is None


def test_figures_of_a_difference() -> None:
    x = torch.ones(2, 3)
    y = x.clone()
    y[0, 2] += 2**-23
    y[1, 1] = 1.5
    found = compare_tensors(x, y, name="w")
    assert found is not None
    assert (found.kind, found.name, found.differing, found.elements) == ("value", "w", 2, 6)
    assert (found.max_abs, found.max_rel, found.max_ulp) == (0.5, 0.5, 2**22)
    assert found.index == (0, 2)
    assert (found.expected, found.actual) == (1.0, 1.0 + 2**-23)
    assert "w: 2 of 6 elements differ" in str(found)
    assert "w[0, 2]" in str(found)
    json.dumps(found.to_dict())


def test_tolerances() -> None:
    x, y = torch.tensor([1.0, 100.0]), torch.tensor([1.0, 100.5])
    assert compare_tensors(x, y, rtol=0.01) is None
    assert compare_tensors(x, y, atol=0.5) is None
    assert compare_tensors(x, y, rtol=0.001) is not None


@pytest.mark.parametrize("tolerance", [nan, -1e-9, -inf])
def test_a_tolerance_that_bounds_nothing_is_refused(tolerance: float) -> None:
    x, y = torch.ones(2), torch.zeros(2)
    with pytest.raises(ConfigError, match=f"rtol: got {tolerance}, allowed is a number from 0"):
        compare_tensors(x, y, rtol=tolerance)
    with pytest.raises(ConfigError, match=f"atol: got {tolerance}, allowed is a number from 0"):
        compare_states({"w": x}, {"w": y}, atol=tolerance)


@pytest.mark.parametrize(
    ("one", "two"), [(nan, 1.0), (1.0, nan), (inf, 1.0), (inf, -inf), (nan, inf)]
)
def test_a_nan_or_infinity_on_one_side_is_a_difference_whatever_the_tolerance(
    one: float, two: float
) -> None:
    found = compare_tensors(torch.tensor([2.0, one]), torch.tensor([2.0, two]), rtol=1e9, atol=1e9)
    assert found is not None
    assert found.kind == "nan"
    assert found.index == (1,)
    assert found.max_abs == 0.0
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_units_in_the_last_place(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, -1.0, 0.0], dtype=dtype)
    two = torch.nextafter(one, torch.full_like(one, 2.0))
    found = compare_tensors(one, two)
    assert found is not None
    assert found.max_ulp == 1
    far = compare_tensors(torch.tensor([-1.0], dtype=dtype), torch.tensor([1.0], dtype=dtype))
    bits = {torch.float64: 64, torch.float32: 32}.get(dtype, 16)
    kind = {64: torch.int64, 32: torch.int32, 16: torch.int16}[bits]
    assert far is not None
    assert far.max_ulp == 2 * int(torch.tensor(1.0, dtype=dtype).view(kind))


def test_the_widest_possible_distance_does_not_overflow() -> None:
    most = torch.finfo(torch.float64).max
    found = compare_tensors(torch.tensor([most, 1.0]).double(), torch.tensor([-most, 1.0]).double())
    assert found is None or found.max_ulp is not None
    x = torch.tensor([most], dtype=torch.float64)
    found = compare_tensors(x, -x)
    assert found is not None
    assert found.max_ulp == 2 * int(x.view(torch.int64))
    assert found.max_abs == inf


def test_shape_dtype_and_names() -> None:
    x = torch.zeros(2, 3)
    shape = compare_tensors(x, torch.zeros(3, 2), name="w")
    assert shape is not None
    assert str(shape) == "w: shape (3, 2), expected (2, 3)"
    dtype = compare_tensors(x, x.double())
    assert dtype is not None
    assert dtype.kind == "dtype"
    assert compare_tensors(x, x.double(), check_dtype=False) is None


def test_other_kinds_of_tensors() -> None:
    big = torch.tensor([2**62, 2**62 + 1])
    found = compare_tensors(big, torch.tensor([2**62, 2**62]))
    assert found is not None
    assert (found.index, found.max_ulp) == ((1,), None)
    assert compare_tensors(torch.tensor([True]), torch.tensor([False])) is not None
    z = torch.tensor([1 + 2j, 3 + 4j])
    found = compare_tensors(z, torch.tensor([1 + 2j, 3 + 5j]))
    assert found is not None
    assert (found.index, found.max_abs) == ((1, 1), 1.0)
    low = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert compare_tensors(low, low) is None
    sparse = torch.eye(3).to_sparse()
    assert compare_tensors(sparse, sparse) is None
    assert compare_tensors(torch.ones(2, 3).t(), torch.ones(3, 2)) is None


def test_states_part_first_in_the_expected_order() -> None:
    one = {"b": torch.ones(2), "a": torch.ones(2), "gone": torch.ones(1)}
    two = {"a": torch.zeros(2), "b": torch.ones(2), "new": torch.ones(1)}
    found = compare_states(one, two)
    assert not found.equal
    assert [item.name for item in found.differences] == ["a", "gone", "new"]
    assert [item.kind for item in found.differences] == ["value", "missing", "extra"]
    assert found.first is not None
    assert found.first.name == "a"
    assert (found.compared, found.max_abs) == (2, 1.0)
    assert "(and 2 more)" in str(found)
    assert str(compare_states(one, one)) == "equal: 3 tensors"


def test_chunks_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(1000.0).view(10, 100)
    y = x.clone()
    y[7, 33] += 1
    y[9, 99] += 3
    whole = compare_tensors(x, y)
    monkeypatch.setattr(module, "_CHUNK", 64)
    assert compare_tensors(x, y) == whole
    assert whole is not None
    assert (whole.index, whole.differing, whole.max_abs) == ((7, 33), 2, 3.0)


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_a_tensor_equals_itself_and_finds_any_change(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert compare_tensors(x, x.clone()) is None
    y = x.clone()
    y[-1] = 1.0 if y[-1] != 1.0 else 2.0
    found = compare_tensors(x, y)
    assert found is not None
    assert found.index == (len(values) - 1,)
