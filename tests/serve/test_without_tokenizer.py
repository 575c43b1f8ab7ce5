"""Folders whose files lack a tokenizer, or one that says how a text ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from lezero.cli.main import main
from lezero.core.errors import ConfigError, FileError
from lezero.data.tokenizer import bytes_tokenizer
from lezero.models import save_hf
from lezero.serve.llm import LLM
from lezero.serve.offline import answer_lines
from lezero.serve.sampling import SamplingParams
from tests.data.test_special import unnamed
from tests.serve.models import prompts, small

GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(params=["kernels", "transformers"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of weights alone."""
    if request.param == "kernels":
        return save_hf(small(), tmp_path / "model")
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_of_weights_alone_takes_tokens(weights: Path) -> None:
    llm = LLM(weights, weights="fp32", context=64)
    found = llm.generate(prompts(2, longest=20), GREEDY)
    assert [len(answer.tokens) for answer in found] == [12, 12]
    line = {"prompt": [5, 6], "max_tokens": 3, "temperature": 0}
    (told,) = answer_lines(llm, [json.dumps(line)])
    assert (told["text"], len(told["token_ids"])) == ("", 3)
    assert len(llm.embed([[5, 6]])[0]) > 1
    for ask in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(ConfigError, match="has no tokenizer: give prompts as tokens"):
            ask()
    with pytest.raises(ConfigError, match="stop: this model has no tokenizer"):
        llm.generate([[5]], SamplingParams(stop="x"))


def test_a_coder_is_more_than_a_tokenizer() -> None:
    given: Any = bytes_tokenizer()
    with pytest.raises(ConfigError, match=r"coder: got a .*, allowed is lezero.serve.coder.Coder"):
        LLM(small(), coder=given)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_models_own_end_tokens_end_an_answer(weights: Path, file: str) -> None:
    free = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    (whole,) = LLM(weights, weights="fp32", context=64).generate([[5, 6, 7]], free)
    end = whole.tokens[3]
    (weights / "generation_config.json").unlink(missing_ok=True)
    told = json.loads((weights / "config.json").read_text())
    named = {"eos_token_id": [end, 96]}
    (weights / file).write_text(json.dumps({**told, **named} if file == "config.json" else named))
    llm = LLM(weights, weights="fp32", context=64)
    (found,) = llm.generate([[5, 6, 7]], GREEDY)
    assert found.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    assert found.reason == "stop"
    (found,) = llm.generate([[5, 6, 7]], free)
    assert found.tokens == whole.tokens


def test_it_is_not_served(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(weights), "--port", "0"]) == 2
    assert "holds no tokenizer, without which answers have no text" in capsys.readouterr().err


def test_a_torn_tokenizer_is_still_an_error(weights: Path) -> None:
    (weights / "tokenizer_config.json").write_text("{}")
    with pytest.raises(FileError, match=r"holds no tokenizer|no tokenizer that can be read"):
        LLM(weights, weights="fp32", context=64)


def test_the_models_files_say_how_a_text_ends(tmp_path: Path) -> None:
    unnamed(tmp_path)
    save_hf(small(vocab=301), tmp_path)
    with pytest.raises(FileError, match="names no end-of-text token"):
        LLM(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 0]}')
    llm = LLM(tmp_path, weights="bf16")
    assert llm.coder is not None
    assert llm.coder.end_tokens == {9, 0}
    assert llm.coder.end_token == 9
    assert main(["generate", str(tmp_path), "-p", "a few", "-n", "2"]) == 0
