"""What the demos can be asked for. A field with a text is an option of the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from fabric_ray.errors import InvalidArgument

MAX_TOKENS = 1024
"""Of a completion of the key/value cache demo: one takes seconds on a laptop."""

_LONGEST_S = 3600

Transport = Annotated[Literal["auto", "shm", "tcp"], "What moves the bytes."]
Kind = Literal["llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]
Trainers = Annotated[int, "FSDP2 trainers."]
Output = Annotated[Path, "Where the timeline goes."]
Address = Annotated[
    str | None, "Of a running Ray cluster. Default: RAY_ADDRESS, or Ray is started here."
]


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """See ``fabric-ray demo weights --help``."""

    checkpoint: Annotated[
        Path | None,
        "Directory of a Hugging Face checkpoint (safetensors). Default: a model is made.",
    ] = None
    trainers: Trainers = 2
    rollouts: Annotated[int, "Rollouts: the tensor-parallel size."] = 2
    ep: Annotated[int, "Groups of rollouts that own whole experts (MoE)."] = 1
    transport: Transport = "auto"
    kind: Annotated[Kind, "Kind of the model that is made."] = "llama"
    parameters: Annotated[float, "Size of the model that is made."] = 300e6
    pushes: Annotated[int, "Versions to push."] = 4
    steps: Annotated[int, "Training steps before each push."] = 1
    in_place: Annotated[bool, "Rollouts hold one copy, overwritten by a push."] = False
    digest: Annotated[bool, "Have every push compare digests on both sides."] = False
    output: Output = Path("demo-output")
    address: Address = None
    seed: int = 0

    def check(self) -> None:
        """Raises InvalidArgument for what can't be run, before anything is started."""
        check_least(self, trainers=1, rollouts=1, ep=1, pushes=1, steps=0)
        if not math.isfinite(self.parameters):
            raise InvalidArgument(
                f"--parameters: got {self.parameters}, expected a number such as 300e6"
            )
        if self.checkpoint is not None and not self.checkpoint.is_dir():
            raise InvalidArgument(
                f"--checkpoint: {self.checkpoint} is not a directory; give one that holds "
                "config.json and *.safetensors"
            )


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """See ``fabric-ray demo kvcache --help``."""

    model: Annotated[
        str,
        "tiny-llama, tiny-qwen3, tiny-mla, tiny-hybrid..., or a directory of a Hugging Face "
        "checkpoint.",
    ] = "tiny-llama"
    prefill_tp: Annotated[int, "Tensor-parallel ranks of a prefiller."] = 2
    decode_tp: Annotated[int, "Tensor-parallel ranks of a decoder."] = 1
    clients: Annotated[int, "Clients, each with one request at a time."] = 6
    seconds: Annotated[float, "Of load, without what scaling takes."] = 12.0
    """A third each before scaling, before the kill, and after it."""
    max_tokens: Annotated[int, "Of each completion."] = 24
    transport: Transport = "auto"
    seed: Annotated[int, "Of weights and prompts."] = 0
    address: Address = None

    def check(self) -> None:
        """Raises InvalidArgument for what can't be run, before anything is started."""
        check_least(self, prefill_tp=1, decode_tp=1, clients=1, max_tokens=1)
        check_most(self, prefill_tp=64, decode_tp=64, clients=32, max_tokens=MAX_TOKENS)
        if not 0 < self.seconds <= _LONGEST_S:
            raise InvalidArgument(
                f"--seconds: got {self.seconds:g}, expected more than 0 and at most {_LONGEST_S}"
            )


class Moe(msgspec.Struct, frozen=True, kw_only=True):
    """See ``fabric-ray demo moe --help``."""

    ranks: Annotated[int, "Actors that the experts are divided among."] = 4
    tokens: Annotated[int, "That each rank reads in a step."] = 32
    steps: Annotated[int, "Of each of the three phases."] = 3
    transport: Transport = "auto"
    timeout: float = 10.0
    seed: Annotated[int, "Of weights and tokens."] = 0
    address: Address = None

    def check(self) -> None:
        """Raises InvalidArgument for what can't be run, before anything is started."""
        check_least(self, ranks=2, tokens=1, steps=1)
        check_most(self, ranks=64, tokens=4096)
        # No option of the command line.
        if not 1 <= self.timeout < math.inf:
            raise InvalidArgument(f"timeout: got {self.timeout} s, expected at least 1")


def check_least(options: object, **least: int) -> None:
    """Raises InvalidArgument if an option is less than it can be."""
    for name, bound in least.items():
        if (value := getattr(options, name)) < bound:
            raise InvalidArgument(f"{option(name)}: got {value}, expected at least {bound}")


def check_most(options: object, **most: int) -> None:
    """Raises InvalidArgument if an option is more than it can be."""
    for name, bound in most.items():
        if (value := getattr(options, name)) > bound:
            raise InvalidArgument(f"{option(name)}: got {value}, expected at most {bound}")


def option(field: str) -> str:
    """What the command line calls a field."""
    return f"--{field.replace('_', '-')}"
