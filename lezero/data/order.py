"""The order of rows: a pure function of (seed, epoch, index), whatever the world size.

A shuffle of n rows needs no list of n numbers: a Feistel network over pairs (left, right) with
left < a, right < b, a·b ≥ n is a bijection of a·b numbers, and walking on from a number ≥ n until
one < n appears makes it a bijection of n (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002: cycle walking and the generalised Feistel cipher). With a ≈ √n, b = ⌈n/a⌉ almost no
number needs a second walk. A call costs some microseconds and no memory.
"""

from __future__ import annotations

from math import isqrt

from lezero.core.errors import ConfigError

FORMAT = 1
_ROUNDS = 10
_MASK = (1 << 64) - 1


class Order:
    """Shuffles `length` rows anew for each epoch. Equal on every machine and version."""

    def __init__(self, seed: int, length: int) -> None:
        if length < 1:
            raise ConfigError(f"an order needs at least one row, got {length}")
        self.seed, self.length = seed, length
        self._a = max(1, isqrt(length))
        self._b = -(-length // self._a)
        self._keys: tuple[int, tuple[int, ...]] = (-1, ())

    def index(self, epoch: int, i: int) -> int:
        """The row at place `i` (0 ≤ i < length) of an epoch."""
        if not 0 <= i < self.length:
            raise IndexError(f"place {i} of an order of {self.length} rows")
        if self._keys[0] != epoch:
            start = _mix(_mix(self.seed & _MASK) ^ epoch)
            self._keys = (epoch, tuple(_mix(start + r) for r in range(_ROUNDS)))
        while True:
            i = self._permute(i)
            if i < self.length:
                return i

    def at(self, sample: int) -> int:
        """The row of a sample counted over all epochs."""
        return self.index(*divmod(sample, self.length))

    def _permute(self, value: int) -> int:
        left, right = divmod(value, self._b)
        keys = self._keys[1]
        for r in range(0, _ROUNDS, 2):
            left = (left + _mix(keys[r] ^ right)) % self._a
            right = (right + _mix(keys[r + 1] ^ left)) % self._b
        return left * self._b + right


def _mix(value: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014): 64 bits to 64 well-mixed bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
