"""Optimizers, parameter groups and schedules."""

from lezero.optim.adamw import AdamW
from lezero.optim.adamw8bit import AdamW8bit
from lezero.optim.groups import decayed_names, parameter_groups
from lezero.optim.schedule import Schedule

__all__ = ["AdamW", "AdamW8bit", "Schedule", "decayed_names", "parameter_groups"]
