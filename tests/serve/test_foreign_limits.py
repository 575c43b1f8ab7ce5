"""Where models of transformers end, which ones cannot be run at all, and what their caches hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import lezero as lz
from lezero.core.errors import ConfigError, FileError
from lezero.hub.foreign import load_foreign
from lezero.serve.foreign import TransformersProgram, _longest
from lezero.serve.llm import LLM
from lezero.serve.program import Fed
from lezero.serve.sampling import SamplingParams
from tests.serve.models import prompts

_SMALL: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
_ORIGINAL = "original_max_position_embeddings"
LONG = {"rope_type": "longrope"}
SHORT = {"rope_type": "default", "rope_theta": 1e4}
HYBRID = {
    "lfm2": transformers.Lfm2Config(
        **_SMALL, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3
    ),
    "jamba": transformers.JambaConfig(
        **{**_SMALL, "pad_token_id": 0, "num_experts": 2, "use_mamba_kernels": False},
        **{"attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "qwen3_next": transformers.Qwen3NextConfig(
        **{**_SMALL, "num_hidden_layers": 4, "head_dim": 8, "num_experts": 2},
        **{"num_experts_per_tok": 1, "moe_intermediate_size": 32},
        **{"shared_expert_intermediate_size": 32, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
}


def saved(folder: Path, config: Any) -> Path:
    torch.manual_seed(4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=None
    )
    return saved(tmp_path_factory.mktemp("gpt2"), config)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0)


def test_a_file_that_is_written_to_changes_no_answers(gpt2: Path, tmp_path: Path) -> None:
    """transformers maps weights of the wanted type: reading behind the end of a file that was cut
    short would end the process, so it is overwritten first."""
    shutil.copytree(gpt2, tmp_path / "served")
    file, given = tmp_path / "served" / "model.safetensors", prompts(3)
    llm = LLM(tmp_path / "served", weights="fp32")
    before = [answer.tokens for answer in llm.generate(given, greedy(8))]
    held = file.read_bytes()
    with file.open("r+b") as writer:
        writer.seek(len(held) // 2)
        writer.write(b"\xff" * (len(held) - len(held) // 2))
    assert [answer.tokens for answer in llm.generate(given, greedy(8))] == before
    file.open("wb").close()
    assert [answer.tokens for answer in llm.generate(given, greedy(8))] == before


def test_a_prompt_beyond_the_models_limit_is_refused_up_front(tmp_path: Path) -> None:
    config = transformers.MptConfig(
        vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=64, eos_token_id=None
    )
    llm = LLM(saved(tmp_path, config), weights="fp32")
    assert llm.context == 64
    with pytest.raises(ConfigError, match="together 65, allowed is 64 together"):
        llm.generate([[5] * 60], greedy(5))
    with pytest.raises(ConfigError, match="context: got 65, allowed is 1 to the model's 64"):
        LLM(tmp_path, weights="fp32", context=65)
    (full,) = llm.generate([[5] * 60], greedy(4))
    assert (full.error, len(full.tokens)) == (None, 4)


@pytest.mark.parametrize(
    ("named", "longest"),
    [
        ({"max_position_embeddings": 99, "model_max_length": 5}, 99),
        ({"n_positions": 99}, 99),
        ({"max_sequence_length": 99}, 99),
        ({"seq_length": 99}, 99),
        ({"model_max_length": 99}, 99),
        ({"max_position_embeddings": -1, "max_seq_len": 99}, 99),
        ({"max_position_embeddings": None}, 2048),
        ({"max_seq_len": "99", "n_ctx": True}, 2048),
        ({}, 2048),
        ({"n_ctx": 99, "rope_parameters": {**LONG, _ORIGINAL: 64}, _ORIGINAL: 32}, 64),
        ({"n_ctx": 99, "rope_parameters": LONG, _ORIGINAL: 32}, 32),
        ({"n_ctx": 99, "rope_parameters": {**LONG, _ORIGINAL: 640}}, 99),
        ({"n_ctx": 99, "rope_parameters": LONG}, 99),
        ({"n_ctx": 99, "rope_parameters": LONG, _ORIGINAL: None}, 99),
        ({"n_ctx": 99, "rope_parameters": {"a": {**LONG, _ORIGINAL: 64}, "b": SHORT}}, 64),
        ({"n_ctx": 99, "rope_parameters": {"a": {**LONG, _ORIGINAL: 64}, "b": LONG}}, 64),
        (
            {
                **{"n_ctx": 99, _ORIGINAL: 16},
                "rope_parameters": {"a": {**LONG, _ORIGINAL: 64}, "b": {**LONG, _ORIGINAL: 32}},
            },
            32,
        ),
        ({"n_ctx": 99, "rope_parameters": {"a": {**SHORT, _ORIGINAL: 64}, "b": SHORT}}, 99),
        ({"n_ctx": 99, "rope_parameters": {"rope_type": "llama3", _ORIGINAL: 64}}, 99),
    ],
)
def test_what_configs_call_the_limit(named: dict[str, Any], longest: int) -> None:
    assert _longest(SimpleNamespace(**named)) == longest


def test_a_long_form_of_one_type_of_layers_ends_all(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [20.0] * 4, "factor": 4.0}
    config = transformers.Gemma3TextConfig(
        **{**_SMALL, "head_dim": 8, "sliding_window": 16},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": SHORT,
            "full_attention": {**LONG, **factors, "rope_theta": 1e4, _ORIGINAL: 64},
        },
    )
    llm = LLM(saved(tmp_path, config), weights="fp32")
    assert llm.context == 64
    assert any("beyond 64 tokens" in line for line in llm.forecast.lines())
    with pytest.raises(ConfigError, match=r"together 65, .* angles are others beyond 64 tokens"):
        llm.generate([[5] * 60], greedy(5))
    (full,) = llm.generate([[5] * 60], greedy(4))
    assert (full.error, len(full.tokens)) == (None, 4)


@pytest.mark.parametrize("kind", HYBRID)
def test_models_with_states_are_refused_by_what_they_are(kind: str, tmp_path: Path) -> None:
    with pytest.raises(
        FileError,
        match=r"does not keep keys and values of each token.*use the model's own generate",
    ):
        LLM(saved(tmp_path, HYBRID[kind]))


def test_a_model_that_goes_on_otherwise_than_from_its_keys_is_refused(gpt2: Path) -> None:
    class Forgetful(TransformersProgram):
        def _caches_of(self, fed: Any) -> list[Any]:
            return [transformers.DynamicCache() for _ in fed]

    program = Forgetful(load_foreign(str(gpt2), torch.float32))
    with pytest.raises(FileError, match="gives other numbers where it goes on"):
        program.try_out("a folder")


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, transformers.LlamaConfig(**_SMALL, is_causal=False))
    with pytest.raises(FileError, match="gives other numbers where it goes on"):
        LLM(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_step_reads_and_multiplies(tied: bool) -> None:
    """A row of a table is next to nothing; one that is the head too is read whole."""
    config = transformers.LlamaConfig(**_SMALL, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config)
    program = TransformersProgram(model)
    table, inside = 97 * 32, list(model.model.layers.parameters())
    norms_and_angles = program.read_bytes - 4 * (table + sum(x.numel() for x in inside))
    assert 4 * 32 <= norms_and_angles < 4 * table
    assert program.weight_bytes - program.read_bytes == (0 if tied else 4 * table)
    assert program.products == sum(x.numel() for x in inside if x.dim() == 2)


def test_states_are_of_the_rows_that_are_asked_for(gpt2: Path) -> None:
    program = TransformersProgram(load_foreign(str(gpt2), torch.float32))
    tokens = [5, 6, 7, 8]
    whole = program.states([Fed(tokens, 0, [0], range(4))])
    some = program.states([Fed(tokens, 0, [0], [1, 3]), Fed(tokens, 0, [1], [2])])
    assert torch.equal(some, whole[[1, 3, 2]])


def held(program: Any) -> int:
    assert isinstance(program, TransformersProgram)
    return sum(cache.get_seq_length() for cache in program._caches.values())


@pytest.mark.parametrize("draft", [False, True])
def test_caches_go_with_their_requests(gpt2: Path, draft: bool) -> None:
    guesses: dict[str, Any] = {"speculate": "draft", "draft": gpt2} if draft else {}
    llm = LLM(gpt2, weights="fp32", max_requests=3, **guesses)
    given = prompts(5, longest=30)
    wanted = [answer.tokens for answer in llm.generate(given, greedy(20))]
    assert held(llm.program) == 0
    assert [answer.tokens for answer in llm.generate(given, greedy(20))] == wanted
    stream = llm.stream(given[0], greedy(20))
    next(stream)
    assert held(llm.program) > 0
    stream.close()
    assert held(llm.program) == 0
    llm.embed([[5] * 90, [6]])
    assert held(llm.program) == 0
    if draft:
        assert llm._draft is not None
        llm.engine._speculator.guess(())  # type: ignore[union-attr]
        assert held(llm._draft) == 0


def test_caches_of_preempted_requests_go_too(gpt2: Path) -> None:
    given = prompts(6, longest=40)
    wanted = [x.tokens for x in LLM(gpt2, weights="fp32").generate(given, greedy(30))]
    size = LLM(gpt2, weights="fp32").program.block_bytes
    tight = LLM(gpt2, weights="fp32", cache_bytes=8 * size)
    answers = [tight.begin(tight.request(prompt, greedy(30))) for prompt in given]
    while tight.engine.busy:
        tight.advance()
        assert held(tight.program) <= 8 * tight.program.block_size
        assert len(tight.program._caches) == len(tight.engine.scheduler.running)  # type: ignore[attr-defined]
    assert [answer.completion().tokens for answer in answers] == wanted
    assert tight.engine.totals.preempted > 0
    assert held(tight.program) == 0


def test_the_way_out_of_a_quantized_model_is_told_and_works(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=1, n_head=4, n_positions=64)
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    with pytest.raises(ConfigError, match=r"call lz\.dequantize_\(model\), save it and its token"):
        LLM(model)
    lz.save_quantized(model, tmp_path / "quantized")
    with pytest.raises(FileError, match=r"or one that lz\.dequantize_ has made float again"):
        LLM(tmp_path / "quantized")
    lz.dequantize_(model)
    model.save_pretrained(tmp_path / "float")
    engine = LLM(tmp_path / "float", weights="fp32")
    asked = torch.arange(5)
    one = SamplingParams(max_tokens=1, temperature=0)
    (answer,) = engine.generate([asked.tolist()], one)
    with torch.no_grad():
        assert answer.tokens == [int(model(asked[None]).logits[0, -1].argmax())]
