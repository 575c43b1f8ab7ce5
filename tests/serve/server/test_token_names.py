"""What log-probabilities call tokens, where a tokenizer drops the space that begins a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers

from lezero.data.tokenizer import bytes_tokenizer
from lezero.serve.coder import Coder, open_coder
from lezero.serve.llm import LLM
from lezero.serve.program import Fed
from lezero.serve.sampling import SamplingParams
from lezero.serve.server.coded import TokenText
from tests.serve.models import runs, says, small
from tests.serve.server.running import serving

WORDS = ["\u2581the", "the", "\u2581cat", "cat", "\u2581a", "a", "s", "."]


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Coder:
    """Of the kind of Llama 2: pieces of SentencePiece, with bytes for all other letters."""
    pieces = ["<unk>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), *WORDS]
    made = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(
        [
            *(decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<unk>", "</s>"])
    folder: Path = tmp_path_factory.mktemp("sentencepiece")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return open_coder(folder, folder)


def test_a_name_keeps_the_space_of_its_piece(coder: Coder) -> None:
    text = TokenText(coder)
    names = [text.of(258 + number) for number in range(len(WORDS))]
    assert names == [" the", "the", " cat", "cat", " a", "a", "s", "."]
    assert text.of(2 + ord("z")) == "z"
    assert TokenText(None).of(5) == "token 5"


def test_a_name_is_looked_up_once(coder: Coder, monkeypatch: pytest.MonkeyPatch) -> None:
    text, asked = TokenText(coder), list[list[int]]()
    decode = coder.decode

    def counted(tokens: list[int]) -> str:
        asked.append(tokens)
        return decode(tokens)

    monkeypatch.setattr(coder, "decode", counted)
    names = [text.of(token) for token in (260, 261, 260, 261, 260)]
    assert names == [" cat", "cat", " cat", "cat", " cat"]
    assert len(asked) == 2


def test_names_together_are_the_text_and_the_likeliest_of_a_name_stays(coder: Coder) -> None:
    llm = LLM(small(vocab=266), coder=coder, weights="bf16")
    words = {"temperature": 0, "repetition_penalty": 1.5, "max_tokens": 40, "logprobs": 20}
    prompt = [258, 260, 262]
    likeliest = llm.generate(prompt, SamplingParams(**words))[0].logprobs
    assert likeliest is not None
    with serving(llm) as client:
        (choice,) = client.complete(prompt, **words).json["choices"]
    told = choice["logprobs"]
    if "\ufffd" not in choice["text"]:
        assert "".join(told["tokens"]) == choice["text"]
    text = TokenText(coder)
    of_tokens = zip(told["tokens"], told["token_logprobs"], strict=True)
    for found, one, (name, value_of_own) in zip(
        told["top_logprobs"], likeliest, of_tokens, strict=True
    ):
        best: dict[str, float] = {}
        for token, value in one.likeliest:
            best.setdefault(text.of(token), value)
        own = found.pop(name)
        assert own == value_of_own
        best.pop(name, None)
        assert found == best
        assert list(found) == list(best), "best first"


@pytest.mark.parametrize("logprobs", [0, 2])
def test_a_drawn_token_is_among_the_likeliest_that_are_told(coder: Coder, logprobs: int) -> None:
    llm = LLM(small(vocab=266), coder=coder, weights="bf16")
    asked = {"temperature": 5, "seed": 1, "max_tokens": 20, "logprobs": logprobs}
    with serving(llm) as client:
        (choice,) = client.complete([258, 260], **asked).json["choices"]
    told = choice["logprobs"]
    rare = 0
    for name, value, best in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert best[name] == value
        assert list(best.values()) == sorted(best.values(), reverse=True)
        assert len(best) <= logprobs + 1
        rare += len(best) == logprobs + 1
    assert rare


def test_tokens_have_their_place_in_the_text() -> None:
    """Halves of a character are no text yet, and special tokens never."""
    tokenizer = bytes_tokenizer()
    llm = LLM(small(vocab=257), coder=Coder(tokenizer, frozenset()), weights="bf16")
    says(llm.program, 1, tokenizer.encode("é中<|endoftext|>ab. "))
    asked = {"temperature": 0, "max_tokens": 10, "logprobs": 1, "stop": ["b.x", " \u00e9"]}
    with serving(llm) as client:
        (choice,) = client.complete([1], **asked).json["choices"]
        lines = client.complete([1], stream=True, **asked).body.decode().split("\n\n")
    told = choice["logprobs"]
    assert choice["text"] == "é中ab. "
    assert told["text_offset"] == [0, 0, 1, 1, 1, 2, 2, 3, 4, 5]
    assert told["tokens"][5:] == ["<|endoftext|>", "a", "b", ".", " "]
    events = [json.loads(x.removeprefix("data: ")) for x in lines if x.startswith("data: {")]
    streamed = [event["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert [place for some in streamed for place in some] == told["text_offset"]


def events(body: bytes) -> list[dict[str, Any]]:
    lines = [x.removeprefix("data: ") for x in body.decode().split("\n\n")]
    return [json.loads(line)["choices"][0] for line in lines if line.startswith("{")]


@pytest.mark.parametrize(
    ("stop", "names"),
    [
        ("cat", [" the", " "]),
        (" cat", [" the"]),
        ("ats", [" the", " c"]),
        ("s.", [" the", " cat"]),
        ("s. the ca", [" the", " cat"]),
        (". t", [" the", " cat", "s"]),
        (" the", []),
        ("h", [" t"]),
        ("no such text", [" the", " cat", "s", "."] * 2),
    ],
)
def test_names_end_where_a_stop_string_cuts_the_text(
    coder: Coder, stop: str, names: list[str]
) -> None:
    llm = LLM(small(vocab=266), coder=coder, weights="bf16")
    the, cat, plural, end = 258, 260, 264, 265
    says(llm.program, 2, [the, cat, plural, end])
    asked = {"temperature": 0, "max_tokens": 8, "stop": stop, "logprobs": 1}
    with serving(llm) as client:
        (whole,) = client.complete([263, 265], **asked).json["choices"]
        streamed = events(client.complete([263, 265], stream=True, **asked).body)
    told = whole["logprobs"]
    assert told["tokens"] == names
    assert whole["text"] == "".join(names)
    assert told["text_offset"] == [sum(map(len, names[:at])) for at in range(len(names))]
    assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(names)
    for field in told:
        assert [x for one in streamed for x in one["logprobs"][field]] == told[field]
    shown = named = ""
    for one in streamed:
        shown += one["text"]
        named += "".join(one["logprobs"]["tokens"])
        assert shown.startswith(named)


def test_a_chat_names_a_token_that_is_cut_with_the_bytes_that_are_left() -> None:
    tokenizer = bytes_tokenizer()
    template = "{{ messages[0].content }}"
    llm = LLM(
        small(vocab=257), coder=Coder(tokenizer, frozenset(), template=template), weights="bf16"
    )
    says(llm.program, 1, tokenizer.encode("é中ab"))
    messages = [{"role": "user", "content": "x"}]
    asked = {"temperature": 0, "max_tokens": 7, "logprobs": True, "messages": messages}
    with serving(llm) as client:
        for stop, left in (("中", "é"), ("a", "é中"), ("é", ""), ("中a", "é")):
            answer = client.ask("/v1/chat/completions", {**asked, "stop": stop}).json
            (choice,) = answer["choices"]
            assert choice["message"]["content"] == left
            found = [byte for one in choice["logprobs"]["content"] for byte in one["bytes"]]
            assert bytes(found).decode() == left
            assert answer["usage"]["completion_tokens"] > len(choice["logprobs"]["content"])


def test_of_equal_names_the_likeliest_stays_in_its_place() -> None:
    """Halves of characters all read U+FFFD."""
    llm = LLM(small(vocab=257), coder=Coder(bytes_tokenizer(), frozenset()), weights="bf16")
    scores = {0xC3: 9.0, ord("b"): 8.0, 0xE4: 7.0, ord("a"): 6.0}

    def run(fed: Sequence[Fed]) -> torch.Tensor:
        found = torch.zeros(sum(len(one.rows) for one in fed), llm.program.vocab)
        for token, score in scores.items():
            found[:, token] = score
        return found

    runs(llm.program, run)
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 4}
    with serving(llm) as client:
        (choice,) = client.complete([1], **asked).json["choices"]
        scores[0xE4] = 9.5
        (other,) = client.complete([1], **{**asked, "logprobs": 3}).json["choices"]
    for told, names in ((choice, ["\ufffd", "b", "a"]), (other, ["\ufffd", "b"])):
        (best,) = told["logprobs"]["top_logprobs"]
        assert list(best) == names
        assert list(best.values()) == sorted(best.values(), reverse=True)
        assert best["\ufffd"] == told["logprobs"]["token_logprobs"][0]


class _OfLetters:
    """Raises for all other tokens."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return "".join({97: "a", 98: "b", 99: "c"}[token] for token in tokens)


