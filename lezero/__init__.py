"""LeZero: train, shrink and serve PyTorch models with zero surprise.

Importing this package is inert and cheap: names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from lezero.core.lazy import lazy as _lazy

__version__ = "0.1.0"

_NAMES = {
    "CapacityError": "lezero.core.errors",
    "Config": "lezero.core.config",
    "ConfigError": "lezero.core.errors",
    "CorruptError": "lezero.core.errors",
    "DataConfig": "lezero.data",
    "Decisions": "lezero.core.decisions",
    "DistributedError": "lezero.core.errors",
    "Engine": "lezero.train",
    "FileError": "lezero.core.errors",
    "Fp8": "lezero.compress.quantize",
    "Int4Weight": "lezero.compress.quantize",
    "Int8Weight": "lezero.compress.quantize",
    "Int8WeightActivation": "lezero.compress.quantize",
    "LLM": "lezero.serve",
    "LeZeroError": "lezero.core.errors",
    "Mesh": "lezero.comm",
    "MissingExtraError": "lezero.core.errors",
    "Nf4": "lezero.compress.quantize",
    "NumericsError": "lezero.core.errors",
    "OrderError": "lezero.core.errors",
    "RunConfig": "lezero.train",
    "SamplingParams": "lezero.serve",
    "StepResult": "lezero.train",
    "Trainer": "lezero.train",
    "Wire": "lezero.comm",
    "Zero": "lezero.parallel.zero",
    "checkpoint": "lezero.checkpoint",
    "clip_grad_norm_": "lezero.parallel.zero",
    "comm": "lezero.comm",
    "data": "lezero.data",
    "dequantize_": "lezero.compress.quantize",
    "forecast": "lezero.plan",
    "from_pytorch": "lezero.hub",
    "hardware": "lezero.profiler",
    "load_quantized": "lezero.compress.quantize",
    "materialize_": "lezero.parallel.zero",
    "memory": "lezero.memory",
    "models": "lezero.models",
    "next_token_loss": "lezero.train",
    "nn": "lezero.nn",
    "no_sync": "lezero.parallel.zero",
    "optim": "lezero.optim",
    "profiler": "lezero.profiler",
    "quantization_report": "lezero.compress.quantize",
    "quantize_": "lezero.compress.quantize",
    "save_quantized": "lezero.compress.quantize",
    "shard_": "lezero.parallel.zero",
    "train": "lezero.train",
}

__all__ = ["__version__", *_NAMES]
__getattr__, __dir__ = _lazy(__name__, _NAMES)

if TYPE_CHECKING:
    from lezero import checkpoint as checkpoint
    from lezero import comm as comm
    from lezero import data as data
    from lezero import memory as memory
    from lezero import models as models
    from lezero import nn as nn
    from lezero import optim as optim
    from lezero import profiler as profiler
    from lezero import train as train
    from lezero.comm import Mesh as Mesh
    from lezero.comm import Wire as Wire
    from lezero.compress.quantize import Fp8 as Fp8
    from lezero.compress.quantize import Int4Weight as Int4Weight
    from lezero.compress.quantize import Int8Weight as Int8Weight
    from lezero.compress.quantize import Int8WeightActivation as Int8WeightActivation
    from lezero.compress.quantize import Nf4 as Nf4
    from lezero.compress.quantize import dequantize_ as dequantize_
    from lezero.compress.quantize import load_quantized as load_quantized
    from lezero.compress.quantize import quantization_report as quantization_report
    from lezero.compress.quantize import quantize_ as quantize_
    from lezero.compress.quantize import save_quantized as save_quantized
    from lezero.core.config import Config as Config
    from lezero.core.decisions import Decisions as Decisions
    from lezero.core.errors import CapacityError as CapacityError
    from lezero.core.errors import ConfigError as ConfigError
    from lezero.core.errors import CorruptError as CorruptError
    from lezero.core.errors import DistributedError as DistributedError
    from lezero.core.errors import FileError as FileError
    from lezero.core.errors import LeZeroError as LeZeroError
    from lezero.core.errors import MissingExtraError as MissingExtraError
    from lezero.core.errors import NumericsError as NumericsError
    from lezero.core.errors import OrderError as OrderError
    from lezero.data import DataConfig as DataConfig
    from lezero.hub import from_pytorch as from_pytorch
    from lezero.parallel.zero import Zero as Zero
    from lezero.parallel.zero import clip_grad_norm_ as clip_grad_norm_
    from lezero.parallel.zero import materialize_ as materialize_
    from lezero.parallel.zero import no_sync as no_sync
    from lezero.parallel.zero import shard_ as shard_
    from lezero.plan.forecast import forecast as forecast
    from lezero.profiler import hardware as hardware
    from lezero.serve import LLM as LLM
    from lezero.serve import SamplingParams as SamplingParams
    from lezero.train import Engine as Engine
    from lezero.train import RunConfig as RunConfig
    from lezero.train import StepResult as StepResult
    from lezero.train import Trainer as Trainer
    from lezero.train import next_token_loss as next_token_loss
