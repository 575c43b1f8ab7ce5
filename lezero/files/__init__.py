"""Safe files: atomic generations of tensors and documents with a digest for every byte."""

from lezero.files.folder import discard, write_file
from lezero.files.generation import (
    Generation,
    list_generations,
    read_documents,
    read_generation,
    step_of,
    step_path,
    tensor_bytes,
    write_generation,
    write_tensor_file,
)
from lezero.files.sealed import check_json, seal, unseal

__all__ = [
    "Generation",
    "check_json",
    "discard",
    "list_generations",
    "read_documents",
    "read_generation",
    "seal",
    "step_of",
    "step_path",
    "tensor_bytes",
    "unseal",
    "write_file",
    "write_generation",
    "write_tensor_file",
]
