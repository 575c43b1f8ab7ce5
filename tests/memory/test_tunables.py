"""What glibc reads only when a process begins."""

import json
import os
import subprocess
import sys

import pytest

from lezero.memory import tuned

OFF = "glibc.malloc.tcache_count=0"
linux = pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")


@linux
def test_thread_caches_are_switched_off_beside_what_is_set_already():
    assert tuned({})["GLIBC_TUNABLES"] == OFF
    assert tuned({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})["GLIBC_TUNABLES"] == (
        f"glibc.malloc.hugetlb=1:{OFF}"
    )
    own = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=3", "A": "b"}
    assert tuned(own) == own
    assert tuned(tuned({})) == tuned({})


def test_the_flag_of_the_pool_leaves_them_as_they_are(monkeypatch):
    monkeypatch.setenv("LEZERO_POOL", "0")
    assert tuned({"A": "b"}) == {"A": "b"}


def begin(tmp_path, *arguments, **environment):
    script = tmp_path / "a script.py"
    script.write_text(
        "import json, os, sys\n"
        "from lezero.memory import begin_tuned\n"
        "begin_tuned()\n"
        "print(json.dumps([os.environ.get('GLIBC_TUNABLES'), sys.argv[1:], sys.flags.utf8_mode]))\n"
    )
    made = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | environment
    done = subprocess.run(
        [sys.executable, "-X", "utf8", script, *arguments],
        capture_output=True, text=True, timeout=60, env=made,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@linux
def test_a_program_begins_anew_with_its_own_command_line(tmp_path):
    assert begin(tmp_path, "a b", "--c=ä") == [OFF, ["a b", "--c=ä"], 1]
    assert begin(tmp_path, GLIBC_TUNABLES="glibc.malloc.tcache_count=5")[0].endswith("=5")
    assert begin(tmp_path, LEZERO_POOL="0")[0] is None
    assert begin(tmp_path, LEZERO_POOL="perhaps")[0] is None
