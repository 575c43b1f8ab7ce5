"""Checkpoints: saved in the background, verified when loaded, never silently wrong."""

from lezero.checkpoint.environment import environment, environment_difference
from lezero.checkpoint.export import export_hf, export_weights
from lezero.checkpoint.find import (
    Loaded,
    Wanted,
    checkpoint_root,
    is_generation,
    load,
    load_together,
)
from lezero.checkpoint.inner_optimizers import inner_optimizers, outer_name, warn_of_left_out
from lezero.checkpoint.marks import read_mark
from lezero.checkpoint.masters import weights_of_masters
from lezero.checkpoint.optimizer import pack_optimizer, unpack_optimizer
from lezero.checkpoint.own_buffers import own_buffers_prefix, pack_own_buffers
from lezero.checkpoint.random_state import pack_random, unpack_random
from lezero.checkpoint.rows import is_split, rows_of, split_like
from lezero.checkpoint.saver import Saver

__all__ = [
    "Loaded",
    "Saver",
    "Wanted",
    "checkpoint_root",
    "environment",
    "environment_difference",
    "export_hf",
    "export_weights",
    "inner_optimizers",
    "is_generation",
    "is_split",
    "load",
    "load_together",
    "outer_name",
    "own_buffers_prefix",
    "pack_optimizer",
    "pack_own_buffers",
    "pack_random",
    "read_mark",
    "rows_of",
    "split_like",
    "unpack_optimizer",
    "unpack_random",
    "warn_of_left_out",
    "weights_of_masters",
]
