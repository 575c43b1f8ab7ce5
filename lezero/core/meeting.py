"""Whether what listens at the ranks' meeting point is rank 0."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

from lezero.core import sockets
from lezero.core.errors import DistributedError

ANSWER_S = 15.0


def need_store(host: str, port: int, timeout_s: float) -> None:
    """Raises where rank 0's place is taken by something that does not answer.

    torch's store waits for an answer for ever, whatever its timeout, once it is connected.
    """
    import torch.distributed as dist

    if sockets.connected_to(port):  # an old connection could not be told from the new one
        return
    problem: list[Exception] = []

    def ask() -> None:
        try:
            limit = timedelta(seconds=timeout_s)
            dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)
        except Exception as error:
            problem.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    connected = None
    while asking.is_alive():
        asking.join(0.02 if connected is None else 0.5)
        if connected is None and sockets.connected_to(port):
            connected = time.monotonic()
        if connected is not None and time.monotonic() - connected > ANSWER_S:
            raise DistributedError(
                f"what listens there has not answered for {ANSWER_S:.0f} s and is not rank 0"
            )
    if problem:
        raise problem[0]
