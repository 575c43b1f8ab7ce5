"""Real launches of tiny programs: what the user sees, the exit status, and that nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from lezero.core.errors import CapacityError, ConfigError, DistributedError
from lezero.elastic import LaunchConfig, launch, launcher, output, restarts
from lezero.elastic.launcher import _resolve

LZ = [sys.executable, "-c", "import sys; from lezero.cli.main import main; sys.exit(main())"]


def write(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text("import os, sys, time, signal\nrank = os.environ['RANK']\n" + text)
    return str(path)


def run(script: str, *arguments: str, **config: object) -> int:
    settings = {"ranks": 2, "oversubscribe": True, "quiet": True, **config}
    return launch(LaunchConfig(**settings), [script, *arguments])


def left(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(marker in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_output_arguments_and_environment(tmp_path, capfd):
    script = write(
        tmp_path,
        "print(rank, sys.argv[1:], __name__, os.environ['OMP_NUM_THREADS'], flush=True)\n"
        "sys.stderr.write('from stderr\\n')\n"
        "from lezero.core.log import logger\n"
        "logger('train').warning('told')\n"
        "assert os.environ['TORCH_DISABLE_SHARE_RDZV_TCP_STORE'] == '1'\n"
        "assert os.environ['EXTRA'] == 'x'\n"
        "assert sys.path[0] == os.path.dirname(os.path.abspath(__file__))\n",
    )
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before, handlers = dict(os.environ), [signal.getsignal(number) for number in numbers]
    config = LaunchConfig(ranks=2, threads=3, oversubscribe=True)
    assert launch(config, [script, "a$b", "${local_rank}", "--n=1"], env={"EXTRA": "x"}) == 0
    assert dict(os.environ) == before
    assert [signal.getsignal(number) for number in numbers] == handlers
    out, err = capfd.readouterr()
    assert out == "0 ['a$b', '${local_rank}', '--n=1'] __main__ 3\n"  # rank 0 alone, untouched
    assert sorted(err.splitlines()) == [
        "[rank 1] from stderr",
        "[rank 1] lezero: told",
        "from stderr",
        "lezero: 2 ranks, 3 threads each (OMP_NUM_THREADS)",
        "lezero: told",
    ]
    assert not left(script)


def test_show_all_shows_the_stdout_of_every_rank(tmp_path, capfd):
    assert run(write(tmp_path, "print('hello', rank)"), show_all=True) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 1] hello 1", "hello 0"]


@pytest.mark.usefixtures("without_accelerator")
def test_two_gloo_ranks_survive_sigkill(tmp_path, capfd):
    script = write(
        tmp_path,
        "import torch\n"
        "import torch.distributed as dist\n"
        "from lezero.core import groups\n"
        "groups.join(timeout_s=60)\n"
        "restarts = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "for step in range(50):\n"
        "    total = groups.all_reduce_sum(torch.ones(1))\n"
        "    if step == 5 and restarts < 2 and rank == str(restarts):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "groups.leave()\n"
        "print('done', rank, int(total), restarts)\n",
    )
    start = time.monotonic()
    assert run(script) == 0
    seconds = time.monotonic() - start
    out, err = capfd.readouterr()
    assert out == "done 0 2 2\n"
    assert err.count("restarting all ranks") == 2, err  # two kills, two restarts, no other try
    assert "rank 0 was killed by SIGKILL" in err
    assert "rank 1 was killed by SIGKILL" in err
    assert "Traceback" not in err
    print(f"2 kills, 2 restarts, 3 starts of torch in {seconds:.1f} s")
    assert seconds < 60
    assert not left(script)


def test_restarts_spent_names_rank_signal_and_last_lines(tmp_path, capfd):
    script = write(
        tmp_path,
        "print('last words of', rank, file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV) if rank == '1' else time.sleep(60)\n",
    )
    assert run(script, max_restarts=1) == 128 + signal.SIGSEGV
    err = capfd.readouterr().err
    assert "rank 1 was killed by SIGSEGV (a crash in native code); restarting all ranks (1" in err
    assert "error: rank 1 was killed by SIGSEGV" in err
    assert "no restart is left of 1" in err
    assert err.rstrip().endswith("the last lines of its stderr:\n  last words of 1")


def test_exception_is_shown_once_without_frames_of_the_launcher(tmp_path, capfd):
    script = write(tmp_path, "def work():\n    raise ArithmeticError('bad sum')\nwork()\n")
    assert run(script, max_restarts=0) == 1
    err = capfd.readouterr().err
    assert err.count("bad sum") == 2  # the line of code and the message, from one rank
    assert "program.py" in err
    assert "lezero/elastic" not in err
    assert "torch" not in err
    assert "failed: ArithmeticError: bad sum" in err


def test_user_errors_are_told_once_and_never_restarted(tmp_path, capfd):
    script = write(
        tmp_path,
        f"open({str(tmp_path)!r} + '/starts' + rank, 'a').write('x')\n"
        "from lezero.core.errors import ConfigError\nraise ConfigError('train.lr: got -1')\n",
    )
    assert run(script) == 2
    assert capfd.readouterr().err == "error: train.lr: got -1\n"
    # On a busy machine one rank may end the job before the other has begun.
    assert {starts.read_text() for starts in tmp_path.glob("starts?")} == {"x"}


def test_commands_that_explain_themselves_are_not_repeated(tmp_path, capfd):
    script = write(tmp_path, "print('error: no such file', file=sys.stderr)\nsys.exit(2)\n")
    assert run(script) == 2
    assert capfd.readouterr().err.strip() == "error: no such file"


def test_errors_of_a_rank_that_goes_on_are_shown(tmp_path, capfd, monkeypatch):
    script = write(tmp_path, "sys.stderr.write('error: trying again\\n')\n")
    assert run(script) == 0
    assert sorted(capfd.readouterr().err.splitlines()) == [
        "[rank 1] error: trying again",
        "error: trying again",
    ]
    monkeypatch.setattr(output, "_WAITS_S", 0.05)
    shown = output.Output(tmp_path, 2, show_all=False)
    _, errs = shown.assign({0: 0, 1: 1})
    Path(errs[1]).write_text("error: still here\n")
    end = time.monotonic() + 10
    while "still here" not in (err := capfd.readouterr().err) and time.monotonic() < end:
        time.sleep(0.02)
    assert err == "[rank 1] error: still here\n"
    monkeypatch.setattr(output, "_WAITS_S", 60.0)
    Path(errs[1]).write_text("error: the end\n")
    assert shown.tail(1) == ["error: still here", "error: the end"]
    shown.close()
    assert "the end" not in capfd.readouterr().err


def test_module_and_program(tmp_path, capfd, monkeypatch):
    (tmp_path / "launched_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    config = LaunchConfig(ranks=1, quiet=True)
    assert launch(config, ["-m", "launched_module", "x"]) == 0
    assert launch(config, ["sh", "-c", "echo $RANK-$WORLD_SIZE; exit 7"]) == 7
    out, err = capfd.readouterr()
    assert out.startswith("__main__ ['x']\n0-1\n")
    assert "rank 0 ended with exit status 7" in err


@pytest.mark.usefixtures("not_under_nohup")
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["ctrl-c", "sigterm", "closed terminal"],
)
def test_signal_gives_the_ranks_time_to_save(tmp_path, number, status):
    script = write(
        tmp_path,
        "def save(*_):\n"
        "    time.sleep(0.3)\n"
        f"    open({str(tmp_path)!r} + '/saved' + rank, 'w').close()\n"
        "    sys.exit(0)\n"
        "for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(n, save)\n"
        "child = os.fork()\n"
        f"open({str(tmp_path)!r} + '/ready' + rank, 'w').close() if child else None\n"
        "if child and rank == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"  # hears it even so
        # In parts: a signal just before a sleep begins is handled when that ends.
        "for _ in range(600): time.sleep(0.1)\n",
    )
    process = subprocess.Popen([*LZ, "launch", "-n", "2", "--oversubscribe", script])
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(number)
    assert process.wait(30) == status
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
    assert not left(script)  # the forked children, deaf to the signal, are gone too


def test_second_signal_does_not_wait(tmp_path):
    script = write(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        f"open({str(tmp_path)!r} + '/ready' + rank, 'w').close() if child else None\n"
        "time.sleep(60)\n",
    )
    process = subprocess.Popen([*LZ, "launch", script], stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "ready0")
    process.terminate()
    assert process.stderr is not None
    while "stopping" not in process.stderr.readline():
        pass
    process.terminate()
    assert process.wait(10) == 143
    process.stderr.close()
    assert not left(script)


def test_a_closed_terminal_ends_ranks_that_are_deaf_after_their_grace(tmp_path):
    script = write(
        tmp_path,
        "for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
        f"open({str(tmp_path)!r} + '/ready' + rank, 'w').close()\n"
        "time.sleep(60)\n",
    )
    own = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # also under nohup
    lz = [*LZ[:2], own + LZ[2]]
    process = subprocess.Popen([*lz, "launch", "--grace", "0.2", script], stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "ready0")
    process.send_signal(signal.SIGHUP)
    start = time.monotonic()
    assert process.wait(30) == 129
    assert time.monotonic() - start < 4.5
    assert not left(script)


@pytest.mark.parametrize(
    ("ranks", "asked", "given", "found"),
    [(1, 0, "", 8), (3, 0, "", 2), (8, 0, "", 1), (2, 0, "3", 3), (2, 5, "3", 5)],
)
def test_ranks_share_the_cores_unless_threads_are_given(monkeypatch, ranks, asked, given, found):
    monkeypatch.setattr(launcher, "usable_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    config = LaunchConfig(ranks=ranks, threads=asked)
    assert launcher._threads(config, {}) == found
    assert launcher._threads(config, {"OMP_NUM_THREADS": "7"}) == (asked or 7)


def test_nothing_survives_a_killed_launcher(tmp_path):
    """The second one goes with its agent, which cannot stop the ranks any more."""
    script = write(
        tmp_path,
        f"open({str(tmp_path)!r} + '/ready' + sys.argv[1], 'w').close()\ntime.sleep(60)\n",
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    first, second = (
        subprocess.Popen([*LZ, "launch", script, word], stderr=subprocess.DEVNULL, env=env)
        for word in "01"
    )
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    (agent,) = psutil.Process(second.pid).children()
    agent.suspend()
    for process in (first, second, agent):
        process.kill()
    for process in (first, second):
        process.wait()
    end = time.monotonic() + 10
    while left(script) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left(script)


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.02)


def test_refusals_come_before_anything_starts(tmp_path):
    script = write(tmp_path, "")
    with pytest.raises(CapacityError, match=r"4000 ranks are more than the \d+ usable cores"):
        launch(LaunchConfig(ranks=4000), [script])
    with pytest.raises(ConfigError, match=r"missing\.py: no such file"):
        launch(LaunchConfig(), ["missing.py"])
    with pytest.raises(ConfigError, match="no such program"):
        launch(LaunchConfig(), ["no-such-program-here"])
    with pytest.raises(ConfigError, match=r"launch `lz train run\.yaml`"):
        launch(LaunchConfig(), ["run.yaml"])
    with pytest.raises(ConfigError, match=r"words of their own.*: lz launch -n 2 lz train"):
        launch(LaunchConfig(), ["lz train run.yaml"])
    with pytest.raises(ConfigError, match="nothing to launch"):
        launch(LaunchConfig(), [])
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DistributedError, match=f"port {port} cannot be used"):
            launch(LaunchConfig(port=port), [script])


def test_a_program_that_does_not_load_is_not_started_again(tmp_path, capfd):
    for command in (["-m", "no_such_module_here"], ["-m", "no_such.module"]):
        assert launch(LaunchConfig(ranks=1), command) == 1
        said = capfd.readouterr().err
        assert "no_such" in said
        assert "restarting" not in said


def test_no_interface_is_told_before_anything_starts(tmp_path, monkeypatch):
    (tmp_path / "x.py").write_text("")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(DistributedError, match="no network interface 'eth77' that is up"):
        launch(LaunchConfig(ranks=2, oversubscribe=True), [str(tmp_path / "x.py")])


def test_a_path_to_an_installed_command_is_that_command():
    folder = Path(sys.executable).parent
    for name in ("lz", str(folder / "lz"), os.path.relpath(folder / "lz")):
        assert _resolve([name, "train", "a.yaml"], None) == ["entry", "lz", "train", "a.yaml"]
    assert _resolve(["/bin/sh", "-c", "true"], None)[0] == "program"


def test_config_names_what_is_wrong():
    with pytest.raises(ConfigError, match="ranks"):
        LaunchConfig(ranks=0)
    for nodes in ("two", "0", "3:1", "1:"):
        with pytest.raises(ConfigError, match=rf"^nodes: allowed is .*1:4 \(got '{nodes}'\)$"):
            LaunchConfig(nodes=nodes)
    with pytest.raises(ConfigError, match=r"^nodes: 2 machines .* --address and --port[^{]*$"):
        LaunchConfig(nodes="2")


def test_command_line_reports_errors_in_one_line(tmp_path):
    done = subprocess.run(
        [*LZ, "launch", "-n", "4000", write(tmp_path, "")], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert done.stderr.startswith("error: 4000 ranks are more than")
    assert len(done.stderr.splitlines()) == 1


def test_restarts_reads_the_environment(monkeypatch):
    assert restarts() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restarts() == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "two")
    with pytest.raises(ConfigError, match="TORCHELASTIC_RESTART_COUNT='two': allowed is a whole"):
        restarts()


def test_a_killed_agent_takes_its_own_processes_along_and_nobody_elses(tmp_path):
    script = write(
        tmp_path,
        "import pathlib, subprocess\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "subprocess.Popen(['sleep', '600s'], start_new_session=True)\n"
        "(folder / 'new').write_text(os.environ['TORCHELASTIC_RUN_ID'])\n"
        "(folder / 'new').rename(folder / 'id')\n"
        "while not (folder / 'go').exists():\n"
        "    time.sleep(0.01)\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        "time.sleep(600)\n",
    )
    ended: list[int] = []
    config, env = LaunchConfig(ranks=1, quiet=True), {"TMPDIR": str(tmp_path)}
    job = threading.Thread(
        target=lambda: ended.append(launch(config, [script, str(tmp_path)], env=env))
    )
    job.start()
    while not (tmp_path / "id").exists():
        time.sleep(0.01)
    # As of another job: all launches over several machines have one run id.
    other = {**os.environ, "TORCHELASTIC_RUN_ID": (tmp_path / "id").read_text()}
    bystander = subprocess.Popen(["sleep", "601"], env=other)
    try:
        (tmp_path / "go").touch()
        job.join(60)
        assert ended == [128 + signal.SIGKILL]
        assert bystander.poll() is None
        assert not left("600s")
    finally:
        bystander.kill()
        bystander.wait()
