"""Named sizes for demos, forecasts and benchmarks."""

from __future__ import annotations

import difflib
from typing import Any

from lezero.core.errors import ConfigError
from lezero.models.config import TransformerConfig

_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"vocab": 2048, "dim": 128, "layers": 4, "heads": 4, "context": 256},
    "small": {"vocab": 8192, "dim": 256, "layers": 10, "heads": 8, "context": 256},
    "26m": {"vocab": 2048, "dim": 512, "layers": 8, "heads": 8, "context": 256},
    "135m": {
        **{"vocab": 49152, "dim": 576, "layers": 30, "heads": 9, "kv_heads": 3, "ffn": 1536},
        **{"context": 8192, "rope_theta": 100_000.0},
    },
}
PRESETS = tuple(_PRESETS)


def preset(name: str, **overrides: Any) -> TransformerConfig:
    """The config called `name` with some fields replaced.

    "tiny" has 1.0 million parameters, "small" 10, "26m" 26 (the size of the benchmarks: 8 layers,
    512 wide) and "135m" 135 (the shape of SmolLM2-135M). All tie the head to the embedding.
    """
    if name not in _PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(PRESETS)}"
        raise ConfigError(f"there is no model preset '{name}'; {hint}")
    return TransformerConfig(**{**_PRESETS[name], **overrides})
