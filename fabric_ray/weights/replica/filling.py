"""One trainer's share of pushes: gathers a bucket, loads the replica as each rollout in turn, and
sends complete tensors."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain

import msgspec
import torch

from fabric_ray._native import RegionDescriptor, bind_copies
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Copy, Plan
from fabric_ray.weights.replica.engine import EngineReplica
from fabric_ray.weights.replica.gathering import Gathering
from fabric_ray.weights.replica.memory import ReplicaMemory
from fabric_ray.weights.replica.schedule import schedule
from fabric_ray.weights.replica.sides import unnamed
from fabric_ray.weights.report import PushTarget, Sent, SourceShare, Span, Temporary
from fabric_ray.weights.request_cache import RequestCache, rotated
from fabric_ray.weights.step_sender import Route, StepSender

_Routes = dict[int, list[Route]]
"""Routes by load number, one per stripe."""


class Filling:
    """Runs one trainer's share of each push of a session.

    Raises:
        InvalidArgument: bucket or cache are too small, or the replica is of another engine than
            the rollouts.
    """

    def __init__(
        self,
        share: SourceShare,
        gathering: Gathering,
        replica: EngineReplica,
        memory: ReplicaMemory,
        *,
        bucket: int,
        cache: int,
    ) -> None:
        self.session = share.session
        """The session of the plan."""
        self._share = share
        self._gathering = gathering
        self._replica = replica
        self._memory = memory
        self._rank = memory.rank
        self._routes: RequestCache[_Routes] = RequestCache()
        plan = Plan.from_bytes(share.plan)
        self._copies: dict[tuple[int, str], list[Copy]] = defaultdict(list)
        """By rollout that a replica is loaded as, and engine tensor."""
        for copy in plan.for_source(self._rank):
            name, rollout = unnamed(share.containers[copy.src_container])
            self._copies[rollout, name].append(copy)
        needs = self._needs()
        whole = gathering.whole().values()
        sizes = {t.name: math.prod(t.shape) * t.dtype.itemsize for t in whole}
        self._schedule = schedule(sizes, needs, bucket=bucket, cache=cache)
        self._loads = [load for bucket in self._schedule.buckets for load in bucket.loads]
        replica.reserve(tuple(needs), {name for _, name in self._copies})
        self._places = memory.places(plan.local_containers("source", self._rank))

    def prepare(self, timeout: float) -> None:
        """Connects to the rollouts and prepares requests for all of their regions."""
        engine = self._memory.engine
        ready = []
        for push_target in self._share.push_targets:
            regions = (push_target.region, *push_target.further)
            for region in regions:
                there = msgspec.structs.replace(push_target, region=region, further=regions)
                for route in chain.from_iterable(self._routes.get(there, self._requests).values()):
                    ready.append(engine.prepare(route.batch, timeout=timeout))
        for transfer in ready:
            transfer.wait()

    def push(
        self,
        push_targets: list[PushTarget],
        sending: StepSender,
        *,
        digest: bool,
        proceed: Callable[[], None],
    ) -> Sent:
        """Gathers, loads and sends one version.

        Args:
            push_targets: of all rollouts.
            proceed: called before each load; raises to stop.
        """
        coming = iter(self._gathering)
        try:
            return self._push(coming, push_targets, sending, digest, proceed)
        except Exception:
            # The other trainers gather to the end. Without this one they would wait, and take part
            # of its next gather for the rest of this one (RS-1).
            with suppress(Exception):
                deque(coming, maxlen=0)
            raise

    def _push(
        self,
        coming: Iterator[tuple[str, torch.Tensor]],
        push_targets: list[PushTarget],
        sending: StepSender,
        digest: bool,
        proceed: Callable[[], None],
    ) -> Sent:
        actor = f"trainer {self._rank}"
        ordered = rotated(
            sorted(push_targets, key=lambda push_target: push_target.rank), self._rank
        )
        routes = [
            (push_target, self._routes.get(push_target, self._requests)) for push_target in ordered
        ]
        spans: list[Span] = []
        held: dict[str, torch.Tensor] = {}
        number = most = 0
        for bucket in self._schedule.buckets:
            start = time.time()
            held |= {name: next(coming)[1] for name in bucket.arrive}
            most = max(most, sum(tensor.nbytes for tensor in held.values()))
            spans.append(Span(actor, "gather", start, time.time()))
            start = time.time()
            for load in bucket.loads:
                proceed()
                # Waits only if this load reuses memory that is being sent.
                sending.wait_for(load.after)
                self._replica.load(load.rank, {name: held[name] for name in load.tensors})
                for push_target, route in (
                    (push_target, r) for push_target, mine in routes for r in mine.get(number, ())
                ):
                    sending.send(number, push_target, route)
                    if digest:
                        # Before the next load reuses the memory.
                        sending.add_digest(push_target, route)
                number += 1
            kept = held.keys() - set(bucket.drop)
            held = {name: _alone(tensor) for name, tensor in held.items() if name in kept}
            spans.append(Span(actor, "load", start, time.time()))
        next(coming, None)  # raises if the function yields a tensor that was not announced
        start = time.time()
        sending.wait_for(number)
        spans.append(Span(actor, "write", start, time.time()))
        sent = sending.result(spans)
        return msgspec.structs.replace(sent, temporary=Temporary(most, self._memory.nbytes))

    def _needs(self) -> dict[int, dict[str, frozenset[str]]]:
        """The whole tensors that each sent engine tensor needs, by rollout."""
        whole = self._gathering.whole()
        out: dict[int, dict[str, frozenset[str]]] = {}
        for rollout in sorted({rollout for rollout, _ in self._copies}):
            if rollout not in self._replica.ranks:
                raise InvalidArgument(
                    f"rollout {rollout} is none of the ranks that the replica of trainer "
                    f"{self._rank} can be loaded as; make it of all rollouts"
                )
            parts = self._replica.needs(rollout, whole)
            out[rollout] = {}
            for name in (name for r, name in self._copies if r == rollout):
                if name not in parts:
                    raise InvalidArgument(
                        f"rollout {rollout} holds `{name}`, which the replica of trainer "
                        f"{self._rank} has nothing for; make it of the rollouts' engine"
                    )
                out[rollout][name] = frozenset(parts[name])
        return out

    def _requests(self, push_target: PushTarget) -> _Routes:
        """The routes for one rollout, by load."""
        target = self._memory.engine.import_region(RegionDescriptor.from_bytes(push_target.region))
        routes: _Routes = defaultdict(list)
        for number, load in enumerate(self._loads):
            by_stripe: dict[int, list[Copy]] = defaultdict(list)
            for copy in chain.from_iterable(self._copies[load.rank, n] for n in load.complete):
                if copy.peer == push_target.rank:
                    by_stripe[push_target.stripes[copy.dst_container]].append(copy)
            for stripe, copies in sorted(by_stripe.items()):
                request = bind_copies(copies, self._places, target, push_target.offsets)
                nbytes = sum(copy.nbytes for copy in copies)
                routes[number].append(Route(stripe, *request, nbytes))
        return dict(routes)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own, so that a kept view does not keep a larger storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
