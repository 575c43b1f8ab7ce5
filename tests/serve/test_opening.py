"""What weights a model that is quantized already runs in, and what is said of them."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.compress.quantize import (
    Fp8,
    Int4Weight,
    Int8Weight,
    Int8WeightActivation,
    Nf4,
    dequantize_,
    quantize_,
    save_quantized,
)
from lezero.core import device, facts
from lezero.core.errors import ConfigError, FileError, OrderError
from lezero.data.tokenizer import bytes_tokenizer
from lezero.models import Transformer, load_gguf, save_hf
from lezero.ops.decoder import native
from lezero.serve import opening
from lezero.serve.coder import Coder
from lezero.serve.llm import LLM
from lezero.serve.opening import open_program, program_of
from lezero.serve.plain import PlainProgram
from lezero.serve.program import Fed, Program
from lezero.serve.sampling import SamplingParams
from lezero.train import Engine
from tests.serve.models import small

GREEDY = SamplingParams(max_tokens=8, temperature=0)


def quantized() -> Transformer:
    model: Any = quantize_(small(), Int8Weight(), objective="size")
    return model  # type: ignore[no-any-return]


@pytest.mark.skipif(not native.NATIVE.available(), reason="no kernel runs here")
def test_a_model_that_was_given_says_so() -> None:
    model = small()
    LLM(model, weights="bf16")
    with pytest.raises(OrderError, match="given to an LLM"):
        model(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ConfigError, match="given to an LLM before"):
        LLM(model)


def test_bf16_turns_codes_back() -> None:
    kept, wide = program_of(quantized(), "auto"), program_of(quantized(), "bf16")
    if native.NATIVE.available():
        assert "int8 weights" in kept.description
    assert "bf16 weights" in wide.description or "bfloat16 weights" in wide.description
    assert wide.read_bytes > 1.5 * kept.read_bytes
    assert len(LLM(quantized(), weights="bf16").generate([1, 2, 3], GREEDY)[0].tokens) == 8


@pytest.mark.parametrize(
    "scheme", [Int8Weight(), Int8WeightActivation(), Int4Weight(group=32), Fp8(), Nf4(group=32)]
)
def test_fp32_is_exact_for_a_quantized_model_too(scheme: Any) -> None:
    made: Any = quantize_(small().bfloat16(), scheme, objective="size")
    plain = copy.deepcopy(made).float()
    dequantize_(plain)
    prompt = [1, 2, 3, 5, 8]
    answer = LLM(made, weights="fp32").generate(
        prompt, SamplingParams(max_tokens=8, temperature=0, logprobs=0)
    )[0]
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + answer.tokens]))[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(
        1, torch.tensor(answer.tokens)[:, None]
    )
    found = torch.tensor([one.logprob for one in answer.logprobs or []])
    assert (found - expected[:, 0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        (Fp8(), "fp8 turned into bf16, which kernels read"),
        (Fp8(activations="token"), "fp8 turned into bf16, which kernels read, and activations are"),
        (Nf4(group=32), "nf4 turned into bf16, which kernels read"),
        (Int8Weight(), ""),
    ],
    ids=lambda given: type(given).__name__,
)
def test_codes_that_kernels_do_not_read_are_told_of(
    scheme: Any, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = quantize_(small(), scheme, objective="size")
    program = program_of(model, "auto")
    if native.NATIVE.available():
        assert program.origin.startswith(form)
        assert ("not rounded" in program.origin) == ("activations" in form)
        assert (f"weights are {form}" in caplog.text) == bool(form)
        assert ("bf16 weights" in program.description) == bool(form)


@pytest.mark.parametrize(
    ("weights", "given", "place", "runs"),
    [
        ("fp32", torch.bfloat16, "cpu", torch.float32),
        ("fp32", torch.bfloat16, "cuda", torch.float32),
        ("auto", torch.float16, "cpu", torch.bfloat16),
        ("auto", torch.float32, "cpu", torch.float32),
        ("int8", torch.float32, "cpu", torch.float32),
        ("auto", torch.float32, "cuda", torch.bfloat16),
        ("int4", torch.float32, "cuda", torch.bfloat16),
        ("int4", torch.float16, "cuda", torch.float16),
    ],
)
def test_plain_operations_run_in_one_type(
    weights: Any, given: torch.dtype, place: str, runs: torch.dtype
) -> None:
    model: Any = small()
    if weights in ("int8", "int4"):
        scheme = Int8Weight() if weights == "int8" else Int4Weight(group=32)
        model = quantize_(model, scheme, objective="size")
    model = opening._in_one_type(model.to(given), weights, place)
    assert {x.dtype for x in model.parameters()} == {runs}
    assert logits(PlainProgram(model)).isfinite().all()


def test_fp32_is_exact_for_models_in_memory_too() -> None:
    program = program_of(small().bfloat16(), "fp32")
    assert program.description == "plain torch, float32 weights, keys and values"


def test_models_are_cast_before_they_go_to_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "F16")
    asked: list[Any] = []
    free = 1 << 40
    monkeypatch.setattr(device, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(device, "memory_free", lambda place: asked.append(place) or free)
    moved: list[set[torch.dtype]] = []
    real = Transformer.to

    def to(model: Transformer, *given: Any) -> Transformer:
        moved.append({x.dtype for x in model.parameters()})
        return real(model, *given)

    monkeypatch.setattr(Transformer, "to", to)
    monkeypatch.setattr(opening, "_in_parts", lambda *_: None)
    program, _ = open_program(path, "auto")
    assert program.place.type == "meta"
    assert moved == [{torch.bfloat16}]
    assert asked == [torch.device("meta")]
    free = program.weight_bytes - 1
    with pytest.raises(ConfigError, match=r"weights: got 'auto', which take .* are free on meta"):
        open_program(path, "auto")


@pytest.mark.skipif(device.accelerator() is not None, reason="weights go to the accelerator")
def test_weights_that_no_memory_is_free_for_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hf(small().bfloat16(), tmp_path)
    (tmp_path / "model.fp16.safetensors").write_bytes(b"a copy" * 10_000)  # is not read
    held = (tmp_path / "model.safetensors").stat().st_size
    free = SimpleNamespace(available=2 * held, limit=1 << 60)
    monkeypatch.setattr(facts, "memory", lambda: free)
    open_program(tmp_path, "fp32")
    free.available -= 1
    with pytest.raises(ConfigError, match=r"got 'fp32'; those of .* take weights='bf16', a"):
        open_program(tmp_path, "fp32")
    free.available = held - 1
    monkeypatch.setattr(opening, "open_model", lambda *_: pytest.fail("it was read"))
    monkeypatch.setattr(native.NATIVE, "available", lambda: False)  # so it would come whole
    with pytest.raises(ConfigError, match=r"'bf16'; those of .* free; take a smaller model"):
        open_program(tmp_path, "bf16")


def test_what_goes_to_an_accelerator_whole_needs_room_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose numbers are nowhere stands in for one."""
    save_quantized(model := quantized(), tmp_path)
    held = sum(x.nbytes for x in model.state_dict().values())
    free = SimpleNamespace(available=held, limit=1 << 60)
    monkeypatch.setattr(facts, "memory", lambda: free)
    monkeypatch.setattr(device, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(device, "memory_free", lambda place: 1 << 40)
    assert open_program(tmp_path, "auto")[0].place.type == "meta"
    free.available -= 1
    monkeypatch.setattr(opening, "open_model", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ConfigError, match=r"free on cpu, through which they go to meta; take a"):
        open_program(tmp_path, "auto")


@pytest.mark.usefixtures("without_accelerator")  # on its way to one a model is cast
def test_matrices_of_a_file_are_never_all_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = written(tmp_path, "Q4_1"), list[Transformer]()
    real = opening.open_model
    monkeypatch.setattr(
        opening, "open_model", lambda *given: opened.append((found := real(*given))[0]) or found
    )
    kinds = {}
    monkeypatch.setattr(opening, "_in_parts", lambda *_: None)
    for weights in ("bf16", "fp32"):
        monkeypatch.setattr(opening, "program_of", lambda model, weights: None)
        open_program(path, weights)  # type: ignore[arg-type]
        kinds[weights] = {(x.dim(), x.dtype) for x in opened.pop().parameters()}
    assert kinds["bf16"] == {(1, torch.float32), (2, torch.bfloat16)}
    assert kinds["fp32"] == {(1, torch.float32), (2, torch.float32)}


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_codes_are_not_quantized_again(weights: Any) -> None:
    with pytest.raises(ConfigError, match=f"weights: got '{weights}', but .* quantized already"):
        program_of(quantized(), weights)


def test_the_plain_program_says_that_weights_are_quantized() -> None:
    assert PlainProgram(quantized()).description == (
        "plain torch, quantized weights, float32 keys and values"
    )
    assert PlainProgram(small().to(torch.bfloat16)).description == (
        "plain torch, bfloat16 weights, keys and values"
    )


def test_layers_that_groups_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match=r"weights: got 'int4'.*\(60, 64, 96\); take 'int8'"):
        program_of(small(dim=60, head_dim=16), "int4")


