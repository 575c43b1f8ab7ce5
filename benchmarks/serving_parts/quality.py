"""What weights cost in quality: perplexity of text, as the engine's program gives it."""

from __future__ import annotations

from typing import Any

import torch
from quantization_parts.texts import perplexity, windows
from torch import Tensor

WINDOWS, LENGTH = 8, 512


def text_perplexity(llm: Any, quick: bool) -> float:
    """exp of the mean loss of the next token, over a held-out part of the language reference.

    quick: bytes as tokens, since the small model has no tokenizer, and less of it.
    """
    encode = (lambda text: list(text.encode()[:1000])) if quick else llm.coder.encode_chat
    count, length = (2, 64) if quick else (WINDOWS, LENGTH)
    rows = windows(encode, count, length, held=True)
    return perplexity(lambda row: _logits(llm, row[0].tolist())[None], rows, at_once=1)


def _logits(llm: Any, tokens: list[int]) -> Tensor:
    """(T, V)"""
    from lezero.serve.program import Fed

    pool, most = llm.engine.pool, llm.program.most_tokens
    blocks, found = pool.allocate(pool.blocks_for(len(tokens))), []
    for start in range(0, len(tokens), most):
        part = tokens[start : start + most]
        found.append(llm.program.run([Fed(part, start, blocks, range(len(part)))]))
    pool.release(blocks)
    return torch.cat(found)
