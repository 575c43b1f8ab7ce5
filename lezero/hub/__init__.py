"""Where models come from: a PyTorch module and a file of weights, checked before they are used."""

from lezero.hub.from_pytorch import from_pytorch as from_pytorch
