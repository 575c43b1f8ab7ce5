"""Everything of `torch.nn`, and LeZero's own modules beside it.

`lz.nn.Module is torch.nn.Module`: a model written against `lz.nn` is a plain PyTorch model.
`lz.nn.functional`, `lz.nn.init` and `lz.nn.utils` are torch's own modules, and
`import lezero.nn.functional as F` works as the torch import does.
"""

import sys

import torch.nn
from torch.nn import *  # noqa: F403  (torch.nn exports its submodules too)

from lezero.nn.dynamic_weight import DynamicWeightGenerator as DynamicWeightGenerator

for _name in ("attention", "functional", "init", "modules", "parallel", "parameter", "utils"):
    sys.modules.setdefault(f"{__name__}.{_name}", getattr(torch.nn, _name))
del _name
