"""What an RL demo is asked to do, and what it found."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Literal

import msgspec

from fabric_ray.demo.rl import task
from fabric_ray.errors import InvalidArgument
from fabric_ray.models import ModelConfig

LOGPROB_TOLERANCE = 1e-4
"""Both sides compute in float32, in another order: differences stay near 1e-5."""
RISE = 0.1
"""By how much the mean reward of the last quarter must pass that of the first; rewards go from 0 to
1, and a quarter's mean varies by some hundredths."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """See ``fabric-ray demo rl --help``."""

    steps: int = 120
    staleness: int = 1
    trainers: int = 2
    rollouts: int = 2
    prompts: int = 8
    """Of a batch that a rollout draws at once."""
    group: int = 8
    """Samples of each prompt."""
    batches: int = 4
    """That each trainer takes for an update."""
    digits: int = 6
    lr: float = 3e-3
    clip: float = 0.2
    transport: Literal["auto", "shm", "tcp"] = "auto"
    seed: int = 0
    output: Path = Path("demo-output")
    address: str | None = None

    def check(self) -> None:
        """Raises InvalidArgument for what can't be run, before anything is started."""
        for name in ("trainers", "rollouts", "prompts", "batches", "digits"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; give at least 1")
        if self.steps < 4:
            raise InvalidArgument(
                f"steps is {self.steps}; give at least 4, so that the rewards have quarters"
            )
        if self.staleness < 0:
            raise InvalidArgument(f"staleness is {self.staleness}; give 0 or more")
        if self.group < 2:
            raise InvalidArgument(
                f"group is {self.group}; give at least 2, a sample is compared with the others"
            )

    @property
    def samples(self) -> int:
        """That one update learns from, on all trainers."""
        return self.trainers * self.batches * self.prompts * self.group


def model() -> ModelConfig:
    """The policy: 90 thousand parameters in float32."""
    return ModelConfig(
        kind="qwen3",
        vocab=task.VOCAB,
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=128,
        qk_norm=True,
        dtype="float32",
    )


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the trainers, and the version that came of it."""

    step: int
    version: int
    """The one that every rollout runs after it."""
    reward: float
    """Mean of the samples that it learned from."""
    solved: float
    """Share of those without a mistake."""
    staleness: dict[int, int]
    """Samples by how many versions they were behind."""
    discarded: int
    """Samples given up as too old since the update before."""
    clipped: float
    """Share of tokens whose importance ratio was clipped."""
    mismatch: float
    """Largest difference between a rollout's log-probability and the trainers' at that version."""
    seconds: float
    train_seconds: float
    push_seconds: float
    generating_in_training: float
    """Share of the training time in which a rollout generated, the mean of all."""
    generating_in_push: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All that the demo found."""

    options: Options
    parameters: int
    nbytes: int
    """Of one push, over all links."""
    updates: tuple[Update, ...]
    wrong: tuple[str, ...]
    """Versions, rollouts and containers where a rollout held something else than the trainers."""
    example: tuple[str, str]
    """A prompt and an answer of the last samples."""
    seconds: float
    """Of all updates."""
    transport: str | None
    timeline: str

    @property
    def quarters(self) -> tuple[float, float]:
        """Mean reward of the first and of the last quarter of the updates."""
        rewards = [update.reward for update in self.updates]
        n = len(rewards) // 4
        return statistics.fmean(rewards[:n]), statistics.fmean(rewards[-n:])

    @property
    def checks(self) -> dict[str, bool]:
        """What has to hold, by name."""
        first, last = self.quarters
        return {
            "weights_equal": not self.wrong,
            "logprobs_agree": all(u.mismatch <= LOGPROB_TOLERANCE for u in self.updates),
            "staleness_bounded": all(
                max(u.staleness) <= self.options.staleness for u in self.updates
            ),
            "reward_rose": last - first >= RISE,
        }

    @property
    def verified(self) -> bool:
        return all(self.checks.values())
