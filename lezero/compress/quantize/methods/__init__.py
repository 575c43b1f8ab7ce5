"""Methods: how the codes of a weight are found."""

from lezero.compress.quantize.methods.awq import AWQ
from lezero.compress.quantize.methods.gptq import GPTQ
from lezero.compress.quantize.methods.hqq import HQQ
from lezero.compress.quantize.methods.method import Method, check_method, methods
from lezero.compress.quantize.methods.nearest import Nearest

__all__ = ["AWQ", "GPTQ", "HQQ", "Method", "Nearest", "check_method", "methods"]
