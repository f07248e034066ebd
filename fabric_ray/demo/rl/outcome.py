"""What the demo of RL found, and how that is shown."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

import msgspec
from rich.console import Console

from fabric_ray.demo.common import plain
from fabric_ray.demo.options import Rl as Options
from fabric_ray.demo.rl import policy
from fabric_ray.models import ModelConfig

LOGPROB_TOLERANCE = 1e-4
"""Both sides compute in float32, in another order: differences stay near 1e-5."""
RISE = 0.1
"""By how much the mean reward of the last quarter must pass that of the first; rewards go from 0 to
1, and a quarter's mean varies by some hundredths."""

HEADER = (
    f"{'step':>5} {'version':>7} {'reward':>7} {'solved':>6}  {'staleness':<16} "
    f"{'samples/s':>9} {'push ms':>7}  generating"
)


def model() -> ModelConfig:
    """The policy: 90 thousand parameters in float32."""
    return ModelConfig(
        kind="qwen3",
        vocab=policy.VOCAB,
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

    def summary(self) -> dict[str, Any]:
        """Machine-readable."""
        first, last = self.quarters
        return {
            "verified": self.verified,
            "checks": self.checks,
            "reward": {
                "first_quarter": first,
                "last_quarter": last,
                "rise": last - first,
                "rise_required": RISE,
                "solved": self.updates[-1].solved,
            },
            "logprob_difference": max(u.mismatch for u in self.updates),
            "logprob_tolerance": LOGPROB_TOLERANCE,
            "versions": self.updates[-1].version,
            "wrong": self.wrong,
            "bytes": self.nbytes,
            "push_seconds": statistics.median(u.push_seconds for u in self.updates),
            "staleness": self._staleness(),
            "discarded": sum(u.discarded for u in self.updates),
            "generating_in_training": self._share("train_seconds", "generating_in_training"),
            "generating_in_push": self._share("push_seconds", "generating_in_push"),
            "samples_per_s": self.options.samples * len(self.updates) / self.seconds,
            "seconds": self.seconds,
            "parameters": self.parameters,
            "transport": self.transport,
            "example": self.example,
            "timeline": self.timeline,
            "options": msgspec.to_builtins(self.options, enc_hook=str),
            "updates": msgspec.to_builtins(self.updates),
        }

    def show(self, console: Console) -> None:
        """Prints what was found, the curve and the verdict."""
        said, options = self.summary(), self.options
        first, last = self.quarters
        asked, answered = self.example
        console.print(f"\nOne of the last samples: {asked}  →  {answered}\n", highlight=False)
        told = {
            "weights_equal": f"{said['versions']} versions on {options.rollouts} rollouts, every "
            "bit",
            "logprobs_agree": "of every sample learned from, within "
            f"{said['logprob_difference']:.0e}; {LOGPROB_TOLERANCE:.0e} is allowed",
            "staleness_bounded": f"{_histogram(said['staleness'])}; at most {options.staleness}, "
            f"{said['discarded']} samples discarded",
            "reward_rose": f"from {first:.3f} in the first quarter to {last:.3f} in the last; "
            f"{RISE} more is required",
        }
        table = plain(show_header=False)
        for check, holds in self.checks.items():
            verdict = "[green]yes[/]" if holds else "[red]no[/]"
            table.add_row(check.replace("_", " "), verdict, told[check])
        console.print(table)
        console.print(
            f"{self.seconds:.0f} s, {said['samples_per_s']:.0f} samples/s; a push of "
            f"{self.nbytes:,} bytes over {self.transport} took {said['push_seconds'] * 1e3:.1f} ms."
        )
        console.print(
            f"Rollouts generated in {said['generating_in_training']:.0%} of the training time and "
            f"in {said['generating_in_push']:.0%} of the push time. Timeline: {self.timeline}"
        )

    def _staleness(self) -> dict[int, int]:
        total: Counter[int] = Counter()
        for update in self.updates:
            total.update(update.staleness)
        return dict(sorted(total.items()))

    def _share(self, seconds: str, share: str) -> float:
        """The mean of a share of times, the longer ones counting more."""
        weights: list[float] = [getattr(u, seconds) for u in self.updates]
        shares: list[float] = [getattr(u, share) for u in self.updates]
        return sum(w * s for w, s in zip(weights, shares, strict=True)) / sum(weights)


def line(update: Update) -> str:
    """One update, under :data:`HEADER`."""
    u = update
    return (
        f"{u.step:>5} {u.version:>7} {u.reward:>7.3f} {u.solved:>6.0%}  "
        f"{_histogram(u.staleness):<16} {sum(u.staleness.values()) / u.seconds:>9.0f} "
        f"{u.push_seconds * 1e3:>7.1f}  {u.generating_in_training:>4.0%}"
    )


def _histogram(staleness: dict[int, int]) -> str:
    total = sum(staleness.values())
    return " ".join(f"{behind}:{n / total:.0%}" for behind, n in staleness.items())
