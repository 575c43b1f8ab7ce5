"""The base of configs: what pydantic would let through, and how errors read."""

from __future__ import annotations

import pickle
import shlex
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import Field

from lezero.core.config import (
    Config,
    PathText,
    dump_yaml,
    load_yaml,
    read_yaml,
    set_path,
)
from lezero.core.errors import ConfigError


class Inner(Config):
    count: int = 1


class Sample(Config):
    inner: Inner = Inner()
    steps: int | None = 1
    rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    stage: Literal[0, 1] = 0
    limits: dict[str, int] = {}  # noqa: RUF012  (pydantic copies defaults)
    either: bool | int = 0
    flag: bool = False
    more: tuple[Inner, ...] = ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({1: 2}, "keys must be text, got 1"),
        ({"inner": {1: 2}}, "inner: got {1: 2}, allowed is text as keys, not 1"),
        ({"more": [{}, {True: 2}]}, "more.1: got {True: 2}, allowed is text as keys, not True"),
    ],
)
def test_keys_are_text_in_each_section(given: dict[object, object], said: str) -> None:
    with pytest.raises(ConfigError, match="text") as caught:
        Sample.parse(given, "run.yaml")
    assert str(caught.value) == f"run.yaml: {said}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": True}, "steps: got True, allowed is a valid integer"),
        ({"rate": False}, "rate: got False, allowed is a valid number"),
        ({"betas": [0.9, True]}, "betas: got [0.9, True], allowed is a valid number"),
        ({"stage": True}, "stage: got True"),
        ({"limits": {"a": True}}, "limits: got {'a': True}"),
        ({"inner": {"count": True}}, "inner.count: got True"),
    ],
)
def test_true_is_no_number(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match="got") as caught:
        Sample.parse(given, "run.yaml")
    assert str(caught.value).startswith(f"run.yaml: {said}")


def test_what_python_cannot_follow_is_an_error_of_the_value() -> None:
    deep: list[object] = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested too deep"):
        Sample.parse({"steps": deep})


def test_fields_have_names() -> None:
    with pytest.raises(ConfigError, match=r"Inner: got 5 without .* as in Inner\(count=…\)"):
        Inner(5)


def test_fields_that_take_truth_values_still_do() -> None:
    sample = Sample(either=True, flag=True)
    assert sample.either is True
    assert sample.flag is True
    assert sample.steps == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("'off'", "off"),
        ("no", "no"),
        ("true", True),
        ("3e-4", 3e-4),
        ("-1.5E+3", -1500.0),
        (".5", 0.5),
        ("12", 12),
        ("1.2.3", "1.2.3"),
        ("e", "e"),
        ("[1e3, on]", [1e3, "on"]),
        ("null", None),
        ("010", 10),
        ("-7", -7),
        ("0o17", 15),
        ("0x1F", 31),
        ("!!int 010", 10),
        ("1:30", "1:30"),
        ("10:00.5", "10:00.5"),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01T10:00:00Z", "2024-01-01T10:00:00Z"),
        ("=", "="),
    ],
)
def test_plain_words_mean_what_editors_take_them_for(text: str, value: object) -> None:
    data: dict[str, object] = {}
    set_path(data, f"a.b={text}")
    assert data == {"a": {"b": value}}


def test_a_value_that_needs_quotes_is_shown_with_them() -> None:
    for text in ("*.txt", "*it's.txt", '*$HOME"`', "!foo bar"):
        with pytest.raises(ConfigError) as told:
            set_path({}, f"data.train={text}")
        (argument,) = shlex.split(str(told.value).split("; quote it: --set ")[1])
        set_path(data := {}, argument)
        assert data == {"data": {"train": text}}


