"""Several steps in one call of the decoder, against the same steps one by one."""

from __future__ import annotations

import math

import pytest
import torch

from lezero.ops.decoder import Beginning, Decoder, Ending
from lezero.ops.decoder.native import NATIVE
from lezero.ops.draw import draw_tokens
from lezero.ops.linear import embedding_rows
from tests.ops.test_decoder import BLOCKS, FORMS, PLAIN, layers, poisoned, tables, weight

VOCABULARY = 333


def made(form: str, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    rows = weight(VOCABULARY, PLAIN.dim, False, **FORMS[form])
    ending = Ending(torch.rand(PLAIN.dim) + 0.5, rows)
    return Decoder(PLAIN, layers(PLAIN, form), ending, Beginning(rows, dtype))


def chunks_at(positions: list[int]) -> torch.Tensor:
    return torch.tensor([[i, 1, at] for i, at in enumerate(positions)], dtype=torch.int32)


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["W8A16", "W4A8 in blocks"])
@pytest.mark.parametrize("sequences", [1, 3, 17])
def test_it_equals_steps_one_by_one(sequences, form, dtype, kernel, monkeypatch):
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    decoder, angles = made(form, dtype), tables(PLAIN)
    assert decoder.follows
    table = torch.arange(5 * sequences).view(sequences, 5).int() % BLOCKS
    mine, theirs = poisoned(PLAIN), poisoned(PLAIN)
    tokens, steps = list(range(7, 7 + sequences)), 20
    found = decoder.follow(tokens, steps, *angles, chunks_at([0] * sequences), table, mine)
    expected, rows = [], torch.arange(sequences).int()
    held, bits, group = decoder.beginning.rows, FORMS[form]["bits"], FORMS[form].get("group", 0)
    for step in range(steps):
        fed = torch.tensor(expected[-1] if expected else tokens)
        x = embedding_rows(fed, held.packed, PLAIN.dim, bits, group, dtype).float()
        given = (x, *angles, chunks_at([step] * sequences), table, theirs, rows)
        expected.append(decoder.logits(*given, best=True)[1].tolist())
    assert found == expected
    assert len({token for row in found for token in row}) > 5
    again = decoder.follow(found[-1], 2, *angles, chunks_at([steps] * sequences), table, mine)
    assert len(again) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(dtype):
    if not NATIVE.available():
        pytest.skip("no native kernel suits this processor")
    decoder, angles = made("W8A16", torch.float32), tables(PLAIN)
    table = torch.arange(10).view(2, 5).int()

    def found():
        given = (*angles, chunks_at([0, 0]), table, poisoned(PLAIN))
        return decoder.follow([1, 2], 8, *given)

    expected, before = found(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert found() == expected
    finally:
        torch.set_default_dtype(before)


def test_logits_of_another_type_are_refused():
    if not NATIVE.available():
        pytest.skip("no native kernel suits this processor")
    decoder = made("W8A16", torch.float32)
    given = (torch.zeros(1, PLAIN.dim), decoder._table, *tables(PLAIN), chunks_at([0]))
    cache, rows = poisoned(PLAIN), torch.zeros(1).int()
    held = (torch.zeros(1, 5).int(), cache.keys, cache.values)
    low, best = torch.zeros(1, VOCABULARY, dtype=torch.bfloat16), torch.empty(0).long()
    with pytest.raises(RuntimeError, match="of fp32"):
        decoder._run((*given, *held), rows, low, best, cache.bits, False)


def chances(steps: int, sequences: int) -> torch.Tensor:
    """Of all kinds: the likeliest token, all, the best few, those within a share."""
    kinds = [[0, 333, 2, 0], [1.0, 333, 2, 0], [0.7, 5, 2, 0], [2.0, 333, 0.9, 0], [1, 333, 2, 0.1]]
    asked = torch.tensor(kinds, dtype=torch.float64)
    rows = asked[torch.arange(steps * sequences) % len(kinds)]
    return torch.cat([rows, torch.rand(len(rows), 1).double()], 1).view(steps, sequences, 5)


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("sequences", [1, 3, 17])
def test_tokens_by_chance_are_those_that_rows_of_logits_give(sequences, kernel, monkeypatch):
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    decoder, angles = made("W8A16", torch.float32), tables(PLAIN)
    if not decoder.draws:
        pytest.skip("no native kernel draws on this processor")
    table = torch.arange(5 * sequences).view(sequences, 5).int() % BLOCKS
    mine, theirs = poisoned(PLAIN), poisoned(PLAIN)
    tokens, steps = list(range(7, 7 + sequences)), 20
    asked = chances(steps, sequences)
    found = decoder.follow(tokens, steps, *angles, chunks_at([0] * sequences), table, mine, asked)
    expected, rows = [], torch.arange(sequences).int()
    for step in range(steps):
        fed = torch.tensor(expected[-1] if expected else tokens)
        x = embedding_rows(fed, decoder.beginning.rows.packed, PLAIN.dim, 8, 0, torch.float32)
        given = (x.float(), *angles, chunks_at([step] * sequences), table, theirs, rows)
        logits = decoder.logits(*given)[0]
        expected.append(draw_tokens(logits, asked[step])[0].tolist())
    assert found == expected
    assert len({token for row in found for token in row}) > 10


@pytest.mark.parametrize("by_chance", [False, True])
def test_it_ends_with_the_step_that_is_not_finite(by_chance):
    if not NATIVE.available():
        pytest.skip("no native kernel suits this processor")
    decoder, angles = made("W8A16", torch.float32), tables(PLAIN)
    angles[0][3] = math.nan
    table = torch.arange(10).view(2, 5).int()
    asked = chances(8, 2) if by_chance else None
    found = decoder.follow([1, 2], 8, *angles, chunks_at([0, 0]), table, poisoned(PLAIN), asked)
    assert len(found) == 4
    assert found[3] == [-1, -1]
    assert all(token >= 0 for row in found[:3] for token in row)


def test_an_embedding_in_fp16_or_none_does_not_follow():
    assert not made("W8A16", torch.float16).follows
    assert not Decoder(PLAIN, layers(PLAIN, "W8A16")).follows