TOKENS = [5, 1, 60, 33, 7, 0, 12]


class _Letters:
    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(65 + token) for token in tokens)


CODER = Coder(_Letters(), frozenset())


def written(path: Path, kind: str, kinds: Any = None, **changes: object) -> Path:
    write = pytest.importorskip("tests.models.test_gguf").write
    model = small(**{"vocab": 64, "context": 64, **changes})  # type: ignore[arg-type]
    made: Path = write(path / "a.gguf", model, kind, kinds=kinds)
    return made


def logits(program: Program) -> Tensor:
    program.reserve(2)
    return program.run([Fed(TOKENS, 0, [0], range(len(TOKENS)))])


OWN: dict[str, tuple[str, Any]] = {
    "Q4_0": ("Q4_0", None),
    "Q4_1": ("Q4_1", None),
    "both": ("Q4_0", {"attn_v": "Q4_1", "ffn_gate": "Q4_1"}),
    "8 bits beside 4": ("Q4_1", {"attn_v": "Q8_0", "ffn_up": "F16", "token_embd": "Q8_0"}),
    "head of its own": ("Q4_1", {"output": "F16"}),
}


@pytest.mark.parametrize("weights", ["int4", "auto"])
@pytest.mark.parametrize("kinds", OWN.values(), ids=OWN)
def test_a_files_own_blocks_answer_as_its_dequantized_weights(
    kinds: tuple[str, Any], weights: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lezero")
    path = written(tmp_path, *kinds, tied="output" not in (kinds[1] or {}))
    exact = logits(PlainProgram(load_gguf(path)))
    llm = LLM(path, weights=weights, coder=CODER)
    error = (logits(llm.program).cpu() - exact).norm() / exact.norm()
    assert float(error) < 0.03  # activations are int8 in blocks or bf16, other weights int8 or bf16
    requantized = float((logits(program_of(load_gguf(path), "int4")) - exact).norm() / exact.norm())
    assert requantized > 0.05
    if native.NATIVE.available() and llm.program.place.type == "cpu":
        form = "int4 weights in groups of 32, int8 activations in blocks"
        assert form in llm.program.description or kinds[1]
    own = "the file's own blocks, not rounded again"
    assert llm.forecast.lines()[0].endswith(f" KiB: {own}")
    assert f"{path}: weights are {own}" in caplog.text


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("Q4_1", "bf16"), ("Q4_1", "fp32"), ("Q4_1", "int8"), ("F16", "auto"), ("Q8_0", "int4")],
)
def test_other_weights_are_made_from_the_dequantized_ones(
    kind: str, weights: Any, tmp_path: Path
) -> None:
    path = written(tmp_path, kind)
    program = LLM(path, weights=weights, coder=CODER).program
    assert not program.origin
    whole = load_gguf(path).to(device.device())
    assert torch.equal(logits(program), logits(program_of(whole, weights)))


