"""Texts become the tokens that transformers makes, whatever the tokenizer's two files say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from lezero.core.errors import FileError
from lezero.hub.bert_text import bert_normalizer
from lezero.serve.batching.encoder import SentenceEncoder
from tests.serve.server.batch_running import tiny_encoder

TEXTS = (
    *("naïve café", "NASA hello World", "日本語 text", "ÀÉÎ õü", "東京 Tower", "e\u0301cole"),
    *("a\u0000b\u200bc", "İstanbul ß", "tab\tnew\nline", "Ünïcödé 中文ABC", "\u00ad soft", "hello"),
)
ABSENT: Any = object()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An encoder that knows each letter as the texts have it, and in lower case and bare."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    bare = normalizers.BertNormalizer(strip_accents=True)
    letters = sorted({x for text in TEXTS for x in text + text.lower() + bare.normalize_str(text)})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    root = tiny_encoder(tmp_path / "encoder")
    made.save(str(root / "tokenizer.json"))
    return root


def change(path: Path, **fields: Any) -> None:
    data = json.loads(path.read_text()) if path.is_file() else {}
    data |= fields
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not ABSENT}))


def compare(folder: Path, encoder: SentenceEncoder) -> None:
    from lezero.hub.encoder import describe_encoder
    from lezero.serve.batching import encoder as encoders

    transformers = pytest.importorskip("transformers")
    encoder._tokenizer = encoders._tokenizer(describe_encoder(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert encoder.tokens(text) == theirs(text)["input_ids"], text


BARE = {
    **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
    **{"strip_accents": None, "lowercase": True},
}
OTHER = {"lowercase": False, "strip_accents": True, "handle_chinese_chars": False}
FILES = {
    "bare": BARE,
    "other": {**BARE, **OTHER, "clean_text": False},
    "none": None,
    "a sequence": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {**BARE, **OTHER}]},
    "not BERT's": {"type": "Replace", "pattern": {"String": "N"}, "content": "x"},
}


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_the_settings_count_as_in_transformers(file: Any, folder: Path) -> None:
    change(folder / "tokenizer.json", normalizer=file)
    encoder = SentenceEncoder(folder, "fp32")
    compare(folder, encoder)  # without a tokenizer_config.json
    for lower, chinese, accents in itertools.product(
        (ABSENT, True, False), (ABSENT, True, False), (ABSENT, None, True, False)
    ):
        keys = {"tokenize_chinese_chars": chinese, "strip_accents": accents}
        change(folder / "tokenizer_config.json", do_lower_case=lower, **keys)
        compare(folder, encoder)


@pytest.mark.parametrize(
    "named",
    [
        *(ABSENT, None, "", "BertTokenizer", "BertTokenizerFast", "DistilBertTokenizerFast"),
        *("ElectraTokenizer", "LayoutLMTokenizer", "LxmertTokenizer", "MobileBertTokenizer"),
        *("SqueezeBertTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "NoSuchClass"),
    ],
)
def test_the_class_says_whether_they_do(named: Any, folder: Path) -> None:
    keys = {"do_lower_case": False, "strip_accents": False, "tokenizer_class": named}
    change(folder / "tokenizer_config.json", **keys)
    encoder = SentenceEncoder(folder, "fp32")
    for model, file in itertools.product(
        (ABSENT, "PreTrainedTokenizerFast", "BertTokenizer"), ("bare", "none", "a sequence")
    ):
        change(folder / "config.json", tokenizer_class=model)
        change(folder / "tokenizer.json", normalizer=FILES[file])
        compare(folder, encoder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("do_lower_case", None), ("tokenize_chinese_chars", 1), ("strip_accents", "no")],
)
def test_a_value_that_is_none_is_named(key: str, value: object, tmp_path: Path) -> None:
    change(tmp_path / "tokenizer_config.json", **{key: value})
    with pytest.raises(FileError, match=f"{key} is {value!r}, allowed are true"):
        bert_normalizer(tmp_path)
