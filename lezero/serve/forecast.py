"""What an engine takes and gives, before it runs: memory, and speed from measured ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from lezero.core import device
from lezero.core.errors import ConfigError
from lezero.core.room import free_memory
from lezero.profiler import Ceilings, hardware
from lezero.report.units import size
from lezero.serve.program import Program
from lezero.serve.rehearsal import Paces

SHARE = 0.3
"""Of the memory that is free, what the cache may take where nobody says."""
_LATER = 32 << 20
"""What libraries take once kernels run: their code, and what they keep. Measured: 37 MiB with bf16,
int8 and int4 weights, 24 of them where torch's own products are compared, and 13 with fp32."""
_ERROR, _LEAST_ERROR = 0.10, 32 << 20
_ALIKE = 0.9
"""A speed that is this share of another and more is not told beside it."""
_PACE_ERROR = 0.20
"""Of speeds that a rehearsal saw, where requests have few tokens behind them."""


@dataclass(frozen=True)
class Forecast:
    """Bytes, and tokens a second; speeds are None where the machine's ceilings were not measured.

    workspace_bytes: of one step of most tokens. decode_tokens_s: of one request without guesses,
    which reading weights limits. prefill_tokens_s: of prompts, which products limit. full_…: of
    the last token of a whole context, which reads the keys and values before it too, and of a
    prompt as long. largest: requests of a whole context that the cache holds at once.
    """

    weight_bytes: int
    cache_bytes: int
    workspace_bytes: int
    token_bytes: int
    """Of a token's keys and values."""
    cache_tokens: int
    context: int
    decode_tokens_s: float | None
    prefill_tokens_s: float | None
    full_decode_tokens_s: float | None = None
    full_prefill_tokens_s: float | None = None
    draft_bytes: int = 0
    """Of the model that guesses: weights, and keys and values."""
    draft_cache_bytes: int = 0
    """The latter alone."""
    origin: str = ""
    """Where the codes of the weights come from, where a file holds them, or what became of codes
    that no kernel reads."""
    slow: str = ""
    """Why the model is slower than others."""
    kv: str = ""
    """What keys and values are kept in, and why."""
    disturbed: bool = False
    """Whether other programs ran while the ceilings were measured, so that more is possible."""
    block_tokens: int = 1
    """Of a block of the cache."""
    faster: float = 1.0
    """How many times as fast decoding is where all guesses are right."""
    invariant: bool = True
    """Whether an answer's bits are what they are alone, whatever else runs."""
    beside_bytes: int = 0
    """Of the process beside all these: tokenizer, libraries; 0 on an accelerator."""

    @property
    def largest(self) -> int:
        each = -(-(self.context - 1) // self.block_tokens)  # the last token is never fed
        return self.cache_tokens // self.block_tokens // max(1, each)

    def lines(self) -> list[str]:
        """For people."""
        each = f"{self.token_bytes / 1024:.1f} KiB a token"
        fits = f"{self.largest} requests of {self.context} tokens, {each}"
        if not self.largest:
            fits = f"a request of {self.cache_tokens + 1} tokens at most, {each}"
        kv = [f"keys/values {self.kv}"] if self.kv else []
        draft = [f"draft       {size(self.draft_bytes)}"] if self.draft_bytes else []
        beside = f"process     {size(self.beside_bytes)}: tokenizer, libraries and what they keep"
        slow = [f"slower      {self.slow}"] if self.slow else []
        origin = f": {self.origin}" if self.origin else ""
        guesses = ""
        if self.faster > 1:
            guesses = f" without guesses, and with right ones {self.faster:.2g} times as fast"
        ends = self.context - 1
        full = self.full_decode_tokens_s, self.decode_tokens_s
        behind = _slower(f"; behind {ends:,} tokens {{}}", *full)
        request = f" for one request{guesses}{behind}"
        full = self.full_prefill_tokens_s, self.prefill_tokens_s
        whole = _slower(f"; of {ends:,} at once {{}}", *full)
        if not self.invariant:
            slow.append("invariance  none: beside others an answer's last bits may differ")
        if self.disturbed:
            slow.append("note        measured beside other programs, so it may be more")
        return [
            f"weights     {size(self.weight_bytes)}{origin}",
            f"cache       {size(self.cache_bytes)}: {fits}",
            *kv,
            f"workspace   {size(self.workspace_bytes)}",
            *draft,
            *([beside] if self.beside_bytes else []),
            f"decode      {_at_most(self.decode_tokens_s, request)}",
            f"prefill     {_at_most(self.prefill_tokens_s, whole)}",
            *slow,
        ]


def foresee(
    program: Program,
    blocks: int,
    context: int,
    draft: Program | None = None,
    kv: str = "",
    *,
    guesses: int = 0,
    beside: int = 0,
) -> Forecast:
    """The forecast of a program with so many blocks of cache, for requests of `context` tokens.

    kv: why keys and values are kept as they are. guesses: of a step at most, by the draft if there
    is one, which reads its weights for each. beside: see `beside_bytes`.
    """
    cost = 0.0 if draft is None else draft.read_bytes / program.read_bytes
    kept = block_bytes(program, draft) - program.block_bytes
    # Those that are kept are the accelerator's, which says nothing of a model on the CPU.
    alike = program.place.type == device.device().type
    ceilings = hardware(measure=False).ceilings if alike else None
    seen, mean = _seen(program.window, context)
    each = program.read_bytes + int(seen * program.block_bytes / program.block_size)
    products = _fastest(ceilings, program.product_forms)
    forms = program.product_forms if program.kv == "int8" else ("fp32", "bf16")
    attention = _fastest(ceilings, forms)
    filling = _seconds(program.products, products)
    return Forecast(
        program.weight_bytes,
        blocks * program.block_bytes,
        program.workspace_bytes,
        program.block_bytes // program.block_size,
        blocks * program.block_size,
        context,
        _reads(ceilings, program.read_bytes),
        _speed_of(filling),
        _reads(ceilings, each),
        _speed_of(filling, _seconds(mean * program.products_a_key, attention)),
        0 if draft is None else draft.weight_bytes + blocks * kept,
        0 if draft is None else blocks * kept,
        program.origin,
        program.slow,
        f"{program.kv}: {kv}" if program.kv and kv else program.kv,
        ceilings is not None and ceilings.disturbed,
        program.block_size,
        max(1.0, (1 + guesses) / (1 + guesses * cost)),
        program.invariant,
        beside,
    )


def _seen(window: int | None, context: int) -> tuple[int, float]:
    """How many tokens the last one of so many sees, and how many they all see in the mean."""
    most = context if window is None else min(window, context)
    return most, most - most * most / (2 * context)


def _reads(ceilings: Ceilings | None, size: int) -> float | None:
    """How many times a second so many bytes are read at most."""
    read = None if ceilings is None else ceilings.read_at_most(size)
    return None if read is None else read / size


def _fastest(ceilings: Ceilings | None, forms: Sequence[str]) -> float | None:
    """Operations a second of products in the fastest of these number formats."""
    found = [ceilings.gemm(form) for form in forms] if ceilings else []
    return max((rate for rate in found if rate is not None), default=None)


def _seconds(products: float, rate: float | None) -> float | None:
    return None if rate is None else 2 * products / rate


def _speed_of(*seconds: float | None) -> float | None:
    """Tokens a second, of which each takes these seconds."""
    known = [each for each in seconds if each is not None]
    return 1 / sum(known) if len(known) == len(seconds) else None


def _slower(words: str, speed: float | None, usual: float | None) -> str:
    """Words for a speed that is not the usual one, or nothing."""
    if speed is None or usual is None or speed > _ALIKE * usual:
        return ""
    return words.format(_number(speed))


def tried_lines(tried: Paces) -> list[str]:
    """What a rehearsal says of the speeds to come, for people; nothing where it saw none."""
    several = (
        ("{} likeliest", tried.alone.speed),
        ("{} drawn by chance", tried.drawn.speed),
        ("{} of a prompt", tried.filling.speed),
    )
    told = [words.format(_number(speed)) for words, speed in several if speed is not None]
    if not told:
        return []
    return [
        f"tried       tokens/s of one request: {', '.join(told)}",
        f"            expect these within {_PACE_ERROR:.0%}, and less behind long texts",
    ]


def compared(
    forecast: Forecast,
    seen: Paces,
    tried: Paces,
    *,
    taken: int | None = None,
    cache_share: float = 1.0,
    draft_share: float = 1.0,
) -> list[str]:
    """What was measured, beside the forecast and the rehearsal, for people.

    taken: bytes that the process has beyond those before the model was opened. cache_share,
    draft_share: parts of the cache and of the draft's that were ever written, which alone take
    memory.
    """
    lines = []
    for name, words, ceiling in (
        ("alone", "decode      {} for one request alone", forecast.decode_tokens_s),
        ("drawn", "drawn       {} for one alone where chance draws them", None),
        ("guessing", "guesses     {} in steps that had some", None),
        ("filling", "prefill     {}", forecast.prefill_tokens_s),
    ):
        speed, expected = getattr(seen, name).speed, getattr(tried, name).speed
        if speed is None:
            continue
        shares = [(expected, "of what was tried"), (ceiling, "of the forecast's ceiling")]
        said = [f"{speed / of:.0%} {what}" for of, what in shares if of is not None]
        lines.append(", ".join([words.format(_speed(speed)), *said]))
    if taken is not None:
        steady = forecast.weight_bytes + forecast.draft_bytes + forecast.beside_bytes
        steady -= int((1 - draft_share) * forecast.draft_cache_bytes)
        expected = steady + int(cache_share * forecast.cache_bytes)
        lines.append(
            f"memory      {size(taken)} taken; forecast {size(expected)} with the cache that was "
            f"used, {size(expected + forecast.workspace_bytes)} with workspace; stated error "
            f"{_ERROR:.0%}, at least {size(_LEAST_ERROR)}"
        )
    return lines


def resident_bytes() -> int:
    """What this process has in memory now."""
    return int(psutil.Process().memory_info().rss)


def beside_bytes(before: int, program: Program, draft: Program | None) -> int:
    """What opening a model took beside its weights, as its tokenizer and what reads that, and what
    libraries take later; 0 on an accelerator, whose memory this is not.

    before: bytes that the process had before that.
    """
    if program.place.type != "cpu":
        return 0
    weights = program.weight_bytes + (0 if draft is None else draft.weight_bytes)
    return max(0, resident_bytes() - before - weights) + _LATER


def block_bytes(program: Program, draft: Program | None) -> int:
    """What a block takes, with what a draft keeps of the same tokens."""
    if draft is None:
        return program.block_bytes
    return program.block_bytes + program.block_size * draft.block_bytes // draft.block_size


def room_for_cache(
    program: Program, context: int, max_requests: int, draft: Program | None = None
) -> int:
    """Bytes for keys and values: of all requests at their longest, or a share of what is free."""
    each = block_bytes(program, draft)
    blocks = -(-context // program.block_size) * max_requests
    return max(each, min(blocks * each, int(SHARE * _free(program))))


def refuse_too_large_a_cache(cache_bytes: int, program: Program) -> None:
    """Raises `ConfigError` for more bytes than are free, which would be found missing only once
    answers have filled them."""
    free = _free(program)
    if 0 < free < cache_bytes:
        raise ConfigError(
            f"cache_bytes (--cache-mib of lz serve): got {cache_bytes} bytes ({size(cache_bytes)}, "
            f"{cache_bytes / 2**20:,.0f} MiB), but only {size(free)} of memory are free beside the "
            f"weights; give less, or none, which takes at most {SHARE:.0%} of what is free"
        )


def _free(program: Program) -> int:
    """Bytes that this process may still take where the cache lies; 0: not known."""
    return free_memory() if program.place.type == "cpu" else device.memory_free(program.place)


def _at_most(found: float | None, what: str) -> str:
    if found is None:
        return "not known; lz doctor measures how fast this machine can be"
    return f"at most {_speed(found)}{what}"


def _speed(found: float) -> str:
    return f"{_number(found)} tokens/s"


def _number(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
