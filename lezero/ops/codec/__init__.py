"""Codecs of flat tensors in blocks: fewer bytes for a wire, with the error kept for the next time.

int8 and int4 with a scale a block, the sign alone, and 2:4 (two of each four kept). Encoding adds
the error of the last time, writes the payload and keeps what was lost, in one pass over memory;
decoding writes or adds. Kernels in C (AVX-512, AVX2, any) and Triton give the same bytes as
`reference.py`. `lezero.comm.codec` gives them their names and the codecs beside them.
"""

from __future__ import annotations

from lezero.ops.codec.layout import BLOCKS, FORMS
from lezero.ops.codec.op import FLOATS, decode, encode, payload_bytes

__all__ = ["BLOCKS", "FLOATS", "FORMS", "decode", "encode", "payload_bytes"]
