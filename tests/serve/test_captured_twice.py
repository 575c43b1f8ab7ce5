"""A model that captured graphs read goes to one LLM at a time."""

from __future__ import annotations

import copy
import gc

import pytest

from lezero.core.errors import ConfigError
from lezero.serve.captured import CapturedProgram
from lezero.serve.opening import program_of
from tests.serve.models import small


def test_a_model_is_free_when_its_program_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedProgram, "suits", staticmethod(lambda model: True))
    model = small()
    program = program_of(model, "fp32")
    assert isinstance(program, CapturedProgram)
    with pytest.raises(ConfigError, match="another LLM runs it; delete that one first"):
        program_of(model, "fp32")
    assert isinstance(program_of(copy.deepcopy(model), "fp32"), CapturedProgram)
    del program
    gc.collect()
    assert isinstance(program_of(model, "fp32"), CapturedProgram)


def test_a_program_that_cannot_be_made_leaves_the_model_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: CapturedProgram, model: object) -> None:
        raise MemoryError

    model = small()
    with monkeypatch.context() as patched:
        patched.setattr(CapturedProgram, "suits", staticmethod(lambda model: True))
        patched.setattr(CapturedProgram, "__init__", fails)
        with pytest.raises(MemoryError):
            program_of(model, "fp32")
    program_of(model, "fp32")
