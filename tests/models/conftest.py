import pytest


@pytest.fixture(autouse=True)
def _no_progress_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers shows progress through tqdm, whose monitor thread would outlive the test."""
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
