"""The trainer's half of a weight push."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fabric_ray import observe
from fabric_ray._native import Region, RegionDescriptor, bind_copies
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Copy, LocalContainer, ParamMeta, Plan, Side
from fabric_ray.plan.dtensor import distributed_rank
from fabric_ray.tensors import wait_for_kernels
from fabric_ray.weights.conversion import Conversion, Recipe
from fabric_ray.weights.delta import DeltaSender
from fabric_ray.weights.latest_call import LatestCallLock, require_session
from fabric_ray.weights.local import check_local
from fabric_ray.weights.memory import allocate
from fabric_ray.weights.modules import reshard
from fabric_ray.weights.quant import Invitation
from fabric_ray.weights.report import PushTarget, Sent, SourceShare, Span
from fabric_ray.weights.request_cache import RequestCache, rotated
from fabric_ray.weights.self_described import check_describes_itself
from fabric_ray.weights.source_tensors import SourceTensors
from fabric_ray.weights.sources import SOURCES, check_rank, check_side_rank
from fabric_ray.weights.step_sender import Route, StepSender
from fabric_ray.weights.steps import Step, Unit, steps, temporary_nbytes

if TYPE_CHECKING:
    import torch

_WATERMARK = 256 << 20


class WeightSource:
    """This rank's shards of a model, ready to be pushed.

    Args:
        tensors: a module, for its parameters and persistent buffers, or tensors by name; DTensors
            and plain tensors in host memory or on a CUDA GPU. Empty on a rank that holds nothing,
            such as all but rank 0 where rank 0 gathers the model.
        config: of a module of Megatron-Core (or its parts under virtual pipeline parallelism), the
            configuration of its model as Hugging Face has it: of transformers, the fields of a
            ``config.json``, its folder, or a :class:`~fabric_ray.models.ModelConfig`. The layout of
            all trainers follows from it and Megatron-Core's parallel state.
        rank: this trainer's index in ``WeightSync(trainers=...)``; by default the process's rank
            in torch.distributed, or 0 without it. With DTensors, and with a side of as many ranks
            as torch.distributed has, it must be ``torch.distributed.get_rank()``.
        side: the layout of all trainers, for plain tensors (such as Megatron's, see
            :func:`fabric_ray.weights.trainers.megatron_side`). The tensors are then this rank's
            parts, under the names of the side's containers. All trainers get the same side.
        name: distinguishes the models of one process.
        engine: by default the process's own, :func:`fabric_ray.runtime.engine`.
        watermark: bytes of temporary memory of a push: for converted tensors, and up to 8 MiB of
            it for requests and scratch memory. By default 256 MiB, or what the largest tensor
            needs.

    Raises:
        InvalidArgument: a parameter can't be pushed; the error names it.
    """

    def __init__(
        self,
        tensors: torch.nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.nn.Module],
        *,
        config: Any = None,
        rank: int | None = None,
        side: Side | None = None,
        name: str = "default",
        engine: TransferEngine | None = None,
        watermark: int | None = None,
    ) -> None:
        from fabric_ray.runtime import engine as process_engine

        rank = distributed_rank() if rank is None else rank
        check_rank(rank)
        if config is not None:
            if side is not None or isinstance(tensors, Mapping):
                raise InvalidArgument(
                    "config is for a module of Megatron-Core, whose side follows from it; leave "
                    "out config, or give the module and no side"
                )
            from fabric_ray.weights.trainers.looking import megatron_parts

            tensors, side = megatron_parts(tensors, config)
        elif isinstance(tensors, Sequence):
            raise InvalidArgument("a list of modules needs a config; give one module otherwise")
        elif side is None:
            check_describes_itself(tensors)
        if side is not None and rank not in side.ranks:
            raise InvalidArgument(f"rank {rank} is not among the side's ranks {side.ranks}")
        if watermark is not None and watermark < 1:
            raise InvalidArgument(f"watermark must be >= 1 byte, got {watermark}")
        self.rank = rank
        self.side = side
        self.name = name
        self.watermark = watermark
        self._engine = engine or process_engine()
        reshard(tensors)
        self._tensors = SourceTensors(tensors, self._engine, rank)
        self._share: SourceShare | None = None
        self._conversion: Conversion | None = None
        self._steps: list[Step] = []
        # Names of the tensors that pushes read.
        self._read: frozenset[str] = frozenset()
        # Registered, and the same as a tensor.
        self._ring: tuple[Region, torch.Tensor] | None = None
        self._routes: RequestCache[list[tuple[int, Route]]] = RequestCache()
        # Sends changes, if the session asks for them.
        self._delta: DeltaSender | None = None
        self._calls_lock = LatestCallLock()
        SOURCES.add(name, self)

    @property
    def temporary(self) -> Region | None:
        """The memory in which tensors are prepared, at most ``watermark`` bytes; ``None`` before
        ``connect``, and where no tensor needs preparation."""
        return None if self._ring is None else self._ring[0]

    @property
    def is_on_one_device(self) -> bool:
        """Whether all tensors are, as conversions need it."""
        return len({tensor.device for tensor in self._tensors.tensors.values()}) <= 1

    def meta(self) -> tuple[int, list[ParamMeta] | bytes, bytes]:
        """This source's metadata for the controller: rank, shards (or the digest of ``side``), and
        engine address.

        Raises:
            InvalidArgument: this process has another rank in torch.distributed.
        """
        address = self._engine.address.to_bytes()
        if self.side is not None:
            check_side_rank(self.rank, self.side)
            encoded = msgspec.msgpack.encode(self.side)
            return self.rank, blake2b(encoded, digest_size=16).digest(), address
        return self.rank, self._tensors.describe(self.rank), address

    def convert(self, session: str, recipe: Recipe, *, again: bool = False) -> Invitation:
        """Prepares conversions; returns the invitation by which other trainers exchange block
        maxima with this one.

        Args:
            again: reconnects after a failed exchange, in the same session.

        Raises:
            Stale: another controller has connected since.
        """
        with self._calls_lock.acquire() as check_latest:
            check_latest()
            if again:
                require_session(session, self._share)
            else:
                self._end_session()
            self._drop_conversion()
            self._conversion = Conversion(session, recipe, self.rank, self._engine)
            return self._conversion.invitation

    def join(self, session: str, invitations: Mapping[int, Invitation]) -> None:
        """Connects to the other trainers for the exchange of block maxima."""
        with self._calls_lock.acquire():
            require_session(session, self._conversion).connect(invitations)

    def accept(self, share: SourceShare, *, timeout: float = 60.0) -> bool:
        """Takes this rank's share of the plan, connects to its rollouts, and prepares the requests
        of the first push. Returns whether pushes gather adapters from other ranks.

        Raises:
            InvalidArgument: this rank's tensors differ from the plan, or a tensor needs more
                temporary memory than the watermark.
            Stale: another controller has connected since.
        """
        with self._calls_lock.acquire() as check_latest:
            check_latest()
            plan = Plan.from_bytes(share.plan)
            if share.converted:
                require_session(share.session, self._conversion)
            self._end_session()
            if not share.converted:
                self._drop_conversion()
            containers = plan.local_containers("source", self.rank)
            self._tensors.refresh()
            self._tensors.drop_moved()
            self._check(containers)
            units = self._conversion.units(containers) if self._conversion else []
            units += self._computed(containers)
            watermark = self.watermark or max(_WATERMARK, *(unit.nbytes for unit in units), 0)
            self._steps = steps(plan.for_source(self.rank), units, watermark)
            sent = (c.src_container for s in self._steps for c in chain(*s.copies.values()))
            self._read = frozenset(share.containers[container] for container in set(sent))
            if self._conversion is not None:
                self._read |= self._conversion.names
            if nbytes := temporary_nbytes(self._steps):
                device = self._tensors.device_of({unit.name for unit in units})
                self._ring = allocate(self._engine, nbytes, device)
            self._tensors.remember_layouts()
            self._share = share
            if share.delta:
                self._delta = DeltaSender(self._engine, plan, self.rank, self._steps, containers)
            transfers = []
            for push_target in share.push_targets:
                regions = (push_target.region, *push_target.further)
                for region in regions:
                    target = msgspec.structs.replace(push_target, region=region, further=regions)
                    for _, route in self._routes.get(target, self._route):
                        transfers.append(self._engine.prepare(route.batch, timeout=timeout))
            for transfer in transfers:
                transfer.wait()
            return self._tensors.gathers

    def ready(self, session: str) -> None:
        """Finds errors of this rank alone before any rank gathers adapters.

        Raises:
            FabricError: this rank's tensors differ from the plan, or it has another session.
        """
        with self._calls_lock.acquire():
            require_session(session, self._share)
            if self._tensors.refresh_moved():
                self._routes.clear()

    def push(
        self,
        session: str,
        version: int,
        push_targets: list[PushTarget],
        *,
        digest: bool = False,
        timeout: float = 60.0,
    ) -> Sent:
        """Writes this rank's share of ``version`` to all rollouts, and waits until it has arrived.

        Prepares each step while earlier steps are sent. The result names the rollouts that can't
        be reached; the others get their share.

        Args:
            timeout: of the whole call, in seconds.

        Raises:
            FabricError: tensors differ from the plan, can't be prepared, or were changed meanwhile.
                The version can't be committed then.
        """
        deadline = time.monotonic() + timeout
        with (
            self._calls_lock.acquire() as check_latest,
            observe.span(f"push {version}"),
            self._tensors.releasing_adapters(),
        ):
            require_session(session, self._share)
            actor = f"trainer {self.rank}"
            start = time.time()
            with self._errors_end_exchange():
                if self._tensors.refresh_moved():
                    self._routes.clear()
                changes = self._tensors.watch(self._read)
                self._tensors.wait_for_kernels(self._read)
                # Even if a later call waits: other ranks wait in this gather.
                self._tensors.gather_adapters()
            # From here on, delta and conversion may be those of a later push.
            check_latest()
            with self._errors_end_exchange():
                by_rollout = self._by_rollout(push_targets)
                if self._delta is not None:
                    self._delta.begin(push_targets)
                spans = [Span(actor, "route", start, time.time())]
                if self._conversion is not None:
                    left = deadline - time.monotonic()
                    spans.append(self._conversion.begin(version, self._tensors.local, left))
            start = time.time()
            sending = StepSender(self.rank, self._engine, deadline)
            for number, step in enumerate(self._steps):
                check_latest()
                if step.units:
                    sending.wait_for(step.ring_slice.after)
                    spans.append(self._prepare_step(step))
                for push_target, routes in by_rollout:
                    changes_only = self._delta is not None and self._delta.sends(push_target)
                    for route in routes.get(number, ()):
                        if not changes_only:
                            sending.send(number, push_target, route)
                        if digest:
                            # Before a later step reuses the memory.
                            sending.add_digest(push_target, route)
                if self._delta is not None:
                    self._delta.send(number, self._sources, sending)
            self._tensors.release_adapters()
            sending.wait_for(len(self._steps))
            changes.check()
            spans.append(Span(actor, "write", start, time.time()))
            sent = sending.result(spans)
            return sent if self._delta is None else self._delta.end(version, sent)

    def release(self) -> None:
        """Drops the registrations of parameters, which keep their memory; the next push makes them
        anew. Call it between pushes where parameters move, as those that go to the host and come
        back: else their memory on the GPU stays until the next push. A push that runs is waited
        for."""
        with self._calls_lock.between_calls():
            self._routes.clear()
            self._tensors.close()

    def close(self) -> None:
        """Drops all registrations."""
        SOURCES.remove(self.name, self)
        with self._calls_lock.acquire():
            self._end_session()
            self._drop_conversion()
            self._tensors.close()

    @contextmanager
    def _errors_end_exchange(self) -> Iterator[None]:
        """Tells the other ranks of an error before or in the exchange, which they wait in."""
        try:
            yield
        except BaseException:
            if self._conversion is not None:
                self._conversion.give_up()
            raise

    def _check(self, containers: Collection[LocalContainer]) -> None:
        """Compares tensors with the plan: sent ones with its containers, converted ones with their
        sources."""
        converted: Collection[str] = ()
        held = {name: self._tensors.like(name) for name in self._tensors.tensors}
        if self._conversion is not None:
            self._conversion.check(held)
            converted = self._conversion.made
        # The plan may omit further names of tied tensors.
        ties, planned = self._tensors.ties(), {container.name for container in containers}
        tied = ties.keys() | ties.values() if self.side is None else set()
        plain = {
            name: tensor
            for name, tensor in held.items()
            if name not in converted and tensor.numel() and (name in planned or name not in tied)
        }
        by: Literal["side", "plan"] = "side" if self.side is not None else "plan"
        check_local(plain, [c for c in containers if c.name not in converted], self.rank, by=by)

    def _computed(self, containers: Collection[LocalContainer]) -> list[Unit]:
        """Tensors whose values are computed at each push, apart from conversions (RS-1)."""
        converted: Collection[str] = self._conversion.made if self._conversion else ()
        return [
            Unit(container.name, container.index, container.nbytes)
            for container in containers
            if container.name not in converted and self._tensors.is_computed(container.name)
        ]

    def _prepare_step(self, step: Step) -> Span:
        assert self._ring is not None, "accept has allocated it"
        start, offsets = time.time(), step.offsets()
        memory = self._ring[1]
        for unit in step.units:
            at = offsets[unit.values]
            local = self._tensors.local(unit.name)
            room = memory[at : at + unit.nbytes]
            if self._conversion is not None and unit.name in self._conversion.names:
                self._conversion.prepare(unit, local, room)
            else:
                room[: unit.values_nbytes].view(local.dtype).view(local.shape).copy_(local)
        wait_for_kernels([memory])
        return Span(f"trainer {self.rank}", "prepare", start, time.time())

    def _by_rollout(
        self, push_targets: list[PushTarget]
    ) -> list[tuple[PushTarget, dict[int, list[Route]]]]:
        """The rollouts that this rank writes to, with the routes of each step. Each trainer begins
        with a different rollout."""
        by_rollout: list[tuple[PushTarget, dict[int, list[Route]]]] = []
        for push_target in sorted(push_targets, key=lambda a: a.rank):
            by_step: dict[int, list[Route]] = {}
            for number, route in self._routes.get(push_target, self._route):
                by_step.setdefault(number, []).append(route)
            if by_step:
                by_rollout.append((push_target, by_step))
        return rotated(by_rollout, self.rank)

    def _route(self, push_target: PushTarget) -> list[tuple[int, Route]]:
        """The requests for one rollout, with their steps."""
        return [
            (number, route)
            for number, step in enumerate(self._steps)
            if push_target.rank in step.copies
            for route in self._requests(step, push_target)
        ]

    def _requests(self, step: Step, push_target: PushTarget) -> list[Route]:
        """A step's requests for a rollout, by stripe."""
        target = self._engine.import_region(RegionDescriptor.from_bytes(push_target.region))
        by_stripe: dict[int, list[Copy]] = {}
        for copy in step.copies[push_target.rank]:
            by_stripe.setdefault(push_target.stripes[copy.dst_container], []).append(copy)
        return [
            Route(
                stripe,
                *bind_copies(copies, self._sources(step, copies), target, push_target.offsets),
                sum(copy.nbytes for copy in copies),
            )
            for stripe, copies in sorted(by_stripe.items())
        ]

    def _sources(self, step: Step, copies: Iterable[Copy]) -> dict[int, tuple[Region, int]]:
        """Region and offset of the containers that copies read."""
        assert self._share is not None, "only a session has routes"
        prepared, names = step.offsets(), self._share.containers
        converted = self._conversion.made if self._conversion else frozenset()
        sources: dict[int, tuple[Region, int]] = {}
        for container in {copy.src_container for copy in copies}:
            name = names[container]
            if container in prepared:
                assert self._ring is not None, "accept has allocated it"
                sources[container] = (self._ring[0], prepared[container])
            elif name in converted:
                raise InvalidArgument(
                    f"trainer {self.rank} can't send `{name}`: the plan converts it, this trainer "
                    "does not; this is a bug, please report it"
                )
            else:
                sources[container] = (self._tensors.region(name), 0)
        return sources

    def _end_session(self) -> None:
        """Refuses pushes of the session so far. With the conversion of another one, they would send
        values of other dtypes than their rollouts hold (RS-1)."""
        self._routes.clear()
        self._share = self._delta = self._ring = None

    def _drop_conversion(self) -> None:
        if self._conversion is not None:
            self._conversion.close()
            self._conversion = None
