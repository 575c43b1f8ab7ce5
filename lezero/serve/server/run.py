"""A language model behind an address, from the forecast to what was measured."""

from __future__ import annotations

from collections.abc import Callable

from lezero.memory.pool import give_back_free_blocks
from lezero.serve.forecast import compared, resident_bytes, tried_lines
from lezero.serve.invariance import cost_lines, invariance_costs
from lezero.serve.llm import LLM
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.host import Host
from lezero.serve.server.language import LanguageFace
from lezero.serve.server.record import Record
from lezero.serve.threads import placement_lines


class Server(Host):
    """One language model at one address; see `Host`. From when it runs until it has ended, `llm` is
    its own: calls and streams in Python raise `OrderError`, as it does itself where some are under
    way, or another server runs with it."""

    def __init__(self, llm: LLM, config: ServeConfig | None = None, name: str = "model") -> None:
        config = config or ServeConfig()
        face = LanguageFace(llm, config, config.name or name)
        super().__init__(face, config)
        self.language = face
        self.llm, self.worker, self.metrics = llm, face.worker, face.metrics


def serve(
    llm: LLM,
    config: ServeConfig,
    name: str,
    say: Callable[[str], None] = print,
    before: int | None = None,
    record: Record | None = None,
) -> None:
    """What `lz serve` does: tells the forecast and the address, serves, and tells what was.

    before: bytes that the process had before the model was opened. record: where what was chosen is
    written down.
    """
    server = Server(llm, config, name)
    forecast = llm.forecast
    say(f"model       {server.name}: {llm.program.description}")
    for line in [*forecast.lines(), *cost_lines(invariance_costs(llm.program))]:
        say(line)
    if record is not None:
        say(f"why         lz why {record.folder}")
    give_back_free_blocks()

    def ready(server: Server) -> None:
        placement = server.worker.placement
        for line in [*tried_lines(server.language.tried), *placement_lines(placement)]:
            say(line)
        if record is not None:
            record.take_placement(placement)
        say(f"serving     {server.url} (page), {server.url}/v1 (OpenAI's protocol)")

    server.run(ready, alone=True)
    worker, metrics = server.worker, server.metrics
    cache_share, draft_share = llm.touched
    ended = sum(metrics.ended.values())
    say(f"ended       {ended} requests, {metrics.tokens_in} tokens in, {metrics.tokens_out} out")
    on_host = before is not None and llm.program.place.type == "cpu"
    for line in compared(
        forecast,
        worker.paces,
        server.language.tried,
        taken=resident_bytes() - (before or 0) if on_host else None,
        cache_share=cache_share,
        draft_share=draft_share,
    ):
        say(line)
