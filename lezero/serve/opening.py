"""A model from wherever it lies, as the fastest program that runs it as asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from lezero import checkpoint
from lezero.compress.quantize import Int4Weight, Int8Weight, Scheme, dequantize_, quantize_
from lezero.compress.quantize.gguf import kept_share, load_gguf_blocks
from lezero.compress.quantize.modules import quantized_layers
from lezero.compress.quantize.ordered import OrderedWeight
from lezero.compress.quantize.weights import PackedWeight
from lezero.core import device, room
from lezero.core.errors import ConfigError, LeZeroError
from lezero.core.first_calls import settle_first_calls
from lezero.core.log import logger
from lezero.core.paths import expand_home
from lezero.data.tokenizer import holds_tokenizer
from lezero.files import reading
from lezero.files.generation import list_generations
from lezero.hub.foreign import is_foreign
from lezero.hub.opened import open_model, require_model
from lezero.memory.allocator import can_come_from_malloc
from lezero.memory.pool import blocks_kept
from lezero.models import Transformer, TransformerConfig
from lezero.models.gguf_blocks import bytes_read
from lezero.models.gguf_header import read_gguf_header
from lezero.models.huggingface import INDEX, SINGLE, weight_files
from lezero.models.transformer import SelfAttention, sdpa
from lezero.ops import linear
from lezero.ops.decoder import native
from lezero.ops.draw.native import NATIVE as DRAW
from lezero.ops.grid_fit.native import NATIVE as FIT
from lezero.ops.linear.native import NATIVE as LINEAR
from lezero.ops.native import build_together
from lezero.report.units import size
from lezero.serve.arriving import Fetch, arriving, room_for, room_on
from lezero.serve.captured import CapturedProgram
from lezero.serve.coder import Coder, open_coder
from lezero.serve.foreign import foreign_type, open_foreign
from lezero.serve.fused import FusedProgram, Taken, shape_of
from lezero.serve.options import Weights
from lezero.serve.plain import PlainProgram
from lezero.serve.program import Program

_GROUPS = (64, 32)
_FILLING = 1024
"""Rows by which vocabularies of one tokenizer may differ."""
_KEPT = {"auto": (4, 8), "int4": (4,)}
"""Bits of blocks in a GGUF file that are kept as they are, where most of its weights lie so."""
_BITS: dict[str, int] = {"auto": 16, "bf16": 16, "int8": 8, "int4": 4, "fp32": 32}
_SMALLER = {"auto": "weights='int8' or 'int4', ", "int8": "weights='int4', "}
_SMALLER |= {"bf16": _SMALLER["auto"], "int4": "", "fp32": "weights='bf16', "}
_TYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""That weights have before they go to an accelerator; none of what is rounded there."""
_OF_16_BITS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""As configs of Hugging Face call them."""
_READ = (nn.Linear.forward, nn.Embedding.forward, nn.RMSNorm.forward, nn.Module.forward)
"""Of classes of torch whose weights programs read; the last is that of containers."""
_OURS = ("lezero.", "torch.nn.utils.")
"""Where more such classes are, and what makes a weight out of others."""
_LOG = logger("serve")
_CAPTURED: WeakKeyDictionary[Transformer, ref[CapturedProgram]] = WeakKeyDictionary()
"""Models whose weights captured graphs read where they lie."""


ReadCoder = Callable[[], Coder]


def open_program(
    model: str | Path | Transformer, weights: Weights
) -> tuple[Program, ReadCoder | None]:
    """The program of a model, and what reads its tokenizer; None for a `Transformer`, and for a
    Hugging Face folder of weights alone."""
    settle_first_calls()
    if isinstance(model, Transformer):
        return program_of(model, weights), None
    place = expand_home(model)
    path = Path(place)
    require_model(path)
    foreign = is_foreign(place)
    if device.device().type == "cpu" and weights != "fp32" and not foreign:
        kernels = [native.NATIVE, LINEAR, DRAW, *([FIT] if weights == "int4" else [])]
        build_together(kernels, can_come_from_malloc)
    kept = _keeps_blocks(path, weights)
    in_parts = None if foreign or kept else _in_parts(path, weights)
    if in_parts is not None:
        return in_parts, _reader(place, path if path.is_dir() else None)
    if foreign:
        _require_room_for_foreign(path, weights)
        return open_foreign(place, weights), _reader(place, path)
    _require_room(path, weights, kept)
    if kept:
        blocks = _placed(load_gguf_blocks(path, others_int8=weights == "int4"), weights)
        found = program_of(blocks, "auto", x_blocks=kept_share(path, (4,)) >= 0.5)
        found.origin = "the file's own blocks, not rounded again"
        _LOG.info("%s: weights are %s", place, found.origin)
        return found, partial(open_coder, place, None)
    opened, folder = open_model(place, torch.float32 if weights == "fp32" else None, _wide(weights))
    return program_of(_placed(opened, weights), weights), _reader(place, folder)


def _in_parts(place: Path, weights: Weights) -> Program | None:
    """The program of a model that is read part by part; None where that cannot be, or nothing would
    become smaller by it. Raises `ConfigError` where there is no room for it."""
    where = device.device()
    on_cpu = where.type == "cpu"
    source = None if on_cpu and weights == "fp32" else arriving(place, _wide(weights))
    if source is None:
        return None
    with source as opened:
        if opened.wide:  # fp64 is rounded by nothing of ours
            return None
        scheme = _scheme(opened.model, weights)
        fused = on_cpu and _fuses(opened.model, weights)
        if on_cpu and not fused and scheme is None:
            return None
        dtype = None if on_cpu else _TYPES.get(weights)
        bits = _BITS[weights]
        kept = (bits, scheme)
        needed = room_for(opened, *kept) if fused else room_on(opened, *kept, dtype)
        how = "are packed" if fused else "arrive"
        _need(needed, where, place, weights, how, _SMALLER[weights])
        fetch = Fetch(opened, scheme, where, dtype)
        with blocks_kept():
            if not fused:
                return _in_modules(fetch.whole(), weights)
            return FusedProgram(opened.model, x_blocks=weights == "int4", fetch=fetch)


def _require_room(place: Path, weights: Weights, kept: bool) -> None:
    """Raises `ConfigError` where the weights of a file or folder, as they come into the processor's
    memory, are more than is free. They come whole, and are packed, rounded or brought to an
    accelerator after that. kept: whether blocks of a GGUF file stay."""
    if place.is_file():
        wide = None if kept else _wide(weights)
        matrix = 4 if wide is None else wide.itemsize
        needed = bytes_read(read_gguf_header(place).tensors, matrix, kept)
    else:
        needed = _bytes_stored(place)
        if weights == "fp32":
            needed = needed * 4 // _type_in_files(place).itemsize
    smaller = _SMALLER["fp32"] if weights == "fp32" else ""
    _need(needed, torch.device("cpu"), place, weights, "are read", smaller)


def _require_room_for_foreign(place: Path, weights: Weights) -> None:
    """Raises `ConfigError` where a model of transformers, in the type that it runs in, is more than
    is free, before any of it is read. On its way to an accelerator what has that type in the files
    stays mapped, which the system takes back where it needs to; the rest is cast in the processor's
    memory, tensor by tensor, and waits there."""
    where = device.device()
    wanted, stored = foreign_type(str(place), weights), _type_in_files(place)
    needed = _bytes_stored(place) * wanted.itemsize // stored.itemsize
    smaller = _SMALLER["fp32"] if wanted == torch.float32 else ""
    if where.type != "cpu":
        _need(needed, where, place, weights, "arrive", smaller)
    if where.type == "cpu" or wanted != stored:
        _need(needed, torch.device("cpu"), place, weights, "are read", smaller)


def _bytes_stored(place: Path) -> int:
    """Of the weights in a folder: a model's, a quantized one, or the newest of a run."""
    if any((place / name).is_file() for name in (SINGLE, INDEX)):
        return sum(file.stat().st_size for file in weight_files(place))
    newest = list_generations(checkpoint.checkpoint_root(place))[-1:]
    at = place if checkpoint.is_generation(place) or not newest else newest[0]
    with suppress(LeZeroError):  # who opens the model says what is wrong
        found = reading.read_generation(at, select=lambda _: False)
        own = [name for name in found.forms if name not in found.ties]
        of_model = [name for name in own if name.startswith("model/")] or own
        return sum(found.forms[name].nbytes for name in of_model)
    return 0


