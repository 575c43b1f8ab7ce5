"""A language model behind an address, from the forecast to what was measured."""

from __future__ import annotations

from collections.abc import Callable

from lezero.serve.llm import LLM
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.host import Host
from lezero.serve.server.language import LanguageFace


class Server(Host):
    """One language model at one address; see `Host`."""

    def __init__(self, llm: LLM, config: ServeConfig | None = None, name: str = "model") -> None:
        config = config or ServeConfig()
        face = LanguageFace(llm, config, config.name or name)
        super().__init__(face, config)
        self.llm, self.worker, self.metrics = llm, face.worker, face.metrics


def serve(llm: LLM, config: ServeConfig, name: str, say: Callable[[str], None] = print) -> None:
    """What `lz serve` does: tells the forecast and the address, serves, and tells what was."""
    server = Server(llm, config, name)
    forecast = llm.forecast
    say(f"model       {server.name}: {llm.program.description}")
    for line in forecast.lines():
        say(line)

    def ready(server: Server) -> None:
        say(f"serving     {server.url} (page), {server.url}/v1 (OpenAI's protocol)")

    server.run(ready)
    worker, metrics = server.worker, server.metrics
    ended = sum(metrics.ended.values())
    say(f"ended       {ended} requests, {metrics.tokens_in} tokens in, {metrics.tokens_out} out")
    if worker.alone_tokens:
        speed = worker.alone_tokens / worker.alone_s
        at_most = forecast.decode_tokens_s
        share = "" if at_most is None else f", {speed / at_most:.0%} of the forecast's ceiling"
        say(f"decode      {speed:,.0f} tokens/s for one request alone{share}")
