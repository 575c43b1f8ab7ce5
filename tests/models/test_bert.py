"""BERT encoders: packed texts equal transformers' padded ones, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lezero.core.errors import FileError
from lezero.models import Bert, bert_config, load_bert
from lezero.models.bert import flops

DATA = {
    "model_type": "bert",
    **{"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 64, "type_vocab_size": 2},
}
LENGTHS = [3, 1, 60, 9, 10, 30, 3]


def model(**changes: object) -> Bert:
    torch.manual_seed(0)
    made = Bert(bert_config({**DATA, **changes}, "config.json")).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def texts() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (n,), generator=drawn) for n in LENGTHS]


@torch.no_grad()
@pytest.mark.parametrize("act", ["gelu", "gelu_new"])
def test_packed_texts_equal_transformers(act: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = model(hidden_act=act)
    config = transformers.BertConfig(**{**DATA, "hidden_act": act})
    theirs = transformers.BertModel(config, add_pooling_layer=False).eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    found = ours(torch.cat(texts()), LENGTHS).split(LENGTHS)
    for text, states in zip(texts(), found, strict=True):
        torch.testing.assert_close(states, theirs(text[None])[0][0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_text_does_not_see_its_neighbours() -> None:
    made = model()
    together = made(torch.cat(texts()), LENGTHS).split(LENGTHS)
    for text, states in zip(texts(), together, strict=True):
        torch.testing.assert_close(made(text, [len(text)]), states, rtol=1e-4, atol=1e-5)


def test_operations_grow_faster_than_tokens() -> None:
    assert flops(bert_config(DATA, "x"), 20) > 2 * flops(bert_config(DATA, "x"), 10)


def test_an_encoder_trains() -> None:
    made = model()
    made(torch.cat(texts()), LENGTHS).square().sum().backward()
    assert all(x.grad is not None for x in made.encoder.parameters())


def test_a_folder_comes_back_equal(tmp_path: Path) -> None:
    made = model()
    (tmp_path / "config.json").write_text(json.dumps(made.config.to_dict()))
    state = {f"bert.{name}": x for name, x in made.state_dict().items()}
    save_file({**state, "bert.pooler.dense.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    again = load_bert(tmp_path, torch.bfloat16)
    assert again.config == made.config
    for name, x in again.state_dict().items():
        assert torch.equal(x, made.state_dict()[name].bfloat16())


def test_norms_are_read_by_their_first_names_too(tmp_path: Path) -> None:
    """Those of google-bert/bert-base-uncased."""
    state, old = model().state_dict(), {"weight": "gamma", "bias": "beta"}
    renamed = {
        ".".join([*path, old[last]] if path[-1] == "LayerNorm" else [*path, last]): x
        for (*path, last), x in ((name.split("."), x) for name, x in state.items())
    }
    assert "embeddings.LayerNorm.gamma" in renamed
    (tmp_path / "config.json").write_text(json.dumps(DATA))
    save_file(renamed, tmp_path / "model.safetensors")
    again = load_bert(tmp_path).state_dict()
    assert all(torch.equal(again[name], x) for name, x in state.items())


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DATA))
    state = dict(model().state_dict())
    del state["encoder.layer.1.output.dense.bias"]
    state["embeddings.LayerNorm.bias"] = torch.zeros(7)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"missing encoder\.layer\.1\.output\.dense\.bias") as found:
        load_bert(tmp_path)
    assert "embeddings.LayerNorm.bias" in str(found.value)
    whole = {**model().state_dict(), "bert.embeddings.LayerNorm.bias": torch.zeros(64)}
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"LayerNorm\.bias', which model.safetensors holds too"):
        load_bert(tmp_path)
    eight = {"embeddings.LayerNorm.bias": torch.zeros(32).to(torch.float8_e4m3fn)}
    save_file({**model().state_dict(), **eight}, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"LayerNorm\.bias is torch\.float8_e4m3fn \(32,\)"):
        load_bert(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "roberta"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 5}, "multiple"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps"),
    ],
)
def test_shapes_that_are_not_built_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(FileError, match=message):
        bert_config({**DATA, **changes}, "config.json")
