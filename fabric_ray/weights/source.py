"""The trainer's half of a weight push."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fabric_ray._native import Batch, CounterRef, Digest, Region, RegionDescriptor, Transfer
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import FabricError, InvalidArgument, Stale
from fabric_ray.plan import Copy, ParamMeta, Plan
from fabric_ray.plan.dtensor import param_meta
from fabric_ray.weights.registry import Registry
from fabric_ray.weights.report import Arm, LinkReport, Sent, SourceShare, Span
from fabric_ray.weights.routing import outgoing

if TYPE_CHECKING:
    import torch

SOURCES: Registry[WeightSource] = Registry("weight source")


class WeightSource:
    """This rank's shards of a model, ready to be pushed.

    Args:
        tensors: a module, or parameters by name; DTensors and plain tensors, in host memory.
        rank: this trainer's place among the trainers: its index in ``WeightSync(trainers=...)``.
        name: tells several models of one process apart.
        engine: by default the process's own, :func:`fabric_ray.runtime.engine`.

    Raises:
        InvalidArgument: a parameter that can't be pushed as it is, by name.
    """

    def __init__(
        self,
        tensors: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        rank: int,
        name: str = "default",
        engine: TransferEngine | None = None,
    ) -> None:
        from fabric_ray.runtime import engine as process_engine

        self._named: Callable[[], Mapping[str, Any]]
        if isinstance(tensors, Mapping):
            self._named = lambda: tensors
        else:
            self._named = lambda: dict(tensors.named_parameters())
        self._tensors: dict[str, Any] = dict(self._named())
        if not self._tensors:
            raise InvalidArgument("a weight source needs at least one parameter")
        for param, tensor in self._tensors.items():
            if tensor.device.type != "cpu":
                raise InvalidArgument(
                    f"parameter `{param}` is on {tensor.device}, and weights are pushed "
                    "from host memory so far; give a copy on the host"
                )
        self.rank = rank
        self.name = name
        self._engine = engine or process_engine()
        self._layouts: dict[str, _Layout] = {}
        self._regions: dict[str, tuple[int, Region]] = {}
        self._share: SourceShare | None = None
        self._copies: dict[int, list[Copy]] = {}
        self._routes: dict[bytes, tuple[Batch, Digest]] = {}
        SOURCES.add(name, self)

    def meta(self) -> tuple[int, list[ParamMeta], bytes]:
        """What the controller gathers: rank, shards, and where the engine is."""
        self._refresh()
        self._layouts = {param: _layout(tensor) for param, tensor in self._tensors.items()}
        metas = [
            param_meta(param, tensor, rank=self.rank)
            for param, tensor in self._tensors.items()
            if tensor.numel()
        ]
        return self.rank, metas, self._engine.address.to_bytes()

    def accept(self, share: SourceShare, *, timeout: float = 60.0) -> None:
        """Takes this rank's part of the routing table, connects to its rollouts, and has everything
        ready that the first push would otherwise wait for."""
        plan = Plan.from_bytes(share.plan)
        by_target: dict[int, list[Copy]] = defaultdict(list)
        for copy in plan.for_source(self.rank):
            by_target[copy.peer].append(copy)
        self._share, self._copies = share, dict(by_target)
        self._routes.clear()
        ready = []
        for arm in share.arms:
            if arm.rank in self._copies:
                for region in (arm.region, *arm.further):
                    batch, _ = self._route(msgspec.structs.replace(arm, region=region))
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

        A rollout that can't be reached is named in the result; the others get their share.
        """
        if self._share is None:
            raise Stale("this trainer was given no route (a restart?); call connect() again")
        if self._share.session != session:
            raise Stale(
                "another WeightSync has connected to this trainer since; push with that one, or "
                "call connect() to take over again"
            )
        who = f"trainer {self.rank}"
        spans, links, failed, digests = [], [], dict[int, str](), dict[int, int]()
        start = time.time()
        self._follow()
        pending: list[tuple[Arm, Transfer, float]] = []
        routes = [(arm, self._route(arm)) for arm in self._in_turn(arms)]
        spans.append(Span(who, "prepare", start, time.time()))
        start = time.time()
        for arm, (batch, _) in routes:
            begun = time.perf_counter()
            try:
                transfer = self._engine.submit(
                    batch, imm=CounterRef.from_bytes(arm.counter), timeout=timeout
                )
                pending.append((arm, transfer, begun))
            except FabricError as error:
                failed[arm.rank] = str(error)
        for arm, transfer, begun in pending:
            try:
                transfer.wait()
            except FabricError as error:
                failed[arm.rank] = str(error)
                continue
            nbytes = sum(copy.nbytes for copy in self._copies[arm.rank])
            seconds = time.perf_counter() - begun
            links.append(LinkReport(self.rank, arm.rank, nbytes, seconds, transfer.transport))
        spans.append(Span(who, "write", start, time.time()))
        if digest and not failed:
            start = time.time()
            digests = {arm.rank: d.compute() for arm, (_, d) in routes}
            spans.append(Span(who, "digest", start, time.time()))
        return Sent(tuple(spans), tuple(links), failed, digests)

    def close(self) -> None:
        """Forgets all registrations."""
        SOURCES.remove(self.name)
        self._routes.clear()
        self._regions.clear()

    def _in_turn(self, arms: list[Arm]) -> list[Arm]:
        """The rollouts that get something from here, each trainer beginning with another."""
        mine = [arm for arm in sorted(arms, key=lambda a: a.rank) if arm.rank in self._copies]
        turn = self.rank % max(1, len(mine))
        return mine[turn:] + mine[:turn]

    def _route(self, arm: Arm) -> tuple[Batch, Digest]:
        """The requests for one rollout; put together once for each place it is written to."""
        if self._share is None:
            raise InvalidArgument("the source has no routes yet; call WeightSync.connect() first")
        route = self._routes.get(arm.region)
        if route is None:
            target = self._engine.import_region(RegionDescriptor.from_bytes(arm.region))
            copies = self._copies[arm.rank]
            names = self._share.containers
            sources = {i: self._region(names[i]) for i in {c.src_container for c in copies}}
            route = outgoing(copies, sources, target, arm.offsets)
            self._routes[arm.region] = route
        return route

    def _region(self, param: str) -> Region:
        known = self._regions.get(param)
        if known is None:
            flat = _memory(param, self._tensors[param])
            known = (flat.data_ptr(), self._engine.register(flat))
            self._regions[param] = known
        return known[1]

    def _refresh(self) -> None:
        """Looks the parameters up again: a module's may have been replaced."""
        for param, tensor in self._named().items():
            held = self._tensors.get(param)
            # While FSDP has gathered a parameter, the module shows the whole one for a moment; the
            # shards remain what is trained.
            if tensor is not held and hasattr(tensor, "_local_tensor") >= hasattr(
                held, "_local_tensor"
            ):
                self._tensors[param] = tensor

    def _follow(self) -> None:
        """Finds parameters that an optimizer or a checkpoint has given new memory.

        Raises:
            InvalidArgument: one has another shape, dtype or placement than was planned for.
        """
        self._refresh()
        for param, tensor in self._tensors.items():
            _span(param, tensor)
            now, planned = _layout(tensor), self._layouts.get(param)
            if now != planned:
                raise InvalidArgument(
                    f"parameter `{param}` was {planned} when the route was planned and is {now} "
                    "now; call WeightSync.connect() again"
                )
        for param, (at, _) in list(self._regions.items()):
            if _local(self._tensors[param]).data_ptr() != at:
                self._regions.pop(param)
                self._routes.clear()


