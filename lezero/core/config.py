"""Base of every config: a frozen, keyword-only record that explains its own errors.

Each config lives in the file of what it configures and derives from `Config`. YAML is one way to
write one: `Config.parse(mapping)` and the constructor accept the same fields and raise the same
`ConfigError`, which names every bad field, the value given, what is allowed and, for an unknown
key, the nearest right one.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from lezero.core.errors import ConfigError
from lezero.core.explained import explain
from lezero.core.paths import expand_home


def as_text(value: Any) -> Any:
    """A `Path` as its text; anything else as it is."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


GivenPath = Annotated[str, BeforeValidator(as_text)]
"""A field that names a file or folder, as text or `Path`, and keeps the text."""
PathText = Annotated[GivenPath, AfterValidator(expand_home)]
"""A field that names a file or folder: `~` stands for the user's home; `$NAME` stays as it is."""


class Config(BaseModel):
    """Frozen record; unknown keys, wrong types and non-finite numbers are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=False,
    )

    def __init__(self, /, *given: Any, **data: Any) -> None:
        if given:
            first = next(iter(type(self).model_fields), "field")
            raise ConfigError(
                f"{type(self).__name__}: got {given[0]!r} without a name; fields have names, "
                f"as in {type(self).__name__}({first}=…)"
            )
        try:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise explain(type(self), error) from None
        except RecursionError:
            raise ConfigError(f"{type(self).__name__}: a value is nested too deep") from None

    @model_validator(mode="wrap")
    @classmethod
    def _keys_are_text(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Asked of a section before Python is, which takes no other keys as keywords."""
        bad = (
            [key for key in value if not isinstance(key, str)] if isinstance(value, Mapping) else []
        )
        if bad:
            raise PydanticCustomError("keys", "text as keys, not {key}", {"key": repr(bad[0])})
        return read(value)

    @field_validator("*", mode="wrap")
    @classmethod
    def _no_number(
        cls, value: Any, read: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        """Python counts True as 1; someone who writes `lr: true` does not mean 1.0. And it reads
        the text "1_000" as 1000, which in YAML 1.2 is no number."""
        kinds = _leaves(cls.model_fields[str(info.field_name)].annotation)
        if bool not in kinds and kinds & {int, float} and _holds_bool(value):
            raise PydanticKnownError("float_type" if float in kinds else "int_type")
        found = read(value)
        text = _read_as_number(value, found)
        if text:
            plain = text.replace("_", "").strip()
            raise PydanticCustomError("underscore", f"a number without '_', as {plain}")
        return found

    @classmethod
    def parse(cls, data: object, source: str = "config") -> Self:
        """Builds the config from parsed YAML or JSON; `source` names it in errors."""
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"{source}: expected a mapping of keys to values, got {type(data).__name__}"
            )
        bad = [key for key in data if not isinstance(key, str)]
        if bad:
            raise ConfigError(f"{source}: keys must be text, got {bad[0]!r}")
        try:
            return cls(**data)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}", error.problems) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values of every field, defaults included."""
        return self.model_dump(mode="json")

    @classmethod
    def schema_dict(cls) -> dict[str, Any]:
        """JSON schema for editors."""
        return cls.model_json_schema()


