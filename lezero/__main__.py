"""`python -m lezero` is the same program as `lz`."""

import sys

from lezero.cli.main import main
from lezero.memory import begin_tuned


def start() -> int:
    """The console scripts: `main` in a process whose C library is set for large blocks."""
    begin_tuned()
    return main()


if __name__ == "__main__":
    sys.exit(start())
