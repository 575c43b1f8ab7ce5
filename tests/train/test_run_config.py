"""What the config of a run makes of its values before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from lezero.core.errors import ConfigError
from lezero.jobs.compress_config import CompressConfig
from lezero.train.config import RunConfig


def config(**sections: Any) -> RunConfig:
    return RunConfig.parse({"data": {"train": "python-docs"}, **sections})


def test_paths_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    found = config(run="~/runs/x", model={"folder": "~/models/a"})
    assert (found.run, found.model.folder) == ("/home/ada/runs/x", "/home/ada/models/a")
    smaller = CompressConfig.parse({"model": "~/a", "out": "~/b", "scheme": "int8_weight"})
    assert (smaller.model, smaller.out) == ("/home/ada/a", "/home/ada/b")


@pytest.mark.parametrize(("warmup", "warned"), [(6, False), (7, True), (600, True)])
def test_a_warmup_that_outlasts_the_run_is_warned_of(
    caplog: pytest.LogCaptureFixture, warmup: int, warned: bool
) -> None:
    config(train={"steps": 6, "lr": 0.3, "schedule": {"warmup": warmup}})
    said = [record.getMessage() for record in caplog.records]
    assert bool(said) == warned
    if warmup == 600:
        assert said[0].startswith(
            "train.schedule.warmup: got 600, but the run ends after train.steps of 6, where the "
            "learning rate is 0.003 and not yet train.lr, 0.3;"
        )


def test_other_ranks_do_not_warn_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    config(train={"steps": 6, "schedule": {"warmup": 7}})
    assert not caplog.records


@pytest.mark.parametrize("name", ["steps", "batch", "accumulate", "max_skipped"])
def test_numbers_that_no_run_can_have_are_refused(name: str) -> None:
    for value in (10**20, 10**23, 1e30, 1 << 41):
        with pytest.raises(ConfigError, match=rf"train\.{name}: got .*, allowed is .*\d+$"):
            config(train={name: value})
    with pytest.raises(ConfigError, match=r"allowed is a whole number from 1 to \d+$"):
        config(train={name: 1e30})
