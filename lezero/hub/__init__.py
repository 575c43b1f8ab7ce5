"""Where models come from: a PyTorch module and a file of weights, a run, a folder, a GGUF file."""

from lezero.hub.from_pytorch import from_pytorch as from_pytorch
