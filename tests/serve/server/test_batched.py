"""Encoders and modules over HTTP: OpenAI's client, tensors, keys, metrics, the page."""

from __future__ import annotations

import base64
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load, save

from lezero.serve.batching.encoder import SentenceEncoder
from lezero.serve.batching.module import InferModule
from lezero.serve.batching.plan import Plan
from lezero.serve.server.inference import TENSORS
from lezero.serve.server.keys import new_key
from tests.serve.server.batch_running import Net, serving_batches, tiny_encoder
from tests.serve.server.browser import Browser
from tests.serve.server.running import Client
from tests.serve.server.test_run import parse_metrics

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TEXTS = ["hello world", "the cat sat on the mat", "fish"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> SentenceEncoder:
    return SentenceEncoder(folder, "fp32")


@pytest.fixture(scope="module")
def server(encoder: SentenceEncoder) -> Iterator[Client]:
    with serving_batches(encoder, name="tiny") as client:
        yield client


@pytest.fixture
def client(server: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def infer() -> Iterator[Client]:
    with serving_batches(InferModule(Net(), torch.zeros(1, 4))) as client:
        yield client


def close(found: Sequence[float], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-4, atol=1e-5)


def test_embeddings_of_texts(client, encoder) -> None:
    found = client.embeddings.create(model="tiny", input=TEXTS)
    items = [encoder.tokens(text) for text in TEXTS]
    for i, (entry, vector) in enumerate(zip(found.data, encoder.run(items), strict=True)):
        assert entry.index == i
        close(entry.embedding, vector)
    assert found.model == "tiny"
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, items))
    one = client.embeddings.create(model="tiny", input=TEXTS[0])
    close(one.data[0].embedding, encoder.run(items[:1])[0])


def test_embeddings_of_tokens_and_both_encodings(client, encoder, server) -> None:
    tokens = encoder.tokens(TEXTS[1])
    wanted = encoder.run([tokens])[0]
    for given in (tokens, [tokens]):
        found = client.embeddings.create(model="tiny", input=given, encoding_format="float")
        close(found.data[0].embedding, wanted)
    plain = server.ask("/v1/embeddings", {"input": TEXTS[1], "encoding_format": "base64"}).json
    data = base64.b64decode(plain["data"][0]["embedding"])
    close(struct.unpack(f"<{encoder.dim}f", data), wanted)
    assert plain["object"] == "list"


def test_long_texts_are_refused_or_cut_off_where_the_client_says_so(client, encoder) -> None:
    text = "hello " * 100
    with pytest.raises(openai.BadRequestError) as found:
        client.embeddings.create(model="tiny", input=text)
    assert found.value.code == "context_length_exceeded"
    cut = client.embeddings.create(model="tiny", input=text, extra_body={"truncate": True})
    assert cut.usage.prompt_tokens == encoder.longest
    close(cut.data[0].embedding, encoder.run([encoder.tokens("hello " * 46)])[0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["x", 3]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["x"] * 3000}, "input"),
        ({"input": [99999]}, "input[0]"),
        ({"input": ["x", [99999]]}, "input[1]"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 5}, "dimensions"),
        ({"inputt": "x"}, "inputt"),
        ({"truncate": "yes"}, "truncate"),
    ],
)
def test_what_is_wrong_is_named(server, fields, param) -> None:
    found = server.ask("/v1/embeddings", {"input": "x", **fields})
    assert found.status == 400
    assert found.error["param"] == param


def test_too_many_texts_are_counted(server) -> None:
    found = server.ask("/v1/embeddings", {"input": ["x"] * 2049})
    assert found.status == 400
    assert "got 2049 texts; required: text, 1 to 2048 texts" in found.error["message"]


@pytest.mark.parametrize(
    ("given", "name"),
    [("", "input[0]"), (["hello", ""], "input[1]"), (" \n", "input[0]"), ([[2, 3]], "input[0]")],
)
def test_an_empty_text_is_refused_as_language_models_do(server, given, name) -> None:
    found = server.ask("/v1/embeddings", {"input": given})
    message = f"{name}: got an empty text, which has no embedding; leave it out"
    wanted = {"message": message, "type": "invalid_request_error", "param": name, "code": None}
    assert (found.status, found.error) == (400, wanted)


@pytest.mark.parametrize("fields", [{}, {"truncate": True}])
def test_tokens_that_are_not_framed_as_the_encoders_own_are_refused(server, encoder, fields):
    """As LangChain sends those of OpenAI's tokenizer."""
    own = encoder.tokens("hello world")
    assert server.ask("/v1/embeddings", {"input": [own], **fields}).status == 200
    for given in ([4, 5], [4] * 100, own[1:], own[:-1], own[:1], own[-1:]):
        found = server.ask("/v1/embeddings", {"input": [own, given], **fields})
        assert found.status == 400
        assert found.error["param"] == "input[1]"
        if len(given) <= encoder.longest or fields:
            assert "check_embedding_ctx_length=False" in found.error["message"]


