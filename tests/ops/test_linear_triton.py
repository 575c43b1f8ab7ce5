"""The Triton kernels are near the reference: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from tests.ops.interpreted import assert_passes, needs_triton


@needs_triton
def test_triton_kernels_are_near_the_reference() -> None:
    assert_passes("tests.ops.linear_triton")


@needs_triton
def test_products_of_few_tokens_are_near_fp64() -> None:
    assert_passes("tests.ops.few_triton")
