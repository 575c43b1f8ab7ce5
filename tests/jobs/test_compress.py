"""`lz compress`: from a folder to a quantized one, and what is refused before anything is done."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import lezero as lz
from lezero.cli.main import main
from lezero.data.store import TokenRows
from lezero.data.tokenizer import bytes_tokenizer
from lezero.jobs.compress import _free, _full, _rows, compress
from lezero.jobs.compress_config import CompressConfig
from lezero.jobs.perplexity import perplexity
from lezero.models import Transformer, TransformerConfig, load_hf, save_hf
from lezero.nn.meta import parameters_on_meta
from tests.leaks import own_cache
from tests.train.runs import TEXT

SHAPE = {"vocab": 257, "dim": 64, "layers": 1, "heads": 4, "ffn": 64, "context": 64}


def trained() -> Transformer:
    model = Transformer(TransformerConfig(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.tensor(list(TEXT.encode()[: 40 * 8 * 33])).view(40, 8, 33)
    for row in rows:
        lz.next_token_loss(model, {"tokens": row[:, :-1], "targets": row[:, 1:]}).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compress")
    bytes_tokenizer().save(root / "tokenizer")
    save_hf(trained(), root / "model", root / "tokenizer")
    (root / "text.txt").write_text(TEXT[:20_000], encoding="utf-8")
    own_cache(root / "cache")
    return root


def settings(place: Path, out: Path, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": str(place / "model"),
        "out": str(out / "out"),
        "scheme": {"kind": "int4_weight", "group": 32, "method": "gptq"},
        "data": {"train": [str(place / "text.txt")], "sequence": 32},
        "calibration_rows": 8,
        "validation_rows": 8,
        "batch": 4,
        "objective": "size",
    }
    return {**made, **changes}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(place / "cache"))


def test_the_command_writes_a_folder_that_loads(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(settings(place, tmp_path, budget=0.5)))
    assert main(["compress", str(path), "--set", "scheme.scales=minmax"]) == 0
    out, err = capsys.readouterr()
    told = [line.partition(", some")[0] for line in err.splitlines()]
    first, last = "perplexity of the model as it is", "perplexity after quantization"
    middle = "calibrating and quantizing, block by block"
    assert told == [f"{first}: 2 batches", middle, f"{last}: 2 batches"]
    for said in ("int4 g32", "size: ", "perplexity on held-out text: ", "saved: "):
        assert said in out
    made = lz.load_quantized(tmp_path / "out")
    text = torch.tensor([list(TEXT.encode()[:32])])
    with torch.no_grad():
        wanted, found = load_hf(place / "model")(text), made(text)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.2
    assert main(["generate", str(tmp_path / "out"), "-p", "The", "-n", "4"]) == 0
    assert main(["compress", str(path)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_scheme_in_its_short_form_takes_fields(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{model: m, out: o, scheme: int4_weight}")
    made = CompressConfig.load(path, ["scheme.group=32", "scheme.scales=minmax"])
    assert made.scheme == lz.Int4Weight(group=32, scales="minmax")
    named = CompressConfig.load(path, ["scheme=nf4", "scheme.group=32"])
    assert named.scheme == lz.Nf4(group=32)
    assert CompressConfig.load(path, ["scheme=nf4"]).scheme == lz.Nf4()
    assert CompressConfig.load(path, ["scheme=nf4", "objective=size"]).objective == "size"


def test_a_budget_that_is_not_met_writes_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(place, tmp_path, budget=0.0, scheme={"kind": "nf4", "group": 32})
    higher = itertools.count(10)  # on so small a model, rounding may well do good
    monkeypatch.setattr("lezero.jobs.compress.perplexity", lambda model, held: float(next(higher)))
    with pytest.raises(lz.NumericsError, match="budget=0 allows"):
        compress(CompressConfig.parse(config))
    assert not (tmp_path / "out").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"scheme": "int5"}, "scheme: kind 'int5' is none of int8_weight"),
    "a list of kinds": ({"scheme": {"kind": ["nf4"]}}, r"scheme: kind \['nf4'\] is none of int8_"),
    "a list": ({"scheme": ["nf4"]}, r"scheme: kind \['nf4'\] is none of int8_weight"),
    "field": ({"scheme": {"kind": "nf4", "grup": 3}}, r"scheme.grup: unknown key; did you mean"),
    "group": ({"scheme": {"kind": "int4_weight", "group": 24}}, "scheme.group"),
    "key": ({"modle": "x"}, "did you mean 'model'"),
    "model": ({"model": "/nowhere"}, "/nowhere: no such file"),
    "no model": ({"model": "{place}/tokenizer"}, "holds no model; looked for config.json"),
    "fp8 for servers": (
        {"scheme": "fp8", "layout": "compressed-tensors"},
        "layout 'compressed-tensors': Fp8 cannot be written in it; int4 and int8 can",
    ),
    "hqq for servers": (
        {"scheme": {"kind": "int4_weight", "method": "hqq"}, "layout": "compressed-tensors"},
        "zero points of 'hqq'",
    ),
    "below a file": ({"out": "{place}/text.txt/a/b"}, r"out: .*text\.txt is a file"),
    "itself": ({"out": "{place}/model"}, "the model itself"),
    "data": ({"data": {"train": ["/nowhere.txt"], "sequence": 32}}, "/nowhere.txt: no such file"),
    "long": ({"data": {"train": ["python-docs"], "sequence": 128}}, "model's context of 64"),
    "tokenizer": (
        {"data": {"train": ["{place}/text.txt"], "sequence": 32, "tokenizer": {"train": 300}}},
        r"data.tokenizer: got \{train: 300\}, but the model in .* leave data.tokenizer out",
    ),
    "bytes": (
        {"data": {"train": ["{place}/text.txt"], "sequence": 32, "tokenizer": {}}},
        "data.tokenizer: got bytes, but the model in .* leave data.tokenizer out",
    ),
    "held out": (
        {"data": {"train": ["{place}/text.txt"], "sequence": 32, "validation": 0.0}},
        "nothing is held out",
    ),
    "calibration": ({"calibration_rows": 0}, "calibration_rows: got 0, but method"),
}


def _filled(value: Any, place: Path) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, place) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, place) for item in value]
    return value.replace("{place}", str(place)) if isinstance(value, str) else value


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_said_first(name: str, place: Path, tmp_path: Path) -> None:
    change, said = REFUSED[name]
    with pytest.raises(lz.LeZeroError, match=said):
        compress(CompressConfig.parse({**settings(place, tmp_path), **_filled(change, place)}))
    assert not (tmp_path / "out").exists()


def test_a_pair_without_a_token_that_counts_is_left_out() -> None:
    pairs, index = np.array([9, 1, 2, 3, 9], np.uint16), np.array([[0, 0, 1], [1, 3, 5]])
    rows = TokenRows(pairs[:0], pairs, index, 8, 9, "digest")
    assert [part.tolist() for part in _full(rows, 4, 2)] == [[[1, 2, 3, 9]]]
    assert _full(TokenRows(pairs[:0], pairs, index[:1], 8, 9, "digest"), 4, 2) == []


@pytest.mark.parametrize("form", ["lezero", "gptq", "compressed-tensors"])
def test_a_quantized_model_is_refused_before_anything_is_read(
    form: str, place: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    if form == "lezero":
        small = lz.quantize_(load_hf(place / "model"), lz.Nf4(group=32), objective="size")
        lz.save_quantized(small, model)
    else:
        shutil.copytree(place / "model", model)
        about = json.loads((model / "config.json").read_text())
        about["quantization_config"] = {"quant_method": form, "bits": 4}
        (model / "config.json").write_text(json.dumps(about))
    nowhere = {"train": ["/nowhere.txt"], "sequence": 32}
    config = CompressConfig.parse(settings(place, tmp_path, model=str(model), data=nowhere))
    said = f"model: {model} holds quantized weights; give the folder of the float model"
    with pytest.raises(lz.ConfigError, match=f"^{re.escape(said)}$"):
        compress(config)


def test_a_place_that_cannot_be_written_to_is_said_first(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lezero.jobs.compress.os.access", lambda *_: False)  # a read-only disk
    config = CompressConfig.parse(settings(place, tmp_path / "new"))
    with pytest.raises(lz.FileError, match=rf"out: .*{tmp_path.name} cannot be written to"):
        compress(config)


def test_an_empty_folder_in_one_that_cannot_be_written_to_will_do(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr("lezero.jobs.compress.os.access", lambda path, _: path == out)
    monkeypatch.setattr("lezero.jobs.compress._open", lambda *_: (_ for _ in ()).throw(Begun))
    with pytest.raises(Begun):
        compress(CompressConfig.parse(settings(place, tmp_path)))


class Begun(Exception):
    """The work has begun: nothing was refused."""


@pytest.mark.parametrize("kind", ["GPT2", "Mixtral"])
def test_models_of_transformers_are_compressed_too(kind: str, place: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shapes = {
        "GPT2": {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64},
        "Mixtral": {
            **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
            **{"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 2},
        },
    }
    shape = {**shapes[kind], "vocab_size": 257, "bos_token_id": 0, "eos_token_id": 1}
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "model")
    bytes_tokenizer().save(tmp_path / "model")
    given = settings(place, tmp_path, model=str(tmp_path / "model"))
    done = compress(CompressConfig.parse(given))
    assert done.perplexity_after == pytest.approx(done.perplexity_before, rel=0.05)
    assert ("in no layer that can be quantized" in str(done)) == (kind == "Mixtral")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    with parameters_on_meta():
        empty = transformers.AutoModelForCausalLM.from_config(config)
    made = lz.load_quantized(tmp_path / "out", empty)
    text = torch.tensor([list(TEXT.encode()[:32])])
    with torch.no_grad():
        wanted, found = model(text).logits, made(text).logits
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.2
    other = {**given, "out": str(tmp_path / "other"), "layout": "compressed-tensors"}
    with pytest.raises(lz.ConfigError, match="layout: got 'compressed-tensors'"):
        compress(CompressConfig.parse(other))


@pytest.mark.parametrize("batch", [1, 3, 100_000])
def test_only_rows_of_the_text_calibrate_and_measure(
    batch: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def looks(model: Any, scheme: Any, *, data: Any, metric: Any, **_: Any) -> None:
        seen.update(data=data, held=metric(model))
        raise lz.NumericsError("enough")

    monkeypatch.setattr("lezero.jobs.compress.quantize_", looks)
    monkeypatch.setattr("lezero.jobs.compress.perplexity", lambda model, held: held)
    for rows in (8, 10_000):
        config = settings(place, tmp_path, batch=batch, calibration_rows=rows, filter="*mlp*")
        with pytest.raises(lz.NumericsError, match="enough"):
            compress(CompressConfig.parse(config))
        given = torch.cat(seen["data"])
        assert len(given) == 8 if rows == 8 else 8 < len(given) < 1000
        assert int((given == given[0]).all(1).sum()) == 1  # a loader fills up with the first
        assert max(len(part) for part in seen["data"]) <= batch
        assert sum(len(part["tokens"]) for part in seen["held"]) == 8


def test_what_fills_rows_up_does_not_calibrate(place: Path, tmp_path: Path) -> None:
    """Each text comes whole, prompts too, and once, in front of an end of text."""
    pairs = [{"prompt": f"What is {n:03}?", "response": f" It is {n + 1:03}."} for n in range(40)]
    files = {"pairs": pairs[:-2], "held": pairs[-2:], "one": pairs[:1]}
    for name, held in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, held)))
    (tmp_path / "text.txt").write_text(TEXT[:100])
    texts = {"pairs": [pair["prompt"] + pair["response"] for pair in files["pairs"]]}
    texts |= {"text": [TEXT[:100]], "one": texts["pairs"][:1]}
    for names, rows, width in (
        *((["pairs.jsonl"], 3, 64), (["pairs.jsonl"], 10**20, 64)),
        *((["text.txt", "pairs.jsonl"], 10_000, 64), (["one.jsonl"], 8, 24)),
    ):
        data = {"train": [str(tmp_path / name) for name in names], "sequence": 64}
        data["validation"] = [str(tmp_path / "held.jsonl")]
        given = settings(place, tmp_path, data=data, calibration_rows=rows)
        config = CompressConfig.parse(given)
        found, held = _rows(config, load_hf(place / "model"), place / "model")
        stream = [
            token
            for name in names
            for text in texts[name.partition(".")[0]]
            for token in (*text.encode(), 256)
        ]
        flat = torch.cat(found).flatten().tolist()
        assert flat == stream[: min(rows, len(stream) // width) * width]
        assert flat.count(256) < 0.1 * len(flat)
        assert {batch.shape[1] for batch in found} == {width}
        assert [tuple(batch["tokens"].shape) for batch in held] == [(2, 64)]


@pytest.mark.parametrize("objective", ["size", "speed"])
def test_what_the_config_asks_for_is_asked_of_quantize(
    objective: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def looks(model: Any, scheme: Any, **given: Any) -> None:
        seen.update(given)
        raise lz.NumericsError("enough")

    monkeypatch.setattr("lezero.jobs.compress.quantize_", looks)
    wanted = {"objective": objective, "budget": 0.25, "filter": ["*mlp*"]}
    with pytest.raises(lz.NumericsError, match="enough"):
        compress(CompressConfig.parse(settings(place, tmp_path, **wanted)))
    assert {name: seen[name] for name in wanted} == {**wanted, "filter": ("*mlp*",)}


def test_perplexity_counts_each_target_once() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 6, 11), torch.randint(0, 11, (5, 6))
    targets[3:, 1:] = -100
    rows = torch.arange(5)
    batches = [{"tokens": rows[part], "targets": targets[part]} for part in rows.split([3, 2])]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert perplexity(lambda tokens: logits[tokens], batches) == pytest.approx(float(loss.exp()))


def test_a_filter_without_patterns_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(lz.ConfigError, match=r"filter: .*no pattern in it"):
        CompressConfig.parse(settings(place, tmp_path, filter=[]))


def test_a_model_without_a_tokenizer_takes_the_one_of_the_data(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "model", tmp_path / "bare")
    for path in (tmp_path / "bare").glob("*token*"):
        path.unlink()
    data = {**settings(place, tmp_path)["data"], "tokenizer": {"folder": str(place / "tokenizer")}}
    made = settings(place, tmp_path, model=str(tmp_path / "bare"), data=data)
    found = compress(CompressConfig.parse(made))
    assert isinstance(lz.load_quantized(found.folder), Transformer)
    assert not list(found.folder.glob("*token*"))


def test_what_is_wrong_beside_the_tokenizer_is_told_before_the_work(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": "x"}')
    monkeypatch.setattr("lezero.jobs.compress.quantize_", lambda *_, **__: pytest.fail("too late"))
    made = settings(place, tmp_path, model=str(tmp_path / "model"))
    with pytest.raises(lz.FileError, match="generation_config"):
        compress(CompressConfig.parse(made))


def test_a_folder_that_was_written_to_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _free(out) == out
    out.mkdir()
    assert _free(out) == out
    for number in (2, 3):
        (_free(out) / "model").parent.mkdir(exist_ok=True)
        (_free(out) / "model").write_text("of another run")
        assert _free(out) == tmp_path / f"out-{number}"
