"""The trainer's half of a weight push."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from fabric_ray._native import Batch, Digest, Region, RegionDescriptor
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument, Stale
from fabric_ray.plan import LocalContainer, ParamMeta, Plan, Side
from fabric_ray.weights.conversion import Conversion, Recipe
from fabric_ray.weights.held import Held
from fabric_ray.weights.local import check_local
from fabric_ray.weights.quant import Invitation
from fabric_ray.weights.registry import Registry
from fabric_ray.weights.report import Arm, Sent, SourceShare, Span
from fabric_ray.weights.routing import outgoing
from fabric_ray.weights.sending import Sending
from fabric_ray.weights.steps import Step, steps, temporary_nbytes

if TYPE_CHECKING:
    import torch

SOURCES: Registry[WeightSource] = Registry("weight source")


class WeightSource:
    """This rank's shards of a model, ready to be pushed.

    Args:
        tensors: a module, or parameters by name; DTensors and plain tensors, in host memory.
        rank: this trainer's place among the trainers: its index in ``WeightSync(trainers=...)``.
        side: what all trainers hold, where tensors can't tell (Megatron's, see
            :func:`fabric_ray.weights.trainers.megatron_side`). The tensors are then plain, this
            rank's part, under the names of the side's containers. All trainers are given the same.
        name: tells several models of one process apart.
        engine: by default the process's own, :func:`fabric_ray.runtime.engine`.
        watermark: bytes of temporary memory for tensors that change their dtype on the way.

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

        if side is not None and rank not in side.ranks:
            raise InvalidArgument(f"rank {rank} is not among the side's ranks {side.ranks}")
        if watermark < 1:
            raise InvalidArgument(f"a watermark of {watermark} bytes lets nothing be made ready")
        self.rank = rank
        self.side = side
        self.name = name
        self.watermark = watermark
        self._engine = engine or process_engine()
        self._held = Held(tensors, self._engine)
        self._share: SourceShare | None = None
        self._conversion: Conversion | None = None
        self._steps: list[Step] = []
        self._ring: Region | None = None
        self._routes: dict[tuple[int, bytes], tuple[Batch, Digest]] = {}
        SOURCES.add(name, self)

    def meta(self) -> tuple[int, list[ParamMeta] | bytes, bytes]:
        """What the controller gathers: rank, shards (or the digest of the side that this source was
        given), and where the engine is."""
        self._held.note()
        address = self._engine.address.to_bytes()
        if self.side is not None:
            encoded = msgspec.msgpack.encode(self.side)
            return self.rank, blake2b(encoded, digest_size=16).digest(), address
        return self.rank, self._held.reports(self.rank), address

    def convert(self, recipe: Recipe) -> Invitation:
        """Gets ready to send other dtypes than it holds; returns what the other trainers need to
        share block maxima with it."""
        self._drop_conversion()
        self._conversion = Conversion(recipe, self.rank, self._engine)
        return self._conversion.invitation

    def accept(self, share: SourceShare, *, timeout: float = 60.0) -> None:
        """Takes this rank's part of the routing table, connects to its rollouts, and has everything
        ready that the first push would otherwise wait for.

        Raises:
            InvalidArgument: this rank's tensors aren't what the side that it was given says, or
                one of them takes more temporary memory than the watermark.
        """
        plan = Plan.from_bytes(share.plan)
        if not share.invitations:
            self._drop_conversion()
        elif self._conversion is not None:
            self._conversion.connect(share.invitations)
        if self.side is not None:
            self._check_side(plan.local_containers("source", self.rank))
        units = self._conversion.units(share.containers) if self._conversion else []
        self._routes.clear()
        self._ring = None
        self._steps = steps(plan.for_source(self.rank), units, self.watermark)
        if nbytes := temporary_nbytes(self._steps):
            self._ring = self._engine.alloc(nbytes)
        self._share = share
        ready = []
        for arm in share.arms:
            for region in (arm.region, *arm.further):
                for number in self._sent_to(arm):
                    batch, _ = self._route(number, msgspec.structs.replace(arm, region=region))
                    ready.append(self._engine.prepare(batch, timeout=timeout))
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

        Raises:
            FabricError: tensors aren't what was planned for, or can't be made ready; nothing of
                the version counts then.
        """
        if self._share is None:
            raise Stale("this trainer was given no route (a restart?); call connect() again")
        if self._share.session != session:
            raise Stale(
                "another WeightSync has connected to this trainer since; push with that one, or "
                "call connect() to take over again"
            )
        who = f"trainer {self.rank}"
        start = time.time()
        if self._held.follow():
            self._routes.clear()
        sending = Sending(self.rank, self._engine, timeout)
        mine = self._in_turn(arms)
        for arm in mine:
            for number in self._sent_to(arm):
                self._route(number, arm)
        spans = [Span(who, "route", start, time.time())]
        if self._conversion is not None:
            local = {name: self._held.local(name) for name in self._conversion.names}
            spans.append(self._conversion.begin(version, local, timeout))
        start = time.time()
        for number, step in enumerate(self._steps):
            if step.units:
                sending.wait_for(step.place.after)
                spans.append(self._make_ready(step))
            for arm in mine:
                if arm.rank in step.copies:
                    batch, found = self._route(number, arm)
                    nbytes = sum(copy.nbytes for copy in step.copies[arm.rank])
                    sending.send(number, arm, batch, nbytes)
                    if digest:
                        # Now: what was made ready isn't there any more when all is sent.
                        sending.add_digest(arm, found)
        sending.wait_for(len(self._steps))
        spans.append(Span(who, "write", start, time.time()))
        return sending.result(spans)

    def close(self) -> None:
        """Forgets all registrations."""
        SOURCES.remove(self.name)
        self._routes.clear()
        self._drop_conversion()
        self._held.close()
        self._ring = None

    def _check_side(self, containers: Iterable[LocalContainer]) -> None:
        """That tensors are what the side says: those sent as they are by the plan, others by what
        they are made from."""
        made: Collection[str] = ()
        if self._conversion is not None:
            self._conversion.check(self._held.tensors)
            made = self._conversion.made
        plain = {name: t for name, t in self._held.tensors.items() if name not in made}
        check_local(plain, [c for c in containers if c.name not in made], self.rank)

    def _make_ready(self, step: Step) -> Span:
        assert self._conversion is not None, "only then a step has units"
        assert self._ring is not None, "accept has made room"
        start, offsets = time.time(), step.offsets()
        memory = self._ring.tensor()
        for unit in step.units:
            at = offsets[unit.values]
            local = self._held.local(unit.name)
            self._conversion.prepare(unit, local, memory[at : at + unit.nbytes])
        return Span(f"trainer {self.rank}", "prepare", start, time.time())

    def _in_turn(self, arms: list[Arm]) -> list[Arm]:
        """The rollouts that get something from here, each trainer beginning with another."""
        mine = [arm for arm in sorted(arms, key=lambda a: a.rank) if list(self._sent_to(arm))]
        turn = self.rank % max(1, len(mine))
        return mine[turn:] + mine[:turn]

    def _sent_to(self, arm: Arm) -> Iterator[int]:
        """The steps that have something for a rollout."""
        return (number for number, step in enumerate(self._steps) if arm.rank in step.copies)

    def _route(self, number: int, arm: Arm) -> tuple[Batch, Digest]:
        """The requests of one step for one rollout; put together once for each place it is written
        to."""
        if self._share is None:
            raise InvalidArgument("the source has no routes yet; call WeightSync.connect() first")
        route = self._routes.get((number, arm.region))
        if route is None:
            step = self._steps[number]
            copies = step.copies[arm.rank]
            target = self._engine.import_region(RegionDescriptor.from_bytes(arm.region))
            ready = step.offsets()
            names = self._share.containers
            sources: dict[int, tuple[Region, int]] = {}
            for container in {copy.src_container for copy in copies}:
                if container in ready:
                    assert self._ring is not None, "accept has made room"
                    sources[container] = (self._ring, ready[container])
                else:
                    sources[container] = (self._held.region(names[container]), 0)
            route = outgoing(copies, sources, target, arm.offsets)
            self._routes[number, arm.region] = route
        return route

    def _drop_conversion(self) -> None:
        if self._conversion is not None:
            self._conversion.close()
            self._conversion = None
