"""Whether a launcher started this process as one rank of several, as the environment says."""

from __future__ import annotations

import functools
import os

from lezero.core.errors import ConfigError
from lezero.core.log import logger

_KEYS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STARTERS = {
    "mpirun": "OMPI_COMM_WORLD_SIZE",  # which itself may be started by srun
    "srun": "SLURM_STEP_NUM_TASKS",
    "mpiexec": "PMI_SIZE",
}
"""What starts several processes and tells none of them of `_KEYS`; where it says how many."""
_LOG = logger("groups")


def number(key: str, missing: int = 0) -> int:
    """What the environment says of `key`; `ConfigError` for what is no whole number from 0."""
    given = os.environ.get(key, "")
    if given and not given.isdecimal():
        raise ConfigError(f"{key}={given!r}: allowed is a whole number from 0, as launchers set")
    return int(given or missing)


def launched() -> bool:
    """True when a launcher started this process as one rank of several."""
    return all(map(os.environ.get, _KEYS)) and number("WORLD_SIZE") > 1


def check_place() -> None:
    """Raises `ConfigError` for a RANK that is none of WORLD_SIZE, and for a rank of several that is
    not told where the others are: they would never meet, or each would work alone."""
    ranks, rank, _ = (number(key) for key in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
    missing = [key for key in _KEYS if not os.environ.get(key)]
    if ranks > 1 and missing and len(missing) < len(_KEYS) - 1:  # WORLD_SIZE alone says nothing
        raise ConfigError(
            f"WORLD_SIZE={ranks} without {' and '.join(missing)}: this process would work alone; "
            f"start it with `lz launch -n {ranks}` or torchrun, which set all of "
            f"{', '.join(_KEYS)}, or unset WORLD_SIZE"
        )
    if rank and "WORLD_SIZE" in missing:
        raise ConfigError(
            f"RANK={rank} without WORLD_SIZE: this process would work alone; start it with "
            "`lz launch` or torchrun, which set both, or unset RANK"
        )
    if rank >= max(ranks, 1):
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={ranks}: allowed is a rank from 0 to {max(ranks, 1) - 1}"
        )
    if not launched():
        _tell_of_others()


@functools.cache
def _tell_of_others() -> None:
    """Says once that processes which were started together do not work together."""
    for starter, key in _STARTERS.items():
        count = os.environ.get(key, "")
        if not count.isdecimal():
            continue
        if int(count) > 1:
            _LOG.warning(
                "%s started %s processes (%s) and told them nothing of each other: each works "
                "alone. For the ranks of one run have it start `lz launch` once on each machine",
                starter,
                count,
                key,
            )
        return
