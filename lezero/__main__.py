"""`python -m lezero` is the same program as `lz`."""

import sys

from lezero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
