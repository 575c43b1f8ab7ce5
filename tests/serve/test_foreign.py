"""Models of transformers that LeZero has no kernels for, through the same engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from lezero.core import device
from lezero.core.errors import ConfigError, FileError, MissingExtraError
from lezero.data.tokenizer import bytes_tokenizer
from lezero.serve import foreign, opening
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.models import prompts
from tests.serve.server.running import serving

VOCAB = 257
_SMALL: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        bos_token_id=256,
        eos_token_id=256,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
    ),
    "pythia": lambda: transformers.GPTNeoXConfig(
        **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 512},
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64},
        **{"max_position_embeddings": 512, "sliding_window": 9},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    # Of types that lezero.models has, in forms that it cannot express.
    "llama": lambda: transformers.LlamaConfig(**_SMALL, hidden_act="gelu"),
    "qwen2": lambda: transformers.Qwen2Config(
        **_SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each type with random weights, so large that tokens differ."""
    return {kind: saved(tmp_path_factory.mktemp(kind), CONFIGS[kind]()) for kind in CONFIGS}


def saved(folder: Path, config: Any) -> Path:
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(4 if "embed" in name or "wte" in name else 8)
    model.save_pretrained(folder)
    bytes_tokenizer().save(folder)
    return folder


def expected(folder: Path, given: list[list[int]], count: int) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    found = []
    for prompt in given:
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(whole[0, len(prompt) :].tolist())
    return found


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_equals_generate_of_transformers(folders: dict[str, Path], kind: str) -> None:
    given = [*prompts(6, longest=40), prompts(1, seed=9)[0] * 10]
    wanted = expected(folders[kind], given, 24)
    llm = LLM(folders[kind], weights="fp32", max_requests=4)
    assert llm.program.vocab == VOCAB
    assert [answer.tokens for answer in llm.generate(given, greedy(24))] == wanted
    assert [answer.tokens for answer in llm.generate(given, greedy(24))] == wanted
    tight = LLM(folders[kind], weights="fp32", cache_bytes=30 * llm.program.block_bytes)
    assert [answer.tokens for answer in tight.generate(given, greedy(24))] == wanted
    assert tight.engine.totals.preempted > 0
    for one in (llm, tight):
        one.engine.scheduler.check()
        assert one.engine.pool.used_count == 0


@pytest.mark.parametrize(
    ("types", "is_own"),
    [(["full_attention", "sliding_attention"], False), (["full_attention"] * 2, True)],
)
def test_a_mistral_with_types_of_layers_is_read_as_by_transformers(
    types: list[str], is_own: bool, tmp_path: Path
) -> None:
    config = transformers.MistralConfig(**_SMALL, sliding_window=9)
    folder = saved(tmp_path, config)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "layer_types": types}))
    given = [*prompts(3, longest=40), prompts(1, seed=9)[0] * 10]
    llm = LLM(folder, weights="fp32")
    assert isinstance(llm.program, foreign.TransformersProgram) is not is_own
    assert [answer.tokens for answer in llm.generate(given, greedy(12))] == expected(
        folder, given, 12
    )


@pytest.mark.parametrize("speculate", ["lookup", "draft"])
def test_refused_guesses_are_taken_back(folders: dict[str, Path], speculate: Any) -> None:
    given = [[5, 6, 7, 8] * 6, *prompts(4)]
    wanted = expected(folders["gpt2"], given, 30)
    draft = folders["pythia"] if speculate == "draft" else None
    llm = LLM(folders["gpt2"], weights="fp32", speculate=speculate, draft=draft)
    assert [answer.tokens for answer in llm.generate(given, greedy(30))] == wanted
    assert llm.engine.totals.drafted > llm.engine.totals.accepted


