"""Sentence encoders: texts in, one vector each out.

Texts of any length run together: their tokens lie in one row without padding (`models.bert`), so a
step's time follows its tokens. A vector is that of the text alone but for rounding, since a matrix
product of more rows may add in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lezero.compress.quantize import Int8WeightActivation, quantize_
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError, FileError, need_extra
from lezero.core.facts import cpu
from lezero.core.first_calls import settle_first_calls
from lezero.data.panics import need_sound, without_panic
from lezero.hub.bert_text import bert_normalizer
from lezero.hub.encoder import EncoderFolder, describe_encoder, open_encoder
from lezero.models import Bert
from lezero.models.bert import flops
from lezero.serve.batching.model import COUNTS, BatchedModel
from lezero.serve.request import TooLongError

EncoderWeights = Literal["auto", "fp32", "bf16", "int8"]
_WEIGHTS = ("auto", "fp32", "bf16", "int8")
TOPIC = "encoder weights"
LEAST_COSINE = 0.99
"""Of each vector to fp32's, for "auto" to take other weights."""
_SHORT = ("thank you!", "thanks!", "yes", "ok", ",", "a", "?", "heck", "hello", "cheap flights")
_USUAL = (12, 24, 48)
_TIMED = 9
_TEXT = (
    "The harbour was quiet when the first boats came in, and the price of fish had fallen again. "
    "How do I reset my password? To install the package, run the command below and restart the "
    "service. In 1969 a probe of 380 kg reached the planet; its batteries lasted for 53 minutes. "
    "She said that she would not go, since nobody had asked her, and closed the door."
)


class SentenceEncoder(BatchedModel):
    """An encoder of a Hugging Face folder with its tokenizer.

    weights: "auto" measures fp32, bf16 and int8 (weights and activations) on this machine and takes
    the fastest whose vectors stay within a cosine of 0.99 of fp32's; a quantized folder stays as it
    is. What was chosen, with figures, is in `decisions`.

    Errors: `ConfigError`, `FileError`, and `MissingExtraError` without tokenizers.
    """

    def __init__(
        self,
        place: str | Path,
        weights: EncoderWeights = "auto",
        decisions: Decisions | None = None,
    ) -> None:
        if weights not in _WEIGHTS:
            raise ConfigError(f"weights: got {weights!r}, allowed are {', '.join(_WEIGHTS)}")
        settle_first_calls()
        self.folder = describe_encoder(place)
        self.decisions = decisions if decisions is not None else Decisions()
        self._tokenizer = _tokenizer(self.folder)
        self._nothing = self.tokens("")
        self._opening, self._closing = _frame(self._tokenizer.encode(_TEXT))
        self.longest = self.folder.longest
        self._model, self.weights = self._choose(weights)
        config = self._model.config
        self.dim = config.dim
        self._token_flops = flops(config, 1)
        self.usual = [self._of_length(n) for n in _USUAL]
        self.description = (
            f"encoder of {config.layers} layers, {config.dim} wide, {self.weights} weights, "
            f"{self.folder.pooling} of tokens, up to {self.longest} tokens, on the processor"
        )

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text, with the folder's prompt and those that the model expects around it."""
        return list(self._tokenizer.encode(self.folder.prompt + text).ids)

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """The first of them that the model takes, with those that close a text where they did."""
        closing = len(self._closing)
        if len(tokens) <= self.longest or list(tokens[len(tokens) - closing :]) != self._closing:
            return list(tokens[: self.longest])
        return [*tokens[: self.longest - closing], *self._closing]

    def check(self, tokens: Sequence[int], name: str = "input") -> None:
        """Raises `ConfigError`, which calls the text `name`, for tokens that the model does not
        take, and for an empty text.

        sentence-transformers does answer one, with the vector of the tokens around it. But that is
        one vector for every text that holds nothing, which a search then finds beside real ones; so
        it is refused, as OpenAI's API and language models here do. So are tokens without those that
        the tokenizer puts around each text: clients that know no other send tokens of OpenAI's,
        which would be read as other words.
        """
        if list(tokens) == self._nothing:
            raise ConfigError(f"{name}: got an empty text, which has no embedding; leave it out")
        if not 1 <= len(tokens) <= self.longest:
            kind = TooLongError if tokens else ConfigError
            raise kind(
                f"{name}: got {len(tokens)} tokens, allowed is 1 to the model's {self.longest} "
                "together; shorten the text, or cut it off with truncate: true"
            )
        vocab = self._model.config.vocab
        if not all(0 <= token < vocab for token in tokens):
            raise ConfigError(f"{name}: holds a token outside of 0 to {vocab - 1}")
        if not self._is_framed(list(tokens)):
            raise ConfigError(
                f"{name}: got tokens without those that this model's own tokenizer puts around a "
                "text; send text (LangChain: check_embedding_ctx_length=False)"
            )

    def _is_framed(self, tokens: list[int]) -> bool:
        opening, inside = len(self._opening), len(tokens) - len(self._closing)
        framed = tokens[:opening] == self._opening and tokens[inside:] == self._closing
        return framed and opening <= inside

    def work(self, item: Any) -> float:
        return self._of_length(len(item))

    @torch.inference_mode()
    def run(self, items: Sequence[Any]) -> Sequence[Tensor]:
        """One fp32 vector (dim,) for each list of tokens."""
        return list(_vectors(self._model, items, self.folder))

    def is_sound(self, answer: Any) -> bool:
        return bool(answer.isfinite().all())

    def samples(self) -> Iterator[list[Any]]:
        for count in COUNTS:
            yield self._sample(count)

    def _sample(self, count: int) -> list[list[int]]:
        """Texts of usual lengths, in tokens."""
        tokens = self.tokens(_TEXT)
        lengths = [min(self.longest, _USUAL[i % len(_USUAL)]) for i in range(count)]
        return [
            [tokens[(7 * i + j) % len(tokens)] for j in range(n)] for i, n in enumerate(lengths)
        ]

    def _tokens_of(self, texts: Sequence[str]) -> list[list[int]]:
        found = (self.tokens(text)[: self.longest] for text in texts)
        return [tokens for tokens in found if tokens]

    def _of_length(self, tokens: int) -> float:
        return flops(self._model.config, tokens) / self._token_flops

    def _choose(self, weights: str) -> tuple[Bert, str]:
        """The model in the weights that are asked for, or in the fastest that stay true."""
        chosen = None if weights == "auto" else weights
        if self.folder.is_quantized:
            if chosen is not None:
                raise ConfigError(f"weights: got {weights!r}, but {self.folder.path} is quantized")
            self.decisions.record(TOPIC, "quantized", reason="the folder is quantized")
            return open_encoder(self.folder), "quantized"
        texts, words = self._sample(8), _TEXT.split()
        calibration = texts + self._tokens_of(words[::2])
        judged = texts + self._tokens_of([*_SHORT, *words[1::2]])
        exact = None if chosen else _vectors(_opened(self.folder, "fp32"), judged, self.folder)

        def candidate(name: str) -> float:
            model = _opened(self.folder, name, calibration)
            found = _vectors(model, judged, self.folder)
            assert exact is not None
            least = float(F.cosine_similarity(exact, found).min())
            if not least >= LEAST_COSINE:
                raise ConfigError(f"cosine {least:.4f} to fp32, below {LEAST_COSINE}")
            return _seconds(model, texts, self.folder)

        measures = {name: (lambda name=name: candidate(name)) for name in _WEIGHTS[1:]}
        why = "the fastest measured"
        taken = self.decisions.choose(TOPIC, measures, override=chosen, why=why)
        return _opened(self.folder, taken, calibration), taken


