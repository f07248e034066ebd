"""Weights in another dtype: cast or quantised shard by shard, bit-equal to the whole tensor.

:func:`quantised_source` and :func:`quantised_target` say what both sides hold, a
:class:`RankQuantiser` converts what one rank holds, and an :class:`EdgeExchange` moves the maxima
of blocks that lie on several ranks.
"""

from fabric_ray.weights.quant.arithmetic import quantise
from fabric_ray.weights.quant.edges import Edges, RankEdges
from fabric_ray.weights.quant.errors import (
    ExchangeFailed,
    NotFinite,
    QuantError,
    UnalignedBlocks,
    UnsupportedFormat,
)
from fabric_ray.weights.quant.exchange import EdgeExchange, Invitation
from fabric_ray.weights.quant.formats import Cast, Format, Formats, Fp8, Int8
from fabric_ray.weights.quant.layout import quantised_source, quantised_target
from fabric_ray.weights.quant.shards import Preparation, RankQuantiser
from fabric_ray.weights.quant.tables import QUANTISED, linear_formats

__all__ = [
    "QUANTISED",
    "Cast",
    "EdgeExchange",
    "Edges",
    "ExchangeFailed",
    "Format",
    "Formats",
    "Fp8",
    "Int8",
    "Invitation",
    "NotFinite",
    "Preparation",
    "QuantError",
    "RankEdges",
    "RankQuantiser",
    "UnalignedBlocks",
    "UnsupportedFormat",
    "linear_formats",
    "quantise",
    "quantised_source",
    "quantised_target",
]