@pytest.mark.parametrize("text", ["!!int 0b11", "!!timestamp 2024-01-01", "!!timestamp x"])
def test_a_tag_of_yaml_1_1_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--set a=.*: the value is not valid YAML"):
        set_path({}, f"a={text}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: !!bool maybe", "line 2: 'maybe' is not understood as bool"),
        ("[!!float '']", "line 1: '' is not understood as float"),
        ("!!float x", "line 1: 'x' is not understood as float"),
    ],
)
def test_a_text_that_its_tag_does_not_fit_is_told(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        load_yaml(text)


MERGED = """
a: &a {x: 1}
base:
  inner: &b {<<: *a, x: 2}
c: {<<: *b}
d: {<<: [*a, *b], x: 3}
"""


def test_what_is_merged_may_be_there_already() -> None:
    found = load_yaml(MERGED)
    assert (found["base"], found["c"], found["d"]) == ({"inner": {"x": 2}}, {"x": 2}, {"x": 3})
    for text in ("{x: 1, x: 2}", "a: &a {x: 1}\nb: {y: 1, <<: *a, y: 2}"):
        with pytest.raises(ValueError, match=r"^line [12]: '[xy]' is there twice$"):
            load_yaml(text)


@pytest.mark.parametrize("text", ["1:30", "0b11", "10:00"])
def test_what_is_no_number_in_yaml_1_2_is_refused_as_one(text: str) -> None:
    data: dict[str, object] = {}
    set_path(data, f"steps={text}")
    with pytest.raises(ConfigError, match=f"steps: got '{text}', allowed is a valid integer"):
        Sample.parse(data)


class Numbers(Config):
    count: int | None = None
    share: float | tuple[str, ...] = 0.5
    pair: tuple[float, float] = (0.9, 0.95)
    many: dict[str, int] | None = None
    group: int | Literal["a_row"] = "a_row"
    either: int | str = 0
    word: str = ""


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        *(("count=1_000", "1000"), ("count=' 1_0 '", "10"), ("share=0.0_5", "0.05")),
        *(("pair=[0.9, 0.9_5]", "0.95"), ("many={a_b: 1_0}", "10"), ("group=12_8", "128")),
    ],
)
def test_a_number_with_underscores_is_text_and_refused_as_one(text: str, plain: str) -> None:
    data: dict[str, object] = {}
    set_path(data, text)
    field = text.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{field}: got .*, allowed is a number without '_', as"):
        Numbers.parse(data)
    with pytest.raises(ConfigError, match=f"as {plain}(, or null)?$"):
        Numbers.parse(data)


def test_texts_with_underscores_stay_texts() -> None:
    found = Numbers.parse({"share": ["1_0"], "group": "a_row", "either": "1_0", "word": "1_0"})
    assert (found.share, found.group, found.either, found.word) == (("1_0",), "a_row", "1_0", "1_0")
    assert Numbers.parse({"count": "10", "many": {"a_b": 1}}).count == 10


def test_problems_show_what_they_hold_and_stay_equal_on_their_way_to_other_processes() -> None:
    with pytest.raises(ConfigError) as caught:
        Sample.parse({"stage": 7, "nope": 1})
    there = pickle.loads(pickle.dumps(caught.value))
    assert (str(there), there.problems) == (str(caught.value), caught.value.problems)
    shown = repr(there.problems[0])
    assert shown.startswith("Problem(path=('stage',), value=7, reason='got 7, allowed is ")


class Places(Config):
    run: PathText = Field("runs/latest", min_length=1)
    folder: PathText | None = None


def test_a_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    places = Places(run="~/runs/x", folder="~")
    assert (places.run, places.folder) == ("/home/ada/runs/x", "/home/ada")
    kept = Places(run="$HOME/x~", folder="a/~/b")
    assert (kept.run, kept.folder) == ("$HOME/x~", "a/~/b")
    with pytest.raises(ConfigError, match="run: ~no-such-user/x: there is no user 'no-such-user'"):
        Places(run="~no-such-user/x")
    assert Places().folder is None
    given = Places(run=Path("~/runs/x"), folder=Path("a"))
    assert given == Places(run="~/runs/x", folder="a")
    with pytest.raises(ConfigError, match="run: got '', allowed is at least 1 character"):
        Places(run="")


def test_a_config_file_may_lie_in_the_home_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("steps: 010\n")
    assert read_yaml("~/run.yaml") == {"steps": 10}


def test_yes_and_off_are_truth_values_where_a_field_takes_them() -> None:
    assert Sample.parse({"flag": "yes"}).flag is True
    assert Sample.parse({"flag": "off"}).flag is False


def test_a_key_that_is_there_twice_is_refused(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("base: &base {steps: 1}\nsample:\n  <<: *base\n  steps: 2\n")
    assert read_yaml(str(file))["sample"] == {"steps": 2}
    file.write_text("train:\n  steps: 5\nrun: a\ntrain:\n  batch: 4\n")
    with pytest.raises(ConfigError, match="line 4: 'train' is there twice"):
        read_yaml(str(file))


def test_a_key_named_self_is_unknown_as_any_other() -> None:
    with pytest.raises(ConfigError, match="self: unknown key"):
        Sample.parse({"self": 1})


@pytest.mark.parametrize("text", ["[" * 5000, "a: " + "{b: " * 5000])
def test_yaml_nested_by_thousands_is_told(tmp_path, text) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"deep\.yaml: not valid YAML: nested too deeply"):
        read_yaml(str(path))


@pytest.mark.parametrize("on_one_line", [True, False])
def test_what_is_dumped_comes_back(on_one_line: bool) -> None:
    """Texts that YAML 1.1 or 1.2 reads as something else among them."""
    odd = "1e3 0o10 010 3E5 .5 1_000 0x8 yes off true null ~ 10:00 2024-01-01 0b11 - = << .inf"
    value = {
        "texts": [*odd.split(), "", " a ", "a\nb", "# c", "é"],
        "n": [1, 1e-5, 1e20, None, True],
    }
    assert load_yaml(dump_yaml(value, on_one_line=on_one_line)) == value
    assert yaml.safe_load(dump_yaml(value, on_one_line=on_one_line)) == value
