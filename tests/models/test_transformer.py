import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lezero.core.errors import ConfigError
from lezero.models import KVCache, Transformer, TransformerBlock, TransformerConfig

SHAPE = {"vocab": 50, "dim": 32, "layers": 2, "heads": 4, "ffn": 64, "context": 32}


def build(**change: Any) -> Transformer:
    model = Transformer(TransformerConfig(**{**SHAPE, **change}), seed=1)
    for name, parameter in model.named_parameters():  # far from zero, so that mistakes show
        if "norm" not in name:
            parameter.data.mul_(8.0)
    return model


def some_tokens(rows: int, length: int) -> Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(3))


def test_logits_have_one_row_a_token_and_train_every_parameter() -> None:
    model = build(kv_heads=2, tied=False, attention_bias="qkvo", mlp_bias=True, qk_norm=True)
    logits = model(some_tokens(2, 7))
    assert logits.shape == (2, 7, 50)
    logits.square().mean().backward()
    # A key's bias moves all scores of a row alike, and qk_norm keeps it visible.
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_token_sees_no_later_one() -> None:
    model, tokens = build(), some_tokens(1, 9)
    before = model(tokens)
    tokens[0, 6] = (tokens[0, 6] + 1) % 50
    after = model(tokens)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("change", [{}, {"kv_heads": 2}, {"kv_heads": 1, "sliding_window": 3}])
def test_the_cache_gives_the_logits_of_one_pass(change: dict[str, Any]) -> None:
    model, tokens = build(**change), some_tokens(2, 12)
    whole = model(tokens)
    cache = KVCache(model.config)
    parts = [model(part, cache) for part in tokens.split([4, 1, 3, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    assert cache.length == 12


def test_a_sliding_window_forgets() -> None:
    model, tokens = build(sliding_window=2, layers=1), some_tokens(1, 8)
    before = model(tokens)[0, -1]
    tokens[0, :6] = 0
    assert torch.allclose(model(tokens)[0, -1], before)
    tokens[0, 6] = (tokens[0, 6] + 1) % 50
    assert not torch.allclose(model(tokens)[0, -1], before)


def test_padding_on_the_left_changes_nothing() -> None:
    model, tokens = build(kv_heads=2), some_tokens(1, 6)
    alone = model(tokens)
    padded = torch.cat((torch.full((1, 3), 7), tokens), dim=1)
    positions = torch.arange(9)[None] - 3
    found = model(padded, positions=positions)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found[:, 3:], alone, rtol=1e-4, atol=1e-5)


def test_positions_in_a_row_are_the_default() -> None:
    model, tokens = build(), some_tokens(2, 6)
    torch.testing.assert_close(model(tokens, positions=torch.arange(6)), model(tokens))


def test_attention_is_an_argument() -> None:
    seen: list[tuple[int, ...]] = []

    def plain(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool) -> Tensor:
        seen.append(tuple(q.shape))
        assert mask is None
        assert causal
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return F.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v

    config = TransformerConfig(**{**SHAPE, "kv_heads": 2})
    ours, theirs = Transformer(config, seed=5), Transformer(config, attention=plain, seed=5)
    tokens = some_tokens(2, 6)
    torch.testing.assert_close(theirs(tokens), ours(tokens))
    assert seen == [(2, 4, 6, 8)] * 2


def test_weights_depend_on_seed_and_name_only() -> None:
    config = TransformerConfig(**SHAPE)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = Transformer(config, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.device("meta"):
        second = Transformer(config)
    assert all(p.is_meta for p in second.parameters())
    second.to_empty(device="cpu")
    second.init_weights(3)
    deeper = Transformer(config.model_copy(update={"vocab": 60}), seed=3)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
        if name != "embed_tokens.weight":
            assert torch.equal(parameter, deeper.get_parameter(name))
    tokens = some_tokens(1, 5)
    assert torch.equal(first(tokens), second(tokens))
    other = Transformer(config, seed=4).layers[0].self_attn.q_proj.weight
    assert not torch.equal(first.layers[0].self_attn.q_proj.weight, other)


def test_weights_start_with_the_stated_deviation() -> None:
    model = Transformer(TransformerConfig(vocab=1000, dim=64, layers=2, heads=2), seed=0)
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.layers[0].mlp.down_proj.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert bool((model.norm.weight == 1).all())


def test_a_model_filled_from_a_state_dict_on_meta_runs() -> None:
    model = build()
    with torch.device("meta"):
        other = Transformer(model.config)
    other.load_state_dict(model.state_dict(), assign=True)
    tokens = some_tokens(1, 5)
    assert torch.equal(other(tokens), model(tokens))


def test_a_forecast_can_run_it_on_fake_tensors() -> None:
    with FakeTensorMode():
        model = build(kv_heads=2)
        logits = model(torch.zeros(2, 7, dtype=torch.long))
        logits.sum().backward()
    assert logits.shape == (2, 7, 50)
    assert all(isinstance(p, FakeTensor) for p in model.parameters())
    with torch.device("meta"):
        logits = Transformer(model.config)(torch.zeros(2, 7, dtype=torch.long))
    assert logits.is_meta


def test_bf16_is_near_fp32() -> None:
    model, tokens = build(kv_heads=2), some_tokens(2, 12)
    wanted = model(tokens)
    found = copy.deepcopy(model).bfloat16()(tokens)
    assert found.dtype == torch.bfloat16
    assert (found.float() - wanted).norm() / wanted.norm() < 0.03
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(tokens)
    assert (mixed.float() - wanted).norm() / wanted.norm() < 0.03


@pytest.mark.parametrize("change", [{}, {"kv_heads": 2, "qk_norm": True}])
def test_a_block_compiles_as_one_graph_for_any_length(change: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = build(**change)
    wanted = [model(some_tokens(2, T)) for T in (8, 12, 16)]
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    for block in model.layers:
        assert isinstance(block, TransformerBlock)
        block.compile(fullgraph=True, backend=backend)
    for T, logits in zip((8, 12, 16), wanted, strict=True):
        torch.testing.assert_close(model(some_tokens(2, T)), logits)
    assert len(graphs) <= 2  # one for the first length, one for every other, shared by all blocks
    assert all("_orig_mod" not in name for name, _ in model.named_parameters())
    torch._dynamo.reset()


def test_it_is_exported_and_compiled_for_any_length() -> None:
    torch._dynamo.reset()
    model = build(kv_heads=2)
    length = torch.export.Dim("length", min=2, max=16)
    shapes = ({1: length},)
    exported = torch.export.export(model, (some_tokens(2, 8),), dynamic_shapes=shapes).module()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for T in (8, 5, 16):
        tokens = some_tokens(2, T)
        torch.testing.assert_close(exported(tokens), model(tokens))
        torch.testing.assert_close(compiled(tokens), model(tokens))
    torch._dynamo.reset()


def test_what_does_not_fit_is_a_clear_error() -> None:
    model = build()
    with pytest.raises(ConfigError, match="33 tokens is longer than the model's context of 32"):
        model(some_tokens(1, 33))
    with pytest.raises(ConfigError, match="not empty"):
        model(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ConfigError, match="expected \\(batch, tokens\\)"):
        model(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ConfigError, match="allowed is 1 to 32"):
        KVCache(model.config, 33)
    cache = KVCache(model.config, 4)
    model(some_tokens(1, 3), cache)
    with pytest.raises(ConfigError, match="5 tokens do not fit the cache of 4"):
        model(some_tokens(1, 2), cache)
    with pytest.raises(ConfigError, match="positions must be given from a cache's first"):
        model(some_tokens(1, 1), cache, torch.tensor([3]))
