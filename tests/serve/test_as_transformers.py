"""Twenty greedy answers in fp32 are those of transformers, for each of its types with own kernels.

The weights are drawn, biases and norms too, which transformers itself begins at zeros and ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lezero.serve.foreign import TransformersProgram
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.models import VOCAB, prompts

COUNT, TOKENS, WINDOW, CLOSE = 20, 64, 12, 1e-4
_SMALL: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaConfig(**_SMALL),
    "Mistral": lambda: transformers.MistralConfig(**_SMALL, sliding_window=WINDOW),
    "Qwen2": lambda: transformers.Qwen2Config(**_SMALL),
    "Qwen3": lambda: transformers.Qwen3Config(**_SMALL, head_dim=16),
}


def drawn(kind: str) -> Any:
    torch.manual_seed(9)  # no two tokens are ever nearly as likely, so that rounding chooses none
    model = getattr(transformers, f"{kind}ForCausalLM")(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "embed" in name else 0.4 if "head" in name else 0.15)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.5)
    return model


@torch.no_grad()
def generated(model: Any, given: list[list[int]]) -> list[list[int]]:
    """All prompts at once, filled up from the left."""
    longest = max(map(len, given))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in given])
    mask = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in given])
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    whole: Tensor = model.generate(ids, attention_mask=mask, **options)
    return whole[:, longest:].tolist()


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Of all tokens at each place of the answer, with no keys kept: (T, V)."""
    logits = model(torch.tensor([prompt + answer]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_and_their_logprobs_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model, given = drawn(kind), prompts(COUNT)
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, weights="fp32", context=128)
    assert not isinstance(llm.program, TransformersProgram)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=0)
    found = llm.generate(given, params)
    assert [answer.tokens for answer in found] == generated(model, given)
    for prompt, answer in zip(given, found, strict=True):
        right_TV = logprobs(model, prompt, answer.tokens)
        right = right_TV.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        own = torch.tensor([token.logprob for token in answer.logprobs or ()])
        assert (own - right).abs().max() < CLOSE
        best_T, second_T = right_TV.topk(2).values.unbind(-1)
        assert (best_T - second_T).min() > 4 * CLOSE