def test_a_token_that_only_the_model_has_is_named_by_its_number() -> None:
    llm = LLM(small(vocab=257), coder=Coder(_OfLetters(), frozenset()), weights="bf16")
    says(llm.program, 1, list(b"abc"))
    asked = {"temperature": 0, "max_tokens": 3, "logprobs": 2}
    with serving(llm) as client:
        (whole,) = client.complete(list(b"a"), **asked).json["choices"]
        streamed = events(client.complete(list(b"a"), stream=True, **asked).body)
    told = whole["logprobs"]
    assert (whole["text"], told["tokens"]) == ("abc", ["a", "b", "c"])
    others = [name for found in told["top_logprobs"] for name in found if name not in "abc"]
    assert others == ["token 0"] * 3
    assert [x for one in streamed for x in one["logprobs"]["top_logprobs"]] == told["top_logprobs"]


def test_what_a_stop_string_leaves_of_a_token(coder: Coder) -> None:
    text = TokenText(coder)
    assert (text.of(260, 2), text.bytes_of(260, 2)) == (" c", b" c")
    assert (text.of(260, 9), text.bytes_of(260, 9)) == ("", b"")


def test_names_have_their_bytes(coder: Coder) -> None:
    tokenizer = bytes_tokenizer()
    text = TokenText(Coder(tokenizer, frozenset()))
    assert text.bytes_of(0xE4) == b"\xe4"
    assert text.of(256) == "<|endoftext|>"
    assert text.bytes_of(256) == b"<|endoftext|>"
    fallback = TokenText(coder)
    assert fallback.bytes_of(2 + 0xE4) == b"\xe4"
    assert fallback.bytes_of(258) == b" the"
    assert (fallback.of(1), fallback.bytes_of(1)) == ("</s>", b"</s>")
    assert TokenText(None).bytes_of(5) == b"token 5"
