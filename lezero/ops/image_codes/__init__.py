"""Images as codes of 8 bits, with one scale and zero point: what int8 convolutions read."""

from lezero.ops.image_codes.op import image_codes

__all__ = ["image_codes"]
