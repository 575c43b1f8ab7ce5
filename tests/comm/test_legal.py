"""What is allowed, what is not, and that the page says the same."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from lezero.comm import codec as codecs
from lezero.comm.legal import LEGAL, Case, problems
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.errors import ConfigError, DistributedError
from tests.house.floors import ROOT
from tests.ranks import RankPool

CODECS = ("none", "fp16", "bf16", "int8", "int4", "sign", "topk:0.01", "2:4-int8")


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"feedback": "worker"}, "feedback", "nothing is lost without a codec"),
        ({"codec": "sign"}, "feedback", "set feedback: worker"),
        ({"codec": "2:4-int4"}, "feedback", "lost for good"),
        ({"gather": "topk:0.1"}, "gather", "set gather: none, fp16"),
        ({"codec": "int8", "topology": "shared"}, "topology", "topology: auto"),
        ({"codec": "int9"}, "codec", "did you mean 'int8'"),
        ({"codec": "int8:7"}, "codec", "int8"),
        ({"gather": "sgin"}, "gather", "did you mean 'sign'"),
        ({"feedback": "server"}, "feedback", "'none', 'worker' or 'both'"),
        ({"toplogy": "flat"}, "toplogy", "did you mean 'topology'"),
        ({"codec": "int4", "budget": 0.1}, "budget", "got 0.1, which codec auto alone heeds"),
        ({"codec": "int4", "feedback_dtype": "bf16"}, "feedback_dtype", "set feedback: worker"),
    ],
)
def test_a_wire_that_is_not_allowed_is_told(fields: dict[str, str], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Wire.parse(fields)
    assert field in str(caught.value)


def test_what_is_left_at_its_default_or_chosen_by_auto_is_no_mistake() -> None:
    assert Wire.parse(Wire(codec="int4").to_dict()) == Wire(codec="int4")
    assert Wire(codec="auto", budget=0.1, feedback_dtype="int8").budget == 0.1
    assert Wire(codec="sign", feedback="worker", feedback_dtype="int8").codec.startswith("sign")


def test_names_that_editors_offer_are_codecs() -> None:
    for name in Wire.model_json_schema()["properties"]["codec"]["examples"]:
        assert name in ("none", "auto") or codecs.codec(name).name.startswith(name)


def test_every_other_combination_can_be_written() -> None:
    count = 0
    for codec, gather, feedback, topology in product(
        CODECS, CODECS, ("none", "worker", "both"), ("auto", "flat", "hierarchical", "shared")
    ):
        fields = {"codec": codec, "gather": gather, "feedback": feedback, "topology": topology}
        wrong = problems(Case(codec, gather, feedback, topology))
        if wrong:
            with pytest.raises(ConfigError) as caught:
                Wire.parse(fields)
            assert {p.path for p in caught.value.problems} == {p.path for p in wrong}
        else:
            assert Wire.parse(fields).codec.startswith(codec)
            count += 1
    # No codec: any gather that keeps all; dense codecs: any feedback; the others: with feedback.
    flat, keeping, dense, dropping = 3, 5, 4, 3
    assert count == flat * keeping * (1 + dense * 3 + dropping * 2) + 1


def test_an_all_reduce_that_would_lose_for_good_is_refused() -> None:
    with Link(Wire(codec="sign", feedback="worker"), Mesh({"shard": 1}), "shard") as link:
        link.check("reduce_scatter")
        with pytest.raises(ConfigError, match=r"encodes twice.*set feedback: both"):
            link.check("all_reduce")
        with pytest.raises(ConfigError, match="encodes twice"):
            link.all_reduce(torch.ones(4), key="x")


def test_the_page_has_every_rule() -> None:
    page = " ".join((ROOT / "docs/wires.md").read_text(encoding="utf-8").split())
    for rule in LEGAL:
        for part in (rule.what, rule.reason, rule.remedy):
            assert part in page, part


def differs() -> str:
    wire = Wire(codec="int8" if groups.rank() else "int4")
    with pytest.raises(DistributedError) as caught:
        Link(wire, Mesh({"shard": 2}), "shard")
    return str(caught.value)


def test_ranks_with_different_wires_are_told_which_key(ranks: RankPool) -> None:
    for text in ranks(2, differs):
        assert "wire.codec is" in text
        assert "on rank 1" in text
