"""Whether the engine answers as SmolLM2-135M does: beside the oracle and transformers.

In fp32 greedy answers must be the same tokens, and log-probabilities within 1e-4; in bf16 those of
the engine may be no farther from fp32 than those of transformers. Where two tokens' logits are
within 1e-4 of each other, either may be drawn: such ties are counted and shown, and what follows
them is not compared. Prints one JSON object.

    .venv/bin/python -m benchmarks.serving_parts.exact [--prompts 20] [--tokens 64]
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lezero.models import generate, load_gguf, packaged_gguf, save_hf
from lezero.serve.answer import Completion
from lezero.serve.llm import LLM
from lezero.serve.program import Fed
from lezero.serve.sampling import SamplingParams

TIE = 1e-4
LONGEST = 48


def measure(count: int, tokens: int) -> dict[str, Any]:
    """What the JSON object holds."""
    from transformers import AutoModelForCausalLM

    place = packaged_gguf()
    model = load_gguf(place, torch.float32).eval()
    prompts = texts(model, count)
    answers = engine_answers(copy.deepcopy(model), prompts, tokens)
    oracle = generate(model, prompts, tokens)
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    named = [their_answer(theirs, prompt, tokens) for prompt in prompts]
    exact = [logprobs(model, p, a.tokens) for p, a in zip(prompts, answers, strict=True)]
    other = [logprobs(theirs, p, a.tokens) for p, a in zip(prompts, answers, strict=True)]
    found = {"prompts": count, "tokens": sum(len(answer.tokens) for answer in answers)}
    for name, tokens_there in (("oracle", oracle), ("transformers", named)):
        gaps = differences([a.tokens for a in answers], tokens_there, exact)
        found[f"differ_from_{name}"] = sum(gap > TIE for gap in gaps)
        found[f"ties_with_{name}"] = [gap for gap in gaps if gap <= TIE]
    found["logprob_error_oracle"] = largest(answers, exact)
    found["logprob_error_transformers"] = largest(answers, other)
    mine = bf16_logprobs(copy.deepcopy(model), prompts, answers)
    theirs = theirs.bfloat16()
    halves = [logprobs(theirs, p, a.tokens) for p, a in zip(prompts, answers, strict=True)]
    found["bf16_error"] = far(mine, exact)
    found["bf16_error_transformers"] = far(halves, exact)
    found["bf16_vs_transformers"] = found["bf16_error"] / found["bf16_error_transformers"]
    return found


def texts(model: Any, count: int) -> list[list[int]]:
    """Prompts of many lengths that the model wrote itself, each from another token on."""
    first = [[1000 + 40000 * index // count] for index in range(count)]
    written = generate(model, first, LONGEST, temperature=0.9, seed=1)
    return [
        [*start, *text[: 4 + index * LONGEST // count]]
        for index, (start, text) in enumerate(zip(first, written, strict=True))
    ]


def engine_answers(model: Any, prompts: Sequence[list[int]], tokens: int) -> list[Completion]:
    llm = LLM(model, weights="fp32", context=2 * LONGEST + tokens, max_requests=len(prompts))
    return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, logprobs=0))


@torch.no_grad()
def their_answer(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    whole = model.generate(
        *(ids,),
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    found: list[int] = whole[0, len(prompt) :].tolist()
    return found


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Of all tokens at each place of the answer: fp32 (T, V)."""
    found = model(torch.tensor([prompt + answer]))
    logits: Tensor = getattr(found, "logits", found)
    return logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)


def differences(
    mine: Sequence[list[int]], there: Sequence[list[int]], exact: Sequence[Tensor]
) -> list[float]:
    """Of each answer that differs: how far apart the logits of the first two tokens are."""
    gaps = []
    for own, other, logprob_TV in zip(mine, there, exact, strict=True):
        for place, (a, b) in enumerate(zip(own, other, strict=True)):
            if a != b:
                gaps.append(float((logprob_TV[place, a] - logprob_TV[place, b]).abs()))
                break
    return gaps


def largest(answers: Sequence[Completion], exact: Sequence[Tensor]) -> float:
    """The largest error of the log-probability of a token that was drawn."""
    errors = [0.0]
    for answer, logprob_TV in zip(answers, exact, strict=True):
        own = torch.tensor([entry.logprob for entry in answer.logprobs or ()])
        right = logprob_TV.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        errors.append(float((own - right).abs().max()))
    return max(errors)


def bf16_logprobs(
    model: Any, prompts: Sequence[list[int]], answers: Sequence[Completion]
) -> list[Tensor]:
    """The engine's in bf16, at the places of the answers."""
    llm, found = LLM(model, weights="bf16", context=512, max_requests=1), []
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = prompt + answer.tokens
        blocks = llm.engine.pool.allocate(llm.engine.pool.blocks_for(len(whole)))
        rows = range(len(prompt) - 1, len(whole) - 1)
        found.append(llm.program.run([Fed(whole, 0, blocks, rows)]).log_softmax(-1))
        llm.engine.pool.release(blocks)
    return found


def far(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The mean distance of log-probabilities."""
    sums = [float((a - b).abs().mean()) for a, b in zip(found, exact, strict=True)]
    return sum(sums) / len(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    print(json.dumps(measure(options.prompts, options.tokens)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
