import mmap
from pathlib import Path

import pytest
import torch

from lezero.memory import huge_pages
from lezero.memory.huge_pages import HUGE, HugePages, given, huge_room


@pytest.mark.skipif(not given(), reason="this system gives no huge pages")
def test_tensors_stay_what_they_are_and_lie_side_by_side() -> None:
    torch.manual_seed(0)
    made = [
        torch.randn(300, 7),
        torch.randint(0, 255, (5, 4, 16, 4), dtype=torch.uint8),
        torch.randn(64, 32, dtype=torch.bfloat16).T,
        torch.randn(3, 1, 16).half(),
        torch.nn.Parameter(torch.tensor(2.5)),
    ]
    kept = [x.detach().clone() for x in made]
    module = torch.nn.Module()
    module.register_buffer("codes", made[1])
    HugePages().move(made)
    for x, before in zip(made, kept, strict=True):
        assert x.dtype == before.dtype
        assert torch.equal(x, before)
        assert x.is_contiguous()
        assert x.data_ptr() % 64 == 0
    assert made[0].data_ptr() % HUGE == 0
    assert module.codes.data_ptr() == made[1].data_ptr()
    assert 0 < made[-1].data_ptr() - made[0].data_ptr() < sum(x.nbytes + 64 for x in kept)


@pytest.mark.skipif(not given(), reason="this system gives no huge pages")
def test_what_is_larger_than_a_slab_has_one_of_its_own() -> None:
    pages = HugePages()
    made = [torch.ones(n, dtype=torch.uint8) for n in (31 << 20, 40 << 20, 100)]
    pages.move(made)
    assert all(x.sum() == x.numel() for x in made)
    assert made[1].data_ptr() % HUGE == 0


@pytest.mark.skipif(not given(), reason="this system gives no huge pages")
def test_room_takes_memory_as_it_is_written() -> None:
    statm = Path("/proc/self/statm")
    before = int(statm.read_text().split()[1])
    room = huge_room(1 << 30)
    assert room.shape == (1 << 30,)
    assert room.dtype == torch.uint8
    assert room.data_ptr() % HUGE == 0
    room[5 << 20 : 7 << 20] = 1
    taken = mmap.PAGESIZE * (int(statm.read_text().split()[1]) - before)
    assert 2 << 20 <= taken < 64 << 20


def test_room_of_a_system_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "given", lambda: False)
    assert huge_room(1000).shape == (1000,)
    monkeypatch.setattr(huge_pages, "given", lambda: True)
    with pytest.raises(RuntimeError, match="memory"):
        huge_room(1 << 50)


def test_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not given(tmp_path / "none")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert not given(tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert given(tmp_path / "enabled") is hasattr(mmap, "MADV_HUGEPAGE")
    empty, meta = torch.empty(0), torch.empty(3, device="meta")
    HugePages().move([empty, meta])
    assert meta.is_meta
    x = torch.ones(1000)
    before = x.data_ptr()

    def none(size: int) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(huge_pages, "_slab", none)
    HugePages().move([x])
    assert x.data_ptr() == before
    monkeypatch.setattr(huge_pages, "given", lambda: False)
    HugePages().move([x])
    assert x.data_ptr() == before
