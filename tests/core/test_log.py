import io
import os

import pytest

from lezero.core.log import say


@pytest.mark.parametrize("buffering", ["lines", "none"])
def test_a_line_and_its_end_are_one_write(buffering):
    reader, writer = os.pipe2(os.O_DIRECT)  # what one call wrote, one call reads
    raw = os.fdopen(writer, "wb", buffering=0)
    stream = io.TextIOWrapper(
        raw, line_buffering=buffering == "lines", write_through=buffering == "none"
    )
    try:
        say("error: told", stream)
        assert os.read(reader, 100) == b"error: told\n"
    finally:
        os.close(reader)
    say("nobody reads any more", stream)
    stream.detach().close()
    say("closed", stream)


def test_what_the_stream_cannot_hold_is_spelled_out():
    kept = io.BytesIO()
    stream = io.TextIOWrapper(kept, encoding="ascii", write_through=True)
    say("two: é – ü", stream)
    assert kept.getvalue() == b"two: \\xe9 \\u2013 \\xfc\n"
