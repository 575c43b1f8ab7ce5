"""Writes a model that transformers opens, and reads it back."""

import tempfile

import torch

from lezero.models import Transformer, count_parameters, load_hf, preset, save_hf


def main():
    config = preset("tiny", kv_heads=2)
    model = Transformer(config, seed=0)
    tokens = torch.randint(config.vocab, (1, 32))
    print(f"{count_parameters(config) / 1e6:.1f} million parameters")

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_hf(model, folder)
        print(f"here: equal logits: {torch.equal(load_hf(folder)(tokens), model(tokens))}")
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils.logging import disable_progress_bar
        except ImportError:
            print("transformers is not installed")
            return
        disable_progress_bar()
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        far = (theirs(tokens).logits - model(tokens)).abs().max() / model(tokens).abs().max()
        print(f"transformers: largest difference of a logit: {far:.1e} of the largest logit")


if __name__ == "__main__":
    main()
