"""Models of transformers, from tiny configs: each stage computes what one process computes."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks

from lezero.core import groups
from lezero.parallel.zero import Zero, shard_, sharding_of

transformers = pytest.importorskip("transformers")
LOADED_ONCE = [
    f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "bert", "vit")
]
SMALL = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2}
TEXT = {**SMALL, "intermediate_size": 24, "vocab_size": 30}


def llama():
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=1, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=30, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))


def vit():
    config = transformers.ViTConfig(
        **SMALL, intermediate_size=24, image_size=8, patch_size=4, num_labels=5
    )
    return transformers.ViTForImageClassification(config)


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit}


def inputs(name, rank, ranks):
    generator = torch.Generator().manual_seed(2)
    part = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    if name == "vit":
        pixels = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels[part], "labels": torch.arange(4)[part]}
    tokens = torch.randint(0, 30, (4, 7), generator=generator)[part]
    return {"input_ids": tokens, "labels": tokens}


def build(name, recompute=False):
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_probs_dropout_prob"):
        if hasattr(model.config, key):
            setattr(model.config, key, 0.0)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def steps(model, name, rank, ranks):
    """Losses of three steps and the gradients of the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**inputs(name, rank, ranks)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return torch.stack(losses), grads


def sharded(name):
    found = []
    for stage, recompute in ((0, False), (1, False), (2, True), (3, False), (3, True)):
        model = shard_(build(name, recompute), Zero(stage=stage))
        losses, grads = steps(model, name, groups.rank(), groups.world_size())
        blocks = len(sharding_of(model).units) - 1
        whole = {
            n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in grads.items()
        }
        found.append((groups.all_reduce_sum(losses) / 2, whole, blocks))
        if name == "llama" and stage == 3:
            tokens = inputs(name, 0, 1)["input_ids"][:, :3]
            out = model.eval().generate(tokens, max_new_tokens=4, do_sample=False)
            assert out.shape == (4, 7)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(ranks, name):
    losses, grads = steps(build(name), name, 0, 1)
    for found, whole, blocks in ranks(2, sharded, name)[1]:
        assert blocks == 3
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)  # the loss is in fp32
        assert set(whole) == set(grads)
        for key, gradient in grads.items():
            torch.testing.assert_close(whole[key], gradient, rtol=1e-5, atol=1e-7)
