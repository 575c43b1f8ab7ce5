"""Causal language models of `transformers` that LeZero has no kernels for, run by their own code.

Slower than the models of `lezero.models`: sequences go through the model one after another, and
requests with equal beginnings do not share what was computed.

[Note: whose cache] The model's code keeps keys and values in a cache of its own, one for each
sequence; blocks only count. Without sharing, a sequence alone holds its first block for as long as
it lives, so that block names its cache. A cache is dropped as soon as that block is given back, and
begun anew where a sequence begins; tokens that were refused are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lezero.core import device
from lezero.core.errors import ConfigError, FileError, LeZeroError
from lezero.core.facts import cpu
from lezero.hub.foreign import load_foreign
from lezero.models.hf_config import SUPPORTED
from lezero.serve.program import Fed, Program

_BLOCK = 16
_MOST_TOKENS = 256
_LIMITS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"),
    *("max_seq_length", "seq_length", "model_max_length", "max_target_positions", "n_ctx"),
)
"""What configs of transformers call the longest sequence; the first that is named counts."""
_ORIGINAL = "original_max_position_embeddings"
"""What they call the length beyond which a long form takes other angles."""
_LONGEST = 2048
"""Of a model that has no limit of its own."""
_STATES = ("conv", "linear", "mamba", "recurrent", "hybrid")
"""In names of layers that keep one state of all tokens so far."""
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PROBE = (0, 1, 2, 1)


def open_foreign(place: str, weights: str) -> TransformersProgram:
    """The model in a Hugging Face folder, with the code of transformers alone, on the accelerator
    where there is one.

    Raises what `foreign_type` and `load_foreign` do; `FileError` for a model that this engine
    cannot run.
    """
    model = load_foreign(place, foreign_type(place, weights)).to(device.device())
    _hold(model)
    program = TransformersProgram(model)
    program.try_out(place)
    return program


def _hold(model: nn.Module) -> None:
    """transformers leaves weights of the wanted type in the file, mapped: whoever writes into that
    would change the answers, and whoever cuts it short end the process."""
    for held in (*model.parameters(), *model.buffers()):
        if held.device.type == "cpu" and not held.untyped_storage().resizable():
            held.data = held.data.clone()


def foreign_type(place: str, weights: str) -> torch.dtype:
    """What the weights of such a model are cast to. "auto" is bf16, but fp32 on a processor that
    does not multiply bf16 itself: torch then takes many times as long.

    Raises `ConfigError` for weights other than bf16 and fp32.
    """
    if weights == "auto":
        native = device.device().type != "cpu" or cpu().native_bf16
        weights = "bf16" if native else "fp32"
    if weights not in _DTYPES:
        raise ConfigError(
            f"weights: got {weights!r}, allowed are auto, {', '.join(_DTYPES)} for {place}, "
            f"which LeZero has no kernels for; it has them for {', '.join(SUPPORTED)} in their "
            "usual forms"
        )
    return _DTYPES[weights]


class TransformersProgram(Program):
    """Any causal model of transformers, on the device that it is on."""

    block_size = _BLOCK
    most_tokens = _MOST_TOKENS
    shares = False

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self.place = model.device
        self._caches: dict[int, Any] = {}
        config = model.config.get_text_config()
        self._vocab = int(config.vocab_size)
        self._longest = _longest(config)
        self._dim = int(config.hidden_size)
        self._token_bytes = 0
        name = type(model).__name__
        dtype = str(model.dtype).removeprefix("torch.")
        self.description = f"{name} of transformers, {dtype}"
        self.slow = (
            f"{name} runs by the code of transformers: one request after another, and without "
            "shared beginnings; LeZero has no kernels for it"
        )
        self._why_longest = ""
        if _long_forms(config):
            self._why_longest = (
                f", angles are others beyond {self._longest} tokens "
                f"({_ORIGINAL}), which end it here"
            )
            self.slow += self._why_longest

    def try_out(self, place: str) -> None:
        """Measures what a token's keys and values take; the model must go on from its cache.

        Raises `FileError` where its code keeps something that cannot be taken back.
        """
        own = "; use the model's own generate"
        if _has_states(self._model):
            raise FileError(
                f"{place}: {self.description} does not keep keys and values of each token, which "
                f"this engine needs{own}"
            )
        tokens = [token % self._vocab for token in _PROBE]
        self._caches.clear()
        try:
            whole = self.run([Fed(tokens, 0, [0], range(4))])
            self.run([Fed([*tokens[:2], tokens[0]], 0, [0], [0])])
            parts = self.run([Fed(tokens[2:], 2, [0], range(2))])
        except (MemoryError, torch.OutOfMemoryError, LeZeroError):
            raise
        except Exception as error:  # a model's own code raises what it wants
            raise FileError(f"{place}: {self.description} does not run: {error}") from None
        if not _same(whole[2:], parts):
            raise FileError(
                f"{place}: {self.description} gives other numbers where it goes on from its keys "
                f"and values than for the whole text, so this engine cannot run it{own}"
            )
        held = [x for layer in self._caches[0].layers for x in (layer.keys, layer.values)]
        self._token_bytes = sum(x.nbytes for x in held if x is not None) // len(tokens)
        self._caches.clear()

    def reserve(self, blocks: int) -> None:
        self._caches.clear()

    @torch.no_grad()
    def run(self, fed: Sequence[Fed]) -> Tensor:
        return torch.cat(
            [
                self._call(self._model, one, cache).logits[0, list(one.rows)].float()
                for one, cache in zip(fed, self._caches_of(fed), strict=True)
            ]
        )

    @torch.no_grad()
    def states(self, fed: Sequence[Fed]) -> Tensor:
        states = []
        for one, cache in zip(fed, self._caches_of(fed), strict=True):
            found = getattr(
                self._call(self._model.base_model, one, cache), "last_hidden_state", None
            )
            if found is None:  # its base model is the whole of it, which gives logits
                raise ConfigError(
                    f"{self.description} gives no hidden states by themselves, so it makes no "
                    "embeddings; take another model for them"
                )
            states.append(found[0, list(one.rows)].float())
        return torch.cat(states)

    def _call(self, module: Any, one: Fed, cache: Any) -> Any:
        ids = torch.tensor([list(one.tokens)], device=self._model.device)
        return module(input_ids=ids, past_key_values=cache, use_cache=True)

    def _caches_of(self, fed: Sequence[Fed]) -> list[Any]:
        """The cache of each sequence, which holds the tokens before those that are fed."""
        from transformers import DynamicCache

        for one in fed:
            if one.position == 0:
                self._caches[one.blocks[0]] = DynamicCache()
        found = [self._caches[one.blocks[0]] for one in fed]
        for one, cache in zip(fed, found, strict=True):
            for layer in cache.layers:
                if layer.keys is not None:
                    layer.keys = layer.keys[..., : one.position, :]
                    layer.values = layer.values[..., : one.position, :]
        return found

    def forget(self, block: int) -> None:
        self._caches.pop(block, None)

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def vocab(self) -> int:
        return self._vocab

    @property
    def longest(self) -> int:
        return self._longest

    @property
    def why_longest(self) -> str:
        return self._why_longest

    @property
    def block_bytes(self) -> int:
        return _BLOCK * self._token_bytes

    @property
    def weight_bytes(self) -> int:
        held = {id(x): x for x in [*self._model.parameters(), *self._model.buffers()]}
        return sum(x.nbytes for x in held.values())

    @property
    def read_bytes(self) -> int:
        table = self._model.get_input_embeddings().weight
        head = self._model.get_output_embeddings()
        tied = head is not None and head.weight is table
        return self.weight_bytes - (0 if tied else int(table.nbytes))

    @property
    def workspace_bytes(self) -> int:
        return 4 * _MOST_TOKENS * (self._vocab + 16 * self._dim)

    @property
    def products(self) -> int:
        tables = {id(self._model.get_input_embeddings().weight)}
        head = self._model.get_output_embeddings()
        tables |= set() if head is None else {id(head.weight)}
        matrices = [x for x in self._model.parameters() if x.dim() > 1 and id(x) not in tables]
        return sum(x.numel() for x in matrices)

    @property
    def products_a_key(self) -> int:
        return 0  # not known of each

    @property
    def window(self) -> int | None:
        return None


def _has_states(model: Any) -> bool:
    """Whether it is recurrent, in all layers or in some (Mamba, Jamba, Qwen3-Next, LFM2)."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    stateful = any(word in str(kind) for kind in kinds for word in _STATES)
    return stateful or bool(getattr(model, "_is_stateful", False))


def _long_forms(config: Any) -> list[dict[str, Any]]:
    """Parameters by which all angles change once a text is longer than some (Phi-3's long form), so
    that keys that were kept would be turned wrongly: of all layers, or of each type of them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_types = [named for named in parameters.values() if isinstance(named, dict)]
    return [x for x in (parameters, *of_types) if x.get("rope_type") == "longrope"]


def _longest(config: Any) -> int:
    """Tokens up to which keys that were kept stay right."""
    named = (getattr(config, name, None) for name in _LIMITS)
    longest = next((x for x in named if type(x) is int and x > 0), _LONGEST)  # -1 is none
    original = getattr(config, _ORIGINAL, None) or longest
    return min([longest, *(int(x.get(_ORIGINAL) or original) for x in _long_forms(config))])


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal up to what rounding does, even in bf16."""
    return bool((a - b).abs().max() <= 0.1 * a.std())
