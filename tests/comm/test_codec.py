"""The built-in codecs, their names, and codecs by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch

import lezero.comm
from lezero.comm import compress, decompress
from lezero.comm.codec import codec, codecs
from lezero.comm.topk_codec import largest
from lezero.core.errors import ConfigError
from tests.comm.codec_conformance import CodecConformance, values

BITS = {
    "none": 32.0,
    "fp16": 16.0,
    "bf16": 16.0,
    "int8": 8.0625,
    "int8:64": 8.25,
    "int4": 4.25,
    "int4:256": 4.0625,
    "sign": 1.0625,
    "sign:32": 1.5,
    "topk:0.0625": 4.0,
    "2:4-bf16": 9.0,
    "2:4-int8": 5.0625,
    "2:4-int4": 3.25,
}


@pytest.mark.parametrize("member", BITS)
class TestEveryBuiltInCodec(CodecConformance):
    @pytest.fixture(autouse=True)
    def _member(self, member: str) -> None:
        type(self).name, type(self).bits = member, BITS[member]


def test_every_family_is_tested() -> None:
    assert {codec(name).name.partition(":")[0] for name in BITS} == {
        name.partition(":")[0] for name in codecs
    }
    assert all(any(member.startswith(family) for member in BITS) for family in codecs)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("int44", "there is no codec 'int44'; did you mean 'int4'"),
        ("2:4", "there is no codec '2:4'; known: 2:4-bf16"),
        ("int8:100", "one of 32, 64, 128"),
        ("bf16:2", "it has no options"),
        ("2:4-bf16:64", "it has no blocks"),
        ("topk", "as in 'topk:0.01'"),
        ("topk:0", "above 0 and at most 1"),
        ("topk:nan", "above 0 and at most 1"),
        ("topk:many", "above 0 and at most 1"),
        ("quantum", "known: 2:4-bf16, 2:4-int4"),
        (4, "allowed is a name"),
    ],
)
def test_a_name_that_means_nothing_is_explained(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        codec(name)


def test_top_k_keeps_the_exact_part_and_the_first_of_equals() -> None:
    assert codec("topk:0.07").bytes(100) == 8 * 7
    assert codec("topk:0.01").bytes(1) == 8
    x = torch.tensor([1.0, -2.0, 2.0, 0.5, 2.0, float("nan")])
    assert largest(x, 3).tolist() == [1, 2, 5]
    for x in (values(300_000, "wide"), values(300_000, "equal"), torch.arange(300_000) % 64 / 1.0):
        for k in (1, 3000, 100_000):
            order = torch.sort(x.abs(), descending=True, stable=True).indices[:k]
            assert torch.equal(largest(x, k), order.sort().values)
    one, out = codec("topk:0.5"), torch.empty(4)
    payload = torch.empty(one.bytes(4), dtype=torch.uint8)
    one.encode(torch.tensor([3.0, -1.0, 1.0, -4.0]), payload)
    assert payload.view(torch.int32)[2:].tolist() == [0, 3]
    one.decode(payload, out)
    assert out.tolist() == [3.0, 0.0, 0.0, -4.0]


def test_int4_of_a_block_by_hand() -> None:
    """The example of docs/codecs.md."""
    x = torch.zeros(64)
    x[:4] = torch.tensor([7.0, -3.4, 0.5, 1.5])
    one = codec("int4:64")
    payload, out = torch.empty(one.bytes(64), dtype=torch.uint8), torch.empty(64)
    one.encode(x, payload)
    assert payload[:2].view(torch.bfloat16).item() == 1.0
    assert [hex(byte) for byte in payload[2:5].tolist()] == ["0x5f", "0xa8", "0x88"]
    one.decode(payload, out)
    assert out[:4].tolist() == [7.0, -3.0, 0.0, 2.0]


def test_tensors_by_hand_keep_shape_type_and_form() -> None:
    x = values(600).view(20, 30)
    named = {"a": x, "b": x.t().bfloat16(), "c": torch.tensor(3.0), "d": torch.empty(0, 5)}
    payload = compress(named, codec="int8")
    found = decompress(payload)
    assert isinstance(found, dict)
    for key, was in named.items():
        assert (found[key].shape, found[key].dtype) == (was.shape, was.dtype)
        assert (found[key] - was).abs().float().amax() < 0.03 if was.numel() else True
    assert payload.nbytes == sum(codec("int8").bytes(y.numel()) for y in named.values())
    assert 2.5 < payload.ratio < 4
    assert isinstance(decompress(compress(x)), torch.Tensor)
    listed = decompress(compress(torch.nn.Linear(3, 4).parameters(), "none"))
    assert isinstance(listed, list)
    assert [tuple(y.shape) for y in listed] == [(4, 3), (4,)]
    assert lezero.comm.compress is compress
    assert compress([]).ratio == 1.0


@pytest.mark.parametrize(
    "name", ["none", "fp16", "bf16", "int8", "int4", "sign", "topk:1", "2:4-bf16"]
)
def test_tensors_whose_sign_is_a_flag_keep_it(name: str) -> None:
    plain = -torch.arange(1.0, 9)
    for negated in (torch._neg_view(-plain), torch.complex(plain, -plain).conj().imag):
        assert negated.is_neg()
        sent, expected = decompress(compress(negated, name)), decompress(compress(plain, name))
        assert isinstance(sent, torch.Tensor)
        assert torch.equal(sent, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (torch.arange(4), "the tensor is int64"),
        (torch.ones(2, dtype=torch.complex64).conj(), "the tensor is complex64"),
        ({"step": torch.zeros(3, dtype=torch.int32)}, "'step' is int32"),
        ([torch.zeros(2), torch.zeros(2).double()], "tensor 1 is float64"),
        ([torch.zeros(2), None], "tensor 1 is NoneType"),
        (torch.eye(3).to_sparse(), "the tensor is sparse"),
        ({"w": torch.zeros(3, device="meta")}, "'w' is on meta"),
        ([torch.nested.as_nested_tensor([torch.zeros(2)], layout=torch.jagged)], "0 is nested"),
        (numpy.zeros(3, numpy.float32), "got ndarray; give torch.from_numpy"),
    ],
)
def test_tensors_that_are_not_floats_are_refused(tensors: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compress(tensors, codec="int4")  # type: ignore[arg-type]


def test_what_is_no_payload_is_refused() -> None:
    for given in (None, 5):
        with pytest.raises(ConfigError, match="allowed is a tensor, or a list or dict of them"):
            compress(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is no codec 'bogus'"):
        compress([], codec="bogus")
    with pytest.raises(ConfigError, match="got Tensor, allowed is what compress returned"):
        decompress(torch.zeros(3))  # type: ignore[arg-type]


def test_places_that_no_top_k_payload_has_are_refused() -> None:
    payload = compress(torch.randn(100), "topk:0.1")
    data = payload.parts[0].data
    for place in (-1, 100, int(data.view(torch.int32)[-2])):  # the last: one place twice
        data.view(torch.int32)[-1] = place
        with pytest.raises(ConfigError, match=r"payload: not one of topk:0\.1: its places"):
            decompress(payload)


@pytest.mark.parametrize("name", [*BITS, "topk:0.1"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": torch.Size([10**13])}, "payload is a contiguous uint8 tensor of shape"),
        ({"shape": (1000,)}, r"part 0 has shape \(1000,\)"),
        ({"shape": torch.Size([-1000])}, r"part 0 has shape torch.Size\(\[-1000\]\)"),
        ({"data": None}, "data of type NoneType"),
        ({"dtype": torch.int64}, "dtype torch.int64"),
    ],
)
def test_a_part_that_cannot_be_is_refused_before_memory_is_taken(name, change, says) -> None:
    payload = compress(torch.randn(1000), name)
    (part,) = payload.parts
    with pytest.raises(ConfigError, match=says):
        decompress(replace(payload, parts=(replace(part, **change),)))
    with pytest.raises(ConfigError, match="got 2 parts of a single tensor"):
        decompress(replace(payload, parts=(part, part)))
    with pytest.raises(ConfigError, match="got 2 keys for 1 parts"):
        decompress(replace(payload, keys=("a", "b"), single=False))


@pytest.mark.parametrize("name", BITS)
def test_a_bound_is_the_same_whatever_the_default_dtype_is(name: str) -> None:
    used, x = codec(name), torch.randn(1021)
    wanted = used.bound(x)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = used.bound(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)
