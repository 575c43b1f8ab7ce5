"""What log-probabilities call tokens, where a tokenizer drops the space that begins a text."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from lezero.serve.coder import Coder, open_coder
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from lezero.serve.server.coded import TokenText
from tests.serve.models import small
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
    for found, one in zip(told["top_logprobs"], likeliest, strict=True):
        best: dict[str, float] = {}
        for token, value in one.likeliest:
            best.setdefault(text.of(token), value)
        assert found == best
