"""What transformers raises for a damaged folder is told as the folder's fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lezero.core.errors import FileError
from lezero.hub.foreign import load_foreign


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"vocab_size": "many"}, r"config\.json: transformers does not know it: .*vocab_size"),
        ({"n_head": 0}, r"transformers cannot load it: .*zero"),
    ],
)
def test_values_that_no_model_has(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 60}
    about = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **shape, **wrong}
    (tmp_path / "config.json").write_text(json.dumps(about))
    save_file({"transformer.wte.weight": torch.ones(60, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=said) as caught:
        load_foreign(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