@pytest.mark.usefixtures("without_accelerator")  # there activations are rounded to bf16
def test_a_file_in_eight_bits_is_kept_too(tmp_path: Path) -> None:
    path = written(tmp_path, "Q8_0")
    program = LLM(path, coder=CODER).program
    exact = logits(PlainProgram(load_gguf(path)))
    assert float((logits(program) - exact).norm() / exact.norm()) < 0.005
    assert program.origin


@pytest.mark.usefixtures("without_accelerator")  # which has kernels of its own
def test_without_kernels_auto_stays_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lezero.ops.linear.available", lambda: False)
    path = written(tmp_path, "Q4_1")
    assert not LLM(path, coder=CODER).program.origin
    assert LLM(path, weights="int4", coder=CODER).program.origin


def test_a_given_coder_stands_in_for_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    path = written(tmp_path, "F16")
    with pytest.raises(FileError, match="its tokenizer cannot be read"):
        LLM(path)
    assert len(LLM(path, coder=CODER).generate([1, 2, 3], GREEDY)[0].tokens) == 8


@pytest.mark.parametrize("kind", ["run", "quantized"])
def test_room_for_what_has_no_files_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(device, "device", lambda: torch.device("cpu"))
    if kind == "run":
        model = small(vocab=257)
        engine = Engine(model, torch.optim.AdamW(model.parameters()), precision="fp32")
        engine.save(tmp_path, model=model.config.to_dict())
        takes = sum(x.nbytes for x in model.state_dict().values())
    else:
        save_quantized(model := quantized(), tmp_path)
        takes = sum(x.nbytes for x in model.state_dict().values())
    bytes_tokenizer().save(tmp_path / ("tokenizer" if kind == "run" else ""))
    asked: list[int] = []
    monkeypatch.setattr(opening, "_need", lambda needed, *_: asked.append(needed))
    open_program(tmp_path, "auto")
    assert asked == [takes]


