"""Quantization: weights (and activations) of 4 and 8 bits, measured before they are kept.

`verb` is where to begin: `quantize_` and `dequantize_`. Configs: `int8`, `int4`, `floats`, on
`scheme`. What a layer becomes: `modules` and `weights`. How it goes: `sites` finds the layers,
`work` goes through them, `replay` and `capture` (with `autocast`) bring the calibration data to
each block, `methods` and `observers` find codes and ranges, `scaling` and `folds` (with `evidence`)
move difficulty between layers, `input_rounding`, `speed`, `budget` and `report` judge, `journal`,
`buffers` and `spill` undo. Files: `layout` describes the layers, `saved` (with `forms`) writes and
reads them, `imported` (with `foreign` and `ordered`) reads GPTQ and AWQ, `gguf` reads GGUF,
`exported` writes compressed-tensors.
"""

from lezero.compress.quantize.floats import Fp8, Nf4
from lezero.compress.quantize.int4 import Int4Weight
from lezero.compress.quantize.int8 import Int8Weight, Int8WeightActivation
from lezero.compress.quantize.opened import is_quantized_folder, load_quantized
from lezero.compress.quantize.report import (
    LayerReport,
    QuantizationReport,
    quantization_report,
)
from lezero.compress.quantize.saved import save_quantized
from lezero.compress.quantize.scheme import Scheme
from lezero.compress.quantize.verb import dequantize_, quantize_

__all__ = [
    "Fp8", "Int4Weight", "Int8Weight", "Int8WeightActivation", "LayerReport", "Nf4",
    "QuantizationReport", "Scheme", "dequantize_", "is_quantized_folder", "load_quantized",
    "quantization_report", "quantize_", "save_quantized",
]  # fmt: skip