def _opened(folder: EncoderFolder, weights: str, calibration: Sequence[Sequence[int]] = ()) -> Bert:
    """What is between the products of int8 is bf16 where the processor has that, else fp32.

    Short texts lose the most by int8: without a calibration that takes the inputs of half of the
    layers in blocks or in 16 bits, a text of two words by MiniLM keeps 0.96 of its cosine."""
    short = weights == "bf16" or (weights == "int8" and cpu().native_bf16)
    model = open_encoder(folder, torch.bfloat16 if short else torch.float32)
    if weights == "int8":
        lengths = [len(item) for item in calibration]
        data = [
            (torch.tensor([token for item in calibration for token in item], device="cpu"), lengths)
        ]
        scheme = Int8WeightActivation(vocabulary="keep", exact_above=1.0)
        quantize_(model, scheme, data=data, objective="size")
    return model.eval()


@torch.inference_mode()
def _vectors(model: Bert, items: Sequence[Sequence[int]], folder: EncoderFolder) -> Tensor:
    """(B, D) fp32."""
    lengths = [len(item) for item in items]
    tokens_N = torch.tensor([token for item in items for token in item], device="cpu")
    x_ND = model(tokens_N, lengths).float()
    pool = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "max": lambda x: x.amax(0)}
    x_BD = torch.stack([pool[folder.pooling](x) for x in x_ND.split(lengths)])
    return F.normalize(x_BD, dim=1) if folder.normalize else x_BD


def _seconds(model: Bert, items: Sequence[Sequence[int]], folder: EncoderFolder) -> float:
    """Of one step; the lower quartile, since what other programs add is no property of weights."""
    import time

    took = []
    for _ in range(_TIMED + 1):
        began = time.perf_counter()
        _vectors(model, items, folder)
        took.append(time.perf_counter() - began)
    return sorted(took[1:])[_TIMED // 4]


def _frame(encoding: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and behind each text."""
    texts = [i for i, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    ids = list(encoding.ids)
    return ids[: min(texts, default=0)], ids[max(texts, default=-1) + 1 :]


def _tokenizer(folder: EncoderFolder) -> Any:
    try:
        from tokenizers import Tokenizer, models, normalizers
    except ImportError:
        raise need_extra("text", "tokenizers", "an encoder") from None
    path = folder.path / "tokenizer.json"
    if not path.is_file():
        raise FileError(f"{path}: no such file; an encoder needs its tokenizer")
    try:
        made = without_panic(Tokenizer.from_file, str(path))
    except Exception as error:
        raise FileError(f"{path}: cannot be read ({error})") from None
    if isinstance(made.model, models.WordPiece):
        given = bert_normalizer(folder.path)
        if given is not None:
            made.normalizer = normalizers.BertNormalizer(**given)
    made.no_padding()
    made.no_truncation()
    if folder.lower:
        own = [] if made.normalizer is None else [made.normalizer]
        made.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    need_sound(made, path)
    return made