def test_caches_of_requests_that_ended_do_not_pile_up(folders: dict[str, Path]) -> None:
    llm = LLM(folders["gpt2"], max_requests=3, context=64)
    llm.generate(prompts(30, longest=30), greedy(20))
    held = sum(cache.get_seq_length() for cache in llm.program._caches.values())  # type: ignore[attr-defined]
    assert held <= llm.engine.pool.count * llm.program.block_size


def test_embeddings(folders: dict[str, Path]) -> None:
    llm = LLM(folders["pythia"], weights="fp32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["pythia"])
    states = model.base_model(torch.tensor([[5, 6, 7]])).last_hidden_state[0].mean(0)
    found = torch.tensor(llm.embed([[9] * 300, [5, 6, 7]])[1])
    assert (found - torch.nn.functional.normalize(states, dim=0)).abs().max() < 1e-4


def test_it_is_put_on_the_accelerator(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.device] = []
    real = foreign.load_foreign(str(folders["gpt2"]))
    monkeypatch.setattr(real, "to", lambda place: moved.append(place) or real)
    asked: list[torch.dtype] = []
    monkeypatch.setattr(foreign, "load_foreign", lambda place, dtype: asked.append(dtype) or real)
    monkeypatch.setattr(foreign, "cpu", lambda: SimpleNamespace(native_bf16=False))
    monkeypatch.setattr(device, "device", lambda: torch.device("cuda", 1))
    foreign.open_foreign("a folder", "auto")
    assert moved == [torch.device("cuda", 1)]
    assert asked == [torch.bfloat16], "whatever the processor multiplies"
    monkeypatch.undo()
    assert foreign.TransformersProgram(real.to("meta")).place == torch.device("meta")


@pytest.mark.parametrize(("weights", "wide"), [("auto", 2), ("bf16", 2), ("fp32", 4)])
def test_room_on_an_accelerator_is_asked_for_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any, wide: int
) -> None:
    """Files keep headers beside numbers, a few KiB."""
    model = transformers.GPT2LMHeadModel(CONFIGS["gpt2"]())
    numbers = sum(x.numel() for x in model.parameters())
    free = 0
    monkeypatch.setattr(device, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(device, "memory_free", lambda place: free)
    monkeypatch.setattr(opening, "open_foreign", lambda *_: "opened")
    for kept in (torch.float32, torch.bfloat16):
        model.to(kept).save_pretrained(tmp_path / str(kept))
        free = numbers * wide + (16 << 10)
        assert opening.open_program(tmp_path / str(kept), weights)[0] == "opened"
        free = numbers * wide - 1
        with pytest.raises(ConfigError, match=rf"got '{weights}'; .* are free on meta; take "):
            opening.open_program(tmp_path / str(kept), weights)


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize(("weights", "wide"), [("auto", 2), ("bf16", 2), ("fp32", 4)])
def test_room_on_the_host_is_asked_for_what_is_cast_or_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any, wide: int, place: str
) -> None:
    model = transformers.GPT2LMHeadModel(CONFIGS["gpt2"]())
    numbers = sum(x.numel() for x in model.parameters())
    free = 0
    monkeypatch.setattr(device, "device", lambda: torch.device(place))
    monkeypatch.setattr(device, "memory_free", lambda place: 1 << 40)
    monkeypatch.setattr(foreign, "cpu", lambda: SimpleNamespace(native_bf16=True))
    monkeypatch.setattr(opening.room, "free_memory", lambda: free)
    monkeypatch.setattr(opening, "open_foreign", lambda *_: "opened")
    for kept in (torch.float32, torch.float16, torch.bfloat16):
        model.to(kept).save_pretrained(tmp_path / str(kept))
        free = numbers * wide + (16 << 10)
        assert opening.open_program(tmp_path / str(kept), weights)[0] == "opened"
        free = numbers * wide - 1
        if place != "cpu" and kept == (torch.float32 if wide == 4 else torch.bfloat16):
            free = 1
            assert opening.open_program(tmp_path / str(kept), weights)[0] == "opened"
            continue
        with pytest.raises(ConfigError, match=rf"got '{weights}'; .* are free.*; take "):
            opening.open_program(tmp_path / str(kept), weights)


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_bf16_where_the_processor_multiplies_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, native: bool, dtype: str
) -> None:
    monkeypatch.setattr(foreign, "cpu", lambda: SimpleNamespace(native_bf16=native))
    monkeypatch.setattr(device, "device", lambda: torch.device("cpu"))
    program = foreign.open_foreign(str(folders["gpt2"]), "auto")
    assert program.description == f"GPT2LMHeadModel of transformers, {dtype}"


