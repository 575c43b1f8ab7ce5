"""The guard that fails a test which leaves something behind, tried on tests that do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import leaks
from tests.house.floors import ROOT
from tests.leaks import Snapshot

LEAKY = """
import os, subprocess, sys, tempfile, threading, time
import pytest
from tests.conftest import nothing_left_behind

def test_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

def test_orphan():
    # The launcher is gone and its child lives on: found by the mark in its environment.
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_thread():
    threading.Thread(target=time.sleep, args=(20,), name="left", daemon=True).start()

def test_file():
    open("left.txt", "w").close()

def test_temporary_file():
    tempfile.mkdtemp(prefix="left-")

def test_variable():
    os.environ["LEFT_BEHIND"] = "1"

def test_variable_removed():
    del os.environ["HOME"]

def test_folder(tmp_path):
    os.chdir(tmp_path)

def test_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("LEFT_BEHIND", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").touch()
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=time.sleep, args=(0.05,)); thread.start()

def test_nothing_of_the_others_is_left():
    assert "LEFT_BEHIND" not in os.environ and "HOME" in os.environ
"""


def test_what_torch_compiled_is_kept_for_this_user_alone(tmp_path: Path) -> None:
    folder = leaks.compiled_code(tmp_path)
    assert folder == leaks.compiled_code(tmp_path)
    assert str(os.getuid()) in folder.name
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(RuntimeError, match="not a folder of this user alone"):
        leaks.compiled_code(tmp_path)
    folder.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    folder.symlink_to("theirs")
    with pytest.raises(RuntimeError, match="not a folder of this user alone"):
        leaks.compiled_code(tmp_path)


def test_each_leak_fails_its_own_test_only(tmp_path: Path) -> None:
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT)], cwd=tmp_path, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    said = {line.split("::")[1].split(" ")[0]: line for line in lines}
    expected = {
        "test_process": "process ",
        "test_orphan": "sleep 60",
        "test_thread": "thread left",
        "test_file": "left.txt",
        "test_temporary_file": "left-",
        "test_variable": "environment variable LEFT_BEHIND",
        "test_variable_removed": "environment variable HOME",
        "test_folder": "working folder",
    }
    assert said.keys() == expected.keys(), done.stdout + done.stderr
    assert all(text in said[name] for name, text in expected.items()), said
    assert re.search(r"^10 passed, (\d+ warnings?, )?8 errors", done.stdout, re.MULTILINE)


# The guard of this repository, in a session of its own, with a grace period of a moment.
RUN = """
import os, sys
os.environ["COLUMNS"] = "300"
sys.path.insert(0, sys.argv[1])
from tests import conftest, leaks
leaks.Snapshot.leaks.__defaults__ = (0.3,)
import pytest
sys.exit(pytest.main(["-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]))
"""


def test_what_ends_within_the_grace_period_is_no_leak() -> None:
    before = Snapshot.take()
    thread = threading.Thread(target=time.sleep, args=(0.2,))
    thread.start()
    process = subprocess.Popen(["sleep", "0.2"])
    assert before.leaks() == []
    assert process.wait() == 0


def test_a_leaked_process_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    before = Snapshot.take()
    # Its name is there when it says so: a started process has none for a moment.
    code = "import time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        (found,) = before.leaks(grace_s=0.0)
        assert "time.sleep(60)" in found
        assert process.wait(5) == -9


def test_a_look_costs_little() -> None:
    began = time.perf_counter()
    for _ in range(10):
        Snapshot.take()
    cost_s = (time.perf_counter() - began) / 10
    print(f"one look costs {cost_s * 1e3:.1f} ms")
    assert cost_s < 0.1
