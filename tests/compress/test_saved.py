"""Quantized models as folders: bitwise back, and every kind of damage refused."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import prune

import lezero as lz
from lezero.compress.quantize import load_quantized, save_quantized
from lezero.compress.quantize.modules import QuantizedLinear
from lezero.compress.quantize.speed import LayerSpeed
from lezero.data.tokenizer import bytes_tokenizer
from lezero.files import seal, unseal, write_generation
from lezero.jobs.writer import open_writer
from lezero.models import Transformer, TransformerConfig, save_hf
from lezero.nn.meta import parameters_on_meta
from tests.compress.test_quantize import small, tokens

SCHEMES = {
    "int8": lz.Int8Weight(),
    "w8a8 static": lz.Int8WeightActivation(activations="tensor", smooth=0.5),
    "int4": lz.Int4Weight(group=32),
    "nf4": lz.Nf4(group=32),
    "fp8 token": lz.Fp8(activations="token"),
}


def saved(folder: Path, scheme: Any = None, tied: bool = True) -> Transformer:
    model = small(tied)
    lz.quantize_(model, scheme or lz.Int4Weight(group=32), data=tokens(), objective="size")
    save_quantized(model, folder)
    return model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "q"
    saved(folder)
    return folder


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "q"))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()[0])


def change(folder: Path, edit: Any) -> None:
    """A manifest as a stranger would write it: changed, with a right digest."""
    path = folder / "manifest.json"
    fields = unseal(path.read_bytes(), "manifest", 1, "0")
    edit(fields)
    fields.pop("digest")
    path.write_bytes(seal(fields.pop("format"), fields))


@pytest.mark.parametrize("name", SCHEMES)
def test_what_comes_back_is_bitwise_the_same(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "q", SCHEMES[name], tied=name != "int8")
    found = load_quantized(tmp_path / "q")
    assert isinstance(found, Transformer)
    one, two = model.state_dict(), found.state_dict()
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert value.dtype == two[key].dtype
        assert torch.equal(value.view(torch.uint8), two[key].view(torch.uint8)), key
    assert torch.equal(logits(model), logits(found))
    with pytest.raises(lz.OrderError, match="quantized already"):
        lz.quantize_(found, lz.Int8Weight())


def test_any_module_is_loaded_into_the_float_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 8),
        )  # fmt: skip

    model, x = build().eval(), torch.randn(4, 3, 6, 6)
    filtered = lz.quantize_(
        *(build().eval(), lz.Int8WeightActivation()), data=[x], objective="size", filter="[!0]"
    )
    assert torch.equal(filtered[0].weight, model[0].weight)
    assert type(filtered[1]) is nn.BatchNorm2d
    monkeypatch.setattr(LayerSpeed, "keeps", lambda self, name, *_: name != "0")
    monkeypatch.setattr("lezero.compress.quantize.verb._WHOLE_MARGIN", 1e9)
    for objective in ("size", "speed"):  # the convolution stays, with its batch norm folded
        made = lz.quantize_(build().eval(), lz.Int8WeightActivation(), data=[x],
                            objective=objective)  # fmt: skip
        assert (type(made[0]) is nn.Conv2d) == (objective == "speed")
        save_quantized(made, tmp_path / objective)
        found = load_quantized(tmp_path / objective, build())
        assert torch.equal(made(x), found(x))
        wanted = lz.dequantize_(copy.deepcopy(made)).state_dict()
        given = lz.dequantize_(found).state_dict()
        assert wanted.keys() == given.keys() == build().state_dict().keys()
        assert all(torch.equal(value, given[name]) for name, value in wanted.items())
    save_quantized(made, tmp_path / "m")
    with pytest.raises(lz.FileError, match="build it"):
        load_quantized(tmp_path / "m")
    other = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(lz.FileError, match=r"/.*: the quantized layer .* none of the model's"):
        load_quantized(tmp_path / "m", other)
    assert type(other[0]) is nn.Linear
    with pytest.raises(lz.OrderError, match="no layer is quantized"):
        save_quantized(model, tmp_path / "n")


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("around", [nn.utils.weight_norm, nn.utils.spectral_norm, pruned])
def test_a_layer_that_computes_its_weight_is_loaded_beside_quantized_ones(
    around: Any, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 32), around(nn.Linear(32, 32)))

    model, x = lz.quantize_(build(), lz.Int8Weight(), objective="size").eval(), torch.randn(4, 32)
    save_quantized(model, tmp_path / "q")
    with parameters_on_meta():
        on_meta = build()
    for given in (build(), on_meta):
        assert torch.equal(load_quantized(tmp_path / "q", given)(x), model(x))


def test_a_parameter_keeps_the_strides_that_the_model_has(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        conv = nn.ConvTranspose2d(3, 32, 3, bias=False).to(memory_format=torch.channels_last)
        return nn.Sequential(conv, nn.Flatten(), nn.Linear(2048, 8)).eval()

    model, x = lz.quantize_(build(), lz.Int8Weight(), objective="size"), torch.randn(2, 3, 6, 6)
    save_quantized(model, tmp_path / "q")
    with parameters_on_meta():
        on_meta = build()
    for given in (build(), on_meta):
        found = load_quantized(tmp_path / "q", given)
        assert found[0].weight.stride() == model[0].weight.stride() != (288, 9, 3, 1)
        assert torch.equal(found(x), model(x))


def test_folders_are_replaced_only_where_they_are_ours(copied: Path, tmp_path: Path) -> None:
    model = load_quantized(copied)
    save_quantized(model, tmp_path / "q")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    save_quantized(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load_quantized(tmp_path / "empty").config == model.config
    shutil.rmtree(tmp_path / "empty")
    (tmp_path / "link").unlink()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(lz.FileError, match="holds other files"):
        save_quantized(model, tmp_path / "mine")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["mine", "q"]
    (copied / "notes.md").write_text("which of them was best")
    with pytest.raises(lz.FileError, match=r"other files \(notes\.md\), which would be lost"):
        save_quantized(model, copied)
    assert (copied / "notes.md").is_file()


def a_checkpoint(folder: Path) -> None:
    made = write_generation(folder, 7, tensors={"w": torch.ones(3)}, documents={"model": {}})
    made.rename(folder / "made")


def a_web_page(folder: Path) -> None:
    (folder / "made").mkdir(parents=True)
    (folder / "made/manifest.json").write_text("{}")
    (folder / "made/app.js").write_text("start()")


def a_model_of_others(folder: Path) -> None:
    """In the compressed-tensors layout, as llm-compressor writes it."""
    save_quantized(plain(), folder / "made", layout="compressed-tensors")
    config = folder / "made/config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({key: x for key, x in said.items() if key != "written_by"}))


OTHERS: dict[str, tuple[Any, str]] = {
    "a checkpoint": (a_checkpoint, "lezero compressed-tensors"),
    "a web page": (a_web_page, "lezero compressed-tensors"),
    "one of others": (a_model_of_others, "lezero compressed-tensors"),
    "a float model": (lambda f: save_hf(small(), f / "made"), "lezero compressed-tensors"),
    "ours": (lambda folder: saved(folder / "made"), "compressed-tensors"),
    "theirs": (
        lambda folder: save_quantized(plain(), folder / "made", layout="compressed-tensors"),
        "lezero",
    ),
}


def plain() -> Transformer:
    return lz.quantize_(small(), lz.Int4Weight(group=32, zero_point=False), objective="size")


@pytest.mark.parametrize("name", OTHERS)
def test_what_others_wrote_is_never_replaced(name: str, tmp_path: Path) -> None:
    make, layouts = OTHERS[name]
    make(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    for layout in layouts.split():
        with pytest.raises(lz.FileError, match=r"holds (other files|a model in the layout)"):
            save_quantized(plain(), tmp_path / "made", layout=layout)  # type: ignore[arg-type]
    assert {path: path.read_bytes() for path in (tmp_path / "made").iterdir()} == before


def test_a_folder_of_the_same_layout_is_replaced(tmp_path: Path) -> None:
    for seed in (0, 1):
        model = lz.quantize_(small(seed=seed), lz.Int8Weight(), objective="size")
        for layout in ("lezero", "compressed-tensors"):
            save_quantized(model, tmp_path / layout, layout=layout)  # type: ignore[arg-type]
    assert torch.equal(logits(load_quantized(tmp_path / "lezero")), logits(model))
    weights = load_file(tmp_path / "compressed-tensors/model.safetensors")
    embedding = model.embed_tokens.weight.decode()
    assert torch.equal(weights["model.embed_tokens.weight"], embedding)


def test_a_type_that_no_file_holds_is_named(tmp_path: Path) -> None:
    model = lz.quantize_(small(), lz.Int8Weight(), objective="size").double()
    with pytest.raises(lz.ConfigError, match=r"decodes to torch.float64.*call model.float"):
        save_quantized(model, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_every_flipped_bit_and_cut_is_found(copied: Path) -> None:
    for name in ("manifest.json", "tensors-00000.safetensors"):
        path = copied / name
        whole = path.read_bytes()
        for at in range(0, len(whole), len(whole) // 25):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
            with pytest.raises(lz.FileError):
                load_quantized(copied)
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(lz.CorruptError):
            load_quantized(copied)
        path.write_bytes(whole)
    load_quantized(copied)


def _layer(fields: dict[str, Any]) -> dict[str, Any]:
    found = fields["documents"]["quantization"]["layers"]["layers.0.mlp.up_proj"]
    assert isinstance(found, dict)
    return found


HOSTILE: dict[str, tuple[Any, str]] = {
    "group": (lambda f: _layer(f)["grid"].update(group=48), "32 times n"),
    "no group": (lambda f: _layer(f)["grid"].update(group=0), "group"),
    "format": (lambda f: _layer(f)["grid"].update(format="int3"), "int3"),
    "extra": (lambda f: _layer(f).update(run="rm"), "unknown key"),
    "shape": (lambda f: _layer(f).update(shape=[1 << 40, 1 << 40]), "has a weight of"),
    "kind": (lambda f: _layer(f).update(kind="conv"), "dims"),
    "shares": (lambda f: _layer(f).update(shares_with="layers.1.mlp.up_proj"), "shares"),
    "bits": (lambda f: _layer(f)["grid"].update(format="int8"), "should be"),
    "tokens": (lambda f: _layer(f).update(weight="coded", activation_bits=8), "fp8 in rows"),
    "layers": (lambda f: f["documents"]["quantization"].update(layers=[]), "no table"),
    "newer": (lambda f: f["documents"]["quantization"].update(format=2), "format 2"),
    "none": (lambda f: f["documents"].pop("quantization"), "no quantized model"),
    "folded": (lambda f: f["documents"]["quantization"]["layers"].update(
        {"layers.0.mlp": {"kind": "folded", "into": None, "had_bias": False}}),
        "'layers.0.mlp' is a .*no convolution can take in"),
    "others": (lambda f: f["documents"]["quantization"]["layers"].update(
        {"layers.0.mlp": {"kind": "folded", "into": None, "had_bias": 1}}), "had_bias is 1"),
    "into": (lambda f: f["documents"]["quantization"]["layers"].update(
        {"layers.0.mlp": {"kind": "folded"}}), "'layers.0.mlp' does not name the convolution"),
    "lacks": (lambda f: f["documents"]["quantization"]["layers"].pop("layers.0.mlp.up_proj"),
              "unexpected layers.0.mlp.up_proj"),
    "model": (lambda f: f["documents"]["model"].update(dim=1 << 19), "has a weight of"),
    "huge": (lambda f: f["documents"]["model"].update(layers=3), "missing layers.2"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_that_disagrees_is_refused(name: str, copied: Path) -> None:
    edit, said = HOSTILE[name]
    change(copied, edit)
    with pytest.raises(lz.FileError, match=said):
        load_quantized(copied)


def test_a_quantized_folder_writes_text(tmp_path: Path) -> None:
    bytes_tokenizer().save(tmp_path / "t")
    shape = {"dim": 64, "layers": 1, "heads": 4, "ffn": 64, "vocab": 257, "context": 64}
    model = Transformer(TransformerConfig(**shape))
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    save_quantized(model, tmp_path / "q", tokenizer_folder=tmp_path / "t")
    writer = open_writer(str(tmp_path / "q"))
    assert isinstance(writer.model.layers[0].mlp.up_proj, QuantizedLinear)
    assert "".join(writer.write("ab", 4, temperature=0.0)).startswith("ab")
    assert json.loads((tmp_path / "q/config.json").read_text())["eos_token_id"] == 256
    assert (tmp_path / "q/decisions.json").is_file()
    said = {"eos_token_id": [7, 256], "repetition_penalty": 1.3}
    (tmp_path / "t/config.json").write_text(json.dumps(said))
    save_quantized(model, tmp_path / "q", tokenizer_folder=tmp_path / "t")
    assert said.items() <= json.loads((tmp_path / "q/config.json").read_text()).items()
    other = torch.nn.Sequential(torch.nn.Linear(64, 64))
    other.config = SimpleNamespace(to_dict=lambda: {"eos_token_id": [7, 9]})
    lz.quantize_(other, lz.Int8Weight(), objective="size")
    save_quantized(other, tmp_path / "other", tokenizer_folder=tmp_path / "t")
    found = json.loads((tmp_path / "other/config.json").read_text())
    assert (found["eos_token_id"], found["repetition_penalty"]) == ([7, 9], 1.3)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_a_folder_loads_whatever_the_default_type(kind: torch.dtype, tmp_path: Path) -> None:
    images = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3)).eval()
    x = torch.rand(2, 3, 9, 9)
    scheme = lz.Int8WeightActivation(activations="tensor")
    model, data = small(), tokens(1)[0]
    lz.quantize_(images, scheme, data=x, objective="size")
    lz.quantize_(model, scheme, data=data, objective="size")
    lz.save_quantized(images, tmp_path / "images")
    lz.save_quantized(model, tmp_path / "words")
    bare = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3))
    torch.set_default_dtype(kind)
    try:
        lz.load_quantized(tmp_path / "images", bare)
        words = lz.load_quantized(tmp_path / "words")
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        assert torch.equal(bare(x), images(x))
        assert torch.equal(words(data), model(data))


def test_names_that_a_wrapper_changed_are_not_written(tmp_path: Path) -> None:
    model, data = small(), tokens(1)[0]
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    lz.quantize_(model, lz.Int8Weight(), data=data, objective="size")
    with pytest.raises(lz.ConfigError, match=r"'layers\.1' got a module wrapped by torch\.compile"):
        lz.save_quantized(model, tmp_path / "q")
    assert not (tmp_path / "q").exists()
    model.layers[1] = model.layers[1]._orig_mod
    lz.save_quantized(model, tmp_path / "q")
    wrapped = small()
    wrapped.layers[1] = torch.compile(wrapped.layers[1], backend="eager")
    with pytest.raises(lz.ConfigError, match=r"'layers\.1' .*module\.compile\(\)"):
        lz.load_quantized(tmp_path / "q", wrapped)
    with torch.no_grad():
        assert torch.equal(lz.load_quantized(tmp_path / "q")(data), model(data))


def test_a_shape_that_no_other_program_knows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab=64, dim=64, layers=2, heads=2, context=32, attention_bias="qkv", qk_norm=True
    )
    model, x = Transformer(config).eval(), torch.randint(0, 64, (2, 16))
    lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
    save_quantized(model, tmp_path / "q")
    with torch.no_grad():
        assert torch.equal(load_quantized(tmp_path / "q")(x), model(x))


def test_a_folded_batch_norm_alone_is_no_quantized_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    data = torch.randn(2, 3, 8, 8)
    lz.quantize_(model, lz.Int8WeightActivation(), data=data, objective="size")
    lz.dequantize_(model)
    with pytest.raises(lz.OrderError, match="no layer is quantized"):
        save_quantized(model, tmp_path / "q")


def test_a_model_without_values_is_not_written(tmp_path: Path) -> None:
    model, data = small(), tokens(1)[0]
    lz.quantize_(model, lz.Int8Weight(), data=data, objective="size")
    for layout in ("lezero", "compressed-tensors"):
        with pytest.raises(lz.OrderError, match=r"'.+' has no values .* lz\.load_q"):
            lz.save_quantized(model.to("meta"), tmp_path / "q", layout=layout)
    assert not (tmp_path / "q").exists()
