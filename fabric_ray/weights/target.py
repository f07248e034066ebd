"""The rollout's half of a weight push."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from fabric_ray import observe
from fabric_ray._native import Counter, Digest, EngineAddress, Peer, Transfer
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import FabricError, InvalidArgument, Stale, WeightSyncError
from fabric_ray.plan import LocalContainer, Plan, Side
from fabric_ray.weights.hooks import EngineHooks, Pause, attempt
from fabric_ray.weights.into import Destination
from fabric_ray.weights.readers import LiveWeights, ReaderGate, Reading, caller
from fabric_ray.weights.registry import Registry
from fabric_ray.weights.relay import Copying, Relay
from fabric_ray.weights.report import Arm, Feed, Span, TargetShare
from fabric_ray.weights.routing import arriving
from fabric_ray.weights.slab import Slab

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_OUTDATED = (
    "another WeightSync has connected to this rollout since; push with that one, or call connect() "
    "to take over again"
)

TARGETS: Registry[WeightTarget] = Registry("weight target")


class WeightTarget:
    """This rollout rank's weights: filled by trainers, version by version.

    With ``staged`` (the default) a version arrives in a second copy of the memory while the first
    is in use, and :attr:`weights` flips when the whole version is confirmed everywhere. Without, it
    is written in place: half the memory, but the weights can't be used from the begin of a push
    until its end, and are lost if it fails (a further push restores them).

    With ``into``, each version is copied into the tensors of a module as it is put into use; the
    module takes the place of the second copy.

    A version is put into use when nobody reads the one before: no :meth:`reading` is under way, and
    no tensor of :attr:`weights` is referred to. A push waits for that as long as for any stage, and
    then fails and names the reader (RS-1).

    Args:
        side: what all rollout ranks hold, e.g. from ``fabric_ray.weights.families``.
        rank: this rollout's index in ``WeightSync(rollouts=...)``; a rank of ``side``.
        name: tells several models of one process apart.
        engine: by default the process's own, :func:`fabric_ray.runtime.engine`.
        into: a module whose parameters and persistent buffers are the version in use after each
            commit, or tensors by name. They keep their memory, on any device. A forward pass of
            the module counts as :meth:`reading`.
        hooks: what the inference engine around it does when weights change.
    """

    def __init__(
        self,
        side: Side,
        *,
        rank: int,
        name: str = "default",
        engine: TransferEngine | None = None,
        staged: bool = True,
        into: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
        hooks: EngineHooks | None = None,
    ) -> None:
        from fabric_ray.runtime import engine as process_engine

        if rank not in side.ranks:
            raise InvalidArgument(f"rank {rank!r} is not among the side's ranks {side.ranks}")
        self.side = side
        self.rank = rank
        self.name = name
        self.version: int | None = None
        """The version in use; ``None`` before the first."""
        self._engine = engine or process_engine()
        # What arrives for `into` needs no second copy: the version in use is in the module.
        self._staged = staged and into is None
        self._share: TargetShare | None = None
        self._layout: tuple[LocalContainer, ...] = ()
        self._containers: dict[str, LocalContainer] = {}
        self._slabs: list[Slab] = []
        self._live = 0
        self._counters: list[Counter] = []
        self._relay: Relay | None = None
        self._prepared: int | None = None
        self._torn = False
        # Torn by the announcement of a push alone: no byte may have come yet.
        self._announced = False
        self._engine_hooks = hooks or EngineHooks()
        self._pause = Pause(self._engine_hooks)
        self._hooks: list[Callable[[int], None]] = []
        self._gate = ReaderGate(self._held)
        self._into: Destination | None = None
        if into is not None:
            from fabric_ray.weights.replica.sides import whole_plan

            self._into = Destination(into, self._gate)
            self._into.check(whole_plan(side).local_containers("target", rank), rank)
        TARGETS.add(name, self)

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The containers of the version in use, by name; nothing else can be had (RS-1).

        The mapping looks a tensor up at each access. A tensor that is kept delays the next version
        as :meth:`reading` does; with ``into`` it is the module's own and changes with the version.

        Raises:
            WeightSyncError: there is no version yet, or it is being overwritten in place.
        """
        self._check_usable()
        return self._live_weights(None)

    def reading(self) -> Reading:
        """A block in which the weights stay those of one version: ``with target.reading() as
        weights``, or ``async with`` in an event loop.

        A push waits before it changes them, and fails if that takes longer than its timeout, with
        the reader's name. A block that begins when a push waits already begins after it. Blocks of
        one thread or task may be nested. Threads that a reader starts are given ``weights``.

        Raises:
            WeightSyncError: as for :attr:`weights`; the target is closed; or ``with`` in an event
                loop (InvalidArgument).
        """

        def admitted(reading: Reading) -> Mapping[str, torch.Tensor]:
            self._check_usable()
            return self._live_weights(reading)

        return Reading(self._gate, admitted, caller(1))

    def on_commit(self, hook: Callable[[int], None]) -> None:
        """Calls ``hook(version)`` right after a version went into use, e.g. to flush caches. What
        the engine does around it, in which order, is for ``hooks``."""
        self._hooks.append(hook)

    def address(self) -> bytes:
        return self._engine.address.to_bytes()

    def accept(self, share: TargetShare) -> Arm:
        """Takes this rank's part of the plan and makes room; returns where to write first."""
        self._stop_relay()
        if self._slabs and share.containers == self._layout:
            # Who was given the old route may not have noticed yet (MR-2).
            self._lock_out()
        else:
            # Another layout ends the version in use.
            with self._gate.changing():
                if self._into is not None:
                    self._into.check(share.containers, self.rank)
                self._layout = share.containers
                self._containers = {c.name: c for c in share.containers}
                copies = 2 if self._staged else 1
                self._slabs = [Slab(self._engine, share.containers) for _ in range(copies)]
                self.version, self._live = None, 0
        self._share, self._announced = share, False
        for writer in self._writers():
            self._engine.connect(writer)
        return self._arm()

    def feed(self, feed: Feed) -> Arm:
        """From now on, others write here."""
        self._share = msgspec.structs.replace(self._routed(), feed=feed)
        for writer in self._writers():
            self._engine.connect(writer)
        return self._arm()

    def pass_on(self, children: Sequence[Arm], *, timeout: float = 60.0) -> None:
        """Has the next version go to others that hold the same, while it arrives here."""
        share = self._routed()
        slab = self._slabs[self._next]
        to = [
            Copying(self._engine, share.containers, slab.region, slab.offsets, arm)
            for arm in children
        ]
        # Trainers aren't waited for by name: the first to know of their end is the controller.
        writers = list(self._writers()) if share.feed.relayed else []
        self._relay = Relay(self._arrivals(writers, timeout), to, timeout)

    def give(self, arm: Arm, version: int, *, timeout: float = 60.0) -> int | None:
        """Writes the version in use to another rollout that holds the same; returns its digest, if
        digests are wanted.

        Raises:
            WeightSyncError: another version is in use, or none.
            FabricError: the other can't be reached.
        """
        share = self._routed()
        if self.version != version or self._torn:
            raise WeightSyncError(
                f"version {version} can't be given to {arm.name}: in use is {self.version}",
                version=version,
            )
        slab = self._slabs[self._live]
        Copying(self._engine, share.containers, slab.region, slab.offsets, arm).send(timeout)
        return None if share.plan is None else self._digest(slab).compute()

    def confirm(
        self, version: int, *, timeout: float = 60.0, digest: int | None = None
    ) -> tuple[Span, ...]:
        """Returns when every byte of ``version`` is here (and its digest is right), see RS-3.

        Raises:
            FabricError: a writer was lost, bytes are missing after ``timeout`` seconds, or the
                digest differs.
        """
        if self._share is None:
            raise WeightSyncError(f"version {version} was not announced here", version=version)
        who = self._share.name
        start = time.time()
        if self._relay is not None:
            self._relay.wait()
            self._relay = None
        else:
            # Only now: who is lost sight of between pushes has nothing to do with a version.
            with observe.span(f"push {version}"):
                arrivals = self._arrivals(list(self._writers()), timeout)
            for arrival in arrivals:
                arrival.wait()
        spans = [Span(who, "arrive", start, time.time())]
        if digest is not None:
            start = time.time()
            found = self._digest(self._slabs[self._next]).compute()
            spans.append(Span(who, "digest", start, time.time()))
            if found != digest:
                raise WeightSyncError(
                    f"the bytes of version {version} differ from what was sent (digest "
                    f"{found:016x}, not {digest:016x})",
                    version=version,
                )
        if self._into is not None:
            self._into.check(self._layout, self.rank)
            self._into.check_ties(self._slabs[self._next].views(self._layout))
        self._prepared = version
        return tuple(spans)

    def quiesce(self, before: Literal["write", "commit"], seconds: float) -> tuple[str, ...]:
        """Admits no further reader for ``seconds``; returns who reads the version in use still.

        Args:
            before: what is to follow. Only in place does a write change what is read.
        """
        if (before == "write") != self._writes_in_place:
            return ()
        return self._gate.close(seconds)

    def commit(self, version: int, *, joining: bool = False) -> Arm:
        """Puts a confirmed version into use, and no other (RS-3); returns where to write next.

        Args:
            joining: it may be the version that is in use, since it came from another rollout.
        """
        if version < (self.version or 0) or (version == self.version and not joining):
            raise WeightSyncError(
                f"version {version} is not after {self.version}, which is in use", version=version
            )
        if self._prepared != version:
            raise WeightSyncError(
                f"version {version} can't be put into use: confirmed is {self._prepared}",
                version=version,
            )
        # If this fails, the version stays decided; this rollout keeps the one before, by name.
        with self._gate.changing():
            self._pause.begin()
            try:
                self._gate.check_unread()  # by what the engine did to pause
                if self._into is not None:
                    self._into.check(self._layout, self.rank)
            except FabricError:
                self._pause.end()
                raise
            self._live = self._next
            if self._into is not None:
                self._into.copy(self._slabs[self._live].views(self._layout))
            self.version, self._prepared = version, None
            self._torn = self._announced = False
            return msgspec.structs.replace(self._arm(), hook=self._went_into_use(version))

    def _went_into_use(self, version: int) -> str | None:
        """Tells whom it concerns, and the engine to go on; returns what of that failed.

        The version is in use, here and elsewhere: that can't be taken back.
        """
        hooks, weights = self._engine_hooks, self.weights
        failed = [attempt("on_commit", partial(hook, version)) for hook in self._hooks]
        failed += [
            attempt("post_process_weights", partial(hooks.post_process_weights, weights)),
            attempt("flush_cache", hooks.flush_cache),
            attempt("update_weight_version", partial(hooks.update_weight_version, version)),
            self._pause.end(),
        ]
        return ", ".join(cause for cause in failed if cause) or None

    def abort(self, *, written: bool = True) -> Arm:
        """Gives a version up: nothing of it can be used, counted or written any more.

        Generation goes on unless the version in use was overwritten in part: then not before a
        push succeeds (RS-3).

        Args:
            written: whether trainers may have begun to write it.
        """
        self._routed()
        self._stop_relay()
        self._prepared = None
        if written:
            self._torn = not self._staged and self.version is not None
        elif self._announced:
            self._torn = False
        self._announced = False
        self._lock_out()
        self._gate.open()
        stands_still = self._torn or (self._into is not None and self._into.partly_filled)
        failed = None if stands_still else self._pause.end()
        return msgspec.structs.replace(self._arm(), hook=failed)

    def check_session(self, session: str) -> None:
        """Raises Stale if another controller has connected since."""
        if self._share is not None and self._share.session != session:
            raise Stale(_OUTDATED)

    def begin(self) -> None:
        """A push begins: in place, that is the end of the version in use."""
        if self._staged:
            return
        if not self._writes_in_place:
            self._announced, self._torn = not self._torn, True
            return
        with self._gate.changing():
            self._pause.begin()
            self._announced, self._torn = not self._torn, True

    def close(self) -> None:
        """Gives everything back. Tensors that users hold stay as they are."""
        TARGETS.remove(self.name, self)
        self._gate.end()
        self._stop_relay()
        self._counters = []
        self._slabs = []
        if self._into is not None:
            self._into.close()

    @property
    def _writes_in_place(self) -> bool:
        """Whether trainers write to what is read."""
        return not self._staged and self._into is None

    def _check_usable(self) -> None:
        if self._into is not None:
            self._into.check_filled()
        torn = self._torn and self._into is None
        if self.version is None or torn:
            what = "the version in use was overwritten by a push that is not over or has failed"
            raise WeightSyncError(f"{what if torn else 'no version has arrived'}; push one")

    def _live_weights(self, reading: Reading | None) -> LiveWeights:
        return LiveWeights(lambda: self._containers, self._look_up, reading)

    def _look_up(self, name: str, reading: Reading | None) -> torch.Tensor:
        with self._gate.access(reading):
            self._check_usable()
            container = self._containers[name]
            if self._into is not None:
                return self._into.tensors()[name]
            return self._slabs[self._live].lend(container)

    def _held(self) -> tuple[str, ...]:
        """Tensors of the version in use that somebody has kept (RS-1)."""
        if self.version is None or self._torn or self._into is not None or not self._slabs:
            return ()
        lent = self._slabs[self._live].lent()
        if not lent:
            return ()
        few = ", ".join(f"`{name}`" for name in list(lent)[:3])
        more = f" and {len(lent) - 3} more" if len(lent) > 3 else ""
        return (
            f"tensors of version {self.version}, taken up to {max(lent.values()):.1f} s ago, are "
            f"still referred to: {few}{more}; read them inside `with target.reading()` and drop "
            "them there, or bind the module by WeightTarget(into=module)",
        )

    def _routed(self) -> TargetShare:
        if self._share is None:
            raise InvalidArgument(
                "this rollout was given no route; call WeightSync.connect() again"
            )
        return self._share

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self._relay.cancel()
            self._relay = None

    def _arrivals(self, writers: list[Peer], timeout: float) -> list[Transfer]:
        pages = self._routed().feed.pages
        return [
            counter.expect(count, writers=writers, timeout=timeout)
            for counter, count in zip(self._counters, pages, strict=True)
        ]

    def _lock_out(self) -> None:
        """Ends what earlier pushes may still write; replaces memory where that can't be shown."""
        at = self._next
        if self._slabs[at].lock_out():
            return
        logger.warning(
            "a trainer may still write to memory of this rollout; %s is set aside and replaced",
            self._slabs[at].region,
        )
        self._slabs[at] = Slab(self._engine, self._layout)
        self._torn = not self._staged and self.version is not None

    @property
    def _next(self) -> int:
        return (self._live + 1) % len(self._slabs) if self.version is not None else 0

    def _writers(self) -> Iterator[Peer]:
        for address in self._routed().feed.writers:
            yield self._engine.peer(EngineAddress.from_bytes(address))

    def _arm(self) -> Arm:
        """Fresh counters for the next version, and the place that they will count."""
        share, slab = self._routed(), self._slabs[self._next]
        self._counters = [self._engine.counter() for _ in share.feed.pages]
        others = (s for i, s in enumerate(self._slabs) if i != self._next)
        return Arm(
            share.place,
            share.name,
            self.address(),
            slab.region.descriptor().to_bytes(),
            tuple(counter.ref.to_bytes() for counter in self._counters),
            self._offsets(slab),
            self._staged,
            self.version,
            not self._torn,
            tuple(s.region.descriptor().to_bytes() for s in others),
            share.feed.stripes,
        )

    def _offsets(self, slab: Slab) -> tuple[int, ...]:
        return tuple(slab.offsets.get(i, -1) for i in range(len(self._routed().feed.stripes)))

    def _digest(self, slab: Slab) -> Digest:
        share = self._routed()
        if share.plan is None:
            raise InvalidArgument("digests were not asked for at connect")
        copies = Plan.from_bytes(share.plan).for_target(share.place)
        return arriving(copies, slab.region, self._offsets(slab))
