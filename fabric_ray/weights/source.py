"""The trainer's half of a weight push."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

import msgspec

from fabric_ray import observe
from fabric_ray._native import Region, RegionDescriptor
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Copy, LocalContainer, ParamMeta, Plan, Side
from fabric_ray.weights.claims import Claims, of_session
from fabric_ray.weights.conversion import Conversion, Recipe
from fabric_ray.weights.held import Held
from fabric_ray.weights.local import check_local
from fabric_ray.weights.prepared import Prepared, in_turn
from fabric_ray.weights.quant import Invitation
from fabric_ray.weights.report import Arm, Sent, SourceShare, Span
from fabric_ray.weights.routing import outgoing
from fabric_ray.weights.sending import Route, Sending
from fabric_ray.weights.sources import SOURCES, check_rank
from fabric_ray.weights.steps import Step, Unit, steps, temporary_nbytes

if TYPE_CHECKING:
    import torch


class WeightSource:
    """This rank's shards of a model, ready to be pushed.

    Args:
        tensors: a module, of which parameters and persistent buffers are taken, or tensors by name;
            DTensors and plain tensors, in host memory.
        rank: this trainer's place among the trainers: its index in ``WeightSync(trainers=...)``.
        side: what all trainers hold, where tensors can't tell (Megatron's, see
            :func:`fabric_ray.weights.trainers.megatron_side`). The tensors are then plain, this
            rank's part, under the names of the side's containers. All trainers are given the same.
        name: tells several models of one process apart.
        engine: by default the process's own, :func:`fabric_ray.runtime.engine`.
        watermark: bytes of temporary memory that a push may take: for tensors that change their
            dtype on the way, and up to 8 MiB of it for what it needs besides.

    Raises:
        InvalidArgument: a parameter that can't be pushed as it is, by name.
    """

    def __init__(
        self,
        tensors: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        rank: int,
        side: Side | None = None,
        name: str = "default",
        engine: TransferEngine | None = None,
        watermark: int = 256 << 20,
    ) -> None:
        from fabric_ray.runtime import engine as process_engine

        check_rank(rank)
        if side is not None and rank not in side.ranks:
            raise InvalidArgument(f"rank {rank} is not among the side's ranks {side.ranks}")
        if watermark < 1:
            raise InvalidArgument(f"a watermark of {watermark} bytes lets nothing be made ready")
        self.rank = rank
        self.side = side
        self.name = name
        self.watermark = watermark
        self._engine = engine or process_engine()
        self._held = Held(tensors, self._engine, rank)
        self._share: SourceShare | None = None
        self._conversion: Conversion | None = None
        self._steps: list[Step] = []
        self._ring: Region | None = None
        self._routes: Prepared[list[tuple[int, Route]]] = Prepared()
        self._claims = Claims()
        SOURCES.add(name, self)

    @property
    def temporary(self) -> Region | None:
        """The memory in which tensors are made ready, at most ``watermark`` bytes; ``None`` before
        ``connect``, and where all tensors are sent from where they lie."""
        return self._ring

    def meta(self) -> tuple[int, list[ParamMeta] | bytes, bytes]:
        """What the controller gathers: rank, shards (or the digest of the side that this source was
        given), and where the engine is."""
        address = self._engine.address.to_bytes()
        if self.side is not None:
            encoded = msgspec.msgpack.encode(self.side)
            return self.rank, blake2b(encoded, digest_size=16).digest(), address
        return self.rank, self._held.reports(self.rank), address

    def convert(self, session: str, recipe: Recipe, *, again: bool = False) -> Invitation:
        """Gets ready to send other dtypes than it holds; returns what the other trainers need to
        share block maxima with it.

        Args:
            again: in the session that it is in, since an exchange has failed.

        Raises:
            Stale: another controller has connected since.
        """
        with self._claims.claim():
            if again:
                of_session(session, self._share)
            self._drop_conversion()
            self._conversion = Conversion(session, recipe, self.rank, self._engine)
            return self._conversion.invitation

    def join(self, session: str, invitations: Mapping[int, Invitation]) -> None:
        """Takes part in the exchange of block maxima, with all who were invited to it."""
        with self._claims.claim():
            of_session(session, self._conversion).connect(invitations)

    def accept(self, share: SourceShare, *, timeout: float = 60.0) -> None:
        """Takes this rank's part of the routing table, connects to its rollouts, and has everything
        ready that the first push would otherwise wait for.

        Raises:
            InvalidArgument: this rank's tensors aren't what was planned for, or one of them takes
                more temporary memory than the watermark.
            Stale: another controller has connected since.
        """
        with self._claims.claim():
            plan = Plan.from_bytes(share.plan)
            if share.converted:
                of_session(share.session, self._conversion)
            else:
                self._drop_conversion()
            containers = plan.local_containers("source", self.rank)
            self._held.refresh()
            self._check(containers)
            units = self._conversion.units(containers) if self._conversion else []
            units += self._computed(containers)
            self._share = None
            self._routes.clear()
            self._ring = None
            self._steps = steps(plan.for_source(self.rank), units, self.watermark)
            if nbytes := temporary_nbytes(self._steps):
                self._ring = self._engine.alloc(nbytes)
            self._held.note()
            self._share = share
            ready = []
            for arm in share.arms:
                regions = (arm.region, *arm.further)
                for region in regions:
                    at = msgspec.structs.replace(arm, region=region, further=regions)
                    for _, route in self._routes.of(at, self._route):
                        ready.append(self._engine.prepare(route.batch, timeout=timeout))
            for transfer in ready:
                transfer.wait()

    def push(
        self,
        session: str,
        version: int,
        arms: list[Arm],
        *,
        digest: bool = False,
        timeout: float = 60.0,
    ) -> Sent:
        """Writes this rank's share of ``version`` to every rollout, and waits until it is there.

        Step by step: while one is being sent, the next is made ready. A rollout that can't be
        reached is named in the result; the others get their share.

        Args:
            timeout: seconds for all of it.

        Raises:
            FabricError: tensors aren't what was planned for, or can't be made ready; nothing of
                the version counts then.
        """
        deadline = time.monotonic() + timeout
        with self._claims.claim() as proceed, observe.span(f"push {version}"):
            of_session(session, self._share)
            who = f"trainer {self.rank}"
            start = time.time()
            try:
                if self._held.follow():
                    self._routes.clear()
                self._held.gather()
                mine = self._in_turn(arms)
                spans = [Span(who, "route", start, time.time())]
                if self._conversion is not None:
                    left = deadline - time.monotonic()
                    spans.append(self._conversion.begin(version, self._held.local, left))
            except BaseException:
                if self._conversion is not None:
                    self._conversion.give_up()
                raise
            start = time.time()
            sending = Sending(self.rank, self._engine, deadline)
            for number, step in enumerate(self._steps):
                proceed()
                if step.units:
                    sending.wait_for(step.place.after)
                    spans.append(self._make_ready(step))
                for arm, routes in mine:
                    for route in routes.get(number, ()):
                        sending.send(number, arm, route)
                        if digest:
                            # Now: what was made ready isn't there any more when all is sent.
                            sending.add_digest(arm, route)
            self._held.let_go()
            sending.wait_for(len(self._steps))
            spans.append(Span(who, "write", start, time.time()))
            return sending.result(spans)

    def close(self) -> None:
        """Forgets all registrations."""
        SOURCES.remove(self.name, self)
        with self._claims.claim():
            self._routes.clear()
            self._drop_conversion()
            self._held.close()
            self._ring = self._share = None

    def _check(self, containers: Collection[LocalContainer]) -> None:
        """That tensors are what was planned for: those sent as they are by the plan, others by what
        they are made from."""
        made: Collection[str] = ()
        held = {name: self._held.like(name) for name in self._held.tensors}
        if self._conversion is not None:
            self._conversion.check(held)
            made = self._conversion.made
        # Second names of tied tensors may be left out of the plan.
        ties, planned = self._held.ties(), {container.name for container in containers}
        tied = ties.keys() | ties.values() if self.side is None else set()
        plain = {
            name: tensor
            for name, tensor in held.items()
            if name not in made
            and (self.side is not None or tensor.numel())
            and (name in planned or name not in tied)
        }
        by: Literal["side", "plan"] = "side" if self.side is not None else "plan"
        check_local(plain, [c for c in containers if c.name not in made], self.rank, by=by)

    def _computed(self, containers: Collection[LocalContainer]) -> list[Unit]:
        """What no conversion makes ready and has no memory that could be sent: see RS-1."""
        made: Collection[str] = self._conversion.made if self._conversion else ()
        return [
            Unit(container.name, container.index, container.nbytes)
            for container in containers
            if container.name not in made and self._held.is_computed(container.name)
        ]

    def _make_ready(self, step: Step) -> Span:
        assert self._ring is not None, "accept has made room"
        start, offsets = time.time(), step.offsets()
        memory = self._ring.tensor()
        for unit in step.units:
            at = offsets[unit.values]
            local = self._held.local(unit.name)
            room = memory[at : at + unit.nbytes]
            if self._conversion is not None and unit.name in self._conversion.names:
                self._conversion.prepare(unit, local, room)
            else:
                room[: unit.values_nbytes].view(local.dtype).view(local.shape).copy_(local)
        return Span(f"trainer {self.rank}", "prepare", start, time.time())

    def _in_turn(self, arms: list[Arm]) -> list[tuple[Arm, dict[int, list[Route]]]]:
        """The rollouts that get something from here and the routes of each step, each trainer
        beginning with another rollout."""
        mine: list[tuple[Arm, dict[int, list[Route]]]] = []
        for arm in sorted(arms, key=lambda a: a.rank):
            by_step: dict[int, list[Route]] = {}
            for number, route in self._routes.of(arm, self._route):
                by_step.setdefault(number, []).append(route)
            if by_step:
                mine.append((arm, by_step))
        return in_turn(mine, self.rank)

    def _route(self, arm: Arm) -> list[tuple[int, Route]]:
        """The requests for one rollout by steps."""
        return [
            (number, route)
            for number, step in enumerate(self._steps)
            if arm.rank in step.copies
            for route in self._requests(step, arm)
        ]

    def _requests(self, step: Step, arm: Arm) -> list[Route]:
        """What a step has for a rollout, by stripes."""
        target = self._engine.import_region(RegionDescriptor.from_bytes(arm.region))
        by_stripe: dict[int, list[Copy]] = {}
        for copy in step.copies[arm.rank]:
            by_stripe.setdefault(arm.stripes[copy.dst_container], []).append(copy)
        return [
            Route(
                stripe,
                *outgoing(copies, self._sources(step, copies), target, arm.offsets),
                sum(copy.nbytes for copy in copies),
            )
            for stripe, copies in sorted(by_stripe.items())
        ]

    def _sources(self, step: Step, copies: Iterable[Copy]) -> dict[int, tuple[Region, int]]:
        """Where the containers that copies read lie."""
        assert self._share is not None, "only a session has routes"
        ready, names = step.offsets(), self._share.containers
        made = self._conversion.made if self._conversion else frozenset()
        sources: dict[int, tuple[Region, int]] = {}
        for container in {copy.src_container for copy in copies}:
            name = names[container]
            if container in ready:
                assert self._ring is not None, "accept has made room"
                sources[container] = (self._ring, ready[container])
            elif name in made:
                raise InvalidArgument(
                    f"`{name}` is to be sent by trainer {self.rank}, which doesn't make it; this "
                    "is a bug, please report it"
                )
            else:
                sources[container] = (self._held.region(name), 0)
        return sources

    def _drop_conversion(self) -> None:
        if self._conversion is not None:
            self._conversion.close()
            self._conversion = None
