"""The tokenizer that a run leaves behind: whole, and as the run was trained."""

from __future__ import annotations

import json
from pathlib import Path

from lezero.data.special import read_object
from lezero.data.tokenizer import Tokenizer
from lezero.files.folder import aside, cannot_write, commit, sync_files


def save_as_trained(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `folder` anew, without what an earlier tokenizer left there.

    What a tokenizer puts around a text (<s> before it, for one) is left out: a run is trained
    without, and so must its exported and compressed copies be asked.
    """
    try:
        with aside(folder.parent, folder.name) as made:
            tokenizer.save(made)
            _leave_out_frame(made)
            sync_files(made)
            commit(made, folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _leave_out_frame(folder: Path) -> None:
    file, about = folder / "tokenizer.json", folder / "tokenizer_config.json"
    content = read_object(file, file.stat().st_size)  # which was written just now
    frame = content.get("post_processor")
    if frame is None or frame.get("type") == "ByteLevel":  # that one tells offsets alone
        return
    file.write_text(json.dumps({**content, "post_processor": None}, ensure_ascii=False), "utf-8")
    settings = {**read_object(about), "add_bos_token": False, "add_eos_token": False}
    about.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
