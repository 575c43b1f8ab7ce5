"""The training loop: an engine for one's own loop, a trainer for a config file."""

from typing import TYPE_CHECKING

from lezero.core.lazy import lazy

_NAMES = {
    "Callback": "lezero.train.callbacks",
    "Engine": "lezero.train.engine",
    "RunConfig": "lezero.train.config",
    "StepResult": "lezero.train.engine",
    "TrainResult": "lezero.train.train_result",
    "Trainer": "lezero.train.trainer",
    "next_token_loss": "lezero.train.loss",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = lazy(__name__, _NAMES)

if TYPE_CHECKING:
    from lezero.train.callbacks import Callback as Callback
    from lezero.train.config import RunConfig as RunConfig
    from lezero.train.engine import Engine as Engine
    from lezero.train.engine import StepResult as StepResult
    from lezero.train.loss import next_token_loss as next_token_loss
    from lezero.train.train_result import TrainResult as TrainResult
    from lezero.train.trainer import Trainer as Trainer
