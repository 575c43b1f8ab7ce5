"""What a sentence encoder's folder says about pooling, normalisation and length."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.core.errors import FileError
from lezero.hub.encoder import describe_encoder, is_encoder, open_encoder
from lezero.models import load_bert
from lezero.serve.batching.encoder import SentenceEncoder
from tests.serve.server.batch_running import tiny_encoder


def test_it_reads_what_sentence_transformers_wrote(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "a")
    found = describe_encoder(folder)
    assert (found.pooling, found.normalize, found.longest) == ("mean", True, 48)
    assert is_encoder(folder)
    assert not is_encoder(tmp_path)
    cls = tiny_encoder(tmp_path / "b", pooling_mode_cls_token=True, pooling_mode_max_tokens=False)
    assert describe_encoder(cls).pooling == "cls"
    stages = json.loads((cls / "modules.json").read_text())[:2]
    (cls / "modules.json").write_text(json.dumps(stages))
    assert not describe_encoder(cls).normalize


@pytest.mark.parametrize(
    ("pooling", "wanted"), [("mean", "mean"), ("cls", "cls"), (["max"], "max")]
)
def test_it_reads_pooling_as_written_since_5_4(
    pooling: object, wanted: str, tmp_path: Path
) -> None:
    folder = tiny_encoder(tmp_path / "a")
    data = {"embedding_dimension": 32, "pooling_mode": pooling, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(data))
    assert describe_encoder(folder).pooling == wanted


@pytest.mark.parametrize(
    ("settings", "tokenizer", "longest"),
    [
        ({"max_seq_length": 48}, {"model_max_length": 16}, 48),
        ({"max_seq_length": 48}, None, 48),
        ({"max_seq_length": None}, {"model_max_length": 16}, 16),
        ({}, {"model_max_length": 16}, 16),
        (None, {"model_max_length": 16}, 16),
        (None, {"model_max_length": 10**30}, 64),
        (None, {"model_max_length": 1e30}, 64),
        (None, None, 64),
    ],
)
def test_the_longest_text(
    settings: object, tokenizer: object, longest: int, tmp_path: Path
) -> None:
    folder = tiny_encoder(tmp_path / "a")
    (folder / "sentence_bert_config.json").unlink()
    named = {"sentence_bert_config.json": settings, "tokenizer_config.json": tokenizer}
    for name, data in named.items():
        if data is not None:
            (folder / name).write_text(json.dumps(data))
    assert describe_encoder(folder).longest == longest


def test_texts_are_put_in_lower_case_where_the_folder_says_so(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "a")
    plain = SentenceEncoder(folder, "fp32")
    assert plain.tokens("Hello World") != plain.tokens("hello world")
    settings = json.dumps({"max_seq_length": 48, "do_lower_case": True})
    (folder / "sentence_bert_config.json").write_text(settings)
    assert SentenceEncoder(folder, "fp32").tokens("Hello World") == plain.tokens("hello world")


def test_what_is_no_encoder_is_told_by_its_name(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "a")
    data = json.loads((folder / "config.json").read_text()) | {"is_decoder": True}
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match="is_decoder"):
        describe_encoder(folder)


def test_the_prompt_that_sentence_transformers_puts_before_texts(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "a")
    plain = SentenceEncoder(folder, "fp32")
    for name, prompt in ((None, ""), ("query", "hello ")):
        settings = {"prompts": {"query": "hello "}, "default_prompt_name": name}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        found = SentenceEncoder(folder, "fp32").tokens("world")
        assert found == plain.tokens(prompt + "world")
        assert len(found) == len(plain.tokens("world")) + len(prompt.split())
    pooling = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(FileError, match="include_prompt"):
        describe_encoder(folder)
    (folder / "config_sentence_transformers.json").unlink()
    assert describe_encoder(folder).prompt == ""


def test_a_plain_folder_is_pooled_by_the_mean_and_normalised(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "a")
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    found = describe_encoder(folder)
    assert (found.pooling, found.normalize, found.longest) == ("mean", True, 64)


def test_stages_are_a_file_of_a_bounded_size(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "a")
    stages = folder / "modules.json"
    os.truncate(stages, 1 << 40)
    with pytest.raises(FileError, match=r"modules\.json: larger than 16 MiB"):
        describe_encoder(folder)
    stages.unlink()
    os.mkfifo(stages)
    with pytest.raises(FileError, match=r"modules\.json: not a regular file"):
        describe_encoder(folder)


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("modules.json", [{"type": "x.models.Dense", "path": "2_Dense"}], "Dense"),
        ("modules.json", [{"type": "x.models.Pooling", "path": "../../etc"}], "Pooling"),
        ("modules.json", [{"type": "x.models.Pooling", "path": ".."}], "Pooling"),
        ("modules.json", {}, "no list of a model's stages"),
        ("modules.json", [], "no list of a model's stages"),
        ("modules.json", [3], "not built"),
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ("1_Pooling/config.json", {}, "nothing"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "lasttoken"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "one of mean, cls, max"),
        ("1_Pooling/config.json", {"pooling_mode": {"mean": 1}}, "one of mean, cls, max"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "none of its"),
    ],
)
def test_what_is_not_built_is_refused(
    file: str, data: object, message: str, tmp_path: Path
) -> None:
    folder = tiny_encoder(tmp_path / "a")
    (folder / file).write_text(json.dumps(data))
    with pytest.raises(FileError, match=message):
        describe_encoder(folder)


@torch.no_grad()
def test_a_quantized_folder_answers_as_the_one_it_was_made_of(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "a", pooling_mode_cls_token=True)
    stages = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(stages[:2]))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    prompts = {"prompts": {"query": "hello "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tokenizer_class": "Theirs"}))
    model = load_bert(folder)
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    saved = lz.save_quantized(model, tmp_path / "q", tokenizer_folder=folder)
    assert json.loads((saved / "config.json").read_text())["tokenizer_class"] == "Theirs"
    one, two = SentenceEncoder(folder, "fp32"), SentenceEncoder(saved)
    assert replace(two.folder, path=folder, is_quantized=False) == one.folder
    assert (two.folder.pooling, two.folder.normalize, two.longest) == ("cls", False, 20)
    for text in ("world", "the cat sat on the mat", "a dog on the sea " * 9):
        tokens = one.tokens(text)
        assert two.tokens(text) == tokens
        assert two.cut(tokens) == one.cut(tokens)
        (x,), (y,) = one.run([one.cut(tokens)]), two.run([one.cut(tokens)])
        assert float(torch.cosine_similarity(x, y, dim=0)) > 0.99
        assert float(y.norm()) == pytest.approx(float(x.norm()), rel=0.05)


@torch.no_grad()
@pytest.mark.parametrize("pooler", [False, True])
def test_a_quantized_folder_opens(pooler: bool, tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "a")
    model = open_encoder(describe_encoder(folder))
    if pooler:
        model.pooler = nn.ModuleDict({"dense": nn.Linear(32, 32)})
    lz.quantize_(model, lz.Int8WeightActivation(vocabulary="keep"), objective="size")
    lz.save_quantized(model, tmp_path / "q")
    assert is_encoder(tmp_path / "q")
    found = describe_encoder(tmp_path / "q")
    assert found.is_quantized
    again = open_encoder(found)
    tokens = torch.arange(4, 14)
    assert torch.equal(again(tokens, [6, 4]), model(tokens, [6, 4]))
