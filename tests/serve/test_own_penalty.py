"""A folder's repetition penalty, as transformers heeds it, wherever the model answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lezero.data.tokenizer import bytes_tokenizer
from lezero.jobs.answer import continued
from lezero.serve.llm import LLM
from lezero.serve.offline import answer_lines
from lezero.serve.sampling import SamplingParams
from tests.serve.models import prompts
from tests.serve.server.running import serving

_SMALL: dict[str, Any] = {
    **{"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
NONE = GREEDY.model_copy(update={"repetition_penalty": 1.0})
CONFIGS = {
    "kernels": transformers.LlamaConfig(**_SMALL),
    "transformers": transformers.LlamaConfig(**_SMALL, hidden_act="gelu"),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param])
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    model.save_pretrained(root)
    bytes_tokenizer().save(root)
    said = {"repetition_penalty": 1.3, "min_length": 3, "temperature": 0.6, "do_sample": True}
    (root / "generation_config.json").write_text(json.dumps(said))
    return root


def expected(folder: Path, prompt: list[int], **options: Any) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    options |= {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return whole[0, len(prompt) :].tolist()


def test_it_holds_where_nobody_names_another(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(folder, weights="fp32")
    assert [x.message for x in caplog.records if "min_length would" in x.message]
    for prompt in prompts(4):
        wanted = expected(folder, prompt)
        assert llm.generate([prompt], GREEDY)[0].tokens == wanted
        without = expected(folder, prompt, repetition_penalty=1.0)
        assert llm.generate([prompt], NONE)[0].tokens == without != wanted
        line = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        said, plain = answer_lines(
            llm, [json.dumps(line), json.dumps({**line, "repetition_penalty": 1})]
        )
        assert said["text"] == llm.generate([prompt], GREEDY)[0].text
        assert plain["text"] == llm.generate([prompt], NONE)[0].text


def test_lz_generate_heeds_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(folder, weights="fp32")
    params = GREEDY.model_copy(update={"ignore_eos": False})
    caplog.clear()
    said = list(continued(str(folder), "abc", 24, {"temperature": 0.0}))
    assert "".join(said) == "abc" + llm.generate("abc", params)[0].text
    assert len([x for x in caplog.records if "min_length would" in x.message]) == 1
    (folder / "generation_config.json").write_text('{"min_length": 3}')
    caplog.clear()
    other = list(continued(str(folder), "abc", 24, {"temperature": 0.0}))
    assert len([x for x in caplog.records if "min_length would" in x.message]) == 1
    (folder / "generation_config.json").write_text(
        '{"repetition_penalty": 1.3, "min_length": 3, "temperature": 0.6, "do_sample": true}'
    )
    assert other != said


def test_the_server_heeds_it(folder: Path) -> None:
    llm = LLM(folder, weights="fp32")
    asked = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    prompt = list(b"abc")
    with serving(llm) as client:
        said = client.complete(prompt, **asked).json["choices"][0]["text"]
        null = client.complete(prompt, repetition_penalty=None, **asked).json["choices"][0]["text"]
        plain = client.complete(prompt, repetition_penalty=1, **asked).json["choices"][0]["text"]
    assert said == null == llm.generate([prompt], GREEDY)[0].text
    assert plain == llm.generate([prompt], NONE)[0].text
