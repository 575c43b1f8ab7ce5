"""Steps that run ahead of the host, so that an accelerator does not wait for it between tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Flight(ABC):
    """A step of one token a sequence that was launched, and whose tokens are not read yet.

    The engine launches the next step behind it and reads this one while that computes. At most two
    are unread; they are read in order, or dropped where nobody wants their tokens any more.
    """

    @abstractmethod
    def tokens(self) -> list[int]:
        """For each sequence the token with the largest logit, the lowest of equals; -1 where that
        logit is not a finite number. Waits for this step, not for later ones."""
