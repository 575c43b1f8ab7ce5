"""What a verification does not prove is said: steps that were skipped, bounds that hold nothing."""

import pytest
import torch

from lezero.jobs.verify import verify
from lezero.train.precision import Precision
from tests.jobs.verify_runs import STEPS

pytestmark = pytest.mark.usefixtures("without_accelerator")


@pytest.fixture
def starts_at(monkeypatch):
    """fp16 with another first loss scale."""

    def at(scale):
        def made(self):
            return torch.amp.GradScaler(self.place.type, init_scale=scale)

        monkeypatch.setattr(Precision, "_new_scaler", made)

    return at


def test_a_run_that_takes_no_step_is_not_within_tolerance(run, starts_at):
    starts_at(2.0**60)
    found = verify(run(precision="fp16", max_skipped=100), STEPS)
    assert found.first is not None
    assert found.first.check == "skipped step"
    assert "every step was skipped (fp16 overflow" in found.summary
    assert found.to_json()["skipped_steps"] == STEPS


def test_skipped_steps_are_counted(run):
    found = verify(run(lr=1e30), STEPS).require()
    assert found.skipped == 3
    assert "Within tolerance: 1 step in fp32 is that of plain PyTorch" in found.summary
    assert "(3 of 4 steps were skipped and are not compared)" in found.summary
    assert found.table().count("skipped: ") == 3


def test_a_bound_of_the_whole_gradient_is_no_proof(run, starts_at):
    starts_at(2.0**-30)
    found = verify(run(precision="fp16"), STEPS)
    assert found.first is not None
    assert found.first.check == "gradient"
    assert "a missing one would pass, in 4 of 4 steps" in found.summary


def test_one_step_is_told_as_one(run):
    assert "Within tolerance: 1 step in fp32 is that of plain" in verify(run(), 1).summary