def _leaves(annotation: Any) -> set[type]:
    """The types that a field's values are made of: `tuple[float, ...] | None` is {float, None}."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    inner = get_args(annotation)
    return set().union(*map(_leaves, inner)) if inner else {annotation}


def _holds_bool(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_bool, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_bool, value))
    return isinstance(value, bool)


def _read_as_number(value: Any, found: Any) -> str:
    """The text with `_` in `value` of which a number was made in `found`; "" for none."""
    if isinstance(value, str):
        return value if "_" in value and isinstance(found, int | float) else ""
    if isinstance(value, list | tuple) and isinstance(found, list | tuple):
        return next(filter(None, map(_read_as_number, value, found)), "")
    if isinstance(value, Mapping) and isinstance(found, Mapping):
        return next((x for k in value if (x := _read_as_number(value[k], found.get(k)))), "")
    return ""


_SIGNS = ("*", "&", "!", "%", "@", "`")
"""What a plain value of YAML may not begin with."""


def set_path(data: dict[str, Any], assignment: str) -> None:
    """Applies one `--set a.b=value` to a nested mapping in place; the value is read as YAML.

    Raises `ConfigError` when the assignment has no `=`, an empty key, or leads through a value
    that is not a mapping.
    """
    path, separator, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"--set {assignment}: write it as section.key=value")
    try:
        value = load_yaml(text)
    except ValueError as error:
        escaped = text.replace("'", "''")
        hint = ""
        if text.strip()[:1] in _SIGNS:
            hint = "; quote it: --set " + shlex.quote(f"{path}='{escaped}'")
        raise ConfigError(
            f"--set {assignment}: the value is not valid YAML ({error}){hint}"
        ) from None
    node: Any = data
    for at, key in enumerate(keys[:-1], 1):
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            within = "".join(f"{{{inner}: " for inner in keys[at:])
            whole = f"{'.'.join(keys[:at])}={within}{text}{'}' * len(keys[at:])}"
            raise ConfigError(
                f"--set {assignment}: '{key}' is not a section, but {node!r:.80}; set all of it: "
                f'--set "{whole}"'
            )
    node[keys[-1]] = value


def read_yaml(path: str) -> dict[str, Any]:
    """Reads a YAML mapping from a file (at most 1 MiB); errors name the file and the line."""
    path = expand_home(path)
    try:
        if os.path.getsize(path) > 1 << 20:
            raise ConfigError(f"{path}: larger than 1 MiB; that is no config file")
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the YAML file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    try:
        data = load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values at the top level")
    return data


def load_yaml(text: str) -> Any:
    """The value of a YAML text; `ValueError` says where it is none, or names a key twice.

    Plain words mean what they do in YAML 1.2, and to editors: `3e-4` is a number, `010` is ten,
    `0o10` and `0x8` are eight; `off`, `on`, `yes` and `no` are words (a field that is true or false
    takes them as such), and so are `10:00`, `0b11`, `1_000` and `2024-01-01`.
    """
    import yaml

    try:
        return yaml.load(text, _loader())
    except yaml.MarkedYAMLError as error:
        mark, said = error.problem_mark, error.problem or "not understood"
        raise ValueError(said if mark is None else f"line {mark.line + 1}: {said}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None


def dump_yaml(value: Any, *, on_one_line: bool = False) -> str:
    """`value` as YAML that `load_yaml` reads back, and so do readers of YAML 1.1: a text that is a
    number or a truth value to either is quoted. On one line: line breaks in texts are escaped."""
    import yaml

    written: str = yaml.dump(
        value,
        Dumper=_dumper(on_one_line),
        default_flow_style=on_one_line,
        width=1 << 30 if on_one_line else None,
        sort_keys=on_one_line,
        allow_unicode=True,
    )
    return written.removesuffix("...\n").strip() if on_one_line else written


@functools.cache
def _dumper(on_one_line: bool) -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = '"' if on_one_line and "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    Dumper.yaml_implicit_resolvers = {
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *found]
        for first, found in _loader().yaml_implicit_resolvers.items()
    }
    return Dumper


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()  # here, since `<<` will put others' keys in front of those that are there
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    said = f"'{key.value}' is there twice"
                    raise yaml.composer.ComposerError(None, None, said, key.start_mark)
                seen.add(key.value)
            return node

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (LookupError, ValueError):  # of a tag that the text does not fit
                said = f"{node.value!r:.80} is not understood as {node.tag.rpartition(':')[2]}"
                raise yaml.constructor.ConstructorError(None, None, said, node.start_mark) from None

        def construct_integer(self, node: Any) -> int:
            text = self.construct_scalar(node)
            if not integer.match(text):
                said = f"line {node.start_mark.line + 1}: '{text}' is no integer"
                raise yaml.constructor.ConstructorError(None, None, said)
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    kinds = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "int", "timestamp", "value")}
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag not in kinds]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.yaml_constructors = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag != "tag:yaml.org,2002:timestamp"
    }
    integer = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
    truth = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
    number = re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    )
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", truth, list("tTfF"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", integer, list("-+0123456789"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_integer)
    return Loader
