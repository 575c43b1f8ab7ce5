"""What keys and values are kept in: bf16, or int8 with a scale for each token and head.

int8 takes a little more than half of the memory and of what attention reads; answers differ by what
the rounding does (docs/lab-notes.md).
"""

from __future__ import annotations

from lezero.core.facts import memory_limit
from lezero.core.room import address_room
from lezero.report.units import size
from lezero.serve.forecast import SHARE, block_bytes
from lezero.serve.options import KV
from lezero.serve.program import Program


def settle_kv(
    kv: KV,
    program: Program,
    draft: Program | None,
    *,
    context: int | None,
    max_requests: int,
    cache_bytes: int | None,
) -> str:
    """Lets the programs keep keys and values as asked; why it is this form, for people.

    "auto" takes int8 where a context was asked for, and `max_requests` requests of it do not fit in
    bf16: into `cache_bytes`, or where none were given, 30% of the memory that this process may use.
    What happens to be free plays no part, so that the same call gives the same answers again. A
    draft, whose guesses change no answer, takes int8 by itself where that is enough.
    """
    if kv != "auto":
        _keep(kv, program, draft)
        return "as asked"
    if "int8" not in program.kv_forms:
        return "the form of these kernels"
    if context is None:
        return "auto takes int8 only where a context is given that does not fit in bf16"
    blocks = -(-context // program.block_size) * max_requests

    def need() -> int:
        return blocks * block_bytes(program, draft)

    own = address_room()
    most = memory_limit() if own is None else min(memory_limit(), own)
    room = cache_bytes or int(SHARE * most)
    asked = f"{max_requests} requests of {context} tokens in bf16 take {size(need())}"
    given = "cache_bytes" if cache_bytes else f"{SHARE:.0%} of the memory"
    if draft is not None and need() > room > 0 and "int8" in draft.kv_forms:
        draft.keep_kv("int8")
    if need() > room > 0:
        program.keep_kv("int8")
    return f"{asked}, {given} {size(room)}"


def _keep(form: str, program: Program, draft: Program | None) -> None:
    program.keep_kv(form)
    if draft is not None and form in draft.kv_forms:
        draft.keep_kv(form)