def test_what_holds_no_model_is_told_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for place in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(FileError, match=r"holds no model; looked for config\.json .* of a run"):
            LLM(place)
    (tmp_path / "b.gguf").touch()
    with pytest.raises(FileError, match=r"checkpoints of a run; .*b\.gguf"):
        LLM(tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(
        FileError, match=r"weights\.bin: a file is a model where it is a \.gguf one"
    ):
        LLM(tmp_path / "weights.bin")


def test_a_model_of_transformers_is_told_the_way_in() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)
    model: Any = transformers.GPT2LMHeadModel(config)
    says = "GPT2LMHeadModel, allowed are .* Transformer of lezero.models; .* save_pretrained"
    with pytest.raises(ConfigError, match=f"model: got {says}"):
        LLM(model)
    with pytest.raises(ConfigError, match=f"draft: got {says}"):
        LLM(small(), speculate="draft", draft=model)
    with pytest.raises(ConfigError, match=r"model: got Linear, .* of lezero\.models$"):
        LLM(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_model_that_is_used_up_is_named() -> None:
    model = small()
    LLM(model)
    with pytest.raises(ConfigError, match="model: was given to an LLM before"):
        LLM(model)
    with pytest.raises(ConfigError, match="model: was given to an LLM before"):
        LLM(small(), speculate="draft", draft=model)
    with pytest.raises(ConfigError, match="draft: got the model itself"):
        LLM(model := small(), speculate="draft", draft=model)
    LLM(model)
