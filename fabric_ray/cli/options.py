"""Options that several commands share, and the push that they describe."""

from __future__ import annotations

from typing import Annotated

import typer

from fabric_ray.cli import words
from fabric_ray.models.presets import PRESETS
from fabric_ray.weights.forecast import Push

Model = Annotated[str, typer.Argument(help=f"{', '.join(PRESETS)}, or the path of a config.json.")]
Trainer = Annotated[
    str, typer.Option(help="fsdp=16,pp=2,ep=8 or megatron:tp=8,pp=8,cp=4,ep=32,etp=1.")
]
Rollout = Annotated[str, typer.Option(help="tp=8,ep=8,engines=4; dp=: data-parallel attention.")]
Dtype = Annotated[
    str,
    typer.Option(help="On rollouts: bfloat16, fp8:128x128, fp8:64x64, fp8:channel, int8, ..."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def push(model: str, trainer: str, rollout: str, dtype: str) -> Push:
    """The push that is described.

    Raises:
        InvalidArgument, ModelError, FamilyError, QuantError: a word that means nothing, or sizes
            that don't fit.
    """
    config = words.model(model)
    sides = words.trainers(trainer), words.rollouts(rollout)
    return Push(config, *sides, words.formats(dtype, config))


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes:g} bytes"
