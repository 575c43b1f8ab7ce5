"""A continuation by plain generation: the text that the engine gives."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from lezero.cli.main import main
from lezero.core import device
from lezero.data.tokenizer import bytes_tokenizer
from lezero.jobs import writer
from lezero.models import Transformer, save_hf
from lezero.serve import coder
from tests.serve.models import small

tokenizers = pytest.importorskip("tokenizers")
WAYS = {"plain": [], "engine": ["--weights", "fp32"]}


def llama_like() -> tokenizers.Tokenizer:
    """As Llama 2's: a text begins with <s> and ▁, which decoding drops; rare letters are bytes."""
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdef"]
    vocab = {word: number for number, word in enumerate([*known, "▁a", "▁ab", "▁c"])}
    merges = [("▁", "a"), ("▁a", "b"), ("▁", "c")]
    model = tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    n, d = tokenizers.normalizers, tokenizers.decoders
    inner.normalizer = n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")])
    inner.decoder = d.Sequence(
        [d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return inner


def saying(vocab: int, words: list[int]) -> Transformer:
    """A model for which each of these tokens follows the one before it."""
    model = small(vocab=vocab, layers=1, tied=False)
    places = torch.randn(vocab, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
        model.embed_tokens.weight.copy_(F.normalize(places))
        model.lm_head.weight.zero_()
        model.lm_head.weight[words[1:]] = F.normalize(places)[words[:-1]] * 9
    return model


def folder_of(words: list[str], place: Path) -> Path:
    """A model with a tokenizer like Llama's that says `words`, each behind the one before."""
    inner = llama_like()
    place.mkdir(exist_ok=True)
    inner.save(str(place / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = [inner.token_to_id(word) for word in words]
    return save_hf(saying(inner.get_vocab_size(), ids), place)


@pytest.mark.skipif(device.device().type != "cpu", reason="there the engine answers")
@pytest.mark.parametrize(
    ("words", "tokens", "text"),
    [
        ("▁ab ▁c ▁a b c </s>", 8, "ab c abc"),
        ("▁ab <0xE4> <0xB8> <0x96> ▁c <0xC3> <0xA9> d </s>", 12, "ab世 céd"),
        ("▁ab <0xE4> <0xB8> <0x96> <0xF0> ▁c d </s>", 12, "ab世\ufffd\ufffd\ufffd cd"),
        ("▁ab c <0xE4> <0xB8> <0x96>", 3, "abc\ufffd\ufffd"),
    ],
    ids=["spaces", "characters of bytes", "bytes of none", "held back to the end"],
)
def test_plain_generation_writes_what_the_engine_writes(
    words: str, tokens: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(words.split(), tmp_path / "model")
    asked = ["generate", str(folder), "-p", "ab", "-n", str(tokens), "--temperature", "0"]
    for way, options in WAYS.items():
        assert main([*asked, *options]) == 0
        assert capsys.readouterr().out == f"{text}\n", way


class _OfTransformers:
    """What reads a GGUF file's vocabulary: it adds and shows special tokens unless told not to."""

    bos_token, bos_token_id, chat_template = "<s>", 1, None
    eos_token, eos_token_id = "</s>", 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(llama_like().encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return str(llama_like().decode(tokens, skip_special_tokens=skip_special_tokens))


def test_a_gguf_file_is_read_and_written_as_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = llama_like()
    said = [inner.token_to_id(word) for word in ("▁ab", "▁c", "<unk>", "d", "</s>")]
    model = saying(inner.get_vocab_size(), said)
    monkeypatch.setattr(writer, "open_model", lambda place, dtype: (model, None))
    monkeypatch.setattr(coder, "gguf_tokenizer", lambda place: _OfTransformers())
    monkeypatch.setattr(coder, "gguf_end_tokens", lambda place: frozenset([2, 7]))
    fed: list[list[int]] = []
    stream = writer.generate_stream
    monkeypatch.setattr(
        writer, "generate_stream", lambda *a, **more: (fed.append(a[1]), stream(*a, **more))[1]
    )
    opened = writer.open_writer("a.gguf")
    for prompt in ("ab", "<s>ab"):
        assert "".join(opened.write(prompt, 8, temperature=0.0)) == f"{prompt} cd"
    assert fed[0] == [1, said[0]]
    assert fed[1][:2] != [1, 1]
    assert opened.coder.end_tokens == {2, 7}


def test_a_folder_ends_at_the_tokenizers_own_end_too(tmp_path, monkeypatch):
    """A fine-tune on turns whose config still names the end of a text."""
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    model = SimpleNamespace(eval=lambda: "model")
    monkeypatch.setattr(writer, "open_model", lambda place, dtype: (model, tmp_path))
    found = writer.open_writer(str(tmp_path)).coder
    assert (found.end_tokens, found.end_token) == ({256, 2}, 256)


def test_an_empty_prompt_begins_as_the_engine_begins_it(monkeypatch):
    fed: list[list[int]] = []
    monkeypatch.setattr(
        writer, "generate_stream", lambda _, start, *a, **b: fed.append(start) or []
    )
    tokenizer = bytes_tokenizer()
    for bos in (7, None):
        given = writer.Coder(tokenizer, frozenset([tokenizer.eos]), bos=bos)
        assert "".join(writer.Writer(saying(257, []), given).write("")) == ""
    assert fed == [[7], [tokenizer.eos]]
