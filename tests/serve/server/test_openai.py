"""The official client of OpenAI's API against the server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.server.running import Client, serving, small_llm

MESSAGES = [{"role": "user", "content": "hello"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return small_llm()


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Client]:
    with serving(llm, name="tiny") as client:
        yield client


@pytest.fixture
def client(server: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def expected(prompt: str, tokens: int = 12) -> str:
    return small_llm().generate(prompt, SamplingParams(temperature=0, max_tokens=tokens))[0].text


def test_models(client) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, user="me", **GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected("<user>hello\n<assistant>")
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage.prompt_tokens == len("<user>hello\n<assistant>")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    parts[0] |= {"tool_calls": [], "annotations": [], "audio": None}
    again = client.chat.completions.create(messages=parts, **GREEDY)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_chat_as_a_stream(client) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    pieces = list(
        client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(p.choices[0].delta.content or "" for p in pieces[:-1])
    assert text == whole.choices[0].message.content
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert pieces[-1].choices == []
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({p.id for p in pieces}) == 1


def test_completions_of_texts_and_tokens(client) -> None:
    found = client.completions.create(prompt=["abc", "xyz"], **GREEDY)
    assert [c.text for c in found.choices] == [expected("abc"), expected("xyz")]
    assert [c.index for c in found.choices] == [0, 1]
    tokens = client.completions.create(prompt=list(b"abc"), **GREEDY)
    assert tokens.choices[0].text == expected("abc")
    several = client.completions.create(prompt=[list(b"abc"), list(b"xyz")], **GREEDY)
    assert [c.text for c in several.choices] == [c.text for c in found.choices]


def test_several_answers_and_seeds(client) -> None:
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "n": 3, "seed": -5}
    one = client.completions.create(**asked)
    two = client.completions.create(**asked)
    assert [c.text for c in one.choices] == [c.text for c in two.choices]
    assert len({c.text for c in one.choices}) > 1
    assert one.usage.prompt_tokens == 3
    texts = ["", "", ""]
    for piece in client.completions.create(stream=True, **asked):
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in one.choices]


def test_stop_strings(client) -> None:
    whole = client.completions.create(prompt="abc", **GREEDY).choices[0].text
    stop = whole[5:7]
    cut = client.completions.create(prompt="abc", stop=[stop], **GREEDY).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_logprobs(client) -> None:
    chat = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    text = client.completions.create(prompt="abc", logprobs=2, **GREEDY).choices[0]
    assert "".join(text.logprobs.tokens) == text.text
    assert text.logprobs.text_offset[0] == 0
    pieces = client.completions.create(prompt="abc", logprobs=2, stream=True, **GREEDY)
    found = [x for p in pieces for x in p.choices[0].logprobs.token_logprobs]
    assert found == text.logprobs.token_logprobs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"extra_body": {"ignore_eos": 1}}, "ignore_eos"),
        ({"extra_body": {"ignore_eos": "yes"}}, "ignore_eos"),
        ({"extra_body": {"top_k": 5.0}}, "top_k"),
        ({"extra_body": {"min_p": "0.1"}}, "min_p"),
        ({"extra_body": {"repetition_penalty": "1.1"}}, "repetition_penalty"),
        ({"extra_body": {"stop_token_ids": ["5"]}}, "stop_token_ids"),
        ({"extra_body": {"stop_token_ids": [5, 257]}}, "stop_token_ids"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"extra_body": {"best_of": True}}, "best_of"),
        ({"extra_body": {"echo": 0}}, "echo"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "cat", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_what_is_wrong_is_named(client, fields, param) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**{"messages": MESSAGES, "model": "tiny", **fields})
    assert found.value.param == param
    assert found.value.type == "invalid_request_error"


def test_other_errors(client) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="other", prompt="x")
    assert found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]: got 600 tokens"):
        client.embeddings.create(model="tiny", input="x" * 600)
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="allowed is 0"):
        client.completions.create(model="tiny", prompt=[100000])
    with pytest.raises(openai.BadRequestError, match="allowed is 0"):
        client.completions.create(model="tiny", prompt=[-1])


def test_embeddings(client, llm) -> None:
    texts = ["hello", "a longer text", "z" * 400]
    expected = small_llm().embed(texts)
    found = client.embeddings.create(model="tiny", input=texts)
    assert [entry.embedding for entry in found.data] == expected
    assert found.usage.prompt_tokens == sum(map(len, texts))
    again = client.embeddings.create(model="tiny", input=texts[1], encoding_format="float")
    assert again.data[0].embedding == expected[1]


def test_a_chat_goes_on_to_the_end_of_the_context(client, llm) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == llm.context
    assert answer.choices[0].finish_reason == "length"


def test_a_text_goes_on_for_16_tokens_or_to_the_end_of_the_context(client, llm) -> None:
    for length, drawn in ((9, 16), (llm.context - 16, 16), (llm.context - 3, 3)):
        answer = client.completions.create(
            model="tiny", prompt=[5] * length, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == drawn
        assert answer.choices[0].finish_reason == "length"


def test_the_context_that_is_named_is_what_fits() -> None:
    with serving(small_llm(cache_bytes=1 << 16)) as client:
        fits = client.ask("/v1/models").json["data"][0]["max_model_len"]
        assert client.complete("abc", max_tokens=fits - 3).status == 200
        assert client.complete("abc", max_tokens=fits - 2).error["param"] == "max_tokens"
        assert client.ask("/stats").json["context"] == fits == 257


def test_without_a_template_chat_is_refused() -> None:
    with (
        serving(small_llm(None)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="chat template"),
    ):
        client.chat.completions.create(model="model", messages=MESSAGES)


def test_the_asynchronous_client(server) -> None:
    import asyncio

    async def ask() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked = [client.completions.create(prompt=f"ask {i}", **GREEDY) for i in range(12)]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    alone = small_llm()
    params = SamplingParams(temperature=0, max_tokens=12)
    assert asyncio.run(ask()) == [alone.generate(f"ask {i}", params)[0].text for i in range(12)]
