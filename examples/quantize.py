"""Quantizes a model, shows what became of each layer, and refuses what would be too bad."""

import torch

import lezero as lz


def build():
    shape = {"dim": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 256}
    config = lz.models.TransformerConfig(**shape, vocab=256, context=64)
    return lz.models.Transformer(config)


def main():
    torch.manual_seed(0)
    calibration = [torch.randint(0, 256, (4, 32)) for _ in range(4)]
    tokens = calibration[0]

    model = build()
    with torch.no_grad():
        before = model(tokens)
    config = lz.Int4Weight(group=64, method="gptq")
    lz.quantize_(model, config, data=calibration, objective="size")
    print(lz.quantization_report(model))
    with torch.no_grad():
        error = (model(tokens) - before).norm() / before.norm()
    print(f"outputs differ by {error:.1%}")

    lz.dequantize_(model)
    print(f"plain again: {type(model.layers[0].mlp.up_proj).__name__}")

    # By default a layer stays as it was unless int8 is faster for it on this machine.
    fast = lz.quantize_(build(), lz.Int8WeightActivation(), data=calibration)
    kept = [layer for layer in lz.quantization_report(fast).layers if not layer.quantized]
    print(f"left as they were, since that is faster here: {len(kept)} layers")

    try:  # all or nothing: the model is exactly as it was
        lz.quantize_(build(), config, data=calibration, objective="size", budget=0.001)
    except lz.NumericsError as reason:
        print(f"refused: {reason}")


if __name__ == "__main__":
    main()
