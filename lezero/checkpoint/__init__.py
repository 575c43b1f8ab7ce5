"""Checkpoints: saved in the background, verified when loaded, never silently wrong."""

from lezero.checkpoint.environment import environment, environment_difference
from lezero.checkpoint.export import export_weights
from lezero.checkpoint.find import Loaded, checkpoint_root, is_generation, load
from lezero.checkpoint.marks import read_mark
from lezero.checkpoint.optimizer import pack_optimizer, unpack_optimizer
from lezero.checkpoint.random_state import pack_random, unpack_random
from lezero.checkpoint.saver import Saver

__all__ = [
    "Loaded",
    "Saver",
    "checkpoint_root",
    "environment",
    "environment_difference",
    "export_weights",
    "is_generation",
    "load",
    "pack_optimizer",
    "pack_random",
    "read_mark",
    "unpack_optimizer",
    "unpack_random",
]
