"""Wires between ranks: what moves (codecs), which way (topologies) and what was lost (feedback)."""

from typing import TYPE_CHECKING

from lezero.core.lazy import lazy as _lazy

_NAMES = {
    "Codec": "lezero.comm.codec",
    "Link": "lezero.comm.link",
    "Mesh": "lezero.comm.mesh",
    "Payload": "lezero.comm.payload",
    "Pending": "lezero.comm.pending",
    "Span": "lezero.comm.route",
    "Wire": "lezero.comm.wire",
    "compress": "lezero.comm.payload",
    "decompress": "lezero.comm.payload",
}

__all__ = [*_NAMES]
__getattr__, __dir__ = _lazy(__name__, _NAMES)

if TYPE_CHECKING:
    from lezero.comm.codec import Codec as Codec
    from lezero.comm.link import Link as Link
    from lezero.comm.mesh import Mesh as Mesh
    from lezero.comm.payload import Payload as Payload
    from lezero.comm.payload import compress as compress
    from lezero.comm.payload import decompress as decompress
    from lezero.comm.pending import Pending as Pending
    from lezero.comm.route import Span as Span
    from lezero.comm.wire import Wire as Wire
