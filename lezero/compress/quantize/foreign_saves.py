"""What transformers' `save_pretrained` writes of a quantized model.

[Note: a folder that nobody opens by mistake]
`save_pretrained` writes the codes under names that `from_pretrained` does not look for: it would
give the layers new random weights, with a table in the log at most. So `save_pretrained` is wrapped
once a layer is quantized, or unpickled, where transformers is loaded. Of a model without quantized
layers it does what it did. Of others it says what the folder is, and writes a `quantization_config`
without a method into config.json, which `from_pretrained` refuses. It is not refused itself:
transformers' `Trainer` saves and resumes by it, and an error there would lose its run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lezero.core.log import logger

_LOG = logger("compress")
_MARK = {"quantized_by": "lz.quantize_", "instead": "lz.save_quantized"}
_READ = ("lezero", "gptq", "awq")  # what `load_quantized` makes quantized layers of


def mark_saves(quantized: Callable[[nn.Module], Any]) -> None:
    """Wraps `save_pretrained`, where transformers is loaded. quantized: whether a model is."""
    models = sys.modules.get("transformers.modeling_utils")
    kind = getattr(models, "PreTrainedModel", None)
    if kind is None or hasattr(kind.save_pretrained, "marks"):
        return
    save = kind.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        # Where adapters are saved, the model itself is not.
        if getattr(self, "_hf_peft_config_loaded", False) or not quantized(self):
            return save(self, save_directory, *args, **kwargs)
        _LOG.warning(
            "%s: from_pretrained will refuse this folder, since lz.quantize_ made the layers; "
            "lz.save_quantized(model, folder) writes one that lz.load_quantized opens; for one of "
            "from_pretrained, call lz.dequantize_(model) first",
            save_directory,
        )
        before = vars(self.config).get("quantization_config")
        self.config.quantization_config = dict(_MARK)
        try:
            return save(self, save_directory, *args, **kwargs)
        finally:
            del self.config.quantization_config
            if before is not None:
                self.config.quantization_config = before

    save_pretrained.marks = True  # type: ignore[attr-defined]
    kind.save_pretrained = save_pretrained


def forget_form(model: nn.Module) -> None:
    """Takes what says how the layers were stored from the configs of a model that is plain again:
    `save_pretrained` would write it. Where transformers itself quantized others it stays."""
    if getattr(model, "hf_quantizer", None) is not None:
        return
    for part in model.modules():
        held = getattr(getattr(part, "config", None), "__dict__", {})
        form = held.get("quantization_config")
        if isinstance(form, Mapping) and form.get("quant_method") in _READ:
            del held["quantization_config"]
