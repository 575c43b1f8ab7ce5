"""Text to batches: reading, tokenizers, token files, an order without state, loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lezero.core.lazy import lazy

if TYPE_CHECKING:
    from lezero.data.build import Data, prepare
    from lezero.data.config import DataConfig, TokenizerConfig
    from lezero.data.detokenizer import Detokenizer
    from lezero.data.loader import EvalLoader, Loader, Rows
    from lezero.data.order import Order
    from lezero.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Data",
    "DataConfig",
    "Detokenizer",
    "EvalLoader",
    "Loader",
    "Order",
    "Rows",
    "Tokenizer",
    "TokenizerConfig",
    "load_tokenizer",
    "prepare",
]

__getattr__, __dir__ = lazy(
    "lezero.data",
    {
        "Data": "lezero.data.build",
        "DataConfig": "lezero.data.config",
        "Detokenizer": "lezero.data.detokenizer",
        "EvalLoader": "lezero.data.loader",
        "Loader": "lezero.data.loader",
        "Order": "lezero.data.order",
        "Rows": "lezero.data.loader",
        "Tokenizer": "lezero.data.tokenizer",
        "TokenizerConfig": "lezero.data.config",
        "load_tokenizer": "lezero.data.tokenizer",
        "prepare": "lezero.data.build",
    },
)
