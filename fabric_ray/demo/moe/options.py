"""What the demo is asked for, and what came of it."""

from __future__ import annotations

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.moe.layer import MoeConfig, Traffic
from fabric_ray.moe.model import MoeModelConfig

SEQUENCE = 16
"""Tokens of the longest sequence."""
NEW_TOKENS = 4
"""That are generated in each phase."""
_MOST_RANKS = 64
_MOST_TOKENS = 4096


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """See ``fabric-ray demo moe --help``."""

    ranks: int = 4
    tokens: int = 32
    steps: int = 3
    transport: str = "auto"
    timeout: float = 10.0
    seed: int = 0
    address: str | None = None

    def check(self) -> None:
        """Raises InvalidArgument for what can't be run, before anything is started."""
        if not 2 <= self.ranks <= _MOST_RANKS:
            raise InvalidArgument(
                f"ranks is {self.ranks}; give 2 to {_MOST_RANKS}: one is killed, and others go on"
            )
        if not 1 <= self.tokens <= _MOST_TOKENS:
            raise InvalidArgument(f"tokens is {self.tokens}; give 1 to {_MOST_TOKENS}")
        if self.steps < 1:
            raise InvalidArgument(f"steps is {self.steps}; give at least 1")
        if self.timeout <= 0:
            raise InvalidArgument(f"timeout is {self.timeout}; give more than 0 seconds")

    @property
    def model(self) -> MoeModelConfig:
        """Routed as DeepSeek-V3 is, with four experts for each rank."""
        moe = MoeConfig(
            hidden=64,
            experts=4 * self.ranks,
            topk=3,
            intermediate=32,
            shared_intermediate=32,
            score="sigmoid",
            scale=2.5,
            groups=self.ranks,
            kept_groups=max(1, self.ranks // 2),
            bias=True,
        )
        return MoeModelConfig(moe=moe, positions=SEQUENCE + NEW_TOKENS)


class Phase(msgspec.Struct, frozen=True):
    """Some steps with the same ranks."""

    name: str
    left_out: tuple[int, ...]
    """Experts."""
    steps: int
    tokens: int
    """That were read, on all ranks."""
    seconds: tuple[float, ...]
    """Of each step, as the controller saw it."""
    logits: int
    """Numbers that were compared."""
    wrong: int
    """Of those, how many differ from the model in one place in any bit."""
    said: bool
    """Whether the tokens that were generated are those of the model in one place."""
    traffic: dict[int, Traffic]
    """Of each rank."""

    @property
    def equal(self) -> bool:
        return self.wrong == 0 and self.said and self.logits > 0


class Loss(msgspec.Struct, frozen=True):
    """The rank that was killed, and what became known of it."""

    rank: int
    pid: int
    named: tuple[int, ...]
    """Ranks that were given up."""
    by: tuple[int, ...]
    """Ranks that gave it up by themselves."""
    cause: str
    seconds: float
    """From the kill until the group knew."""
    recovered: float
    """From the kill until the results without it were there."""


class Outcome(msgspec.Struct, frozen=True):
    options: Options
    phases: tuple[Phase, ...]
    loss: Loss
    joined: float
    """Seconds until the rank was replaced."""
    newcomer: bool
    """Whether who replaced it is another actor with another engine."""
    explanation: str

    @property
    def checks(self) -> dict[str, bool]:
        whole, masked, again = self.phases
        return {
            "every rank's logits and tokens are those of the model in one place": whole.equal,
            "who was killed was named, and nobody else": self.loss.named == (self.loss.rank,),
            "the others went on without its experts, bit by bit": masked.equal
            and len(masked.left_out) == self.options.model.moe.experts // self.options.ranks,
            "a new rank took its place": self.newcomer and not again.left_out,
            "whole again, bit by bit": again.equal,
        }

    @property
    def verified(self) -> bool:
        return all(self.checks.values())