def _need(
    needed: int, where: torch.device, place: Path, weights: Weights, how: str, smaller: str
) -> None:
    on_cpu, runs = where.type == "cpu", device.device()
    free = room.free_memory() if on_cpu else device.memory_free(where)
    if 0 < free < needed:
        at = "" if runs.type == "cpu" else f" on {where}"
        if runs.type != where.type:
            at += f", through which they go to {runs}"
        raise ConfigError(
            f"weights: got {weights!r}; those of {place} take {size(needed)} as they {how}, "
            f"but only {size(free)} of memory are free{at}; take {smaller}a smaller model, or one "
            "that was quantized once where there is room (`lz compress`)"
        )


def _type_in_files(place: Path) -> torch.dtype:
    """What the config of a Hugging Face folder says; fp32 where it says nothing."""
    with suppress(OSError, ValueError, AttributeError):  # who opens the model says what is wrong
        found = json.loads((place / "config.json").read_text("utf-8"))
        named = str(found.get("dtype", found.get("torch_dtype")))
        return _OF_16_BITS.get(named, torch.float32)
    return torch.float32


def _reader(place: str, folder: Path | None) -> ReadCoder | None:
    if folder == Path(place) and not holds_tokenizer(folder):
        return None
    return partial(open_coder, place, folder)


