"""Takes a PyTorch module and a file of weights into use, with both checked."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import lezero as lz


def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))


def main():
    example = torch.randn(3, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        trained = build()
        save_file(trained.state_dict(), path)

        module = build()
        model = lz.from_pytorch(module, path, example_inputs=example)
        print(f"the same module: {model is module}")
        print(f"the same outputs: {torch.equal(model(example), trained(example))}")

        try:  # a file that does not fit is refused before anything is copied
            lz.from_pytorch(torch.nn.Linear(4, 2), path)
        except lz.LeZeroError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    main()
