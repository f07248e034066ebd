"""What actors and the controller tell each other, and what a push reports."""

from __future__ import annotations

import msgspec

from fabric_ray.plan import LocalContainer


class Span(msgspec.Struct, frozen=True):
    """A stage of somebody's work, for the timeline."""

    who: str
    stage: str
    start: float
    """Seconds since the epoch, by the clock of the host it ran on."""
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Arm(msgspec.Struct, frozen=True):
    """Where the next version of a rollout is to be written, and on which counters it counts.

    Each push has an arm of its own: writes of an earlier push that failed can reach neither the
    memory (MR-2) nor the counters (IC-6) of a later one.
    """

    rank: int
    """In the layout that trainers write to."""
    name: str
    address: bytes
    region: bytes
    counters: tuple[bytes, ...]
    """One for each stripe."""
    offsets: tuple[int, ...]
    """Where each of the target side's containers begins in the region; -1 if it has none here."""
    staged: bool
    """Whether the version in use stays usable while the next arrives."""
    version: int | None = None
    """The version that the rollout runs."""
    usable: bool = True
    """Whether that can be read: not where it was overwritten in part."""
    further: tuple[bytes, ...] = ()
    """Regions that later versions will be written to."""
    stripes: tuple[int, ...] = ()
    """The stripe of each of the target side's containers."""
    hook: str | None = None
    """Why hooks failed for the version that was just put into use, or given up."""


class SourceShare(msgspec.Struct, frozen=True):
    """What one trainer has to send, to whom and from where: its part of the routing table."""

    session: str
    """Whose route this is: one call of ``connect``. Only the latest counts."""
    plan: bytes
    containers: tuple[str, ...]
    """Names by the indices that copies use."""
    arms: tuple[Arm, ...]
    converted: bool = False
    """Whether tensors change their dtype on the way."""


class Feed(msgspec.Struct, frozen=True):
    """Who writes to a rollout, and what it has to count."""

    writers: tuple[bytes, ...]
    """Addresses of their engines, and of those that feed them: who is lost ends the wait."""
    pages: tuple[int, ...]
    """To be expected, by stripe."""
    stripes: tuple[int, ...]
    """The stripe of each of the target side's containers."""
    relayed: bool = False
    """Whether that is another rollout, not trainers."""


class TargetShare(msgspec.Struct, frozen=True):
    """What one rollout has to hold, and who writes it."""

    session: str
    name: str
    """What the controller calls it."""
    place: int
    """The rank, of those that trainers write to, that holds the same."""
    containers: tuple[LocalContainer, ...]
    feed: Feed
    plan: bytes | None
    """For digests; absent when none are wanted."""


class Sent(msgspec.Struct, frozen=True):
    """What became of one trainer's share of a push."""

    spans: tuple[Span, ...]
    links: tuple[LinkReport, ...]
    failed: dict[int, str]
    """Rollout rank to cause."""
    digests: dict[int, int]
    temporary: Temporary | None = None


class Temporary(msgspec.Struct, frozen=True):
    """What a trainer with a replica took of its host's memory in a push."""

    gathered: int
    """The most bytes of whole tensors at once: a bucket, and those that waited for it."""
    replica: int
    """Bytes of the replica, which are registered once."""


class LinkReport(msgspec.Struct, frozen=True):
    """What moved from one trainer to one rollout."""

    trainer: int
    rollout: int
    """In the layout that trainers write to."""
    nbytes: int
    seconds: float
    """From the trainer's submit to its completion."""
    transport: str | None

    @property
    def gbytes_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9


class ConnectReport(msgspec.Struct, frozen=True):
    """What :meth:`WeightSync.connect` found out and set up."""

    nbytes: int
    """Bytes of one version, over all links."""
    copies: int
    plan_bytes: int
    sender_imbalance: float
    """Busiest trainer over the mean."""
    receiver_imbalance: float
    seconds: dict[str, float]
    """By stage: gather, plan, distribute."""
    converted: int = 0
    """Containers that change their dtype on the way, and their scales."""
    left: tuple[str, ...] = ()
    """Trainers' tensors that stay behind at every push, as ``leave`` allows."""


class PushReport(msgspec.Struct, frozen=True):
    """A version that every rollout has confirmed."""

    version: int
    nbytes: int
    """That left trainers; what rollouts passed on to each other isn't among them."""
    started: float
    """Seconds since the epoch, by the controller's clock."""
    seconds: float
    """From the call until every rollout runs the version."""
    stages: dict[str, float]
    """Wall seconds of write, confirm, commit."""
    links: tuple[LinkReport, ...]
    spans: tuple[Span, ...]
    dropped: dict[int, str] = {}
    """Rollouts that died and were left out from then on, and the cause."""
    temporary: tuple[Temporary, ...] = ()
    """By trainer, where replicas are filled: what that took of memory."""
    left: tuple[str, ...] = ()
    """Trainers' tensors that no rollout needs, and that ``leave`` names: stale where anything else
    has a copy of them."""

    @property
    def gbytes_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9

    def __str__(self) -> str:
        """A few lines: version, bytes, seconds by stage, the slowest link, rollouts left out."""
        stages = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.stages.items())
        lines = [
            f"version {self.version}: {self.nbytes / 1e6:,.1f} MB in {self.seconds:.3f} s "
            f"({self.gbytes_per_s:.2f} GB/s) over {len(self.links)} links",
            f"  stages: {stages}",
        ]
        if self.links:
            slow = max(self.links, key=lambda link: link.seconds)
            lines.append(
                f"  slowest link: trainer {slow.trainer} -> rollout {slow.rollout}, "
                f"{slow.nbytes / 1e6:,.1f} MB in {slow.seconds:.3f} s over {slow.transport}"
            )
        if self.left:
            more = f" and {len(self.left) - 1} more" if len(self.left) > 1 else ""
            lines.append(f"  not pushed: {self.left[0]}{more}")
        lines += [f"  left out: rollout {rank}: {why}" for rank, why in self.dropped.items()]
        return "\n".join(lines)


class JoinReport(msgspec.Struct, frozen=True):
    """A rollout that has joined."""

    rollout: int
    """Its number from now on."""
    version: int | None
    """What it runs; ``None`` if nobody could give it a version: it gets the next."""
    giver: int | None
    """The rollout that it was given by."""
    seconds: float
