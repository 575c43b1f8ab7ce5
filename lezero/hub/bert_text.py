"""What transformers does to a text before a BERT tokenizer cuts it up.

Its classes for BERT take the vocabulary of `tokenizer.json` and build the normalizer anew, by keys
of `tokenizer_config.json` and defaults of their own; which class it is, `tokenizer_class` there or
in `config.json` says. Any other class reads `tokenizer.json` as it is.

Source: transformers 5.23, `BertTokenizer.__init__` and `AutoTokenizer.from_pretrained`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lezero.core.errors import FileError
from lezero.data.special import read_object

_CLASSES = (
    *("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "LayoutLMTokenizer"),
    *("LxmertTokenizer", "MobileBertTokenizer", "SqueezeBertTokenizer"),
)
_KEYS = (
    ("do_lower_case", "lowercase", True),
    ("tokenize_chinese_chars", "handle_chinese_chars", True),
    ("strip_accents", "strip_accents", None),
)
"""Of tokenizer_config.json, of `BertNormalizer`, and the default."""


def bert_normalizer(root: Path) -> dict[str, Any] | None:
    """What `tokenizers.normalizers.BertNormalizer` is given in transformers for an encoder's
    folder; None where that of `tokenizer.json` stays. `FileError` for a value that it refuses."""
    path = root / "tokenizer_config.json"
    settings = read_object(path)
    named = settings.get("tokenizer_class")
    if named is None:
        named = read_object(root / "config.json").get("tokenizer_class") or None
    if named is not None and str(named).removesuffix("Fast") not in _CLASSES:
        return None
    made: dict[str, Any] = {"clean_text": True}
    for key, theirs, default in _KEYS:
        value = settings.get(key, default)
        if not isinstance(value, bool) and (value is not None or default is not None):
            allowed = "true and false" if default is not None else "true, false and null"
            raise FileError(f"{path}: {key} is {value!r}, allowed are {allowed}")
        made[theirs] = value
    return made
