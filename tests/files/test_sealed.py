import pytest

from lezero.core.errors import CorruptError, FileError
from lezero.files import check_json, seal, unseal


def test_every_single_bit_flip_is_detected():
    raw = seal(1, {"step": 3, "text": "a  b", "list": [1, 2.5, None, True]})
    assert unseal(raw, "x", 1, "0.1.0")["step"] == 3
    for at in range(len(raw) * 8):
        flipped = bytearray(raw)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(FileError, match="x: "):
            unseal(bytes(flipped), "x", 1, "0.1.0")


@pytest.mark.parametrize("cut", [0, 1, 10, 80, -1])
def test_truncated_is_detected(cut):
    raw = seal(1, {"step": 3})
    with pytest.raises(CorruptError):
        unseal(raw[:cut], "x", 1, "0.1.0")


def test_trailing_bytes_are_detected():
    with pytest.raises(CorruptError):
        unseal(seal(1, {}) + b" ", "x", 1, "0.1.0")


def test_another_format_names_who_reads_it():
    raw = seal(2, {"readable_from": "0.7.0", "writer": "lezero 0.8.1"})
    with pytest.raises(FileError, match=r"format 2 .*lezero 0.8.1.*LeZero 0.7.0 or newer") as info:
        unseal(raw, "x", 1, "0.1.0")
    assert not isinstance(info.value, CorruptError)
    assert "LeZero 0.1.0, which reads format 1" in str(info.value)


def test_a_later_format_sealed_in_another_way_is_still_named():
    with pytest.raises(FileError, match=r"format 9 .* LeZero 2\.0 or newer"):
        unseal(b'{"format": 9, "readable_from": "2.0"}', "x", 1, "0.1.0")


def test_repeated_keys_and_deep_nesting_are_refused():
    import hashlib

    for inner in ('"a":1,"a":2', '"a":' + "[" * 100_000 + "]" * 100_000):
        zero = ('{"digest":"' + "0" * 64 + '","format":1,' + inner + "}").encode()
        digest = hashlib.sha256(zero).hexdigest().encode()
        with pytest.raises(CorruptError):
            unseal(zero.replace(b"0" * 64, digest), "x", 1, "0.1.0")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": {"b": [1, float("nan")]}}, r"d\.a\.b\[1\]: nan"),
        ({"a": float("inf")}, r"d\.a: inf"),
        ({1: 2}, "keys must be text, got 1"),
        ({"a": object()}, r"d\.a: object"),
        ({"a": b"x"}, r"d\.a: bytes"),
    ],
)
def test_what_json_would_lose_is_named(value, place):
    with pytest.raises(FileError, match=place):
        check_json(value, "d")


def test_a_list_that_holds_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(FileError, match="deep"):
        check_json(loop, "d")


def test_too_large_is_refused(monkeypatch):
    monkeypatch.setattr("lezero.files.sealed.LIMIT", 1000)
    with pytest.raises(FileError, match="at most 1,000"):
        seal(1, {"text": "x" * 2000})
