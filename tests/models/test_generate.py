import copy
from typing import Any

import numpy as np
import pytest
import torch

from lezero.compress.quantize import Int8Weight, quantize_
from lezero.core.errors import ConfigError
from lezero.models import Transformer, TransformerConfig, generate, generate_stream, save_hf

SHAPE = {"vocab": 40, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "context": 32}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]


def build(**change: Any) -> Transformer:
    model = Transformer(TransformerConfig(**{**SHAPE, **change}), seed=2)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(8)
    return model


SAMPLED = {"temperature": 1.0, "top_k": 12, "top_p": 0.95, "seed": 4}


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("change", [{}, {"sliding_window": 4}, {"qk_norm": True}])
def test_cache_and_no_cache_give_the_same_tokens(
    how: dict[str, Any], change: dict[str, Any]
) -> None:
    model = build(**change)
    found = generate(model, PROMPTS, 12, **how)
    assert generate(model, PROMPTS, 12, use_cache=False, **how) == found
    assert [len(row) for row in found] == [12] * 4


def test_a_prompt_gives_the_same_tokens_alone_and_in_a_ragged_batch() -> None:
    model = build()
    together = generate(model, PROMPTS, 10)
    assert together == [generate(model, prompt, 10)[0] for prompt in PROMPTS]
    assert len({tuple(row) for row in together}) == 4
    sampled = generate(model, PROMPTS, 10, **SAMPLED)
    assert sampled[0] == generate(model, PROMPTS[0], 10, **SAMPLED)[0]


def test_logits_are_made_of_the_last_token_of_a_prompt_alone() -> None:
    model, rows = build(tied=False), list[int]()
    model.lm_head.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[1]))
    generate(model, PROMPTS[2], 3)
    generate(model, PROMPTS, 2)
    assert rows == [1] * 5


class Scaled(Transformer):
    """A forward of its own, with the arguments that it had when it was written."""

    def forward(self, tokens_BT: Any, cache: Any = None, positions: Any = None) -> Any:  # type: ignore[override]
        return 2 * super().forward(tokens_BT, cache, positions)


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_forward_of_its_own_generates(where: str) -> None:
    model = build()
    wanted = generate(model, PROMPTS, 5)
    if where == "class":
        model.__class__ = Scaled
    else:
        model.forward = lambda *given: Transformer.forward(model, *given)  # type: ignore
    assert generate(model, PROMPTS, 5) == wanted


def test_prompts_of_a_quantized_model_give_what_each_gives_alone() -> None:
    model = build()
    quantize_(model, Int8Weight(), objective="size")
    together = generate(model, PROMPTS, 10)
    assert together == [generate(model, prompt, 10)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("added", [0, 1])
def test_greedy_equals_the_definition(added: int) -> None:
    model, tokens = build(), list(PROMPTS[2])
    model.layers.extend(copy.deepcopy(block) for block in model.layers[:added])
    for _ in range(8):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, PROMPTS[2], 8) == [tokens[7:]]


@pytest.mark.parametrize("change", [{}, {"sliding_window": 5}])
def test_greedy_equals_transformers(change: dict[str, Any], tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = build(**change)
    save_hf(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for prompt, found in zip(PROMPTS, generate(model, PROMPTS, 12), strict=True):
        inputs = torch.tensor([prompt])
        wanted = theirs.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=12, do_sample=False
        )
        assert wanted[0, len(prompt) :].tolist() == found


def test_the_seed_decides_and_no_global_generator_is_touched() -> None:
    model = build()
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = generate(model, PROMPTS, 10, **SAMPLED)
    torch.manual_seed(9)
    assert generate(model, PROMPTS, 10, **SAMPLED) == first
    torch.manual_seed(0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert generate(model, PROMPTS, 10, **{**SAMPLED, "seed": 5}) != first
    same = generate(model, [PROMPTS[0]] * 3, 10, **SAMPLED)
    assert len({tuple(row) for row in same}) == 3


def test_a_stop_token_ends_its_row_only() -> None:
    model = build()
    free = generate(model, PROMPTS, 10)
    stop = free[0][3]
    wanted = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    for given in ([stop], torch.tensor([stop]), np.array([stop])):
        assert generate(model, PROMPTS, 10, stop=given) == wanted
    assert len(wanted[0]) <= 4


def test_the_stream_yields_what_generate_returns() -> None:
    model = build()
    stream = generate_stream(model, PROMPTS[0], 8, **SAMPLED)
    first = next(stream)
    assert torch.is_grad_enabled()  # nothing leaks between tokens
    assert [first, *stream] == generate(model, PROMPTS[0], 8, **SAMPLED)[0]


def test_tensors_are_prompts_too() -> None:
    model = build()
    assert generate(model, torch.tensor([1, 2, 3]), 4) == generate(model, [1, 2, 3], 4)
    pair = torch.tensor([[1, 2], [3, 4]])
    assert generate(model, pair, 4) == generate(model, pair.tolist(), 4)


def test_the_context_may_be_filled_to_its_last_token() -> None:
    assert len(generate(build(), [1, 2], 30)[0]) == 30


LONGROPE = {
    **{"kind": "longrope", "factor": 3.0, "original_context": 10},
    **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 5.0, 7.0]},
}
GROWING = [
    {"context": 8, "rope_scaling": {"kind": "dynamic", "factor": 4.0}},
    {"rope_scaling": LONGROPE},
]


