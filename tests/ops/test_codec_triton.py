"""The Triton kernels give the reference's bytes: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from tests.ops.interpreted import assert_passes, needs_triton


@needs_triton
def test_triton_kernels_equal_the_reference() -> None:
    assert_passes("tests.ops.codec_triton")
