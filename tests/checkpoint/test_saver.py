import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from lezero.checkpoint import Saver, load, read_mark
from lezero.core import device
from lezero.core.errors import ConfigError, CorruptError, FileError
from lezero.files import list_generations, read_generation


def steps(root):
    return [int(path.name[5:]) for path in list_generations(root)]


def test_save_copies_now_and_writes_later(tmp_path):
    weight = torch.arange(6.0)
    document = {"lr": [0.1]}
    with Saver(tmp_path) as saver:
        assert saver.save(1, {"model/w": weight, "model/tied": weight}, {"state": document})
        weight.add_(100)
        document["lr"].append(0.2)
        assert saver.wait() is None
        assert saver.stall_seconds > 0
        assert saver.write_seconds > 0
    loaded = load(tmp_path)
    assert loaded.step == 1
    assert torch.equal(loaded.tensors["model/w"], torch.arange(6.0))
    assert loaded.tensors["model/tied"].data_ptr() == loaded.tensors["model/w"].data_ptr()
    assert loaded.documents == {"state": {"lr": [0.1]}}
    assert list(loaded.section("model")) == ["w", "tied"]


def test_buffers_are_reused_and_follow_a_new_shape(tmp_path):
    with Saver(tmp_path) as saver:
        saver.prepare({"w": torch.zeros(4)})
        block = saver._buffers._views["w"].data_ptr()
        for step in (1, 2):
            saver.save(step, {"w": torch.full((4,), float(step))}, {})
            assert saver._buffers._views["w"].data_ptr() == block
        saver.save(3, {"w": torch.ones(2, 2).t(), "e": torch.empty(0, dtype=torch.int8)}, {})
        saver.save(4, {"w": torch.full((2, 2), 0.5).double(), "e": torch.empty(0)}, {})
    assert torch.equal(
        read_generation(tmp_path / "step-00000002").tensors["w"], torch.full((4,), 2)
    )
    assert read_generation(tmp_path / "step-00000003").tensors["e"].dtype == torch.int8
    last = load(tmp_path).tensors["w"]  # the same shape in another type
    assert (last.dtype, last.tolist()) == (torch.float64, [[0.5, 0.5]] * 2)