class _Layout(NamedTuple):
    """What a plan depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    placements: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {self.placements}".rstrip()


def _layout(tensor: Any) -> _Layout:
    local = _local(tensor)
    placements = str(getattr(tensor, "placements", ""))
    return _Layout(tuple(local.shape), tuple(local.stride()), str(local.dtype), placements)


def _local(tensor: Any) -> Any:
    """This rank's shard; not by ``to_local()``, which autograd records."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def _span(param: str, tensor: Any) -> tuple[int, int]:
    """Where a shard begins in its storage and up to where it reaches, in bytes.

    Raises:
        InvalidArgument: the storage is shorter than that: its memory was freed.
    """
    local = _local(tensor)
    if not local.numel():
        return 0, 0
    steps = zip(local.shape, local.stride(), strict=True)
    nbytes = (1 + sum((n - 1) * stride for n, stride in steps)) * local.element_size()
    start = local.storage_offset() * local.element_size()
    if start + nbytes > local.untyped_storage().nbytes():
        raise InvalidArgument(
            f"parameter `{param}`: its memory was freed; load the parameter again"
        )
    return start, nbytes


def _memory(param: str, tensor: Any) -> Any:
    """The bytes from a shard's first element to its last, whatever its strides."""
    import torch

    start, nbytes = _span(param, tensor)
    storage = _local(tensor).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (nbytes,), (1,))
