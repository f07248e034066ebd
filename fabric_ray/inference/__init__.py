"""A small inference engine on torch, and the seam that any engine may stand behind.

This package imports no torch; its modules ``engine``, ``model``, ``sampling`` and ``generate`` do.
"""

from fabric_ray.inference.errors import (
    InferenceError,
    InvalidSpec,
    InvalidTable,
    InvalidTokens,
    NonFiniteLogits,
    OutOfPages,
    PageMisuse,
)
from fabric_ray.inference.pool import PagePool, page_keys
from fabric_ray.inference.presets import TINY, tiny
from fabric_ray.inference.protocols import (
    NO_PAGE,
    DecodeEngine,
    DecodeRow,
    InferenceEngine,
    PageTable,
    PrefillChunk,
    PrefillEngine,
    Tail,
    TailLayout,
    WholeEngine,
)
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.inference.tables import CachePools, Tables
from fabric_ray.inference.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "NO_PAGE",
    "TINY",
    "ByteTokenizer",
    "CachePools",
    "CacheSpec",
    "DecodeEngine",
    "DecodeRow",
    "InferenceEngine",
    "InferenceError",
    "InvalidSpec",
    "InvalidTable",
    "InvalidTokens",
    "NonFiniteLogits",
    "OutOfPages",
    "PageMisuse",
    "PagePool",
    "PageTable",
    "PrefillChunk",
    "PrefillEngine",
    "Tables",
    "Tail",
    "TailLayout",
    "Tokenizer",
    "WholeEngine",
    "load_tokenizer",
    "page_keys",
    "tiny",
]