def _wide(weights: Weights) -> torch.dtype | None:
    """What matrices of a GGUF file are dequantized to where fp32 is not what will be read."""
    kernels = device.device().type != "cpu" or native.NATIVE.available()
    bf16 = weights == "bf16" or (weights == "auto" and kernels)
    return torch.bfloat16 if bf16 else None


def _placed(model: Transformer, weights: Weights) -> Transformer:
    """The model where it will run; cast before that, where it will be cast at all.

    Raises `ConfigError` where it does not fit.
    """
    place = device.device()
    if place.type == "cpu":
        return model
    if weights in ("auto", "bf16") and not quantized_layers(model):
        model = model.bfloat16()
    free = device.memory_free(place)
    needed = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    if 0 < free < needed:
        raise ConfigError(
            f"weights: got {weights!r}, which take {size(needed)}, but only {size(free)} of memory "
            f"are free on {place}; take a quantized or smaller model"
        )
    return model.to(place)


def _keeps_blocks(path: Path, weights: Weights) -> bool:
    """Whether a GGUF file's blocks stay as they are, where that is what `weights` asks for.

    "auto" takes them where kernels read them; a reference would be slower than dense weights.
    """
    if weights not in _KEPT or path.suffix != ".gguf" or not path.is_file():
        return False
    slow = device.device().type == "cpu" and not linear.available()
    return not (weights == "auto" and slow) and kept_share(path, _KEPT[weights]) >= 0.5


def open_draft(draft: str | Path | Transformer, weights: Weights, target: Program) -> Program:
    """The program of a model that guesses for `target`; both must have the same tokens, but for
    rows that fill up one vocabulary or the other (Qwen2.5's of 7B has 128 more than that of 0.5B).
    """
    program, _ = open_program(draft, weights)
    if abs(program.vocab - target.vocab) > _FILLING:
        raise ConfigError(
            f"draft: has {program.vocab} tokens, but the model {target.vocab}; give a smaller "
            "model of the same family, with the same tokenizer"
        )
    return program


def program_of(model: Transformer, weights: Weights, *, x_blocks: bool | None = None) -> Program:
    """The fastest program that runs `model` as asked, where it lies. It is used up.

    x_blocks: whether the fused program rounds activations to int8 in blocks, see `FusedProgram`;
    None: with weights that are rounded to 4 bits now.

    Raises `ConfigError` for weights that the model cannot have, and for a model that is used up.
    """
    graphs = _CAPTURED.get(model)
    if graphs is not None and graphs() is not None:
        raise ConfigError("model: another LLM runs it; delete that one first, or open it again")
    if any(isinstance(block, Taken) for block in model.layers):
        raise ConfigError(
            "model: was given to an LLM before, which took its weights and used it up; build or "
            "open it again"
        )
    _refuse_own_code(model)
    model.config = model.actual_config  # by which caches are made
    place = model.norm.weight.device.type
    if quantized_layers(model) and weights in ("int8", "int4"):
        raise ConfigError(
            f"weights: got {weights!r}, but this model is quantized already; take 'auto', which "
            "keeps it as it is, or start from the model before it was quantized"
        )
    if quantized_layers(model) and weights in ("bf16", "fp32"):
        model = model.float() if weights == "fp32" else model  # what codes stand for is not rounded
        dequantize_(model)
    scheme = _scheme(model, weights)
    if scheme is not None:
        quantize_(model, scheme, objective="size")
    if place != "cpu" or not _fuses(model, weights):
        return _in_modules(model, weights)
    origin, blocks = _unread(model), weights == "int4" if x_blocks is None else x_blocks
    found = FusedProgram(model, x_blocks=blocks)
    if origin:
        found.origin = origin
        _LOG.warning("weights are %s", origin)
    return found


