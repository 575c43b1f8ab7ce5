"""Triton rounds tokens to float8 as the reference does: on a GPU, or in its interpreter."""

from __future__ import annotations

from tests.ops.interpreted import assert_passes, needs_triton


@needs_triton
def test_tokens_are_rounded_as_by_the_reference() -> None:
    assert_passes("tests.ops.fp8_triton")
