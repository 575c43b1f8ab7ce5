"""GGUF models that were split: the parts are one model, and what is wrong with them is named."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch

from lezero.compress.quantize.gguf import kept_share, load_gguf_blocks
from lezero.core.errors import FileError
from lezero.models import Transformer, gguf_end_tokens, load_gguf
from lezero.models.gguf_header import read_gguf_header
from lezero.serve.coder import Coder
from lezero.serve.llm import LLM
from tests.models.test_gguf import CONFIG, TOKENS, gguf, write

FIRST, SECOND, THIRD = (f"a-0000{i}-of-00003.gguf" for i in (1, 2, 3))


def split(folder: Path, kind: str, seed: int = 0) -> Path:
    """As `GGUFWriter` cuts it, of whose parts the first alone has metadata."""
    with pytest.MonkeyPatch.context() as patch:
        cut = functools.partial(gguf.GGUFWriter, split_max_tensors=7)
        patch.setattr(gguf, "GGUFWriter", cut)
        write(
            folder / "a.gguf", Transformer(CONFIG, seed=seed), kind, tokenizer__ggml__eos_token_id=3
        )
    return folder / FIRST


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return split(tmp_path, "Q4_1")


@torch.no_grad()
def test_the_parts_are_one_model(first: Path, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", Transformer(CONFIG), "Q4_1")
    assert {path.name for path in tmp_path.glob("a-*")} == {FIRST, SECOND, THIRD}
    assert torch.equal(load_gguf(first)(TOKENS), load_gguf(whole)(TOKENS))
    assert torch.equal(load_gguf_blocks(first)(TOKENS), load_gguf_blocks(whole)(TOKENS))
    assert kept_share(first, (4,)) == kept_share(whole, (4,)) == 1
    names = [info.name for info in read_gguf_header(whole).tensors]
    assert [info.name for info in read_gguf_header(first).tensors] == names
    assert gguf_end_tokens(first) == {3}
    coder = Coder(None, frozenset())
    for weights in ("auto", "int8"):
        answers = [LLM(file, weights=weights, coder=coder).program for file in (first, whole)]
        assert answers[0].weight_bytes == answers[1].weight_bytes


def test_the_first_part_is_asked_for(first: Path) -> None:
    with pytest.raises(FileError, match=rf"is a later one of 3 parts .*; give the first, {FIRST}"):
        load_gguf(first.with_name(SECOND))
    first.rename(first.with_name("b.gguf"))
    with pytest.raises(FileError, match=r"the first of 3 .*; call it b-00001-of-00003\.gguf as be"):
        load_gguf(first.with_name("b.gguf"))


def test_parts_that_are_missing_or_of_another_model_are_named(first: Path, tmp_path: Path) -> None:
    second = first.with_name(SECOND)
    shutil.copy(second, first.with_name(THIRD))
    with pytest.raises(FileError, match=rf"{THIRD}: split\.no is 1, but {FIRST} wants 2"):
        LLM(first)
    second.unlink()
    with pytest.raises(FileError, match=f"the first of 3 parts .*, and {SECOND} is not beside it"):
        LLM(first)


def test_parts_with_other_tensors_than_were_split_are_refused(first: Path) -> None:
    third = first.with_name(THIRD)
    names = b"blk.1.attn_output", b"blk.0.attn_output"
    third.write_bytes(third.read_bytes().replace(*names))
    with pytest.raises(FileError, match=r"3 parts hold 19 tensors, not the 20 that were split"):
        load_gguf(first)