def test_other_paths_and_models(client, server, infer) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert server.ask("/v1/models").json["data"][0]["dimensions"] == 32
    assert infer.ask("/v1/models").json["data"][0]["inputs"] == {"input": "float32 (4)"}
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")
    for asked in ({"inputs": [1, 2, 3, 4]}, {}):
        refused = infer.ask("/v1/infer", {**asked, "model": "other"})
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    named = {"inputs": [1, 2, 3, 4], "model": infer.server.name}
    assert infer.ask("/v1/infer", named).status == 200
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert server.ask("/v1/infer", {}).status == 404
    assert infer.ask("/v1/embeddings", {}).status == 404
    assert server.ask("/v1/embeddings", b"{}", content_type=TENSORS).status == 415
    assert server.ask("/health").status == server.ask("/ready").status == 200


def test_many_clients_at_once_each_get_their_own(server, encoder) -> None:
    import asyncio

    words = ["hello", "cat", "dog", "fish", "boat", "sea", "mat", "the"]
    texts = [" ".join(words[(i * j) % 8] for j in range(1, 2 + i % 12)) for i in range(60)]

    async def ask() -> list[list[float]]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
            asked = [made.embeddings.create(model="tiny", input=text) for text in texts]
            return [answer.data[0].embedding for answer in await asyncio.gather(*asked)]

    for text, found in zip(texts, asyncio.run(ask()), strict=True):
        close(found, encoder.run([encoder.tokens(text)])[0])


@torch.no_grad()
def test_inference_as_json_and_as_tensors(infer) -> None:
    net, x = Net(), torch.randn(5, 4)
    plain = infer.ask("/v1/infer", {"inputs": {"input": x.tolist()}})
    assert plain.headers["content-type"] == "application/json"
    close(plain.json["outputs"]["output"], net(x))
    single = infer.ask("/v1/infer", {"inputs": x[0].tolist()})
    close(single.json["outputs"]["output"], net(x[:1])[0])
    packed = infer.ask("/v1/infer", save({"input": x}), content_type=TENSORS)
    assert packed.headers["content-type"] == TENSORS
    torch.testing.assert_close(load(packed.body)["output"], net(x))
    mixed = infer.ask(
        "/v1/infer", save({"input": x}), content_type=TENSORS, accept="application/json"
    )
    close(mixed.json["outputs"]["output"], net(x))
    other = infer.ask("/v1/infer", {"inputs": x.tolist()}, accept=f"text/html, {TENSORS}")
    torch.testing.assert_close(load(other.body)["output"], net(x))
    assert infer.ask("/v1/infer", {"inputs": x.tolist()}, accept="image/png").status == 406


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": [[1, 2, 3]]},
        {"inputs": [[1, 2, 3, 4], [1, 2]]},
        {"inputs": [["a", "b", "c", "d"]]},
        {"inputs": [[1, 2, 3, 1e400]]},
        {"inputs": [[1, 2, 3, 1e39]]},
        {"inputs": []},
        {"inputs": {"other": [[1, 2, 3, 4]]}},
        {"inputs": {"input": None}},
        {"inputs": [[1, 2, 3, None]]},
        {"inputs": [[1, 2, 3, 4]], "more": 1},
        {"inputs": [[1, 2, 3, True]]},
        {"inputs": [[1, 2, 3, [4]]]},
        b"{",
    ],
)
def test_inputs_that_do_not_fit_are_refused(infer, body) -> None:
    found = infer.ask("/v1/infer", body)
    assert found.status == 400, found.body
    assert found.error["type"] == "invalid_request_error"


class _Spectrum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x)


def test_complex_answers_are_no_json() -> None:
    row = {"inputs": [1, 0, 0, 0]}
    with serving_batches(InferModule(_Spectrum(), torch.zeros(1, 4)), Plan(4)) as client:
        refused = client.ask("/v1/infer", row)
        assert refused.status == 500
        assert "complex numbers, which JSON lacks" in refused.error["message"]
        found = client.ask("/v1/infer", row, accept=TENSORS)
        assert torch.equal(load(found.body)["output"], torch.ones(4, dtype=torch.complex64))


class _Eight(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn)


def test_answers_of_8_bits() -> None:
    with serving_batches(InferModule(_Eight(), torch.zeros(1, 4)), Plan(4)) as client:
        found = client.ask("/v1/infer", {"inputs": [1, 0.5, 0, -2]})
        assert found.json == {"outputs": {"output": [1, 0.5, 0, -2]}}


def test_broken_safetensors_are_refused(infer) -> None:
    good = save({"input": torch.zeros(2, 4)})
    for body in (
        b"",
        b"xx",
        good[:-3],
        good[:20],
        b"\xff" * 8 + good[8:],
        save({"a": torch.ones(1)}),
    ):
        assert infer.ask("/v1/infer", body, content_type=TENSORS).status == 400
    wrong = save({"input": torch.zeros(2, 4, dtype=torch.float64)})
    assert infer.ask("/v1/infer", wrong, content_type=TENSORS).status == 400
    assert infer.ask("/v1/infer", b"x" * (2 << 20), content_type=TENSORS).status == 413


