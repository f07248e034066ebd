"""What a weight-push demo is asked to do, and what it found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.models.kinds import Kind
from fabric_ray.weights.report import ConnectReport, LinkReport, PushReport, Span


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """See ``fabric-ray demo weights --help``."""

    trainers: int = 2
    rollouts: int = 2
    ep: int = 1
    checkpoint: Path | None = None
    kind: Kind = "llama"
    parameters: float = 300e6
    pushes: int = 4
    steps: int = 1
    transport: Literal["auto", "shm", "tcp"] = "auto"
    staged: bool = True
    digest: bool = False
    output: Path = Path("demo-output")
    address: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises InvalidArgument for what can't be run, before anything is started."""
        for name in ("trainers", "rollouts", "ep", "pushes"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; give at least 1")
        if not math.isfinite(self.parameters):
            raise InvalidArgument(f"parameters is {self.parameters}; give a number such as 300e6")
        if self.steps < 0:
            raise InvalidArgument(f"steps is {self.steps}; give 0 or more")
        if self.checkpoint is not None and not self.checkpoint.is_dir():
            raise InvalidArgument(
                f"{self.checkpoint} is not a directory; give one that holds config.json and "
                "*.safetensors"
            )


class Checked(msgspec.Struct, frozen=True):
    """What a rollout found when it compared its weights with the reference."""

    nbytes: int
    """Bytes compared, padding among them."""
    wrong: tuple[str, ...]
    """Containers that differ, are missing or are too many."""
    changed: bool
    """Whether anything differs from the version before: training must have had an effect."""


class Push(msgspec.Struct, frozen=True):
    """One version on its way, and what it is measured against."""

    report: PushReport
    floor_seconds: float
    """A plain copy of the same bytes by the same number of threads, right after the push."""
    losses: tuple[float, ...]
    """Of the training steps before it, averaged over the trainers."""
    checked: tuple[Checked, ...]

    @property
    def verified(self) -> bool:
        return all(not c.wrong and c.changed for c in self.checked)


class Outcome(msgspec.Struct, frozen=True):
    """All that a demo found."""

    model: str
    parameters: int
    trainers: int
    rollouts: int
    threads: int
    """Copying threads of each trainer."""
    connect: ConnectReport
    explanation: str
    pushes: tuple[Push, ...]
    spans: tuple[Span, ...]
    """The driver's."""
    timeline: str

    @property
    def verified(self) -> bool:
        return all(push.verified for push in self.pushes)

    @property
    def links(self) -> tuple[LinkReport, ...]:
        return self.pushes[-1].report.links
