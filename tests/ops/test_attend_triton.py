"""Attention of one token in Triton is near fp64: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from tests.ops.interpreted import assert_passes, needs_triton


@needs_triton
def test_attention_of_one_token_is_near_fp64() -> None:
    assert_passes("tests.ops.attend_triton")