def build_attentive(**change: Any) -> Transformer:
    """A model whose tokens depend much on where it looks."""
    model = build(**change)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data.mul_(3)
    return model


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("change", GROWING, ids=["dynamic", "longrope"])
def test_angles_that_change_in_mid_sequence_turn_all_keys_anew(
    how: dict[str, Any], change: dict[str, Any]
) -> None:
    model = build_attentive(**change)
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(40, (n,), generator=drawn).tolist() for n in (3, 1, 7, 10, 5, 12)]
    found = generate(model, prompts, 16, **how)
    assert generate(model, prompts, 16, use_cache=False, **how) == found
    assert list(generate_stream(model, prompts[0], 16, **how)) == found[0]
    if how:
        return
    for prompt, row in zip(prompts, found, strict=True):
        tokens = list(prompt)
        for _ in range(16):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        assert row == tokens[len(prompt) :]


def test_a_prompt_beside_one_that_goes_alone_is_drawn_by_its_own_number() -> None:
    model = build_attentive(**GROWING[0])
    long, other, short = list(range(1, 13)), [9, 8, 7], [5, 6, 7]
    found = [generate(model, [first, short], 4, **SAMPLED)[1] for first in (long, other)]
    assert found[0] == found[1]
    assert found[0] != generate(model, short, 4, **SAMPLED)[0]


@pytest.mark.parametrize("start", [4, 9, 10, 11, 20])
def test_longrope_is_greedy_as_transformers_where_that_agrees_with_itself(
    start: int, tmp_path: Any
) -> None:
    """Its cache keeps keys as they were turned, so across the border it is right without one."""
    transformers = pytest.importorskip("transformers")
    model = build_attentive(rope_scaling=LONGROPE)
    save_hf(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.randint(40, (1, start), generator=torch.Generator().manual_seed(start))
    within = start > 10 or start + 5 <= 10
    for cached in (False, True) if within else (False,):
        wanted = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6 if within else 12,
            do_sample=False, use_cache=cached,
        )  # fmt: skip
        found = generate(model, prompt, wanted.shape[1] - start)[0]
        assert wanted[0, start:].tolist() == found


@pytest.mark.parametrize(
    ("tokens", "new", "says"),
    [
        ([1, 2], 31, "more than the model's context of 32; .* at most 30"),
        (list(range(33)), 1, "^the prompt of 33 tokens .*context of 32; shorten it$"),
        ([[1], []], 4, "prompt 1 is empty"),
        ([], 4, "the prompt is empty"),
        ([1, 40], 4, "the prompt holds token 40; the vocabulary is 0 to 39"),
        ([-1], 4, "holds token -1"),
        ([1.5], 4, "holds 1.5; tokens are whole numbers"),
        ([1], 0, "max_new_tokens: got 0"),
    ],
)
def test_bad_prompts_are_named(tokens: Any, new: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        generate(build(), tokens, new)


def test_a_stream_is_checked_before_its_first_token() -> None:
    for stop in (3, "3", [2.5], ["3"], None):
        with pytest.raises(ConfigError, match=r"stop: got .*, allowed is a list of tokens"):
            generate_stream(build(), [1], 3, stop=stop)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes one prompt, got 2"):
        generate_stream(build(), [[1], [2]], 3)
    with pytest.raises(ConfigError, match="top_k: got 0"):
        generate_stream(build(), [1], 3, top_k=0)
