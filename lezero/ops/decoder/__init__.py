"""All layers of a decoder in one call, over a cache of blocks that sequences share."""

from lezero.ops.decoder.op import BLOCK, MOST_TOKENS, BlockCache, Decoder, Shape, block_bytes
from lezero.ops.decoder.weights import Beginning, Ending, LayerWeights, Weight

__all__ = [
    "BLOCK",
    "MOST_TOKENS",
    "Beginning",
    "BlockCache",
    "Decoder",
    "Ending",
    "LayerWeights",
    "Shape",
    "Weight",
    "block_bytes",
]
