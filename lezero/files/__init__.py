"""Safe files: atomic generations of tensors and documents with a digest for every byte."""

from lezero.files.folder import discard, read_small, write_file
from lezero.files.generation import (
    Generation,
    list_generations,
    read_documents,
    read_generation,
    split_shared,
    step_of,
    step_path,
    tensor_bytes,
    write_generation,
    write_tensor_file,
)
from lezero.files.sealed import check_json, seal, unseal
from lezero.files.tensorfile import check_tensor, empty_bytes

__all__ = [
    "Generation",
    "check_json",
    "check_tensor",
    "discard",
    "empty_bytes",
    "list_generations",
    "read_documents",
    "read_generation",
    "read_small",
    "seal",
    "split_shared",
    "step_of",
    "step_path",
    "tensor_bytes",
    "unseal",
    "write_file",
    "write_generation",
    "write_tensor_file",
]
