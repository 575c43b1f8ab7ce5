"""A form on trial that fails on one of the ranks has failed for all of them."""

from __future__ import annotations

from unittest import mock

import torch

from lezero.core import groups
from lezero.core.decisions import Decision, Decisions
from lezero.train import speed, tuning
from lezero.train.loss import next_token_loss
from lezero.train.precision import Precision
from lezero.train.tuning import Tuner
from tests.train.test_speed import Model, PlainBlock


def tried(fails_in: int) -> tuple[list[str], Decision, list[list[bool]]]:
    """The forms that this rank's steps began in, what was recorded, and which of the steps timed
    had failed, after each; the blocks, which would win, fail on rank 1 in that step of theirs."""
    made = Tuner(
        Model(PlainBlock), next_token_loss, Decisions(), compile="auto", attention="torch",
        accumulate=1,
    )  # fmt: skip
    made.begin(Precision("fp32", torch.device("cpu")), 1000)
    forms, failed, count = [], [], 0
    while made.trying:
        form = made.form
        count += form.name == "blocks"
        if form.name == "blocks" and count == fails_in and groups.rank() == 1:
            assert made.failed(RuntimeError("no C++ compiler found"))
            assert made.form.name == "eager"
        groups.all_reduce_sum(torch.ones(1), "a step")
        forms.append(form.name)
        made.note({"eager": 1.0, "blocks": 0.1}[made.form.name])
        failed.append([seconds is None for seconds in made.taken])
    return forms, made.decisions.records["compile"], failed


def without_a_compiler(fails_in: int) -> tuple[list[str], Decision, list[list[bool]]]:
    with (
        mock.patch.object(tuning, "compiler_problem", return_value=""),
        mock.patch.object(speed.torch, "compile", lambda code, options: code),
    ):
        return tried(fails_in)


def test_all_leave_a_form_that_fails_on_one_rank(ranks) -> None:
    one, two = ranks(2, without_a_compiler, 2)
    assert one == two
    forms, record, _ = one
    assert forms == ["eager"] * 4 + ["blocks", "eager", "blocks"]
    assert record.chosen == "eager"
    assert record.candidates["blocks"]["failed"] == "no C++ compiler found (rank 1)"
