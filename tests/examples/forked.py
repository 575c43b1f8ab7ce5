"""Runs scripts one after another, each in a process that is forked once torch is loaded.

Reads a JSON line a script, {"path", "folder", "output"}, and answers with its exit status. Most of
what a short script takes is importing torch.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback


def child(path: str, folder: str, output: str) -> int:
    """Runs the script as `python path` in `folder`; returns its status."""
    os.chdir(folder)
    os.environ["TMPDIR"] = folder
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(number, target)
    sys.argv, sys.path[0] = [path], os.path.dirname(path)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    import torch._dynamo  # noqa: F401

    import lezero  # noqa: F401

    gc.freeze()  # what is loaded is not collected, and so not copied, in each child
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = child(**asked)
            import atexit

            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
