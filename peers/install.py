"""Sets up `.peers`, an environment apart from `.venv` with what the benchmarks compare with.

Each peer is installed on its own. One that cannot be installed or imported is a row that says so,
here and in the benchmarks, and the others go on; the status is 1 then, so that `make peers` tries
again. torch is the version of `.venv` for all of them.

Run: python peers/install.py [the package index that torch comes from]
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".peers"
PYTHON = FOLDER / "bin" / "python"
ISOLATED = ("llama-cpp-python",)  # built with tools that only its sources know
FIRST = ("setuptools", "numpy", "psutil")


def peers() -> list[tuple[str, str]]:
    """(package, module) of each peer of `peers.txt`."""
    lines = (ROOT / "peers" / "peers.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return [(package, module) for package, module in rows]


def pip_install(*packages: str, index: str = "") -> str:
    """Installs packages in their tested versions; returns "" or the reason it failed."""
    constraints = ROOT / "peers" / "constraints.txt"
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    if packages[0] not in ISOLATED:
        command.append("--no-build-isolation")
    command += ["--index-url", index] if index else []
    command += ["-c", str(constraints), *packages]
    # DeepSpeed would otherwise look for a CUDA compiler while it is installed.
    return _run(command, {"DS_BUILD_OPS": "0", "CMAKE_ARGS": llama_cpp_build()})


def llama_cpp_build(cpuinfo: str = "/proc/cpuinfo") -> str:
    """How llama.cpp is built for this processor: all it has but AMX, which crashes on some
    virtual machines."""
    try:
        lines = Path(cpuinfo).read_text().splitlines()
    except OSError:
        return ""
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    wanted = {
        **{"AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX512": "avx512f"},
        **{"AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16"},
    }
    on = [f"-DGGML_{name}=ON" for name, flag in wanted.items() if flag in flags]
    return " ".join(["-DGGML_NATIVE=OFF", *on])


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
    return "" if done.returncode == 0 else errors[-1].strip()


def main(torch_index: str = "") -> int:
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=True)
    print("setting up .peers (a few minutes the first time)", flush=True)
    failed = pip_install(*FIRST) or pip_install("torch", index=torch_index)
    if failed:
        print(f"error: .peers cannot hold torch: {failed}", file=sys.stderr)
        return 1
    status = 0
    for package, module in peers():
        reason = pip_install(package, "torch")
        if not reason:
            reason = _run([str(PYTHON), "-c", f"import {module}"])
        print(f"{package:<12} {'ready' if not reason else 'missing: ' + reason}", flush=True)
        status |= bool(reason)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
