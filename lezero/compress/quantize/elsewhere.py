"""What other programs cannot read of a folder in the compressed-tensors layout, told as it is made.

Source: transformers 5.23 with compressed-tensors 0.20, run; vLLM and SGLang as their code of 2026
has it, read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_GROUPS = (None, 32, 64, 128)
_ZEROS = (
    "transformers opens zero points with "
    "quantization_config=CompressedTensorsConfig(dequantize=True) only; zero_point=False needs none"
)
_ZEROS_IN_GROUPS = (
    "transformers opens no folder with zero points whose layers differ in bits, groups or rounded "
    "inputs; for it quantize with zero_point=False, or all layers by one scheme"
)
_INT4_INPUTS = (
    "vLLM and SGLang have no int4 weights with int8 inputs in this layout: the first refuses them, "
    "or takes float8 inputs; the second leaves inputs as they are. Quantize without activations="
)


def unreadable(schemes: Mapping[str, Any], inputs: Mapping[str, int]) -> Iterator[str]:
    """Which programs do not open the folder, and what to do; a sentence for each reason.

    schemes: of each linear layer its entry of `config_groups`, without targets; None of floats.
    inputs: how many a quantized layer has.
    """
    quantized = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    kinds = [scheme["weights"] for scheme in quantized.values()]
    if not all(kind["symmetric"] for kind in kinds):
        first = next(iter(quantized.values()))
        alike = all(scheme == first for scheme in quantized.values())
        yield _ZEROS if alike else _ZEROS_IN_GROUPS
    yield from _joined(schemes)
    if any(x["weights"]["num_bits"] == 4 and x["input_activations"] for x in quantized.values()):
        yield _INT4_INPUTS
    lacking: dict[str, str] = {}
    for name, scheme in quantized.items():
        lacking.setdefault(_no_kernel(scheme, inputs[name]), name)
    yield from (f"vLLM has no kernel for '{name}': {why}" for why, name in lacking.items() if why)


def _joined(schemes: Mapping[str, Any]) -> Iterator[str]:
    """Layers that servers make one of, and that differ."""
    for parts in _JOINED:
        found = []
        for name in schemes:
            layer, _, last = name.rpartition(".")
            others = [f"{layer}.{part}" for part in parts[1:]]
            if last == parts[0] and any(schemes.get(x, 0) != schemes[name] for x in others):
                found.append(layer)
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield (
                f"vLLM and SGLang make one layer of {', '.join(parts)} and refuse a folder where "
                f"these differ, as in '{found[0]}'{more}; quantize all of them by one scheme "
                "(objective='size' leaves out none for its speed), or keep all with filter="
            )


def _no_kernel(scheme: Mapping[str, Any], inputs: int) -> str:
    weights = scheme["weights"]
    if scheme["input_activations"] is not None:
        grouped = weights["num_bits"] == 8 and weights["group_size"] is not None
        return "int8 inputs need weights with a scale a row" if grouped else ""
    if weights["group_size"] not in _GROUPS:
        return f"groups of {weights['group_size']}; those of 32, 64 and 128 and rows have one"
    if weights["num_bits"] == 8 and not weights["symmetric"]:
        return "int8 with zero points (on Hopper alone); zero_point=False has one"
    if inputs * weights["num_bits"] % 32:
        return f"{inputs} inputs, which do not fill whole words of 32 bits"
    return ""
