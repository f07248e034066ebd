"""The rollout's half of a push."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

import msgspec

from fabric_ray import observe
from fabric_ray._native import Counter, Digest, EngineAddress, Peer, digest_copies
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument, Stale, WeightSyncError
from fabric_ray.plan import LocalContainer, Plan, Side
from fabric_ray.weights import target_arguments as arguments
from fabric_ray.weights.delta import DeltaInbox
from fabric_ray.weights.destination import Destination, VersionSink
from fabric_ray.weights.hooks import EngineHooks, Pause, run_commit_hooks
from fabric_ray.weights.latest_call import OUTDATED, LatestCallLock
from fabric_ray.weights.readers import LiveWeights, ReaderGate, Reading, caller
from fabric_ray.weights.registry import Registry
from fabric_ray.weights.relay import Relay, RelayWriter, expect_all
from fabric_ray.weights.report import (
    Arrival,
    Confirmed,
    InboundPlan,
    PushTarget,
    Span,
    TargetShare,
)
from fabric_ray.weights.staging import StagingMemory, wait_for_readers

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TARGETS: Registry[WeightTarget] = Registry("weight target")


class WeightTarget:
    """This rollout rank's weights, which trainers write version by version.

    With ``staged`` (the default), a version arrives in staging memory while the version before is
    in use, and :attr:`weights` flips when all rollouts have confirmed the version. Without, the
    version is written in place. That takes half the memory, but the weights can't be used during a
    push, and are lost if it fails (a further push restores them).

    With ``into``, a commit copies the version into the tensors of a module; the module replaces the
    second copy.

    A commit waits for readers of the version in use: for each :meth:`reading`, and for each
    reference to a tensor of :attr:`weights`. After its timeout, the push fails and names the
    reader (RS-1).

    Args:
        side: the layout of all rollout ranks, e.g. from ``fabric_ray.weights.families``; by default
            that of ``into``: whole on every rollout, or as its DTensors say.
        rank: this rollout's index in ``WeightSync(rollouts=...)``; a rank of ``side``. Not needed
            without ``side``.
        name: distinguishes the models of one process.
        engine: by default the process's own, :func:`fabric_ray.runtime.engine`.
        into: a module whose parameters and persistent buffers hold the version in use after each
            commit, or tensors by name. They keep their memory, on any device. A forward pass of
            the module counts as :meth:`reading`. Or what puts versions into an engine.
        device: where versions arrive: a GPU, such as ``"cuda:0"``, or by default the host. Trainers
            write straight into a GPU, over NVLink or NICs. It needs room for the copies above.
        hooks: callbacks of the inference engine.

    Raises:
        InvalidArgument: an argument is of another type, or ``into`` differs from ``side``.
    """

    def __init__(
        self,
        side: Side | None = None,
        *more: NoReturn,
        rank: int | None = None,
        name: str = "default",
        engine: TransferEngine | None = None,
        staged: bool = True,
        into: torch.nn.Module | Mapping[str, torch.Tensor] | VersionSink | None = None,
        device: torch.device | str | int | None = None,
        hooks: EngineHooks | None = None,
    ) -> None:
        from fabric_ray.runtime import engine as process_engine

        arguments.check_arguments(side, more, into)
        self.side, self.rank = arguments.side_and_rank(side, rank, into)
        self.name = name
        self.version: int | None = None
        """The version in use; ``None`` before the first."""
        self._device = arguments.gpu_of(device)
        self._engine = engine or process_engine()
        # With `into`, the version in use is in the module, so one staging memory is enough.
        self._staged = staged and into is None
        self._share: TargetShare | None = None
        self._layout: tuple[LocalContainer, ...] = ()
        self._containers: dict[str, LocalContainer] = {}
        self._staging: list[StagingMemory] = []
        # For changes, if the session asks for them.
        self._inbox: DeltaInbox | None = None
        self._live = 0
        self._counters: list[Counter] = []
        self._serial = 0  # of the latest push target
        self._relay: Relay | None = None
        self._prepared: int | None = None
        self._torn = False
        # Torn by the announcement of a push alone: perhaps no byte was written.
        self._announced = False
        self._outdated = False  # what hooks refresh, since one has failed
        self._engine_hooks = hooks or EngineHooks()
        self._pause = Pause(self._engine_hooks)
        self._hooks: list[Callable[[int], None]] = []
        self.calls_lock = LatestCallLock()
        """Held by each call of a controller that changes the target (RS-3)."""
        self._gate = ReaderGate(self._referenced, self._is_lent_to_caller)
        self._into: VersionSink | None = None
        if into is not None:
            from fabric_ray.weights.replica.sides import whole_plan

            self._into = into if isinstance(into, VersionSink) else Destination(into, self._gate)
            try:
                held = whole_plan(self.side).local_containers("target", self.rank)
                self._into.check(held, self.rank)
            except BaseException:
                if self._into is not into:
                    self._into.close()
                raise
        TARGETS.add(name, self)

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The containers of the version in use, by name, and no other version (RS-1).

        The mapping looks a tensor up at each access. A reference to a tensor delays the next commit
        as :meth:`reading` does; with ``into`` it is the module's own and changes with the version.

        Raises:
            WeightSyncError: there is no version yet, or it is being overwritten in place.
        """
        self._check_usable()
        return self._live_weights(None)

    def reading(self) -> Reading:
        """A block in which the weights stay those of one version: ``with target.reading() as
        weights``, or ``async with`` in an event loop.

        A push waits for the block to end; after its timeout it fails and names the reader. A new
        block waits for a push that is already waiting. Blocks of one thread or task may be nested.
        Pass ``weights`` to threads that a reader starts.

        Raises:
            WeightSyncError: as for :attr:`weights`; the target is closed; or ``with`` in an event
                loop (InvalidArgument).
        """
        return Reading(self._gate, self._live_weights, self._check_usable, caller(1))

    def on_commit(self, hook: Callable[[int], None]) -> None:
        """Calls ``hook(version)`` after each commit, e.g. to flush caches. ``hooks`` has the other
        callbacks of an inference engine, and their order."""
        self._hooks.append(hook)

    def address(self) -> bytes:
        return self._engine.address.to_bytes()

    def accept(self, share: TargetShare) -> PushTarget:
        """Takes this rank's share of the plan and allocates memory; returns the first push
        target."""
        self._stop_relay()
        arguments.check_delta(share, self._device)
        if self._staging and share.containers == self._layout:
            # Writers of an earlier session may still write with the old key (MR-2).
            self._revoke()
        else:
            # Another layout ends the version in use.
            with self._gate.changing():
                if self._into is not None:
                    self._into.check(share.containers, self.rank)
                copies = 2 if self._staged else 1
                made = (self._engine, share.containers, self._device)
                staging = [StagingMemory(*made) for _ in range(copies)]  # it may fail
                self.version, self._live = None, 0
                self._layout, self._staging = share.containers, staging
                self._containers = {c.name: c for c in share.containers}
        self._share, self._announced, self._prepared = share, False, None
        self._inbox = DeltaInbox.of(self._engine, share, self._offsets(self._staging[0]))
        return self._connected()

    def set_inbound(self, inbound: InboundPlan) -> PushTarget:
        """Replaces the writers of this rollout."""
        self._share = msgspec.structs.replace(self._routed(), inbound=inbound)
        return self._connected()

    def pass_on(self, children: Sequence[PushTarget], *, timeout: float = 60.0) -> None:
        """Relays the next version to replicas while it arrives."""
        share = self._routed()
        staging = self._staging[self._next]
        memory = self._engine, share.containers, staging.region, staging.offsets
        to = [RelayWriter(*memory, push_target) for push_target in children]
        # Trainers are not watched here: the controller notices their end first.
        writers = list(self._writers()) if share.inbound.relayed else []
        arrivals = expect_all(self._counters, share.inbound.pages, writers, timeout)
        self._relay = Relay(arrivals, to, timeout)

    def give(self, push_target: PushTarget, version: int, *, timeout: float = 60.0) -> int | None:
        """Writes the version in use to a replica; returns its digest, if digests are on.

        Raises:
            WeightSyncError: another version is in use, or none.
            FabricError: the replica can't be reached.
        """
        share = self._routed()
        if self.version != version or self._torn:
            raise WeightSyncError(
                f"copy to {push_target.name} failed: version {self.version} is in use, expected "
                f"{version}; push again, then join",
                version=version,
            )
        staging = self._staging[self._live]
        RelayWriter(
            self._engine, share.containers, staging.region, staging.offsets, push_target
        ).send(timeout)
        # Trainers may have cut the replica's pages in another way than this rollout's.
        return None if share.plan is None else self._digest(staging, push_target.rank).compute()

    def confirm(
        self,
        version: int,
        *,
        timeout: float = 60.0,
        digest: int | None = None,
        changes: Arrival | None = None,
        serial: int | None = None,
    ) -> Confirmed:
        """Waits until all bytes of ``version`` have arrived, applies changes, and checks digests
        (RS-3). If the changes don't lead to the trainers' bytes, the version is not confirmed.

        Args:
            changes: what to expect and to apply where trainers have sent changes.
            serial: of the push target that was written to; by default of the latest.

        Raises:
            Stale: that push has ended.
            FabricError: a writer was lost, bytes are missing after ``timeout`` seconds, or the
                digest differs.
        """
        with self.calls_lock.between_calls():
            self.check_current(serial=serial)
            share, counters, relay = self._routed(), self._counters, self._relay
            actor, staging = share.name, self._staging[self._next]
        start = time.time()
        if relay is not None:
            relay.wait()
        else:
            # Watch writers only here: a writer lost between pushes does not affect a version.
            with observe.span(f"push {version}"):
                pages = share.inbound.pages if changes is None else (changes.count,)
                arrivals = expect_all(counters, pages, list(self._writers()), timeout)
            for arrival in arrivals:
                arrival.wait()
        spans = [Span(actor, "arrive", start, time.time())]
        if changes is not None:
            start = time.time()
            same = self._apply(changes, counters)
            spans.append(Span(actor, "apply", start, time.time()))
            if not same:
                return Confirmed(tuple(spans), differs=True)
        if digest is not None:
            start = time.time()
            found = self._digest(staging).compute()
            spans.append(Span(actor, "digest", start, time.time()))
            if found != digest:
                raise WeightSyncError(
                    f"version {version} is corrupt: got digest {found:016x}, expected "
                    f"{digest:016x}; push again",
                    version=version,
                )
        if self._into is not None:
            self._into.check(self._layout, self.rank)
            self._into.check_ties(staging.views(self._layout))
        with self.calls_lock.between_calls():
            if self._counters is not counters:  # it was aborted meanwhile
                raise Stale(OUTDATED)
            self._relay, self._prepared = None, version
        return Confirmed(tuple(spans))

    def quiesce(self, before: Literal["write", "commit"], seconds: float) -> tuple[str, ...]:
        """Admits no further reader for ``seconds``; returns the current readers.

        Args:
            before: the next phase. A write changes what readers see only if it is in place.
        """
        if (before == "write") != self._writes_in_place:
            return ()
        return self._gate.close(seconds)

    def commit(self, version: int, *, joining: bool = False) -> PushTarget:
        """Puts a confirmed version into use (RS-3); returns the next push target.

        Args:
            joining: a replica wrote the version, so it may equal the version in use.
        """
        arguments.check_commit(version, self.version, self._prepared, joining=joining)
        # If this fails, the version stays decided, and this rollout keeps the version before.
        with self._gate.changing():
            try:
                self._pause.begin()
                self._gate.check_unread()  # the pause hook may have read
                wait_for_readers(self._staging)
                live = self._next
                if self._into is not None:
                    self._into.check(self._layout, self.rank)
                    self._into.copy(self._staging[live].views(self._layout))
            except BaseException:
                self._continue_if_whole()
                raise
            self._live, self.version, self._prepared = live, version, None
            self._torn = self._announced = False
            self._outdated = True  # RS-1: until all hooks have run, the engine gives other tokens
            failed = run_commit_hooks(self._hooks, self._engine_hooks, version, self.weights)
            self._outdated = any(failed)
            failed += [] if self._outdated else [self._pause.end()]
            hook = ", ".join(cause for cause in failed if cause) or None
            return msgspec.structs.replace(self._push_target(), hook=hook)

    def abort(self, *, written: bool = True) -> PushTarget:
        """Discards a version: later writes and counts of it have no effect.

        Generation continues, unless the version in use was overwritten in part or a hook has
        failed: then it continues after the next successful push (RS-3).

        Args:
            written: whether trainers may have written bytes of it.
        """
        self._routed()
        self._stop_relay()
        self._prepared = None
        if not written and self._announced:
            self._torn = False
        self._announced = False
        try:
            self._revoke()
        finally:
            self._gate.open()
        return msgspec.structs.replace(self._push_target(), hook=self._continue_if_whole())

    def _continue_if_whole(self) -> str | None:
        """Continues generation if the weights in use allow it (RS-3); returns why that failed."""
        mixed = self._torn if self._into is None else self._into.partly_filled
        return None if self._outdated or mixed else self._pause.end()

    def check_current(self, session: str | None = None, serial: int | None = None) -> None:
        """Raises Stale if another controller has connected, or a push target's push has ended."""
        held = None if self._share is None else self._share.session
        if (session and held and held != session) or serial not in (None, self._serial):
            raise Stale(OUTDATED)

    def begin(self) -> None:
        """Announces a push. Without staging, the version in use becomes unusable."""
        if self._staged:
            return
        if self._writes_in_place:
            with self._gate.changing():
                self._pause.begin()
                wait_for_readers(self._staging)
                self._announce()
        else:
            self._announce()

    def _announce(self) -> None:
        self._announced, self._torn = not self._torn, self.version is not None

    def close(self) -> None:
        """Releases all resources. Tensors that users hold stay valid."""
        TARGETS.remove(self.name, self)
        self._gate.end()
        self._stop_relay()
        self._counters = []
        self._staging, self._inbox = [], None
        if self._into is not None:
            self._into.close()

    @property
    def _writes_in_place(self) -> bool:
        """Whether trainers write to the memory that readers see."""
        return not self._staged and self._into is None

    def _check_usable(self) -> None:
        if self._into is not None:
            self._into.check_filled()
        torn = self._torn and self._into is None
        if self.version is None or torn:
            what = "the version in use was overwritten by a push that is running or has failed"
            raise WeightSyncError(f"{what if torn else 'no version has arrived'}; push one")

    def _live_weights(self, reading: Reading | None) -> LiveWeights:
        return LiveWeights(lambda: self._containers, self._look_up, reading)

    def _look_up(self, name: str, reading: Reading | None) -> torch.Tensor:
        with self._gate.access(reading):
            self._check_usable()
            container = self._containers[name]
            if self._into is not None:
                return self._into.tensors()[name]
            return self._staging[self._live].lend(container)

    def _referenced(self) -> tuple[str, ...]:
        """Describes tensors of the version in use that users refer to (RS-1)."""
        if self.version is None or self._torn or self._into is not None or not self._staging:
            return ()
        return self._staging[self._live].describe_lent(self.version)

    def _is_lent_to_caller(self) -> bool:
        """Whether the caller took tensors of the version in use that are still referred to."""
        if self.version is None or not self._staging:
            return False
        return self._staging[self._live].is_lent_to_caller()

    def _routed(self) -> TargetShare:
        if self._share is None:
            raise InvalidArgument("this rollout has no plan; call WeightSync.connect() again")
        return self._share

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self._relay.cancel()
            self._relay = None

    def _apply(self, sent: Arrival, counters: list[Counter]) -> bool:
        """Applies changes to the version in use; returns whether its bytes are the trainers'."""
        # RS-1: an abort waits for this, and nothing is written to the memory after it.
        with self.calls_lock.between_calls():
            if self._counters is not counters or self._inbox is None:
                raise Stale(OUTDATED)
            base, target = self._staging[self._live], self._staging[self._next]
            return self._inbox.apply(sent.changes, base, target)

    def _revoke(self) -> None:
        """Revokes the key of earlier pushes; replaces the memory if a peer may still write."""
        at = self._next
        if self._inbox is not None:
            self._inbox.revoke()
        if self._staging[at].revoke():
            return
        logger.warning(
            "a trainer may still write to memory of this rollout; %s was replaced",
            self._staging[at].region,
        )
        self._staging[at] = StagingMemory(self._engine, self._layout, self._device)
        self._torn = not self._staged and self.version is not None

    @property
    def _next(self) -> int:
        return (self._live + 1) % len(self._staging) if self.version is not None else 0

    def _connected(self) -> PushTarget:
        for writer in self._writers():
            self._engine.connect(writer)
        return self._push_target()

    def _writers(self) -> Iterator[Peer]:
        for address in self._routed().inbound.writers:
            yield self._engine.peer(EngineAddress.from_bytes(address))

    def _push_target(self) -> PushTarget:
        """A push target for the next version, with new counters."""
        share, staging = self._routed(), self._staging[self._next]
        self._counters = [self._engine.counter() for _ in share.inbound.pages]
        self._serial += 1
        others = (s for i, s in enumerate(self._staging) if i != self._next)
        return PushTarget(
            share.plan_rank,
            share.name,
            self.address(),
            staging.region.descriptor().to_bytes(),
            tuple(counter.ref.to_bytes() for counter in self._counters),
            self._offsets(staging),
            self._staged,
            self.version,
            not self._torn,
            tuple(s.region.descriptor().to_bytes() for s in others),
            share.inbound.stripes,
            None if self._inbox is None else self._inbox.descriptor(share.inbound),
            serial=self._serial,
        )

    def _offsets(self, staging: StagingMemory) -> tuple[int, ...]:
        return tuple(staging.offsets.get(i, -1) for i in range(len(self._routed().inbound.stripes)))

    def _digest(self, staging: StagingMemory, plan_rank: int | None = None) -> Digest:
        """Of this rollout's memory, by the pages of a plan rank that holds the same."""
        share = self._routed()
        rank = share.plan_rank if plan_rank is None else plan_rank
        if share.plan is None:
            raise InvalidArgument("digests were not asked for at connect")
        copies = list(Plan.from_bytes(share.plan).for_target(rank))
        return digest_copies(copies, staging.region, self._offsets(staging))
