"""Readable reference models and their plain generation."""

from lezero.data.special import stop_tokens
from lezero.models.bert import Bert, BertConfig, bert_config, load_bert
from lezero.models.cache import KVCache
from lezero.models.config import RopeScaling, TransformerConfig, count_parameters
from lezero.models.generate import generate, generate_stream
from lezero.models.gguf import load_gguf, packaged_gguf
from lezero.models.gguf_vocabulary import gguf_end_tokens, gguf_tokenizer
from lezero.models.hf_writing import save_hf
from lezero.models.huggingface import load_hf, read_config, token_entries, tokenizer_files
from lezero.models.presets import PRESETS, preset
from lezero.models.sampling import Sampling
from lezero.models.transformer import Attention, Transformer, TransformerBlock

__all__ = [
    "PRESETS",
    "Attention",
    "Bert",
    "BertConfig",
    "KVCache",
    "RopeScaling",
    "Sampling",
    "Transformer",
    "TransformerBlock",
    "TransformerConfig",
    "bert_config",
    "count_parameters",
    "generate",
    "generate_stream",
    "gguf_end_tokens",
    "gguf_tokenizer",
    "load_bert",
    "load_gguf",
    "load_hf",
    "packaged_gguf",
    "preset",
    "read_config",
    "save_hf",
    "stop_tokens",
    "token_entries",
    "tokenizer_files",
]
