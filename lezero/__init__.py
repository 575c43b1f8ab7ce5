"""LeZero: train, shrink and serve PyTorch models with zero surprise."""

__version__ = "0.1.0"
