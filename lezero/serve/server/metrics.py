"""What a server counts, and Prometheus' text of it (exposition format 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_RECENT = 512


class Histogram:
    """Counts of seconds in buckets, and the last ones themselves."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, value: float, count: int = 1) -> None:
        """So many equal ones."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count
        self._recent.extend([value] * min(count, _RECENT))

    def recent(self, share: float) -> float | None:
        """A quantile of the last values; None before there are any."""
        found = sorted(self._recent.copy())
        return found[min(len(found) - 1, int(share * len(found)))] if found else None

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Counts of one server. The engine's thread and the event loop each write their own fields."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, int]] = Counter()
        """HTTP answers by route and status; 499: the client left before it had one."""
        self.ended: Counter[str] = Counter()
        """Requests of the engine, by the reason why they ended."""
        self.tokens_asked = 0
        """Of prompts whose answers have begun."""
        self.tokens_embedded = 0
        """Of texts whose embedding has begun."""
        self.tokens_cached = 0
        """Of `tokens_asked`, those that were found in the cache."""
        self.tokens_out = 0
        self.failed_steps = 0
        self.first_token_s = Histogram(_FIRST_S)
        self.between_tokens_s = Histogram(_BETWEEN_S)

    @property
    def tokens_in(self) -> int:
        return self.tokens_asked + self.tokens_embedded

    def text(self, now: Mapping[str, tuple[str, str, float]]) -> str:
        """The page that Prometheus reads.

        now: name → (kind, help, value) of what is known elsewhere, as the length of the queue.
        """
        lines: list[str] = []
        head(lines, "http_requests_total", "counter", "HTTP answers by route and status.")
        for (route, status), count in sorted(self.answered.items()):
            labels = f'route="{route}",status="{status}"'
            lines.append(f"lezero_http_requests_total{{{labels}}} {count}")
        head(lines, "requests_ended_total", "counter", "Requests of the engine by reason.")
        for reason, count in sorted(self.ended.items()):
            lines.append(f'lezero_requests_ended_total{{reason="{reason}"}} {count}')
        own = {
            "prompt_tokens_total": ("counter", "Tokens of prompts and embeddings.", self.tokens_in),
            "embedded_tokens_total": ("counter", "Tokens of embeddings.", self.tokens_embedded),
            "prefix_hit_tokens_total": (
                *("counter", "Tokens of prompts found in the cache."),
                self.tokens_cached,
            ),
            "generated_tokens_total": ("counter", "Tokens generated.", self.tokens_out),
            "failed_steps_total": ("counter", "Steps that raised an error.", self.failed_steps),
        }
        for name, (kind, help, value) in {**own, **now}.items():
            head(lines, name, kind, help)
            lines.append(f"lezero_{name} {value}")
        for name, help, histogram in (
            ("first_token_seconds", "From a question to its first token.", self.first_token_s),
            ("between_tokens_seconds", "Between tokens of a request.", self.between_tokens_s),
        ):
            head(lines, name, "histogram", help)
            lines += histogram.lines(f"lezero_{name}")
        return "\n".join(lines) + "\n"


def head(lines: list[str], name: str, kind: str, help: str) -> None:
    lines += [f"# HELP lezero_{name} {help}", f"# TYPE lezero_{name} {kind}"]