def _fuses(model: Transformer, weights: Weights) -> bool:
    """Whether the processor's kernels run it as asked."""
    return weights != "fp32" and native.NATIVE.available() and not shape_of(model).problem()


def _in_modules(model: Transformer, weights: Weights) -> Program:
    """The program that runs the modules of a model where they are."""
    model = _in_one_type(model, weights, model.norm.weight.device.type)
    if not CapturedProgram.suits(model):
        return PlainProgram(model)
    made = CapturedProgram(model)
    _CAPTURED[model] = ref(made)  # its graphs have the addresses of what another may convert
    return made


def _refuse_own_code(model: Transformer) -> None:
    """Kernels read weights and call no module, so what a module does beside would be lost."""
    for name, module in model.named_modules():
        what = _own_code(module, model.config)
        if what:
            raise ConfigError(
                f"model: {name or 'it'} has {what}, which the engine would leave out; take it off, "
                "or merge what it adds into the weights; generate of lezero.models runs the model "
                "as it is"
            )


def _own_code(module: nn.Module, config: TransformerConfig) -> str:
    """What a module does that programs do not know of it; "" where that is nothing."""
    forward = type(module).forward
    if module._forward_hooks or module._forward_pre_hooks:
        return "a hook"
    if "forward" in vars(module):
        return "a forward of its own"
    if forward not in _READ and not forward.__module__.startswith(_OURS):
        return f"the forward of {type(module).__name__}"
    if isinstance(module, SelfAttention) and module.attention is not sdpa:
        return "an attention of its own"
    if isinstance(module, nn.RMSNorm) and module.eps != config.norm_eps:
        return f"an eps of {module.eps} beside norm_eps={config.norm_eps} of its config"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "a max_norm"
    return ""


def _unread(model: Transformer) -> str:
    """What becomes of quantized layers that the fused program's kernels do not read, for people."""
    forms, rounds = set[str](), False
    for layer in quantized_layers(model).values():
        if type(layer.weight) is PackedWeight and layer.input_scale is None:
            continue
        ordered = isinstance(layer.weight, OrderedWeight)
        forms.add(layer.weight.grid.format + (" in GPTQ's order" if ordered else ""))
        rounds |= getattr(layer, "x_bits", 16) == 8
    if not forms:
        return ""
    activations = ", and activations are not rounded" if rounds else ""
    return f"{', '.join(sorted(forms))} turned into bf16, which kernels read{activations}"


def _in_one_type(model: Transformer, weights: Weights, place: str) -> Transformer:
    """With floating numbers in the type that plain operations run in; kernels of accelerators want
    16 bits beside codes too."""
    if weights == "fp32":
        return model.float()
    if place != "cpu":
        stays = weights in ("int8", "int4") and model.norm.weight.dtype == torch.float16
    else:
        exact = all(x.dtype == torch.float32 for x in model.parameters())
        stays = weights != "bf16" and (exact or bool(quantized_layers(model)))
    return model if stays else model.bfloat16()


def _scheme(model: Transformer, weights: Weights) -> Scheme | None:
    """What rounds the weights now; None: they stay as they are, or become bf16."""
    if weights == "int8":
        return Int8Weight()
    return _int4(model) if weights == "int4" else None


def _int4(model: Transformer) -> Int4Weight:
    c = model.config
    inputs = (c.dim, c.heads * c.head_dim, c.ffn)
    for group in _GROUPS:
        if not any(K % group for K in inputs):
            return Int4Weight(group=group, method="hqq")
    raise ConfigError(
        f"weights: got 'int4', whose groups of {' or '.join(map(str, _GROUPS))} do not divide the "
        f"inputs of this model's layers ({', '.join(map(str, inputs))}); take 'int8' or 'bf16'"
    )
