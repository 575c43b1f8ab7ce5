"""The folder of a run: what lies in it, written by rank 0 alone.

config.yaml  data.json (what was read and left out)  decisions.json  metrics.jsonl
forecast.json  hardware.json  sample.json  report.html
checkpoints/ (generations)  tokenizer/ (Hugging Face layout)
.launch (the launchers that started the ranks which the generations are of)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lezero.core import groups
from lezero.core.config import dump_yaml
from lezero.core.decisions import Decisions
from lezero.core.errors import FileError
from lezero.core.flags import flag
from lezero.data.detokenizer import Detokenizer
from lezero.files.folder import sync_folder
from lezero.models import generate

if TYPE_CHECKING:
    from lezero.data import Tokenizer
    from lezero.models import Transformer
    from lezero.train.config import ReportConfig, RunConfig


_WAIT_S = 10.0
"""A rank that was killed may take a moment to be gone, with its lock."""
_BUSY = {errno.EAGAIN, errno.EACCES}
_WRITTEN = (
    *("data.json", "metrics.jsonl", "decisions.json", "forecast.json", "hardware.json"),
    *("sample.json", "report.html", "tokenizer", "checkpoints"),
)
_MARK = "# Every value of this run, which writes this file anew each time it starts."


class RunFolder:
    """Paths and small files of one run; from `create` to `release` no other run may use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._taker = 0
        self._launchers: set[str] = set()
        self._again = False
        """Whether a launcher started its ranks before."""
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer"
        self.metrics = path / "metrics.jsonl"
        self.report = path / "report.html"
        self.launch = path / ".launch"

    def create(self) -> None:
        """Makes the folder and takes it for this run.

        `FileError` on every rank when it cannot be written, or another run is at work in it.
        """
        mark = flag("LEZERO_LAUNCH") or flag("TORCHELASTIC_RUN_ID")
        starts = max(flag("LEZERO_STARTS"), flag("TORCHELASTIC_RESTART_COUNT"))
        found = groups.gather_objects((mark, starts))
        # Machines come and go: a launch is the same while one of its launchers is.
        self._launchers, self._again = {mark for mark, _ in found}, any(n for _, n in found)
        problem = self._problem() if groups.is_main() else ""
        problem = groups.broadcast_object(problem)
        if problem:
            raise FileError(problem)

    def _problem(self) -> str:
        """Why this run cannot have the folder; empty when it has it now."""
        try:
            if self.path.exists() and not self.path.is_dir():
                return f"run: {self.path} is a file; name a folder, which may be new"
            if self.path.is_symlink() and not self.path.exists():
                return (
                    f"run: {self.path} is a link that leads nowhere, or into itself (to "
                    f"{os.readlink(self.path)}); remove it, or name another folder"
                )
            if stranger := self._stranger():
                return (
                    f"run: {self.path / stranger} was not written by a run, as far as it says, and "
                    "this one would write over it; name another folder, or move that away"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            write_aside(self.path / ".writable", "")
            (self.path / ".writable").unlink()
            taken = self._take()
            if taken and not self._again:
                self.launch.unlink(missing_ok=True)
        except OSError as error:
            return f"run: {self.path} cannot be written ({error.strerror or error})"
        except UnicodeEncodeError:
            named = ascii(str(self.path))
            return f"run: this locale cannot write the name {named}; set PYTHONUTF8=1"
        if taken:
            return ""
        return (
            f"run: another run is at work in {self.path}; name another folder, or end that one "
            "first"
        )

    def _stranger(self) -> str:
        """What of somebody else's this run would write to, first. A run writes its config before
        all others, and marks it."""
        config = self.path / "config.yaml"
        if config.exists():
            return "" if _is_marked(config) else config.name
        return next((name for name in _WRITTEN if (self.path / name).exists()), "")

    def release(self) -> None:
        """Lets other runs use the folder; the end of the process does it too."""
        if self._lock is not None:
            if self._taker == os.getpid():
                with suppress(OSError):  # a forked child that lives on has the lock with its copy
                    fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def _take(self) -> bool:
        """Whether the folder is ours now; file systems without locks let everybody in."""
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _BUSY and time.monotonic() < until:
                    time.sleep(0.2)
                    continue
                if error.errno in _BUSY:
                    os.close(lock)
                    return False
            self._lock, self._taker = lock, os.getpid()
            return True

    def begin(self) -> None:
        """Writes that the generations here are those that this launch goes on from."""
        if groups.is_main():
            write_aside(self.launch, "\n".join(sorted(self._launchers)))

    def begun(self) -> bool:
        """Whether this launch has begun here before its ranks were started again; rank 0 asks."""
        if not self._again or not self.launch.exists():
            return False
        return not self._launchers.isdisjoint(self.launch.read_text("utf-8").split("\n"))

    def write_config(self, config: RunConfig) -> None:
        """Writes the resolved config."""
        if groups.is_main():
            text = f"{_MARK}\n{dump_yaml(config.to_dict())}"
            write_aside(self.path / "config.yaml", text)

    def write_json(self, name: str, data: Any) -> None:
        if groups.is_main():
            write_aside(self.path / name, json.dumps(data, indent=1) + "\n")

    def write_decisions(self, decisions: Decisions) -> None:
        self.write_json("decisions.json", decisions.to_json())

    def write_samples(self, model: Transformer, tokenizer: Tokenizer, config: ReportConfig) -> None:
        """Lets the trained model continue the prompts of the config."""
        samples = []
        model.eval()
        for prompt in config.samples if config.sample_tokens else ():
            tokens = tokenizer.encode(prompt)[-max(1, model.config.longest // 2) :]
            tokens = tokens or [tokenizer.eos]  # an empty prompt: as at the beginning of a text
            room = min(config.sample_tokens, model.config.longest - len(tokens))
            if room > 0:
                new = generate(model, tokens, room, temperature=0.8, top_k=50)[0]
                text = Detokenizer(tokenizer.decode, tokens)  # many drop a space before a text
                told = "".join(map(text.add, new)) + text.finish()
                samples.append({"prompt": prompt, "text": told})
        if groups.is_main():  # the others are here where a forward pass needs every rank
            self.write_json("sample.json", samples)

    @staticmethod
    def changes(saved: dict[str, Any], now: RunConfig) -> list[str]:
        """What differs from the checkpoint's config and can change what is trained."""
        old, new = flat(saved), flat(now.to_dict())
        return [
            f"{key}: {old.get(key)!r} → {new.get(key)!r}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and key.split(".")[0] not in _HARMLESS
        ]


def _is_marked(config: Path) -> bool:
    """Whether a file is one of `write_config`."""
    try:
        with config.open(encoding="utf-8") as file:
            return file.readline(len(_MARK) + 1).rstrip("\n") == _MARK
    except (OSError, ValueError):
        return False


_HARMLESS = ("run", "checkpoint", "report", "validation")


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, by their keys joined with dots."""
    if not isinstance(data, dict):
        return {prefix.rstrip("."): data}
    return {k: v for key in data for k, v in flat(data[key], f"{prefix}{key}.").items()}


def write_aside(path: Path, text: str) -> None:
    """Writes a small text file in one step: whoever reads sees the old one or the new one, after a
    power cut too."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        error.filename = str(path)  # a write itself does not say where
        raise
