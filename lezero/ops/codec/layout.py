"""Where what lies in a payload: the same arithmetic as `codec.h`.

A payload of `numel` elements in blocks of `block` (the last one may be shorter), its parts one
after the other:

    scales  one bf16 a block (2:4-bf16: none)
    kept    2:4 only: one bit an element, set for the two kept of each four
    data    int8: a byte an element; int4: element 2i in the low half of byte i, plus 8; sign: one
            bit an element, set for negative; 2:4: the kept values in order, as bf16, int8 or int4

Bits go from the lowest of each byte up. What pads the last byte is what zeros would encode to.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMS = ("int8", "int4", "sign", "2:4-bf16", "2:4-int8", "2:4-int4")
"""The block forms; the place of each is its number in `codec.h`."""
BLOCKS = (32, 64, 128, 256, 512, 1024)
"""The blocks that every kernel takes, in elements."""


@dataclass(frozen=True)
class Layout:
    """The parts of one payload, in bytes; `total` is the exact size of the payload."""

    form: str
    numel: int
    block: int

    @property
    def sparse(self) -> bool:
        return self.form.startswith("2:4")

    @property
    def blocks(self) -> int:
        return -(-self.numel // self.block)

    @property
    def groups(self) -> int:
        """Fours of elements, the last one perhaps short."""
        return -(-self.numel // 4)

    @property
    def scales(self) -> int:
        return 0 if self.form == "2:4-bf16" else 2 * self.blocks

    @property
    def kept(self) -> int:
        return -(-self.groups // 2) if self.sparse else 0

    @property
    def data(self) -> int:
        """Bytes of the values themselves."""
        return {
            "int8": self.numel,
            "int4": -(-self.numel // 2),
            "sign": -(-self.numel // 8),
            "2:4-bf16": 4 * self.groups,
            "2:4-int8": 2 * self.groups,
            "2:4-int4": self.groups,
        }[self.form]

    @property
    def total(self) -> int:
        return self.scales + self.kept + self.data
