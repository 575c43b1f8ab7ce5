"""The data section's JSON schema accepts and refuses what the section itself does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lezero.core.config import Config, read_yaml
from lezero.core.errors import ConfigError
from lezero.data import DataConfig, TokenizerConfig
from lezero.train import RunConfig

ROOT = Path(__file__).parents[2]
KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
TESTS = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "minLength": lambda value, limit: len(value) >= limit,
    "minItems": lambda value, limit: len(value) >= limit,
    "maxItems": lambda value, limit: len(value) <= limit,
    "const": lambda value, only: value == only,
    "enum": lambda value, choices: value in choices,
    "required": lambda value, names: set(names) <= set(value),
}
SAID = {"title", "description", "default", "$defs", "discriminator"}


def accepts(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """Whether a JSON schema accepts a value; knows the words that our schemas use, and no other."""
    # What a value is comes before how large it is: "minimum" of a text is no question.
    for word, said in sorted(schema.items(), key=lambda item: item[0] != "type"):
        match word:
            case "$ref":
                good = accepts(root["$defs"][said.removeprefix("#/$defs/")], value, root)
            case "anyOf":
                good = any(accepts(one, value, root) for one in said)
            case "oneOf":
                good = sum(accepts(one, value, root) for one in said) == 1
            case "type":
                number = said in ("integer", "number")
                good = isinstance(value, KINDS[said]) and not (number and isinstance(value, bool))
            case "items":
                good = all(accepts(said, item, root) for item in value)
            case "prefixItems":
                good = all(accepts(one, item, root) for one, item in zip(said, value, strict=False))
            case "properties":
                good = all(accepts(said[k], item, root) for k, item in value.items() if k in said)
            case "additionalProperties":
                known = schema.get("properties", {})
                others = [item for key, item in value.items() if key not in known]
                good = (
                    not others
                    if said is False
                    else said is True or all(accepts(said, item, root) for item in others)
                )
            case _ if word in TESTS:
                good = TESTS[word](value, said)
            case _:
                assert word in SAID, f"the check does not know {word!r}"
                good = True
        if not good:
            return False
    return True


def fits(config: type[Config], value: Any) -> bool:
    schema = config.schema_dict()
    return accepts(schema, value, schema)


def documented(folder: Path) -> list[Any]:
    """Each YAML file and YAML block that the examples and pages hold, read as a run config is."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("examples/*.yaml"))]
    for page in [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted(ROOT.glob("docs/*.md"))]:
        texts += re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    found = []
    for text in texts:
        (folder / "one.yaml").write_text(text, encoding="utf-8")
        found.append(read_yaml(str(folder / "one.yaml")))
    return found


def test_the_schema_accepts_every_documented_config(tmp_path):
    configs = documented(tmp_path)
    sections = [config["data"] for config in configs if "data" in config]
    runs = [config for config in configs if {"run", "model", "data"} <= config.keys()]
    assert len(sections) >= 4
    assert len(runs) >= 3
    for config, given in [(DataConfig, sections), (RunConfig, runs)]:
        for value in given:
            config.parse(value)
            assert fits(config, value), value


def test_paths_of_pathlib_are_taken_as_their_texts():
    path = Path("a/b")
    given = DataConfig(train=path, validation=path, tokenizer={"folder": path})
    assert given == DataConfig(train="a/b", validation="a/b", tokenizer={"folder": "a/b"})
    assert DataConfig(train=[path, "c"], validation=(path,)) == DataConfig(
        train=["a/b", "c"], validation=["a/b"]
    )
    with pytest.raises(ConfigError, match=r"train\.1: got 3, allowed is a valid string"):
        DataConfig(train=[path, 3])


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({}, True),
        ({"train": ["a/", "b.txt"]}, True),
        ({"train": []}, False),
        ({"train": 3}, False),
        ({"train": None}, False),
        ({"validation": 0}, True),
        ({"validation": 0.5}, True),
        ({"validation": 1}, False),
        ({"validation": -0.1}, False),
        ({"validation": True}, False),
        ({"validation": "held.txt"}, True),
        ({"validation": ["held.txt"]}, True),
        ({"validation": []}, False),
        ({"tokenizer": "bytes"}, True),
        ({"tokenizer": "bpe"}, False),
        ({"tokenizer": {"train": 300}}, True),
        ({"tokenizer": {"train": 3}}, False),
        ({"tokenizer": {"trian": 300}}, False),
        ({"tokenizer": {"folder": "there"}}, True),
        ({"tokenizer": {}}, True),
        ({"tokenizer": True}, False),
        ({"sequnce": 4}, False),
        ({"sequence": 4}, True),
        ({"sequence": 1}, False),
    ],
)
def test_the_schema_accepts_what_the_section_accepts(changed, good):
    value = {"train": "python-docs", **changed}
    assert fits(DataConfig, value) == good
    if good:
        DataConfig.parse(value)
    else:
        with pytest.raises(ConfigError):
            DataConfig.parse(value)


def test_short_forms_mean_the_long_ones():
    short = DataConfig.parse({"train": "a", "validation": "b", "tokenizer": "bytes"})
    assert short == DataConfig(train=("a",), validation=("b",), tokenizer=TokenizerConfig())
