"""Messages between actors and the controller, and reports of pushes."""

from __future__ import annotations

from collections import Counter

import msgspec

from fabric_ray.plan import LocalContainer


class Span(msgspec.Struct, frozen=True):
    """A stage of one actor's work, for timelines."""

    actor: str
    """The actor, such as ``trainer 0``."""
    stage: str
    start: float
    """Seconds since the epoch, by the clock of the actor's host."""
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class PushTarget(msgspec.Struct, frozen=True):
    """Where a source writes the next version of a rollout: region and counters.

    Each push has new push targets: writes of an earlier push that failed reach neither the
    memory (MR-2) nor the counters (IC-6) of a later one.
    """

    rank: int
    """Plan rank."""
    name: str
    address: bytes
    region: bytes
    counters: tuple[bytes, ...]
    """One per stripe."""
    offsets: tuple[int, ...]
    """Offset of each container of the target side in the region; -1: not held here."""
    staged: bool
    """Whether the version in use stays usable while the next arrives."""
    version: int | None = None
    """The version in use."""
    usable: bool = True
    """False if the version in use was overwritten in part."""
    further: tuple[bytes, ...] = ()
    """Regions that later versions will be written to."""
    stripes: tuple[int, ...] = ()
    """The stripe of each container of the target side."""
    inbox: bytes | None = None
    """The region for changes of the version in use; ``None`` if it takes versions whole."""
    hook: str | None = None
    """Why hooks failed for the version that was just committed or aborted."""
    serial: int = 0
    """Counts the rollout's push targets. A call that names an earlier one comes too late."""


class SourceShare(msgspec.Struct, frozen=True):
    """One trainer's share of the routing table."""

    session: str
    """Identifies one call of ``connect``. Actors refuse calls of earlier sessions."""
    plan: bytes
    containers: tuple[str, ...]
    """Names; copies refer to them by index."""
    push_targets: tuple[PushTarget, ...]
    converted: bool = False
    """Whether tensors change their dtype on the way."""
    delta: bool = False
    """Whether pushes send what changed."""


class InboundPlan(msgspec.Struct, frozen=True):
    """The engines that write to a rollout, and the counts that it expects."""

    writers: tuple[bytes, ...]
    """Engine addresses of the writers and of all rollouts above them: the loss of one ends the
    wait."""
    pages: tuple[int, ...]
    """Expected counts, by stripe."""
    stripes: tuple[int, ...]
    """The stripe of each container of the target side."""
    relayed: bool = False
    """Whether a rollout writes, not trainers."""


class TargetShare(msgspec.Struct, frozen=True):
    """One rollout's share of the plan."""

    session: str
    name: str
    """The rollout's label, such as ``rollout 0``."""
    plan_rank: int
    """The rank of the plan whose bytes the rollout holds."""
    containers: tuple[LocalContainer, ...]
    inbound: InboundPlan
    plan: bytes | None
    """The encoded plan, for digests and changes; ``None`` without them."""
    delta: bool = False
    """Whether pushes send what changed."""


class Changes(msgspec.Struct, frozen=True):
    """What one trainer has put into a rollout's inbox."""

    pieces: bytes
    """Numbers of the pieces in the inbox, in order, as ``<u4``. The others arrive whole."""
    nbytes: int
    """Bytes in the inbox."""
    digest: int
    """Of the bytes of these pieces once the changes are applied."""


class Arrival(msgspec.Struct, frozen=True):
    """What a rollout that gets changes has to wait for and to apply."""

    count: int
    changes: dict[int, Changes]
    """By trainer."""


class Confirmed(msgspec.Struct, frozen=True):
    """A rollout's answer once all bytes have arrived."""

    spans: tuple[Span, ...]
    differs: bool = False
    """Whether the changes did not lead to the trainers' bytes: the version is not confirmed."""