def test_it_says_that_it_is_slower(folders: dict[str, Path]) -> None:
    llm = LLM(folders["gemma3"], weights="bf16")
    assert "Gemma3ForCausalLM of transformers, bfloat16" in llm.program.description
    assert any("LeZero has no kernels" in line for line in llm.forecast.lines())
    assert llm.forecast.token_bytes == 2 * 2 * 3 * 2 * 8
    assert llm.generate("some text", greedy(4))[0].reason == "length"


def test_angles_that_change_with_the_length_end_where_they_change(tmp_path: Path) -> None:
    config = transformers.Phi3Config(
        **{**_SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 256},
        rope_parameters={
            **{"rope_type": "longrope", "rope_theta": 1e4},
            **{"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        },
        original_max_position_embeddings=256,
    )
    folder = saved(tmp_path, config)
    llm = LLM(folder, weights="fp32")
    given = prompts(4)
    wanted = expected(folder, given, 24)
    assert [answer.tokens for answer in llm.generate(given, greedy(24))] == wanted
    assert any("beyond 256 tokens" in line for line in llm.forecast.lines())
    said = "angles are others beyond 256 .*original_max_position_embedd"
    with pytest.raises(ConfigError, match=f"prompt: got 300 tokens, .* the answer, {said}"):
        llm.generate([[5] * 300], greedy(1))
    with pytest.raises(ConfigError, match=r"context: got 300, .* beyond 256 tokens"):
        LLM(folder, weights="fp32", context=300)


def test_it_is_served(folders: dict[str, Path]) -> None:
    with serving(LLM(folders["gpt2"], context=64)) as client:
        assert client.complete("abc", max_tokens=4).status == 200


def test_what_cannot_be_run_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights: got 'int8', allowed are auto, bf16, fp32"):
        LLM(folders["gpt2"], weights="int8")
    bert = transformers.BertConfig(
        **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "intermediate_size": 32},
    )
    encoder = tmp_path / "encoder"
    transformers.BertModel(bert).save_pretrained(encoder)
    with pytest.raises(FileError, match=r"\['BertModel'\] is no causal language model"):
        LLM(encoder)
    strange = saved(tmp_path / "strange", CONFIGS["gpt2"]())
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "auto_map": {"AutoConfig": "evil.Evil"}})
    )
    (strange / "evil.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(FileError, match="transformers does not know it"):
        LLM(strange)
    (strange / "config.json").write_text(json.dumps({**config, "n_layer": 3}))
    with pytest.raises(FileError, match=r"weights are missing: transformer\.h\.2"):
        LLM(strange)
    (strange / "model.safetensors").rename(strange / "pytorch_model.bin")
    with pytest.raises(FileError, match="pickled"):
        LLM(strange)


def test_without_transformers_the_extra_is_named(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lezero\[hf\]'"):
        LLM(folders["gpt2"])


def test_a_model_whose_state_cannot_go_back_is_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4
    )
    with pytest.raises(FileError, match=r"does not run|does not keep keys and values"):
        LLM(saved(tmp_path, config))


def test_a_model_that_gives_logits_alone_makes_no_embeddings(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folders["gpt2"], weights="fp32")
    kind = type(llm.program._model)
    monkeypatch.setattr(kind, "base_model", property(lambda model: model))
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel .* makes no embeddings"):
        llm.embed([[5, 6, 7]])
