import shutil

import pytest
import torch
from safetensors.torch import load_file

from lezero.checkpoint import export_weights, find, load
from lezero.core.errors import CorruptError, FileError
from lezero.files import step_path, write_generation

FILE = "tensors-00000.safetensors"


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        write_generation(
            root, step, tensors={"model/w": torch.full((5,), step)}, documents={"n": step}
        )
    return root


def damage(path):
    raw = bytearray((path / FILE).read_bytes())
    raw[-1] ^= 4
    (path / FILE).write_bytes(raw)


def test_newest_good_is_used_and_the_rest_named(root, caplog):
    damage(step_path(root, 3))
    (step_path(root, 2) / "manifest.json").write_text("")
    for path in (root, root.parent, str(root)):
        loaded = load(path)
        assert (loaded.step, loaded.documents) == (1, {"n": 1})
        assert [path.name for path, _ in loaded.rejected] == ["step-00000003", "step-00000002"]
        assert "tensor 'model/w'" in loaded.rejected[0][1]
        assert FILE in loaded.rejected[0][1]
        assert "empty" in loaded.rejected[1][1]
        found = f"step 1 of {loaded.path}, {len(loaded.tensors)} tensors, 2 newer refused"
        assert repr(loaded) == f"<Loaded: {found}>"
    assert "step-00000003 is not used" in caplog.text


def test_a_named_generation_fails_loudly(root, tmp_path):
    damage(step_path(root, 3))
    with pytest.raises(CorruptError, match=f"{FILE}: tensor 'model/w'"):
        load(step_path(root, 3))
    renamed = tmp_path / "mine"
    shutil.copytree(step_path(root, 2), renamed)
    assert load(renamed).step == 2


def test_a_list_that_a_writer_has_overtaken_is_read_again(root, monkeypatch):
    listed = find.list_generations

    def slow(folder):
        found = listed(folder)
        if found[-1] == step_path(root, 3):  # the writer prunes before they are opened
            write_generation(root, 4, tensors={}, documents={})
            for path in found:
                shutil.rmtree(path)
        return found

    monkeypatch.setattr(find, "checkpoint_root", lambda path: path)  # it lists them, too
    monkeypatch.setattr(find, "list_generations", slow)
    loaded = load(root)
    assert (loaded.step, loaded.rejected) == (4, [])


def test_a_writer_that_is_always_faster_is_told_of(root, monkeypatch):
    listed = find.list_generations

    def overtaken(folder):
        (*_, newest) = found = listed(folder)
        write_generation(root, find.step_of(newest) + 1, tensors={}, documents={})
        for path in found:
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(find, "checkpoint_root", lambda path: path)
    monkeypatch.setattr(find, "list_generations", overtaken)
    monkeypatch.setattr(find, "_RELISTS", 5)
    with pytest.raises(FileError, match=r"5 times a generation was removed while it was read"):
        load(root)
    assert [path.name for path in listed(root)] == ["step-00000008"]


def test_none_good_lists_all(root, caplog):
    for step in (1, 2, 3):
        damage(step_path(root, step))
    with pytest.raises(CorruptError) as info:
        load(root)
    assert all(str(info.value).count(f"step-{step:08d}") == 1 for step in (1, 2, 3))
    assert not caplog.text, "what the error tells is told once"


def test_nothing_there(tmp_path):
    with pytest.raises(FileError, match="it is no folder"):
        load(tmp_path / "none")
    with pytest.raises(FileError, match="it holds no generation"):
        load(tmp_path)
    with pytest.raises(FileError, match="no such generation"):
        load(tmp_path / "step-00000009")


def test_export_as_fp32_by_parameter_name(tmp_path):
    tied = torch.randn(3, 2).bfloat16()
    tensors = {
        "model/embed.weight": tied,
        "model/head.weight": tied,
        "model/count": torch.tensor(7),
        "optimizer/embed.weight/exp_avg": torch.zeros(3, 2),
    }
    path = write_generation(tmp_path / "r", 1, tensors=tensors, documents={})
    names = export_weights(path, tmp_path / "weights.safetensors")
    assert names == ["count", "embed.weight", "head.weight"]
    read = load_file(tmp_path / "weights.safetensors")
    assert sorted(read) == names
    assert torch.equal(read["head.weight"], tied.float())
    assert read["count"].dtype == torch.int64
    empty = write_generation(tmp_path / "e", 1, tensors={}, documents={})
    with pytest.raises(FileError, match="no model weights"):
        export_weights(empty, tmp_path / "none.safetensors")


def test_two_tensors_never_get_one_name(tmp_path):
    tensors = {"model/a": torch.ones(2), "model/b": torch.zeros(2)}
    path = write_generation(tmp_path / "r", 1, tensors=tensors, documents={})
    with pytest.raises(FileError, match=r"names: calls both 'a' and 'b' 'x'; give each"):
        export_weights(path, tmp_path / "x.safetensors", lambda name: "x")
    assert not (tmp_path / "x.safetensors").exists()


def test_a_run_whose_folder_holds_checkpoints_too_is_named(root, tmp_path):
    write_generation(root.parent, 20, tensors={"model/w": torch.zeros(2)}, documents={})
    for use in (load, lambda path: export_weights(path, tmp_path / "out.safetensors")):
        with pytest.raises(FileError, match=r"of a run in checkpoints/; name .*, or one"):
            use(root.parent)
    assert load(root).step == 3
    assert load(step_path(root.parent, 20)).step == 20
