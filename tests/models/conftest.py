from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are tiny; two threads that wait for each other only make them slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_progress_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers shows progress through tqdm, whose monitor thread would outlive the test."""
    try:
        import tqdm
    except ImportError:
        return
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
