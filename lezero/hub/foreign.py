"""Causal language models of `transformers` that LeZero has no code of its own for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lezero.compress.quantize import is_quantized_folder
from lezero.core.errors import FileError, need_extra
from lezero.core.paths import expand_home
from lezero.models.hf_config import SUPPORTED, UNFINISHED, from_hf
from lezero.models.huggingface import read_json, weight_files


def is_foreign(place: str) -> bool:
    """Whether this is a Hugging Face folder of a type that `lezero.models` does not have, or of a
    form of one that it cannot express, as other angles or layers of different attention."""
    path = Path(expand_home(place))
    if not (path / "config.json").is_file() or is_quantized_folder(path):
        return False
    data = read_json(path / "config.json")
    if data.get("model_type") not in SUPPORTED:
        return not data.get(UNFINISHED)  # which the reader of our own tells
    if data.get("quantization_config") is not None:
        return False  # the reader of plain weights says what opens it
    try:
        from_hf(data)
    except FileError:
        return True
    return False


def load_foreign(place: str, dtype: torch.dtype | None = None) -> Any:
    """The model in a Hugging Face folder, from safetensors, with the code of transformers alone.

    dtype: of the weights; None: as they are stored. Raises `FileError` for what is no causal
    language model, or is damaged; `MissingExtraError` without transformers.
    """
    place = expand_home(place)
    path = Path(place)
    weight_files(path)  # never pickle
    try:
        import transformers
    except ImportError as error:
        raise need_extra("hf", "transformers", f"{place}: this type of model") from error
    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(place, **safe)
    except MemoryError:
        raise
    except Exception as error:  # each type of model checks its values in a way of its own
        raise FileError(f"{path / 'config.json'}: transformers does not know it: {error}") from None
    _refuse_what_is_not_causal(config, place)
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            *(place,),
            **safe,
            config=config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:
        raise FileError(f"{place}: transformers cannot load it: {error}") from None
    model, info = loaded
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:4])
        raise FileError(f"{place}: {len(info['missing_keys'])} weights are missing: {missing}")
    return model.eval()


def _refuse_what_is_not_causal(config: Any, place: str) -> None:
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    bidirectional = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", False
    )
    named = getattr(config, "architectures", None) or []
    # Some types are read as others (Mistral with layer_types as Ministral), whose names differ.
    goes_on = kind in causal and not set(named).isdisjoint(causal.values())
    if not goes_on or bidirectional or config.is_encoder_decoder:
        raise FileError(
            f"{place}: model_type {kind!r} with architectures {named} is no causal language model, "
            "which could continue a text; lz serve takes encoders of BERT's kind, lz.quantize_ and "
            "lz serve --module any module"
        )
