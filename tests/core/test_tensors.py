import torch

from lezero.core.tensors import flat_bytes


def test_the_bytes_of_one_value_of_a_wider_row_are_its_own() -> None:
    row = torch.arange(3.0)[None]
    one = row[:, 1]
    assert one.is_contiguous()
    assert one.stride() == (3,)
    found = flat_bytes(one)
    assert found.view(torch.float32).tolist() == [1.0]
    found.zero_()
    assert row.tolist() == [[0.0, 0.0, 2.0]]


def test_bytes_of_any_shape_are_flat() -> None:
    for shape in ((), (0,), (2, 0), (2, 3)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        found = flat_bytes(x)
        assert found.shape == (8 * x.numel(),)
        assert torch.equal(found.view(torch.float64), x.detach().flatten())
