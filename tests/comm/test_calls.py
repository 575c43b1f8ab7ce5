"""Looking at where code is keeps nothing of it alive."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lezero.comm.calls import origin, place_of, position_of
from lezero.parallel.zero.instead import _lent_by_torch


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


LOOKS: dict[str, Callable[[], object]] = {
    "place": lambda: place_of(threading.get_ident()),
    "position": lambda: position_of(threading.get_ident()),
    "lent": lambda: _lent_by_torch(torch.ones(1)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_the_own_thread_frees_what_callers_held(look: str) -> None:
    def caller() -> weakref.ref[torch.Tensor]:
        large = torch.ones(3)
        assert LOOKS[look]() is not None
        return weakref.ref(large)

    assert caller()() is None


def test_the_place_is_the_users_line() -> None:
    assert re.search(r"test_calls\.py:\d+$", place_of(threading.get_ident()))
    assert position_of(threading.get_ident()) != (0, 0)
    assert place_of(-1) == ""
    with ThreadPoolExecutor(1) as pool:  # no line of the user's is on that thread
        assert pool.submit(place_of, pool.submit(threading.get_ident).result()).result() == ""
    assert position_of(-1) == (0, 0)


def test_the_origin_of_an_error_is_where_it_was_raised_first() -> None:
    def handled() -> None:
        try:
            raise ValueError("seven")
        except ValueError:
            raise  # where the frame was last

    with pytest.raises(ValueError, match="seven") as caught:
        handled()
    line = handled.__code__.co_firstlineno + 2
    assert origin(caught.value).endswith(f"test_calls.py:{line})")
    assert origin(ValueError()) == ""


def test_a_tensor_that_functional_call_lends_is_known() -> None:
    layer, found = torch.nn.Linear(2, 2), []
    layer.register_forward_pre_hook(lambda *_: found.append(_lent_by_torch(weight)))
    weight = torch.nn.Parameter(torch.ones(2, 2))
    layer(torch.ones(2))
    torch.func.functional_call(layer, {"weight": weight}, torch.ones(2))
    assert found == [False, True]
