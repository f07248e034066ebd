"""Trainers in one process: what each holds, and what its shards become."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fabric_ray.plan import Side
from fabric_ray.weights.quant import Edges, Formats, RankQuantiser
from tests.unit.plan.torch_model import evaluate

Held = dict[tuple[int, str], torch.Tensor]


def held(side: Side, full: Mapping[str, torch.Tensor]) -> Held:
    """Every rank's containers, cut out of whole tensors by torch."""
    out = {}
    for container in side.containers:
        for rank in container.ranks or side.ranks:
            found = evaluate(container.layout, rank, dict(full))
            if found is not None and found[0].numel():
                out[rank, container.name] = found[0]
    return out


def plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits in a dtype that torch can cut, join and compare."""
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(dtypes[tensor.element_size()])


def exchanged(quantisers: Mapping[int, RankQuantiser], plain: Held) -> dict[int, torch.Tensor]:
    """Every rank's maxima, once each has what the others know."""
    partial = {
        rank: q.partial_maxima({name: t for (r, name), t in plain.items() if r == rank})
        for rank, q in quantisers.items()
    }
    whole = {rank: maxima.clone() for rank, maxima in partial.items()}
    for rank, q in quantisers.items():
        for peer, places in q.edges.receives.items():
            theirs = partial[peer][torch.from_numpy(quantisers[peer].edges.sends[rank])]
            at = torch.from_numpy(places)
            whole[rank][at] = torch.maximum(whole[rank][at], theirs)
    return whole


def prepared(side: Side, formats: Formats, plain: Held, *, band: int = 1 << 18) -> Held:
    """What all ranks hold after each has converted its own."""
    edges = Edges(side, formats)
    quantisers = {
        rank: RankQuantiser(side, formats, rank, edges=edges, band=band) for rank in side.ranks
    }
    maxima = exchanged(quantisers, plain)
    out: Held = {}
    for (rank, name), local in plain.items():
        if name not in quantisers[rank].preparations:
            out[rank, name] = plain_bytes(local.contiguous())
            continue
        preparation = quantisers[rank].preparations[name]
        values = torch.empty(preparation.shape, dtype=preparation.values_dtype, device="cpu")
        scales = None
        if preparation.scale_shape is not None:
            scales = torch.empty(
                preparation.scale_shape, dtype=preparation.scale_dtype, device="cpu"
            )
        preparation.prepare(local, values, scales, maxima[rank])
        assert preparation.nbytes == values.nbytes + (0 if scales is None else scales.nbytes)
        out[rank, name] = plain_bytes(values)
        if preparation.scale_name is not None:
            out[rank, preparation.scale_name] = plain_bytes(scales)
    return out