def test_keys_guard_these_models_too(encoder, monkeypatch) -> None:
    key, line = new_key("me")
    monkeypatch.setenv("LEZERO_API_KEYS", line)
    with serving_batches(encoder) as client:
        assert client.ask("/v1/embeddings", {"input": "x"}).status == 401
        asked = client.ask("/v1/embeddings", {"input": "x"}, authorization=f"Bearer {key}")
        assert asked.status == 200


def test_metrics_and_stats(encoder) -> None:
    with serving_batches(encoder, p99_ms=30_000) as client:
        for _ in range(3):
            assert client.ask("/v1/embeddings", {"input": TEXTS}).status == 200
        values = parse_metrics(client.ask("/metrics").body.decode())
        stats = client.ask("/stats").json
    assert values['lezero_http_requests_total{route="/v1/embeddings",status="200"}'] == 3
    assert values['lezero_requests_ended_total{reason="answered"}'] == 3
    assert values["lezero_items_total"] == 9
    assert values["lezero_request_seconds_count"] == 3
    assert values["lezero_plan_rate"] > 0
    assert values["lezero_requests_waiting"] == values["lezero_requests_running"] == 0
    assert stats["kind"] == "embeddings"
    assert stats["target_s"] == 30
    assert 0 < stats["latency_s"]["p50"] <= stats["latency_s"]["p99"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(
    ("which", "size"), [("encoder", (1280, 800)), ("encoder", (390, 844)), ("infer", (390, 844))]
)
def test_a_browser_asks(which, size, encoder, tmp_path: Path) -> None:
    model = encoder if which == "encoder" else InferModule(Net(), torch.zeros(1, 4))
    text = "hello world\nthe cat" if which == "encoder" else '{"inputs": [1, 2, 3, 4]}'
    with serving_batches(model, name="tiny") as client, Browser(str(CHROMIUM), tmp_path) as browser:
        browser.open(client.url, *size)
        browser.wait("at('name').textContent === 'tiny' && at('state').textContent === 'ready'")
        browser.wait(
            "at('temperature-label').hidden && at('first-label').textContent === 'Latency'"
        )
        browser.run(f"at('text').value = {text!r}")
        browser.run("at('send').click()")
        browser.wait("document.querySelectorAll('.turn small:not([hidden])').length === 1")
        shown = browser.run("document.querySelector('.turn.assistant p').textContent")
        assert ("cosine to the first" if which == "encoder" else '{"output":[') in shown
        browser.wait("at('cache').textContent !== '–'")
        root = "document.documentElement"
        assert browser.run(f"{root}.scrollWidth - {root}.clientWidth") == 0, "it scrolls sideways"
        assert browser.problems == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_gives_back_what_was_refused_and_can_stop(
    encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, errors = "hello " * 100, "document.querySelectorAll('.turn.error').length"
    may_go_on, run = threading.Event(), encoder.run
    with serving_batches(encoder, Plan(4)) as client, Browser(str(CHROMIUM), tmp_path) as browser:
        browser.open(client.url, 390, 844)
        browser.wait("at('state').textContent === 'ready'")
        browser.run(f"at('text').value = {text!r}")
        browser.run("at('send').click()")
        browser.wait(f"{errors} === 1 && !running")
        assert browser.run("at('text').value") == text
        monkeypatch.setattr(encoder, "run", lambda items: may_go_on.wait(60) and run(items))
        try:
            browser.run("at('text').value = 'hello'")
            browser.run("at('send').click()")
            browser.run("at('stop').click()")
            browser.wait("!running")
        finally:
            may_go_on.set()
        assert browser.run(errors) == 1
        notes = browser.run("[...document.querySelectorAll('.turn small')].pop().textContent")
        assert notes.startswith("stopped")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_shows_whole_numbers_as_they_are(tmp_path: Path) -> None:
    model = InferModule(torch.nn.Identity(), torch.zeros(1, 1, dtype=torch.int64))
    with serving_batches(model) as client, Browser(str(CHROMIUM), tmp_path) as browser:
        browser.open(client.url, 390, 844)
        browser.wait("at('state').textContent === 'ready'")
        text = f'{{"inputs": [{2**53 + 1}]}}'
        browser.run(f"at('text').value = {text!r}")
        browser.run("at('send').click()")
        browser.wait("document.querySelectorAll('.turn small:not([hidden])').length === 1")
        shown = browser.run("document.querySelector('.turn.assistant p').textContent")
        assert shown == f'{{"output":[{2**53 + 1}]}}'


def test_a_plan_can_be_given(encoder, capsys) -> None:
    with serving_batches(encoder, Plan(4, delay_s=0.001)) as client:
        assert client.ask("/v1/embeddings", {"input": TEXTS}).status == 200
        batcher = client.server.batches.batcher
        assert batcher.plan == Plan(4, delay_s=0.001)
        assert client.server.batches.metrics.forecast(client.server.batches.runner) == [
            "batching    at most 4 a step, delay 1 ms: as asked"
        ]
