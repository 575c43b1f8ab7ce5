"""The engine that answers: requests, paged keys and values, a schedule, tokens, text.

A `Request` (`request.py`) waits in the `Scheduler` (`scheduler.py`), which hands out the blocks of
a `BlockPool` (`blocks.py`) and says which tokens the next pass through the model feeds.
`sampler.py` draws a token from each row of logits as `SamplingParams` (`sampling.py`) ask, and
`answer.py` makes text of the tokens as they come. Policy is plain Python; only the sampler and what
runs the model know torch.
"""

from typing import TYPE_CHECKING

from lezero.core.lazy import lazy

_NAMES = {
    "BlockPool": "lezero.serve.blocks",
    "Chunk": "lezero.serve.scheduler",
    "Completion": "lezero.serve.answer",
    "Drawn": "lezero.serve.sampling",
    "LLM": "lezero.serve.llm",
    "Piece": "lezero.serve.answer",
    "Request": "lezero.serve.request",
    "SamplingParams": "lezero.serve.sampling",
    "Scheduler": "lezero.serve.scheduler",
    "State": "lezero.serve.request",
    "Step": "lezero.serve.scheduler",
    "StopStrings": "lezero.serve.stop_strings",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = lazy(__name__, _NAMES)

if TYPE_CHECKING:
    from lezero.serve.answer import Completion as Completion
    from lezero.serve.answer import Piece as Piece
    from lezero.serve.blocks import BlockPool as BlockPool
    from lezero.serve.llm import LLM as LLM
    from lezero.serve.request import Request as Request
    from lezero.serve.request import State as State
    from lezero.serve.sampling import Drawn as Drawn
    from lezero.serve.sampling import SamplingParams as SamplingParams
    from lezero.serve.scheduler import Chunk as Chunk
    from lezero.serve.scheduler import Scheduler as Scheduler
    from lezero.serve.scheduler import Step as Step
    from lezero.serve.stop_strings import StopStrings as StopStrings
