"""SmolLM2-135M in W8A8: perplexity, size and prefill beside bf16, torchao and optimum-quanto.

Its weights come from a GGUF file in Q4_1, so they lie on a grid of 4 bits: 8 bits are judged here,
never 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantization_parts.texts import perplexity, seconds, tensors_in, windows

SIDES = {"bf16": "", "lezero": "", "torchao": "torchao", "quanto": "optimum.quanto"}


def run(side: str, place: str, quick: bool) -> dict[str, Any]:
    """Figures of one side. `place`: a Hugging Face folder; "" for a random small model."""
    model, calibration, held = _tiny() if quick else _smol(place)
    model = model.eval().bfloat16()
    if side == "lezero":
        import lezero as lz

        data = [{"input_ids": rows} for rows in calibration.split(2)]
        # The size is a bar too, so nothing stays in bf16 because it looks slow by itself.
        scheme = lz.Int8WeightActivation(method="gptq")
        lz.quantize_(model, scheme, data=data, objective="size")
    if side == "torchao":
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantize_(model, Int8DynamicActivationInt8WeightConfig())
        model.forward = torch.compile(model.forward, dynamic=False)  # eager is 30 times slower
    if side == "quanto":
        from optimum.quanto import freeze, qint8, quantize

        quantize(model, weights=qint8)
        freeze(model)
    prompt = held[:1]

    def call(tokens: Tensor) -> Tensor:
        return model(tokens, use_cache=False).logits

    figures = {
        "perplexity": perplexity(call, held, at_once=1),
        "bytes": tensors_in(model),
        "prefill_s": seconds(lambda: call(prompt), 3, in_turns=not quick),
    }
    if side == "lezero":
        figures["quantized"] = sum("Quantized" in type(m).__name__ for m in model.modules())
    return figures


def fixture() -> Path:
    """A Hugging Face folder in bf16 of the packaged GGUF file, made once in the cache folder."""
    from lezero.core.facts import cache_folder
    from lezero.models import gguf_tokenizer, load_gguf, packaged_gguf, save_hf

    root = cache_folder() / "benchmarks" / "smollm2-135m-1"
    if not (root / "config.json").is_file():
        file = packaged_gguf()
        gguf_tokenizer(file, save_to=str(root))
        save_hf(load_gguf(file, torch.bfloat16), root, root)
    return root


def _smol(place: str) -> tuple[nn.Module, Tensor, Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(place)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    return model, windows(encode, 16, 512, held=False), windows(encode, 48, 512, held=True)


def _tiny() -> tuple[nn.Module, Tensor, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, intermediate_size=256, **shape)

    def encode(text: str) -> list[int]:
        return list(text.encode()[:20_000])

    model = LlamaForCausalLM(config)
    return model, windows(encode, 4, 64, held=False), windows(encode, 8, 64, held=True)
