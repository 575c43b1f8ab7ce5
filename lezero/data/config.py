"""The `data` section of a config: which text, which tokenizer, which shape.

data:
  train: [books/, "more/*.jsonl"]      # or python-docs, the text that every Python ships
  validation: 0.05                     # a held-out share of the text, or files
  tokenizer: {train: 4096}             # or {folder: path}, or bytes
  sequence: 256
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lezero.core.config import Config, GivenPath, as_text

_Names = Annotated[tuple[str, ...], Field(min_length=1)]
_Share = Annotated[float, Field(ge=0, lt=1)]


class TokenizerConfig(Config):
    """Where tokens come from. At most one field; none means bytes."""

    train: int | None = Field(None, ge=257, le=1 << 20)
    """Trains a byte-level BPE of at most this many entries on the training text (extra `text`)."""
    folder: GivenPath | None = None
    """A Hugging Face tokenizer: its folder or its tokenizer.json (extra `text`)."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.train is not None and self.folder is not None:
            raise ValueError("give train or folder, not both")
        return self


class DataConfig(Config):
    """Which text a model learns from, how it is read and how it becomes batches."""

    train: tuple[str, ...] = Field(min_length=1)
    """Files, folders, globs, or python-docs."""
    validation: float | tuple[str, ...] = 0.05
    """The share of documents held out (0 for none), or files, folders and globs."""
    format: Literal["auto", "text", "jsonl"] = "auto"
    """auto goes by the file's ending: .jsonl and .ndjson are JSONL, .json is a bad file, all else
    is text."""
    text_field: str = Field("text", min_length=1)
    """JSONL: the field with the text."""
    prompt_field: str = Field("prompt", min_length=1)
    """JSONL: the field with the prompt, which carries no loss."""
    response_field: str = Field("response", min_length=1)
    """JSONL: the field with the response, which carries the loss."""
    tokenizer: TokenizerConfig = TokenizerConfig(train=4096)
    sequence: int = Field(256, ge=2, le=1 << 20)
    """Tokens of one row."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of the order of training rows and of the choice of held-out documents."""
    on_bad_file: Literal["skip", "refuse"] = "skip"
    """Unreadable, empty or non-UTF-8 files and bad lines: skipped and counted, or an error."""
    duplicates: Literal["skip", "keep", "refuse"] = "skip"
    """Documents that occur again, word for word."""
    max_line_bytes: int = Field(16 << 20, ge=1, le=1 << 30)
    """JSONL: longer lines are bad lines."""
    max_file_bytes: int = Field(1 << 30, ge=1, le=1 << 34)
    """Text: larger files are bad files, since one text file is one document held in memory."""

    @property
    def names_pairs(self) -> bool:
        """Whether the fields of pairs were named and that of texts was not: of a line with both
        the pair is meant then."""
        pair = (self.prompt_field, self.response_field)
        return self.text_field == "text" and pair != ("prompt", "response")

    # What a validator accepts beside its field's own type must be said for the schema of editors.
    @field_validator("train", mode="before", json_schema_input_type=str | _Names)
    @classmethod
    def _some_names(cls, value: Any) -> Any:
        return _names(value)

    @field_validator("validation", mode="before", json_schema_input_type=_Share | str | _Names)
    @classmethod
    def _share(cls, value: Any) -> Any:
        if isinstance(value, bool) or value is None or value == []:
            raise ValueError("allowed is a share of at least 0 and below 1, or a list of files")
        if isinstance(value, (int, float)) and not 0 <= value < 1:
            raise ValueError("a share of the text is at least 0 and below 1")
        return _names(value)

    @field_validator(
        "tokenizer", mode="before", json_schema_input_type=Literal["bytes"] | TokenizerConfig
    )
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value != "bytes":
                raise ValueError("allowed is bytes, {train: entries} or {folder: path}")
            return TokenizerConfig()
        return value


def _names(value: Any) -> Any:
    """Paths as texts, and a list of one where it is one."""
    if isinstance(value, list | tuple):
        return [as_text(one) for one in value]
    text = as_text(value)
    return (text,) if isinstance(text, str) else value
