"""What preparing one large text takes."""

from __future__ import annotations

from pathlib import Path

from lezero.data import DataConfig, prepare
from lezero.profiler import MemorySampler
from tests.ranks import RankPool

SIZE = 24 << 20


def prepared(folder: str) -> tuple[int, int]:
    """In a process of its own: tokens of a text of 24 MiB, and the memory that they took."""
    path = Path(folder) / "text.txt"
    line = "The quick brown fox jumps over the lazy dog, again and again and again.\n"
    path.write_text(line * (SIZE // len(line)))
    config = DataConfig(train=[str(path)], validation=0.0, sequence=64, tokenizer="bytes")
    with MemorySampler() as memory:
        rows = prepare(config, Path(folder) / "cache").train
    return rows.tokens, memory.above


def test_a_large_text_takes_a_few_times_its_size(tmp_path: Path, ranks: RankPool) -> None:
    ((tokens, above),) = ranks(1, prepared, str(tmp_path))
    assert tokens > 0.99 * SIZE
    assert above < 5 * SIZE, above / SIZE