def test_the_devices_of_what_is_saved_are_waited_for_before_it_is_written(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(device, "synchronize", lambda places: waited.append(set(places)))
    with Saver(tmp_path) as saver:
        saver.save(1, {"w": torch.zeros(3)}, {})
    assert waited == [{torch.device("cpu")}]


def test_retention_keeps_newest_and_marked(tmp_path):
    with Saver(tmp_path, keep=2) as saver:
        for step in range(1, 7):
            saver.save(step, {"w": torch.zeros(3)}, {})
            if step in (2, 4):
                saver.mark("best", step)
        saver.wait()
        assert steps(tmp_path) == [4, 5, 6]
        assert read_mark(tmp_path, "best") == 4
        assert load(tmp_path, mark="best").step == 4
        saver.mark("last", 6)
        assert load(tmp_path, mark="last").step == 6
        with pytest.raises(FileError, match="no generation 1 to mark"):
            saver.mark("best", 1)
        with pytest.raises(FileError, match=r"'\.\./x'"):
            saver.mark("../x", 6)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


def test_a_damaged_mark_is_told_and_what_it_may_mean_stays(tmp_path):
    with Saver(tmp_path, keep=1) as saver:
        saver.save(1, {}, {})
        saver.mark("best", 1)
        saver.wait()
        (tmp_path / "best.json").write_text(
            (tmp_path / "best.json").read_text().replace("1}", "7}")
        )
        for step in (2, 3, 4):
            saver.save(step, {}, {})
            saver.wait()
            assert steps(tmp_path) == [1, step]
    with pytest.raises(FileError, match=r"best\.json"):
        load(tmp_path, mark="best")
    with pytest.raises(FileError, match="no generation is marked 'worst'"):
        load(tmp_path, mark="worst")


def test_the_file_of_another_mark_is_no_mark(tmp_path):
    with Saver(tmp_path) as saver:
        saver.save(1, {}, {})
        saver.mark("last", 1)
    shutil.copy(tmp_path / "last.json", tmp_path / "best.json")
    with pytest.raises(CorruptError, match=r"best\.json: this is no mark 'best'"):
        read_mark(tmp_path, "best")


def test_json_of_others_beside_generations_is_no_mark(tmp_path, caplog):
    with Saver(tmp_path, keep=2) as saver:
        for step in (1, 2, 3, 4):
            (tmp_path / "metrics.json").write_text(f'{{"step": {step}}}')
            (tmp_path / "notes.json").write_bytes(b"\xff\x00 no JSON" * 1000)
            saver.save(step, {}, {})
            saver.wait()
    assert steps(tmp_path) == [3, 4]
    assert "damaged" not in caplog.text


def test_a_failed_write_is_told_and_the_next_one_works(tmp_path, monkeypatch):
    told = []
    saver = Saver(tmp_path, on_error=lambda step, error: told.append((step, str(error))))
    saver.save(1, {"w": torch.ones(3)}, {})
    saver.wait()
    real = os.write

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert saver.save(2, {"w": torch.ones(3)}, {})
    saver.mark("best", 2)
    assert isinstance(saver.wait(), FileError)
    saver.mark("best", 2)  # the write may fail before its mark comes
    assert told[0][0] == 2
    assert "disk is full" in told[0][1]
    monkeypatch.setattr(os, "write", real)
    assert (load(tmp_path).step, read_mark(tmp_path, "best")) == (1, None)
    saver.save(3, {"w": torch.ones(3)}, {})
    assert saver.wait() is None
    assert steps(tmp_path) == [1, 3]
    saver.close()


def test_a_failed_write_moves_nothing_aside_and_prunes_nothing(tmp_path, monkeypatch):
    with Saver(tmp_path) as saver:
        for step in (7, 8, 9):
            saver.save(step, {}, {})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with Saver(tmp_path, keep=1, on_error=lambda step, error: None) as saver:
        saver.save(1, {"w": torch.ones(3)}, {})
        assert isinstance(saver.wait(), FileError)
    assert steps(tmp_path) == [7, 8, 9]
    assert not list(tmp_path.glob("superseded-*"))


def test_the_default_report_is_one_message_and_a_broken_callback_does_no_harm(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("in the way")
    with Saver(tmp_path / "file") as saver:
        saver.save(1, {}, {})
        assert "cannot be made" in str(saver.wait())

    def broken(step, error):
        raise ValueError("oops")

    with Saver(tmp_path / "file", on_error=broken) as saver:
        saver.save(1, {}, {})
        assert saver.wait() is not None


def test_busy_policies(tmp_path, monkeypatch):
    from lezero.checkpoint import saver as module

    go = threading.Event()
    real = module.Crew.write

    def slow(*args, **kwargs):
        go.wait(5)
        return real(*args, **kwargs)

    monkeypatch.setattr(module.Crew, "write", slow)
    with Saver(tmp_path, busy="skip") as saver:
        assert saver.save(1, {}, {})
        assert not saver.save(2, {}, {})
        go.set()
    assert steps(tmp_path) == [1]
    go.clear()
    with Saver(tmp_path) as saver:
        assert saver.save(3, {}, {})
        threading.Timer(0.2, go.set).start()
        assert saver.save(4, {}, {})
        assert saver.stall_seconds > 0.1
    assert steps(tmp_path) == [1, 3, 4]


def test_bad_arguments_raise_at_once(tmp_path):
    with pytest.raises(ConfigError, match="keep: got 0"):
        Saver(tmp_path, keep=0)
    with pytest.raises(ConfigError, match="busy: got 'never'"):
        Saver(tmp_path, busy="never")
    with Saver(tmp_path) as saver:
        with pytest.raises(FileError, match=r"documents\.state\.x: nan"):
            saver.save(1, {}, {"state": {"x": float("nan")}})
        with pytest.raises(FileError, match=r"tensor 'w'.*meta"):
            saver.save(1, {"w": torch.empty(1, device="meta")}, {})
        for step in (-1, "5", 5.0, True):
            with pytest.raises(FileError, match=f"step {step!r}: allowed is an integer from 0"):
                saver.save(step, {}, {})
    assert steps(tmp_path) == []


def test_rewind_moves_the_left_history_aside(tmp_path):
    with Saver(tmp_path) as saver:
        for step in (1, 2, 3):
            saver.save(step, {}, {})
        moved = saver.rewind(1)
        assert len(moved) == 2
        assert all(path.is_dir() for path in moved)
        assert load(tmp_path).step == 1


def test_what_was_saved_last_stays_beside_newer_steps_of_an_earlier_run(tmp_path):
    with Saver(tmp_path, keep=2) as saver:
        for step in (7, 8, 9):
            saver.save(step, {"w": torch.tensor(float(step))}, {})
    with Saver(tmp_path, keep=2) as saver:
        saver.save(1, {"w": torch.tensor(1.0)}, {})
    assert steps(tmp_path) == [1]
    assert load(tmp_path).step == 1
    aside = sorted(path.name[:24] for path in tmp_path.glob("superseded-*"))
    assert aside == ["superseded-step-00000008", "superseded-step-00000009"]


def test_no_more_than_keep_are_left_aside(tmp_path):
    with Saver(tmp_path, keep=2) as saver:
        for _ in range(3):
            for step in (1, 2, 3):
                saver.save(step, {}, {})
            newest = saver.rewind(1)
        saver.save(2, {}, {})
        saver.wait()
        assert sorted(tmp_path.glob("superseded-*")) == sorted(newest)


@pytest.mark.parametrize("keep", [1, 3])
def test_the_best_of_a_left_history_outlives_its_newer_ones(tmp_path, keep):
    with Saver(tmp_path, keep=keep) as saver:
        for step in (1, 7, 8, 9):
            saver.save(step, {}, {})
            saver.mark("best", 1)
        saver.rewind(0)
        for step in (1, 2):
            saver.save(step, {}, {})
    aside = sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("superseded-*"))
    newest = [f"superseded-step-0000000{step}" for step in (7, 8, 9)]
    assert aside == ["superseded-best-step-00000001", *newest[-keep:]]


@pytest.mark.parametrize("rewound", [True, False])
def test_a_mark_goes_with_the_generation_that_it_named(tmp_path, rewound):
    with Saver(tmp_path) as saver:
        for step in (30, 50):
            saver.save(step, {}, {})
            saver.mark("best", step)
            saver.mark("second", step)
        if rewound:
            saver.rewind(30)
        for step in (40, 50):
            saver.save(step, {}, {})
        saver.wait()
        assert list(tmp_path.glob("superseded-best-step-00000050-*"))
        assert (read_mark(tmp_path, "best"), read_mark(tmp_path, "second")) == (None, None)
        saver.mark("best", 40)
        saver.save(40, {}, {}, supersede=True)
    assert (steps(tmp_path), read_mark(tmp_path, "best")) == ([30, 40], None)


# Starts one writer process for each line "ROOT STEP" that comes in, and waits for it to be killed.
WRITERS = """
import os, sys, torch
from lezero.checkpoint import Saver

def write(root, step):
    saver = Saver(root, keep=2)
    weight = torch.empty(100_000)
    while True:
        step += 1
        weight.fill_(step)
        values = {"a": weight, "b": torch.full((3,), float(step))}
        saver.save(step, values, {"state": {"step": step}})
        saver.mark("best", step)

torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    root, step = line.split()
    child = os.fork()
    if child == 0:
        write(root, int(step))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_killed_at_any_moment_a_good_generation_stands(tmp_path):
    chance = random.Random(3)
    newest = leftovers = 0
    command = [sys.executable, "-c", WRITERS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writers:
        assert writers.stdout.readline() == "ready\n"
        for _ in range(25):
            writers.stdin.write(f"{tmp_path} {newest}\n")
            writers.stdin.flush()
            child = int(writers.stdout.readline())
            try:
                first = newest
                while max(steps(tmp_path), default=0) <= first:
                    time.sleep(0.002)
                end = time.monotonic() + chance.uniform(0, 0.1)
                while time.monotonic() < end:  # a reader beside a writer that prunes
                    check(load(tmp_path))
            finally:
                os.kill(child, signal.SIGKILL)
                assert writers.stdout.readline() == "dead\n"
            newest = check(load(tmp_path))
            assert newest > first
            for path in list_generations(tmp_path):
                read_generation(path)
            leftovers += any(name.startswith(".tmp") for name in os.listdir(tmp_path))
        writers.stdin.close()
    assert leftovers > 0, "no kill fell into a write; the test proves nothing"
    with Saver(tmp_path) as saver:
        saver.save(newest + 1, {}, {})
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


def check(loaded):
    assert not loaded.rejected
    assert loaded.documents["state"]["step"] == loaded.step
    assert torch.equal(loaded.tensors["a"], torch.full((100_000,), float(loaded.step)))
    assert torch.equal(loaded.tensors["b"], torch.full((3,), float(loaded.step)))
    return loaded.step


def test_what_a_save_supersedes_goes_aside_at_its_commit(tmp_path, monkeypatch):
    def written(value, supersede=True):
        with Saver(tmp_path) as saver:
            saver.save(1, {"w": torch.full((2,), value)}, {}, supersede=supersede)
            return saver.wait()

    def value(path):
        return float(read_generation(path).tensors["w"][0])

    assert written(1.0) is None
    assert not list(tmp_path.glob("superseded-*"))
    rename = os.rename

    def refuses(source, target):
        if ".tmp-" in str(source):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuses)
        assert isinstance(written(2.0), FileError)
    assert value(tmp_path / "step-00000001") == 1
    assert not list(tmp_path.glob("superseded-*"))
    assert written(2.0) is None
    (aside,) = tmp_path.glob("superseded-step-00000001-*")
    assert [value(aside), value(tmp_path / "step-00000001")] == [1, 2]
    assert written(3.0, supersede=False) is None
    assert [*tmp_path.glob("superseded-*")] == [aside]
