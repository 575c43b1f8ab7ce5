"""The HTTP face of the engine: OpenAI's protocol, metrics and a page, over one `lz.LLM`.

`run.py` binds an address and ends cleanly. `app.py` is the ASGI application: it checks who asks
(`keys.py`) and routes. `exchange.py` reads a body that may be hostile and writes answers;
`asked.py` turns OpenAI's JSON into prompts and parameters, `told.py` turns tokens into OpenAI's
JSON, `answers.py` stands between the two. `worker.py` owns the engine, in a thread of its own.
"""

from typing import TYPE_CHECKING

from lezero.core.lazy import lazy

_NAMES = {
    "ServeConfig": "lezero.serve.server.config",
    "Server": "lezero.serve.server.run",
    "serve": "lezero.serve.server.run",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = lazy(__name__, _NAMES)

if TYPE_CHECKING:
    from lezero.serve.server.config import ServeConfig as ServeConfig
    from lezero.serve.server.run import Server as Server
    from lezero.serve.server.run import serve as serve
