"""The HTTP face of a model: OpenAI's protocol, metrics and a page.

`host.py` binds an address and ends cleanly. `app.py` is the ASGI application: it checks who asks
(`keys.py`) and routes to a `Face` (`face.py`). `exchange.py` reads a body that may be hostile and
writes answers.

An `lz.LLM` (`run.py`, `language.py`): `asked.py` turns OpenAI's JSON into prompts and parameters,
`told.py` turns tokens into OpenAI's JSON, `answers.py` stands between the two. `worker.py` owns the
engine, in a thread of its own. Other models (`batched.py`): `embedding.py` and `inference.py` turn
bodies into items and answers into bodies.
"""

from typing import TYPE_CHECKING

from lezero.core.lazy import lazy

_NAMES = {
    "BatchServer": "lezero.serve.server.batched",
    "ServeConfig": "lezero.serve.server.config",
    "Server": "lezero.serve.server.run",
    "serve": "lezero.serve.server.run",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = lazy(__name__, _NAMES)

if TYPE_CHECKING:
    from lezero.serve.server.batched import BatchServer as BatchServer
    from lezero.serve.server.config import ServeConfig as ServeConfig
    from lezero.serve.server.run import Server as Server
    from lezero.serve.server.run import serve as serve
