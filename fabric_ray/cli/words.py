"""Sizes and dtypes as they are said on the command line."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args

from fabric_ray.errors import InvalidArgument
from fabric_ray.models import ModelConfig, read_config
from fabric_ray.models.config import DTypeName
from fabric_ray.models.errors import UnsupportedModel
from fabric_ray.models.presets import PRESETS, preset
from fabric_ray.weights.forecast import Rollouts, Trainers
from fabric_ray.weights.quant import Cast, Format, Formats, Fp8, Int8, linear_formats
from fabric_ray.weights.simulation import PER_CALL, Costs
from fabric_ray.weights.trainers import FsdpParallel, Parallel

_FSDP = ("fsdp", "pp", "ep")
_MEGATRON = ("tp", "cp", "dp", "pp", "ep", "etp", "vpp")
_ROLLOUT = ("tp", "ep", "dp", "engines")
_FORMATS = "fp8:128x128 (or another block), fp8:channel, fp8:tensor or int8"

Sizes = dict[str, Any]
"""By name; all of them numbers."""


def model(text: str) -> ModelConfig:
    """A model by name, or by the path of a ``config.json`` or its directory.

    Raises:
        ModelError: there is no such model, or it isn't supported.
    """
    if text.lower() not in PRESETS and Path(text).exists():
        return read_config(text, quantised=True)
    if "/" in text:
        raise UnsupportedModel(
            f"there is no file or directory {text!r}; give the path of a config.json or of its "
            "directory",
            model_type=None,
        )
    return preset(text)


def trainers(text: str) -> Trainers:
    """``fsdp=16,pp=2,ep=8`` or ``megatron:tp=8,pp=8,cp=4,ep=32,etp=1``.

    Raises:
        InvalidArgument: it isn't of either form.
        FamilyError: the sizes don't fit each other.
    """
    head, colon, rest = text.rpartition(":")
    if colon and head != "megatron":
        raise InvalidArgument(
            f"--trainer {text!r}: {head!r} is no kind of trainer; say fsdp=16,pp=2,ep=8 or "
            "megatron:tp=8,pp=8,dp=2"
        )
    words, stages = _stages(rest)
    if colon:
        return Trainers(Parallel(**_sizes("--trainer", words, _MEGATRON)), stages)
    return Trainers(FsdpParallel(**_sizes("--trainer", words, _FSDP)), stages)


def rollouts(text: str) -> Rollouts:
    """``tp=4,dp=8,ep=32,engines=4``.

    Raises:
        InvalidArgument: it isn't of that form.
    """
    return Rollouts(**_sizes("--rollout", text, _ROLLOUT))


def formats(text: str, config: ModelConfig) -> Formats:
    """What a dtype means for a model: floats for all of it, others for what engines quantise.

    Raises:
        InvalidArgument: it is no dtype.
        UnsupportedFormat: what engines quantise of this model is unknown.
    """
    for name in get_args(DTypeName):
        if text == name:
            # Engines keep routers' correction biases as they are.
            bias = "*.e_score_correction_bias"
            return {} if name == config.dtype else {bias: Cast("float32"), "*": Cast(name)}
    return linear_formats(config.kind, _quantised(text))


def costs(text: str) -> Costs:
    """``h2d=0,submit=5``: microseconds of a call; what isn't said is what fabric-lib measured.

    Raises:
        InvalidArgument: it isn't of that form.
    """
    found: dict[str, float] = {}
    for word in filter(None, text.split(",")):
        name, _, number = word.strip().partition("=")
        if name not in PER_CALL or not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", number):
            raise InvalidArgument(
                f"--costs {text!r}: {word.strip()!r} is no cost; give us for some of "
                f"{', '.join(PER_CALL)}, as in h2d=0,submit=5"
            )
        found[name] = float(number) / 1e6
    return Costs(**found)


def finite(option: str, number: float, example: str) -> float:
    """The number.

    Raises:
        InvalidArgument: it is not finite.
    """
    if not math.isfinite(number):
        raise InvalidArgument(f"{option}: got {number}, expected a number of {example}")
    return number


def _quantised(text: str) -> Format:
    if text == "int8":
        return Int8()
    if text == "fp8:channel":
        return Fp8("channel")
    if text == "fp8:tensor":
        return Fp8("tensor")
    block = re.fullmatch(r"fp8:([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if block is None:
        raise InvalidArgument(
            f"--dtype {text!r} is none; use {', '.join(get_args(DTypeName))}, {_FORMATS}"
        )
    return Fp8((int(block[1]), int(block[2])))


def _sizes(option: str, text: str, known: tuple[str, ...]) -> Sizes:
    """``a=1,b=2``; every name at most once, and known."""
    sizes: Sizes = {}
    for word in text.split(","):
        name, _, number = word.strip().partition("=")
        if name not in known or not re.fullmatch(r"\d{1,7}", number) or name in sizes:
            again = "is said twice" if name in sizes else "isn't a size"
            raise InvalidArgument(
                f"{option} {text!r}: {word.strip()!r} {again}; give numbers for some of "
                f"{', '.join(known)}, as in {known[0]}=8,{known[2]}=2"
            )
        sizes[name] = int(number)
    return sizes


def _stages(text: str) -> tuple[str, tuple[int, ...] | None]:
    """Takes ``stages=16+15+15`` out of the words."""
    words = text.split(",")
    found = [word for word in words if word.strip().startswith("stages=")]
    if not found:
        return text, None
    said = found[0].strip().removeprefix("stages=")
    if len(found) > 1 or not re.fullmatch(r"\d{1,7}(\+\d{1,7})*", said):
        raise InvalidArgument(
            f"--trainer {text!r}: say stages once, as the layers of each: stages=16+15+15"
        )
    rest = ",".join(word for word in words if word not in found)
    return rest, tuple(int(number) for number in said.split("+"))
