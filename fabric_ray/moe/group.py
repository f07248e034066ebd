"""A model whose experts are divided among Ray actors, which may die and be replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import Self

from fabric_ray.errors import FabricError, InvalidArgument, PeerLost
from fabric_ray.moe.rank import Build, Member, Options, Pass, Rank
from fabric_ray.moe.rank_calls import WATCH_S, gather, ranks_to_evict
from fabric_ray.runtime.causes import cause_of, original

_CLOSE_S = 10.0


class LostRank(msgspec.Struct, frozen=True):
    """A rank that was given up."""

    rank: int
    member: Member
    """The actor that had the rank."""
    cause: str
    named_by: tuple[int, ...]
    """Ranks that gave it up by themselves; empty where Ray or the caller reported the loss."""
    at: float
    """Seconds since the epoch when the group learnt of it."""


class Forward(msgspec.Struct, frozen=True):
    """What the model made of inputs."""

    outputs: list[Any]
    """Of each input."""
    left_out: tuple[int, ...]
    """Experts that no token of these inputs has seen, in any layer."""
    lost: tuple[LostRank, ...]
    """Ranks that were given up meanwhile."""


class ExpertGroup:
    """Ranks of a model, one actor and one engine each: experts divided, inputs divided, the rest on
    every rank.

    A rank that dies, or is silent for ``timeout`` seconds while others wait for it, is given up by
    all; the pass that lost it is made again without it and its experts. Every result is that of one
    model: the whole one, or the one without ``left_out``.

    Controller and ranks exchange arguments and results as Ray does, which pickles them. Ranks among
    themselves exchange bytes that the native exchange decodes and checks; nothing is unpickled.
    A rank is identified by its actor and by the incarnation of its engine
    (:class:`~fabric_ray.moe.rank.Member`): a replacement is another member.

    Calls wait for one another. ``ray.init()`` comes first.

    Args:
        build: makes a rank's model over its exchange, whose layers are
            :class:`~fabric_ray.moe.layer.ParallelExperts` with ``shrink``. The model is called with
            one input at a time, on all ranks together, and with ``None`` where a rank has none.
            Ray pickles what it returns, and what it raises costs its rank: check inputs before.
        ranks: actors.
        exchange: arguments of each rank's :class:`~fabric_ray.moe.AllToAll`: experts, a multiple of
            ``ranks``, topk, hidden, max_tokens and so on.
        timeout: seconds for which a rank may be behind the others; 5 at least, for the time that it
            takes to end one that is stopped.
        ranks_per_node: ranks whose bundles are one placement group, which Ray puts on one node;
            all if ``None``.
        cpus_per_rank: that Ray reserves for each, more than 0.
        gpus_per_rank: likewise; with more than 0 each rank computes on its GPU, and kernels make
            the exchange.
        start_timeout: seconds for actors to come up.
        pass_timeout: seconds after which a rank that hasn't ended a pass is given up, whatever the
            others say.
        engine: fields of :class:`fabric_ray.EngineConfig` for every rank's engine.

    Raises:
        InvalidArgument: sizes that don't go together, or Ray doesn't run.
        FabricError: the actors didn't come up in time.
    """

    def __init__(
        self,
        build: Build,
        *,
        ranks: int,
        exchange: Mapping[str, Any],
        timeout: float = 10.0,
        ranks_per_node: int | None = None,
        cpus_per_rank: float = 1.0,
        gpus_per_rank: float = 0.0,
        start_timeout: float = 120.0,
        pass_timeout: float = 300.0,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        per_node = ranks if ranks_per_node is None else ranks_per_node
        if min(ranks, per_node) < 1:
            raise InvalidArgument(
                f"ranks is {ranks} and ranks_per_node {ranks_per_node}; give at least 1"
            )
        if cpus_per_rank <= 0 or gpus_per_rank < 0:
            raise InvalidArgument(
                f"cpus_per_rank is {cpus_per_rank} and gpus_per_rank {gpus_per_rank}; give more "
                "than 0 CPUs, since Ray keeps no place that takes nothing, and 0 GPUs for none"
            )
        if min(timeout, start_timeout, pass_timeout) <= 0:
            raise InvalidArgument(
                f"timeouts are {timeout}, {start_timeout} and {pass_timeout}; give more than 0"
            )
        if exchange["experts"] % ranks:
            raise InvalidArgument(
                f"{exchange['experts']} experts on {ranks} ranks; give each rank as many"
            )
        if not ray.is_initialized():
            raise InvalidArgument("call ray.init() first: ranks are Ray actors")
        sizes = {**exchange, "ranks": ranks, "timeout": timeout}
        if gpus_per_rank:
            sizes["device"] = "cuda"
        self._options = Options(build=build, exchange=sizes, engine=dict(engine or {}))
        self._ranks = ranks
        self._needs = {"CPU": cpus_per_rank} | ({"GPU": gpus_per_rank} if gpus_per_rank else {})
        self._per_node = per_node
        self._start_timeout, self._pass_timeout = start_timeout, pass_timeout
        self._lock = threading.RLock()
        self._actors: dict[int, Any] = {}
        self._members: dict[int, Member] = {}
        self._lost: dict[int, LostRank] = {}
        self._places: list[Any] = []
        self._closed = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def members(self) -> tuple[Member, ...]:
        """The present ranks, in order."""
        # Copies: another thread may be waiting in a call that gives ranks up, or takes them in.
        members, actors = dict(self._members), dict(self._actors)
        return tuple(members[rank] for rank in sorted(members.keys() & actors.keys()))

    @property
    def lost(self) -> tuple[LostRank, ...]:
        """Ranks that were given up and not replaced."""
        lost = dict(self._lost)
        return tuple(lost[rank] for rank in sorted(lost))

    @property
    def left_out(self) -> tuple[int, ...]:
        """Experts of those."""
        each = self._options.exchange["experts"] // self._ranks
        return tuple(rank * each + i for rank in sorted(self._lost) for i in range(each))

    def explain(self) -> str:
        """Where the ranks are, and what the exchange's memory on each is for."""
        with self._exclusive():
            lines = [
                f"rank {m.rank}: actor {m.actor_id}, engine {m.incarnation}, node {m.node_id}"
                for m in self.members
            ]
            answers, _ = self._ask("explain", sorted(self._actors)[:1])
            return "\n".join([*lines, "each has", *answers.values()])

    def forward(self, inputs: Sequence[Any]) -> Forward:
        """Divides inputs among the ranks, and has the model read them.

        Raises:
            PeerLost: no rank is left.
        """
        with self._exclusive():
            lost: list[LostRank] = []
            while True:
                here = sorted(self._actors)
                shares = {rank: inputs[i :: len(here)] for i, rank in enumerate(here)}
                passes, gone = self._pass(shares)
                lost += gone.values()
                if not gone:
                    break
            outputs = [
                passes[here[number % len(here)]].outputs[number // len(here)]
                for number in range(len(inputs))
            ]
            return Forward(outputs, self.left_out, tuple(lost))

    def mask(self, rank: int, cause: str = "it was masked") -> None:
        """Leaves a rank and its experts out, and ends its actor.

        Raises:
            InvalidArgument: it isn't here.
            PeerLost: it was the last one.
        """
        with self._exclusive():
            if rank not in self._actors:
                raise InvalidArgument(f"rank {rank} is not here; {sorted(self._actors)} are")
            self._evict({rank: (cause, ())})

    def join(self, rank: int | None = None) -> Member:
        """Replaces a rank that was given up by a new actor, which all other ranks admit.

        Args:
            rank: by default the lowest that was given up.

        Raises:
            InvalidArgument: the rank was not given up, or none was.
            PeerLost: the new actor died before all ranks had admitted it, and is left out.
            FabricError: the new actor didn't start in time.
        """
        with self._exclusive():
            # Finds ranks that died since the last pass before others wait for them.
            self._evict_failed(self._ask("member", self._actors)[1])
            if rank is None:
                rank = min(self._lost, default=-1)
            if rank not in self._lost:
                raise InvalidArgument(
                    f"rank {rank} was not given up; {sorted(self._lost) or 'none'} were"
                )
            return self._admit(rank)

    def close(self) -> None:
        """Ends all actors and gives their places back. Further calls do nothing."""
        with self._lock:
            self._closed = True
            if ray.is_initialized():
                self._ask("close", self._actors, timeout=_CLOSE_S)
                for actor in self._actors.values():
                    ray.kill(actor)
                for place in self._places:
                    remove_placement_group(place)
            self._actors, self._members, self._places = {}, {}, []

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise InvalidArgument("the group was closed; make another one")
            yield

    def _start(self) -> None:
        ranks, per_node = self._ranks, self._per_node
        for first in range(0, ranks, per_node):
            bundles = [self._needs] * min(per_node, ranks - first)
            self._places.append(placement_group(bundles, strategy="STRICT_PACK"))
        try:
            ray.get([place.ready() for place in self._places], timeout=self._start_timeout)
        except GetTimeoutError:
            raise FabricError(
                f"no place for {ranks} ranks, {per_node} on a node, of {self._needs} each, within "
                f"{self._start_timeout} s; lower ranks_per_node, cpus_per_rank or gpus_per_rank"
            ) from None
        for rank in range(ranks):
            self._actors[rank] = self._actor(rank)
        self._members = self._need("member", self._actors)
        descriptors = self._need("descriptor", self._actors)
        self._need("connect", self._actors, [descriptors[rank] for rank in range(ranks)])

    def _actor(self, rank: int) -> Any:
        place = self._places[rank // self._per_node]
        where = PlacementGroupSchedulingStrategy(place, rank % self._per_node)
        remote: Any = ray.remote
        kind = remote(concurrency_groups={"watch": 1})(Rank)
        options = {
            "num_cpus": self._needs["CPU"],
            "num_gpus": self._needs.get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": where,
        }
        return kind.options(**options).remote(rank, self._options)

    def _admit(self, rank: int) -> Member:
        actor = self._actor(rank)
        try:
            member: Member = self._of_one(actor.member.remote())
            descriptor = self._of_one(actor.descriptor.remote())
            descriptors, failed = self._ask("descriptor", self._actors, rank)
            self._evict_failed(failed)
            given = [descriptors.get(r) for r in range(self._ranks)]
            self._of_one(actor.connect.remote(given))
        except RayError as error:
            ray.kill(actor)
            raise PeerLost(
                f"rank {rank} could not be replaced: {cause_of(error)}", peer=f"rank {rank}"
            ) from original(error)
        except BaseException:
            ray.kill(actor)
            raise
        _, failed = self._ask("admit", self._actors, descriptor)
        del self._lost[rank]
        self._actors[rank], self._members[rank] = actor, member
        if failed:
            # If the new actor is dead, the ranks that failed to reach it are not at fault.
            dead = self._ask("member", [rank])[1]
            self._evict_failed(dead or failed)
        if rank in self._lost:
            cause = self._lost[rank].cause
            raise PeerLost(f"rank {rank} could not be replaced: {cause}", peer=f"rank {rank}")
        return member

    def _of_one(self, ref: Any) -> Any:
        return ray.get(ref, timeout=self._start_timeout)

    def _need(self, method: str, ranks: Iterable[int], *args: Any) -> dict[int, Any]:
        """The results of all ranks; raises if one failed."""
        answers, failed = self._ask(method, ranks, *args)
        if failed:
            causes = "; ".join(f"rank {rank}: {cause}" for rank, cause in failed.items())
            raise FabricError(f"the group did not start: {causes}")
        return answers

    def _ask(
        self, method: str, ranks: Iterable[int], *args: Any, timeout: float | None = None
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Results by rank, and causes of failures."""
        refs = {getattr(self._actors[r], method).remote(*args): r for r in ranks}
        return gather(refs, timeout or self._start_timeout)

    def _evict_failed(self, failed: Mapping[int, str]) -> None:
        if failed:
            self._evict({rank: (cause, ()) for rank, cause in failed.items()})

    def _pass(
        self, shares: Mapping[int, Sequence[Any]]
    ) -> tuple[dict[int, Pass], dict[int, LostRank]]:
        """Runs one pass on all ranks, and evicts lost ranks."""
        most = max(map(len, shares.values()))

        def hopeless(passes: Mapping[int, Pass], waited_for: Collection[int]) -> bool:
            """Whether all ranks that have answered have given up all ranks that have not."""
            return bool(passes) and all(p.lost.keys() >= {*waited_for} for p in passes.values())

        refs = {
            self._actors[rank].run.remote([*share, *[None] * (most - len(share))]): rank
            for rank, share in shares.items()
        }
        passes, failed = gather(refs, self._pass_timeout, hopeless, self._end_evicted)
        named = {rank: p.lost.keys() & shares.keys() for rank, p in passes.items()}
        causes = {}
        for rank in {*failed, *ranks_to_evict(named)}:
            by = tuple(sorted(r for r, blamed in named.items() if rank in blamed))
            answers = passes[by[0]].lost[rank] if by else failed[rank]
            causes[rank] = (answers, by)
        return passes, self._evict(causes) if causes else {}

    def _end_evicted(self) -> None:
        """Kills ranks that the others have given up during a pass. The others wait for that: a live
        rank might write to memory that it shared with them (MR-1)."""
        answers, _ = self._ask("lost", self._actors, timeout=WATCH_S)
        named = {rank: answers.get(rank, {}).keys() & self._actors.keys() for rank in self._actors}
        for rank in ranks_to_evict(named):
            self._end(self._members[rank])

    def _end(self, gone: Member) -> None:
        """Has another rank of its node kill a process."""
        for rank, member in self._members.items():
            if member.node_id == gone.node_id and member != gone:
                # The result isn't awaited: others see the process end.
                self._actors[rank].end.remote(gone)

    def _evict(self, causes: Mapping[int, tuple[str, tuple[int, ...]]]) -> dict[int, LostRank]:
        """Has all others mask these ranks; returns them and all ranks found dead meanwhile."""
        now, lost = time.time(), {}
        for rank, (cause, by) in causes.items():
            actor = self._actors.pop(rank)
            lost[rank] = LostRank(rank, self._members.pop(rank), cause, by, now)
            # A rank that is only slow must not return with old state.
            ray.kill(actor)
        self._lost |= lost
        if not self._actors:
            answers = "; ".join(f"rank {one.rank}: {one.cause}" for one in lost.values())
            raise PeerLost(f"no rank is left; {answers}", peer=f"rank {max(lost)}")
        for one in list(lost.values()):
            self._end(one.member)
        for rank, (cause, _) in causes.items():
            failed = self._ask("mask", self._actors, rank, cause)[1]
            if failed:
                lost |= self._evict({r: (why, ()) for r, why in failed.items()})
        return lost
