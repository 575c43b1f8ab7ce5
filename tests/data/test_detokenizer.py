import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lezero.data.detokenizer import Detokenizer
from lezero.data.tokenizer import bytes_tokenizer

tokenizers = pytest.importorskip("tokenizers")
Decode = Callable[[list[int]], str]

TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve 🦄🦄 says  hello…\n\n\tdef f(x): return '😀😃'\n"


def byte_level(vocab: int = 300) -> "tokenizers.Tokenizer":
    """Byte-level BPE on a small text: most emoji are several tokens, some tokens half of one."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<end>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT, "world 世 hello"], trainer)
    return inner


def byte_fallback() -> "tokenizers.Tokenizer":
    """As Llama 2's: words begin with ▁, the leading one is dropped, rare characters are bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁wor", "ld", ","]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {word: number for number, word in enumerate(words)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    d = tokenizers.decoders
    inner.decoder = d.Sequence(
        [d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]
    )
    return inner


def pieces(decode: Decode, tokens: list[int]) -> list[str]:
    """The pieces of a text, after checking each beginning against `decode` of all its tokens."""
    detokenizer, given_ = Detokenizer(decode), []
    for end, token in enumerate(tokens, 1):
        given_.append(detokenizer.add(token))
        whole, so_far = decode(tokens[:end]), "".join(given_)
        assert whole.startswith(so_far)
        if not whole.endswith("\ufffd"):
            assert whole == so_far, "held back without need"
    given_.append(detokenizer.finish())
    assert "".join(given_) == decode(tokens)
    return given_


@pytest.mark.parametrize("vocab", [258, 280, 330])
def test_pieces_of_byte_level_bpe_are_the_text(vocab: int) -> None:
    inner = byte_level(vocab)
    tokens = inner.encode(TEXT).ids
    found = pieces(inner.decode, tokens)
    assert "".join(found) == TEXT
    assert not any("\ufffd" in piece for piece in found)
    assert vocab == 330 or "" in found  # half a character gives nothing


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_tokens_of_byte_level_bpe(seed: int) -> None:
    """Invalid UTF-8 of every kind, special tokens among it."""
    chance, inner = random.Random(seed), byte_level()
    often = [inner.token_to_id(letter) for letter in "ðŁĺĢâaĊ"] + [0]
    tokens = [
        chance.choice(often) if chance.random() < 0.7 else chance.randrange(inner.get_vocab_size())
        for _ in range(chance.randrange(60))
    ]
    pieces(inner.decode, tokens)


def test_the_tokenizer_of_bytes() -> None:
    tokenizer = bytes_tokenizer()
    assert "".join(pieces(tokenizer.decode, tokenizer.encode(TEXT))) == TEXT


def test_a_tokenizer_that_drops_the_first_space_and_falls_back_to_bytes() -> None:
    inner = byte_fallback()
    ids = [inner.token_to_id(word) for word in ("▁Hello", ",", "▁wor", "ld", "▁", "▁", "▁Hello")]
    emoji = [inner.token_to_id(f"<0x{byte:02X}>") for byte in "😀é".encode()]
    detokenizer = Detokenizer(inner.decode)
    found = [detokenizer.add(token) for token in [*ids, *emoji, *ids]]
    assert "".join(found) == "Hello, world   Hello😀é Hello, world   Hello"
    assert not any("\ufffd" in piece for piece in found)
    assert found.count("") == 3 + 1  # of the emoji and of é
    assert pieces(inner.decode, ids)


def test_the_text_goes_on_from_the_prompt() -> None:
    inner = byte_fallback()
    hello, world = inner.token_to_id("▁Hello"), inner.token_to_id("▁wor")
    assert Detokenizer(inner.decode, [hello]).add(world) == " wor"
    assert Detokenizer(inner.decode).add(world) == "wor"


@pytest.mark.parametrize("end", ["ᚠᚢᚦ", "é" * 9, "😀é😀", "\ufffd" * 12, "ᚠ\ufffd" * 5, "Hello"])
def test_a_prompt_of_bytes_is_cut_between_characters(end: str) -> None:
    inner = byte_fallback()
    for answer in ("ᚨᚱ", "😀,", "\ufffdé"):
        for more in range(4):  # so that the cut falls on every byte of a character
            known, new = f"Hello{end}{',' * more}{end}", f"{answer}{',' * more}"
            first, second = (inner.encode(text).ids for text in (known, new))
            detokenizer = Detokenizer(inner.decode, first)
            told = "".join(detokenizer.add(token) for token in second) + detokenizer.finish()
            assert inner.decode(first + second)[len(inner.decode(first)) :] == told


@pytest.mark.parametrize("before", ["", "Hello", "Hello" + "😀é" * 9])
@pytest.mark.parametrize("text", ["日本語", "éé日", "😀😀é"])
def test_a_prompt_that_ends_within_a_character_loses_none_behind_it(before: str, text: str) -> None:
    inner = byte_fallback()
    ids = [inner.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    known, end = (inner.encode(each).ids for each in (before, "Hello"))
    for cut in range(1, len(ids)):
        detokenizer = Detokenizer(inner.decode, known + ids[:cut])
        told = "".join(detokenizer.add(token) for token in ids[cut:] + end) + detokenizer.finish()
        whole = text.encode()[:cut].decode(errors="ignore")
        assert told == text[len(whole) :] + "Hello"


def test_half_a_character_comes_out_at_the_end_only() -> None:
    tokens = list("é".encode())[:1]
    detokenizer = Detokenizer(bytes_tokenizer().decode)
    assert detokenizer.add(tokens[0]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["text", "broken", "special"])
def test_the_work_of_a_token_does_not_grow(kind: str) -> None:
    inner, worked = byte_level(), 0

    def decode(tokens: list[int]) -> str:
        nonlocal worked
        worked += len(tokens)
        return str(inner.decode(tokens))

    once = {"text": inner.encode(TEXT).ids, "broken": [inner.token_to_id("ð")] * 40, "special": [0]}
    tokens = (once[kind] * 2000)[:2000]
    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.add(token) for token in tokens) + detokenizer.finish()
    assert text == inner.decode(tokens)
    assert worked / len(tokens) < 50


@pytest.mark.parametrize("letter", "é中😀")
def test_a_character_that_the_prompt_began_is_told_whole(letter: str) -> None:
    tokenizer = bytes_tokenizer()
    start = len(letter.encode())
    for before in ("", "a", "世界 "):
        tokens = tokenizer.encode(f"{before}{letter}b")
        for cut in range(len(before.encode()) + 1, len(before.encode()) + start):
            known = Detokenizer(tokenizer.decode, tokens[:cut])
            told = "".join(known.add(token) for token in tokens[cut:]) + known.finish()
            assert told == f"{letter}b"


def test_broken_text_of_a_prompt_is_not_told_again() -> None:
    tokenizer = bytes_tokenizer()
    for before in ("a\ufffd".encode(), b"a\xe4", b"\xf0\x9f", b"\xff\xff"):
        known = Detokenizer(tokenizer.decode, list(before))
        assert "".join(known.add(token) for token in b"bc") + known.finish() == "bc"
