"""ZeRO: the training state split over ranks, at any of four stages.

`shard` is the verb; `sharding` what it leaves on the model; `unit` one block and when it is whole;
`segment` the memory of parameters that move together, `layout` its arithmetic; `backward` and
`gradients` the way of a gradient; `lines` the mesh and the wires; `guard` what optimizers are told.
"""

from lezero.parallel.zero.config import Zero
from lezero.parallel.zero.layout import Part
from lezero.parallel.zero.materialize import materialize_
from lezero.parallel.zero.norm import clip_grad_norm_, grad_norm
from lezero.parallel.zero.shard import shard_
from lezero.parallel.zero.sharding import Sharding, no_sync, sharding_of
from lezero.parallel.zero.whole import full_parameters, full_state_dict

__all__ = [
    "Part", "Sharding", "Zero", "clip_grad_norm_", "full_parameters", "full_state_dict",
    "grad_norm", "materialize_", "no_sync", "shard_", "sharding_of",
]  # fmt: skip
