"""Ranks that hang or part from each other on purpose, and what the others then say."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

import pytest
import torch

from lezero.comm import judge
from lezero.comm import watch as watching
from lezero.comm.calls import Call, History
from lezero.comm.judge import MISSED_S
from lezero.comm.watch import Watch
from lezero.core import groups
from lezero.core.errors import DistributedError
from tests.ranks import RankError

LABELS = ("embed", "layers.0", "layers.1", "head")
HEALTHY = 5


def collective(label, size=4, dtype=torch.float32):
    groups.all_reduce_sum(torch.ones(size, dtype=dtype), label)


def step(labels=LABELS):
    for label in labels:
        collective(label)


def skipped_layer(bad):
    step([label for label in LABELS if not (bad and label == "layers.0")])
    step()


def other_shape(bad):
    collective("embed")
    collective("layers.0", size=6 if bad else 4)
    step()


def other_dtype(bad):
    collective("embed")
    collective("layers.0", dtype=torch.float64 if bad else torch.float32)
    step()


def other_order(bad):
    step(["embed", "layers.1", "layers.0", "head"] if bad else LABELS)
    step()


def early_exit(bad):
    if not bad:
        step()


def uneven_batches(bad):
    """The bad rank has one batch less than the others, and goes on to evaluate."""
    if not bad:
        step()
    collective("evaluation loss", size=2, dtype=torch.float64)


def early_evaluation(bad):
    """As before, where the evaluation has come three times, as the next step has."""
    for index in range(4):
        for _ in range(3 if bad and index == 3 else 4):
            step()
        collective("evaluation loss")


def uneven_accumulation(bad):
    """The bad rank accumulates one batch less; all tensors are of one size."""
    for index in range(7):
        for _ in range(3 if bad and index == 6 else 4):
            step([f"layers.{n}" for n in range(8)])
        collective("norm")


def every_other_step(bad):
    """The bad rank is one step ahead of the others with what comes every second step."""
    for index in range(8):
        step()
        if (index + (bad and index > 5)) % 2:
            collective("aux")


def stop_signal(bad):
    collective("embed")
    if bad:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)  # continued by the test, it hears what the others said of it
    step(LABELS[1:])


def exception(bad):
    collective("embed")
    if bad:
        raise ValueError("row 7 is bad")
    step(LABELS[1:])


def killed(bad):
    collective("embed")
    if bad:
        os.kill(os.getpid(), signal.SIGKILL)
    step(LABELS[1:])


def killed_after_parting(bad):
    """The third rank is late, so the other two are still asking when the bad one is lost."""
    collective("embed")
    if bad:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        collective("layers.0", size=6)
    if groups.rank() == 2:
        time.sleep(0.6)
    step(LABELS[1:])


SCENES = {
    skipped_layer: r"rank 1 entered all_reduce of 'layers\.1' .* and skipped 'layers\.0', where "
    r"{others} entered all_reduce of 'layers\.0' \(float32 \[4\]\) at tests/comm/test_watch\.py:",
    other_shape: r"rank 1 entered all_reduce of 'layers\.0' \(float32 \[6\]\) at \S+ with another "
    r"shape, where {others} entered .*'layers\.0' \(float32 \[4\]\)",
    other_dtype: r"rank 1 entered all_reduce of 'layers\.0' \(float64 \[4\]\) at \S+ with another "
    r"dtype, where {others} entered .*'layers\.0' \(float32 \[4\]\)",
    other_order: r"rank 1 entered all_reduce of 'layers\.1' .*where {others} entered .*'layers\.0'",
    early_exit: r"rank 1 has finished early, after 20 collectives.* waits in collective 21, "
    r"all_reduce of 'embed'",
    uneven_batches: r"rank 1 entered all_reduce of 'evaluation loss' \(float64 \[2\]\) .*where "
    r"{others} entered all_reduce of 'embed'",
    early_evaluation: r"rank 1 entered all_reduce of 'evaluation loss' .*where {others} entered "
    r"all_reduce of 'embed'",
    uneven_accumulation: r"rank 1 entered all_reduce of 'norm' .*where {others} entered "
    r"all_reduce of 'layers\.0'",
    # Of two ranks either may be the odd one: what each does has come before.
    every_other_step: r"rank 1 entered all_reduce of 'aux' .*where {others} entered .*'embed'|"
    r"{others} entered all_reduce of 'embed' .*where rank 1 entered all_reduce of 'aux'",
    stop_signal: r"rank 1 does not answer since [\d.]+ s: its process \d+ is stopped .*It had "
    r"(come to|finished) collective 21, .*'embed'.* waits in collective 22, .*'layers\.0'",
    exception: r"rank 1 failed: ValueError: row 7 is bad \(at tests/comm/test_watch\.py:\d+\)\. It "
    r"had finished collective 21, .* waits in collective 22, all_reduce of 'layers\.0'",
}


EXPECTED = (early_evaluation, uneven_accumulation, every_other_step)
"""What the other ranks do in these has come before."""


def play(scene, bad_rank, folder=None):
    """A healthy start, then the scene. Returns what this rank was told and after how many s."""
    watch = Watch.start()
    assert watch is watching.current()
    bad = groups.rank() == bad_rank
    for _ in range(HEALTHY):
        step()
    start, told = time.monotonic(), ""
    try:
        with groups.naming_lost_ranks():
            globals()[scene](bad)
    except (DistributedError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
        if scene == "exception" and bad:
            groups.leave()
    seconds = time.monotonic() - start
    if folder is not None:
        (folder / f"told-{groups.rank()}").write_text(told)
    if not bad and scene == "stop_signal":
        os.kill(watch._board.addresses[bad_rank].pid, signal.SIGCONT)
    if not bad and told:
        time.sleep(0.3)  # the others end their own way, not because this rank is gone
    return told, seconds


def played(ranks, world, scene, bad, pattern):
    """What ranks were told, once all of them live to tell.

    Where sizes differ, Gloo loses one send in a hundred of which the connection is shut, and waits
    for it until its own timeout. Then a rank ends by the watch's last resort, which names the cause
    too; but what it was told in Python is not known.
    """
    for _ in range(3):
        try:
            return ranks(world, play, scene, bad, timeout_s=30)
        except RankError as error:
            last_resort = f"ended with status {watching.EXIT_STATUS}" in str(error)
            if not last_resort or not re.search(rf"error: .*{pattern}", str(error)):
                raise
    raise AssertionError("the last resort was needed three times")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_others_name_rank_label_and_what_it_does_instead(ranks, world, scene):
    bad = 0 if world == 3 and scene in (stop_signal, exception) else 1  # rank 0 is none better
    others = {2: "rank 0", 3: "ranks 0 and 2"}[world]
    if scene in EXPECTED:  # a rank that does what is expected tells nobody, and may be late
        others = "(?:ranks 0 and 2|rank [02])"
    pattern = SCENES[scene].replace("rank 1", f"rank {bad}").format(others=others)
    for rank, (told, seconds) in enumerate(played(ranks, world, scene.__name__, bad, pattern)):
        print(f"rank {rank}, {seconds:.2f} s: {told}")
        if rank != bad:
            assert told.startswith("DistributedError: ")
            assert re.search(pattern, told), told
            assert seconds < (20 if scene in EXPECTED else 5)  # those make their history as well


def test_a_killed_rank_is_named_by_its_process(ranks, tmp_path):
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        ranks(2, play, "killed", 1, tmp_path, timeout_s=30)
    told = (tmp_path / "told-0").read_text()
    print(told)
    assert re.search(r"rank 1 is gone: its process \d+ was killed, crashed or ended", told), told
    assert "waits in collective 22, all_reduce of 'layers.0'" in told
    assert "pair.cc" not in told


def test_a_rank_that_parted_and_was_then_lost_is_named_for_parting(ranks, tmp_path):
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        ranks(3, play, "killed_after_parting", 1, tmp_path, timeout_s=30)
    told = (tmp_path / "told-0").read_text()
    assert re.search(r"rank 1 entered all_reduce of 'layers\.0' \(float32 \[6\]\)", told), told
    assert "with another shape" in told


def live():
    """Phases that look like a hang from outside; returns what anyone said."""
    said = []
    watch = Watch.start(patience_s=0.6)
    watch._tell = lambda text, pass_on=True: said.append(text)
    late = groups.rank() == 1
    for _ in range(3):
        step()
    for phase in ("compiles", "evaluates", "saves"):
        if late:
            with watching.busy(phase):
                time.sleep(0.8)
        step()
    if late:  # one C call that lets no other thread of this process run
        ctypes.PyDLL(None).usleep(int((MISSED_S + 0.8) * 1e6))
    step()
    for _ in range(60):
        step()
    groups.leave()  # one rank after the other
    time.sleep(0.2 * groups.rank())
    return said, watch._entered, watch._history.count


def test_a_healthy_run_is_left_alone(ranks):
    for said, entered, counted in ranks(3, live, timeout_s=40):
        assert not said
        assert entered == counted == 4 * 67


def waited_for():
    said = []
    Watch.start(patience_s=0.6)
    judge.log.warning = lambda *words: said.append(words[0] % words[1:])
    judge.log.info = lambda *words: said.append(words[0] % words[1:])
    step()
    if groups.rank() == 1:
        time.sleep(2.2)
    step()
    return said


def test_a_slow_rank_is_told_of_once_with_its_place(ranks):
    said, nothing = ranks(2, waited_for, timeout_s=30)
    assert not nothing
    assert len(said) == 1, said
    assert re.search(r"for rank 1, which is at tests/comm/test_watch\.py:\d+", said[0]), said


def cost():
    watch = Watch.start()
    shape, names = torch.Size([1024, 512]), [f"layers.{i}.weight" for i in range(200)]
    rounds = []
    for _ in range(30):
        groups.barrier()
        start = time.perf_counter()
        for name in names:
            watch.enter("all_reduce", shape, torch.bfloat16, name)
            watch.leave()
        rounds.append((time.perf_counter() - start) / len(names))
    return statistics.median(rounds)


def test_a_collective_costs_microseconds(ranks):
    for seconds in ranks(2, cost, timeout_s=40):
        print(f"{seconds * 1e6:.2f} us")
        assert seconds < 1e-5  # 2 to 3 us on an idle machine


def stuck():
    """The thread cannot be freed: the process ends with its own status."""
    watch = Watch.start(grace_s=0.5)
    if groups.rank() == 1:
        while watch._judge.peers[0].entered == 0:
            time.sleep(0.05)
        time.sleep(0.5)
        groups.leave()
        time.sleep(2.5)
        return
    watch.enter("all_reduce", (4,), torch.float32, "x")
    time.sleep(20)


def test_the_last_resort_ends_the_process(ranks):
    with pytest.raises(RankError, match=r"rank 0 ended with status 75[^$]*rank 1 has finished"):
        ranks(2, stuck, timeout_s=15)


def off():
    return Watch.start() is None


def test_one_rank_or_the_switch_means_no_watch(ranks):
    assert off()
    assert ranks(2, off, env={"LEZERO_WATCH": "0"}) == [True, True]


def off_on_one_rank():
    os.environ["LEZERO_WATCH"] = "01"[groups.rank()]
    with pytest.raises(DistributedError, match="LEZERO_WATCH is 0 on rank 0 but not on rank 1: se"):
        Watch.start()


def test_a_watch_on_some_ranks_only_is_refused_on_each(ranks):
    ranks(2, off_on_one_rank)


def test_a_parting_is_found_in_any_earlier_window():
    mine, theirs = History(), History()
    for number in range(1, 200):
        mine.add(Call("all_reduce", (4,), "float32", f"p{number % 7}", "a.py:1"))
        label = "other" if number == 50 else f"p{number % 7}"
        theirs.add(Call("all_reduce", (4,), "float32", label, "b.py:2"))
    last, seen = None, 0
    while True:
        found = mine.parting(theirs.window(last))
        assert found is not None
        number, exact = found
        if exact:
            break
        last, seen = number + 8, seen + 1
    assert number == 50
    assert seen < 12
    assert mine.parting(mine.window()) is None


def test_importing_the_watch_brings_no_torch():
    code = "import sys, lezero.comm.watch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
