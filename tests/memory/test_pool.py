"""The host memory pool, each case in its own process because the setting is process-wide."""

import json
import subprocess
import sys
import textwrap

import pytest

from lezero.core.errors import ConfigError
from lezero.memory import HostPool


def run(code, **environment):
    import os

    text = textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CODE = """
import json, resource, torch
from lezero.memory import HostPool
pool = HostPool(8 << 30, share={share})
on = pool.enable() if {enable} else False
def work():
    for _ in range(6):
        x = torch.ones(16 << 20); y = x + 1; del x, y
        pool.after_step()
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = pool.stats().kept
pool.disable()
print(json.dumps(dict(on=on, faults=faults, kept=kept, after=pool.stats().kept)))
"""


def test_blocks_are_kept_and_steps_stop_faulting():
    off = run(CODE.format(enable=False, share=0.5))
    on = run(CODE.format(enable=True, share=0.5))
    assert on["on"]
    assert on["faults"] < off["faults"] / 10
    assert on["kept"] > 100 << 20


def test_what_is_kept_stays_within_the_bound():
    bounded = run(CODE.format(enable=True, share=0.005))
    assert bounded["kept"] < 100 << 20


def test_the_flag_switches_it_off():
    off = run(CODE.format(enable=True, share=0.5), LEZERO_POOL="0")
    assert off["on"] is False


def test_bad_share():
    with pytest.raises(ConfigError, match="share: got 0"):
        HostPool(1 << 30, share=0)