class Sent(msgspec.Struct, frozen=True):
    """The result of one trainer's share of a push."""

    spans: tuple[Span, ...]
    links: tuple[LinkReport, ...]
    failed: dict[int, str]
    """Causes, by plan rank."""
    digests: dict[int, int]
    temporary: Temporary | None = None
    counts: dict[int, int] = {}
    """By plan rank: what the rollout has to count of this trainer; empty without changes."""
    changes: dict[int, Changes] = {}
    """By plan rank."""
    compared: bool = False
    """Whether all rollouts had the version that it compared with."""
    comparing: float = 0.0
    """Seconds in which it compared its share, and kept a copy."""


class Temporary(msgspec.Struct, frozen=True):
    """Host memory that a :class:`ReplicaSource` took in a push."""

    gathered: int
    """Peak bytes of whole tensors: a bucket, and the tensors kept from earlier buckets."""
    replica: int
    """Bytes of the replica."""


class LinkReport(msgspec.Struct, frozen=True):
    """Bytes that moved from one trainer to one rollout."""

    trainer: int
    rollout: int
    """Plan rank."""
    nbytes: int
    seconds: float
    """From the trainer's submit to its completion."""
    transport: str | None
    whole: str | None = None
    """With ``delta=True``: why tensors were sent whole; ``None`` if none were."""

    @property
    def gbytes_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9


class ConnectReport(msgspec.Struct, frozen=True):
    """The result of :meth:`WeightSync.connect`."""

    nbytes: int
    """Bytes of one version, over all links."""
    copies: int
    plan_bytes: int
    sender_imbalance: float
    """Bytes that the busiest trainer sends, over the mean."""
    receiver_imbalance: float
    seconds: dict[str, float]
    """Seconds of gather, plan and distribute."""
    converted: int = 0
    """Number of converted containers and of their scales."""
    left: tuple[str, ...] = ()
    """Trainers' tensors that no push sends, since ``leave`` names them."""


class PushReport(msgspec.Struct, frozen=True):
    """The result of a push: a version that all rollouts have committed."""

    version: int
    nbytes: int
    """Bytes that trainers sent, without bytes that rollouts relayed."""
    started: float
    """Seconds since the epoch, by the controller's clock."""
    seconds: float
    """From the call until all rollouts have committed."""
    stages: dict[str, float]
    """Wall seconds of write, confirm, quiesce, commit."""
    links: tuple[LinkReport, ...]
    spans: tuple[Span, ...]
    dropped: dict[int, str] = {}
    """Rollouts that died and were dropped, and why."""
    temporary: tuple[Temporary, ...] = ()
    """Memory that each :class:`ReplicaSource` took."""
    left: tuple[str, ...] = ()
    """Trainers' tensors that were not sent, since ``leave`` names them."""
    version_nbytes: int = 0
    """Bytes of the whole version over all links: what a push without ``delta`` sends."""
    differed: tuple[str, ...] = ()
    """Rollouts whose changed bytes differed from the trainers'. The push was made again, whole."""

    @property
    def gbytes_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9

    def __str__(self) -> str:
        """A few lines: version, bytes, seconds by stage, the slowest link, what was sent whole and
        why, dropped rollouts."""
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
        if self.nbytes < self.version_nbytes:
            part = self.nbytes / self.version_nbytes
            lines.append(f"  changes only: {part:.3f} of {self.version_nbytes / 1e6:,.1f} MB")
        for cause, count in Counter(link.whole for link in self.links if link.whole).items():
            lines.append(f"  sent whole on {count} link{'s' if count > 1 else ''}: {cause}")
        lines += [f"  {name}: its bytes differed; sent whole again" for name in self.differed]
        if self.left:
            more = f" and {len(self.left) - 1} more" if len(self.left) > 1 else ""
            lines.append(f"  not pushed: {self.left[0]}{more}")
        lines += [f"  dropped: rollout {rank}: {why}" for rank, why in self.dropped.items()]
        return "\n".join(lines)


class JoinReport(msgspec.Struct, frozen=True):
    """The result of :meth:`WeightSync.join`."""

    rollout: int
    """The number of the rollout."""
    version: int | None
    """The version in use; ``None`` if no replica could copy one: the next push brings it."""
    giver: int | None
    """The rollout that copied the version."""
    seconds: float
