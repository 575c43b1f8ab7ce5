"""Safe files: atomic generations of tensors and documents with a digest for every byte."""

from lezero.files.folder import discard, read_small, write_file
from lezero.files.generation import (
    Generation,
    Slice,
    check_space,
    commit_parts,
    list_generations,
    split_shared,
    step_of,
    step_path,
    tensor_bytes,
    write_generation,
    write_part,
    write_tensor_file,
    write_tensor_stream,
)
from lezero.files.reading import Rows, Select, read_documents, read_generation
from lezero.files.sealed import check_json, seal, unseal
from lezero.files.tensorfile import Form, check_tensor, empty_bytes, mapped_bytes

__all__ = [
    "Form",
    "Generation",
    "Rows",
    "Select",
    "Slice",
    "check_json",
    "check_space",
    "check_tensor",
    "commit_parts",
    "discard",
    "empty_bytes",
    "list_generations",
    "mapped_bytes",
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
    "write_part",
    "write_tensor_file",
    "write_tensor_stream",
]
