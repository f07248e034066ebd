"""A trainer's half of a weight push that gathers whole tensors and fills engine replicas."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import NoReturn

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Side
from fabric_ray.weights.latest_call import LatestCallLock, require_session
from fabric_ray.weights.quant import Formats
from fabric_ray.weights.replica.engine import EngineReplica
from fabric_ray.weights.replica.filling import Filling
from fabric_ray.weights.replica.gathering import Gathering, Weights
from fabric_ray.weights.replica.memory import ReplicaMemory
from fabric_ray.weights.replica.module import ModuleReplica
from fabric_ray.weights.replica.sides import ReplicaMeta, layout_digest
from fabric_ray.weights.report import PushTarget, Sent, SourceShare
from fabric_ray.weights.sources import SOURCES, check_rank
from fabric_ray.weights.step_sender import StepSender


class ReplicaSource:
    """This trainer's weights, gathered whole and laid out by a replica of the rollouts' engine.

    It takes the place of a :class:`~fabric_ray.weights.WeightSource` where shards can't be
    described, or only the engine's own loader knows its layout. It costs host memory: a bucket of
    gathered tensors, those that wait for others of the same engine tensor, and a replica of what
    this stage has of one engine rank (the miles article on weight updates in SGLang).

    Args:
        weights: a module or tensors by name (DTensors are gathered one by one), or a function that
            gathers and returns pairs of a Hugging Face name and a whole tensor. All trainers of a
            stage gather the same, at the same time. What a function has handed out it may not
            write to again.
        replica: the engine; a :class:`LayoutReplica` or a :class:`ModuleReplica`.
        rank: this trainer's place among the trainers: its index in ``WeightSync(trainers=...)``.
        stage: the pipeline stage that it gathers. Trainers of one stage share the sending.
        formats: what becomes of which tensors once they are whole, as the rollouts' side has them.
        name: tells several models of one process apart.
        engine: by default the process's own, :func:`fabric_ray.runtime.engine`.
        bucket: bytes of whole tensors to gather before they are loaded.
        cache: bytes of whole tensors that may wait for a later bucket.
    """

    side: Side | None = None

    def __init__(
        self,
        weights: Weights,
        replica: EngineReplica,
        *,
        rank: int,
        stage: int = 0,
        formats: Formats | None = None,
        name: str = "default",
        engine: TransferEngine | None = None,
        bucket: int = 1 << 30,
        cache: int = 1 << 30,
    ) -> None:
        from fabric_ray.runtime import engine as process_engine

        check_rank(rank)
        if stage < 0:
            raise InvalidArgument(f"stage is {stage}; number pipeline stages from 0")
        self.rank = rank
        self.stage = stage
        self.name = name
        self._gathering = Gathering(weights, formats or {}, rank)
        self._replica = replica
        self._engine = engine or process_engine()
        self._bucket, self._cache = bucket, cache
        self._memory = ReplicaMemory(rank, self._engine, replica)
        self._filling: Filling | None = None
        self._calls_lock = LatestCallLock()
        SOURCES.add(name, self)

    def meta(self) -> tuple[int, ReplicaMeta, bytes]:
        """What the controller gathers: rank, what this stage fills, and where the engine is.

        Raises:
            InvalidArgument: an engine tensor would be filled in part.
        """
        whole = self._gathering.whole()
        made_of: dict[str, set[str]] = defaultdict(set)
        for rank in self._replica.ranks:
            for name, parts in self._replica.needs(rank, whole).items():
                made_of[name].update(parts)
        fills = [name for name, parts in made_of.items() if parts & whole.keys()]
        for name in fills:
            if missing := made_of[name] - whole.keys():
                raise InvalidArgument(
                    f"trainer {self.rank} gathers only a part of what `{name}` is made of, not "
                    f"`{min(missing)}`; gather all of it in one stage"
                )
        used = {part for name in fills for part in made_of[name]}
        spare = self._gathering.second_names(used)
        unused = tuple(name for name in whole if name not in used and name not in spare)
        side = self._replica.side
        layout = None if side is None else layout_digest(side)
        watched = isinstance(self._replica, ModuleReplica)
        meta = ReplicaMeta(self.stage, tuple(fills), unused, tuple(sorted(used)), layout, watched)
        return self.rank, meta, self._engine.address.to_bytes()

    def convert(self, session: str, recipe: object, *, again: bool = False) -> NoReturn:
        """Never: whole tensors are converted as soon as they are gathered."""
        raise InvalidArgument(f"give trainer {self.rank} the formats, not WeightSync")

    def join(self, session: str, invitations: object) -> NoReturn:
        """Never, as :meth:`convert`."""
        self.convert(session, invitations)

    def accept(self, share: SourceShare, *, timeout: float = 60.0) -> bool:
        """Takes this trainer's part of the routing table, makes room for its replica, and has
        everything ready that the first push would otherwise wait for. Returns ``True``: its pushes
        gather.

        Raises:
            InvalidArgument: bucket or cache are too small (nothing has been gathered then), or the
                replica's tensors aren't those of the rollouts.
        """
        with self._calls_lock.acquire() as check_latest:
            check_latest()
            self._filling = None
            filling = Filling(
                share,
                self._gathering,
                self._replica,
                self._memory,
                bucket=self._bucket,
                cache=self._cache,
            )
            filling.prepare(timeout)
            self._filling = filling
            return True

    def ready(self, session: str) -> None:
        """Finds errors of this trainer alone before any trainer gathers.

        Raises:
            FabricError: this trainer can't gather.
        """
        with self._calls_lock.acquire():
            require_session(session, self._filling)
            self._gathering.check()

    def push(
        self,
        session: str,
        version: int,
        push_targets: list[PushTarget],
        *,
        digest: bool = False,
        timeout: float = 60.0,
    ) -> Sent:
        """Gathers, loads and sends ``version`` bucket by bucket, and waits until all is there.

        A rollout that can't be reached is named in the result; the others get their share, and the
        gather goes on to its end.

        Args:
            timeout: seconds for the sending.

        Raises:
            FabricError: other tensors came than were announced, or one can't be converted.
        """
        sending = StepSender(self.rank, self._engine, time.monotonic() + timeout)
        with self._calls_lock.acquire() as proceed:
            filling = require_session(session, self._filling)
            return filling.push(push_targets, sending, digest=digest, proceed=proceed)

    def close(self) -> None:
        """Forgets all registrations."""
        SOURCES.remove(self.name, self)
        with self._calls_lock.acquire():
            self._filling = None
            self._memory.close()
