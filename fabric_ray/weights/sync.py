"""The controller: gathers metadata, plans once, pushes versions as transactions (RS-3)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Plan, Side, first_twins, plan
from fabric_ray.plan.errors import DtypeMismatch
from fabric_ray.plan.leaving import check_patterns
from fabric_ray.plan.planner import left_of
from fabric_ray.weights import stages
from fabric_ray.weights.calls import Calls, RayCalls
from fabric_ray.weights.clock import Clock
from fabric_ray.weights.conversion import Recipe
from fabric_ray.weights.crew import Crew, names
from fabric_ray.weights.feeding import Feeding
from fabric_ray.weights.quant import Formats
from fabric_ray.weights.replica.sides import ReplicaMeta, replica_sides
from fabric_ray.weights.report import ConnectReport, JoinReport, PushReport
from fabric_ray.weights.session import Session
from fabric_ray.weights.sides import converted, source_side, target_side, with_cast


class WeightSync:
    """Pushes a model's weights from trainer actors into rollout actors.

    Any actor will do: each trainer holds a :class:`WeightSource`, each rollout a
    :class:`WeightTarget`, under the same ``name``. Nothing else is asked of them.

    Args:
        trainers: actor handles; a trainer's rank is its index.
        rollouts: actor handles; a rollout's rank is its index. Others may :meth:`join`.
        name: of the sources and targets.
        leave: patterns of names of trainers' tensors that may stay behind, since no rollout needs
            them: they become stale there. Any other that no rollout needs is refused.
        formats: what becomes of which tensors on the way, by patterns of their names, as for
            :func:`fabric_ray.weights.quant.quantised_target`, which made the rollouts' side. Each
            trainer converts its own shards; the result is that of converting whole tensors.
        digest: have every push compare digests of all bytes on both sides.
        relay: trainers send what several rollouts hold alike only once, and these pass it on to
            each other while it arrives. Pays where a trainer sends more than a rollout receives.
        lost: what becomes of a push when a rollout's process has ended: it fails (``"raise"``), or
            is made again without that rollout, which takes no part from then on (``"drop"``).
        timeout: seconds that a stage may take.
        calls: how the actors are reached; by default as Ray actors.
    """

    def __init__(
        self,
        trainers: Sequence[Any],
        rollouts: Sequence[Any],
        *,
        name: str = "default",
        leave: Sequence[str] = (),
        formats: Formats | None = None,
        digest: bool = False,
        relay: bool = False,
        lost: Literal["raise", "drop"] = "raise",
        timeout: float = 60.0,
        calls: Calls | None = None,
    ) -> None:
        for role, actors in (("trainers", trainers), ("rollouts", rollouts)):
            if not isinstance(actors, Sequence) or isinstance(actors, str):
                raise InvalidArgument(
                    f"{role} is {type(actors).__name__}, expected a list of actor handles; pass "
                    f"[{role.removesuffix('s')}] for one actor"
                )
        if not trainers or not rollouts:
            raise InvalidArgument("a weight sync needs at least one trainer and one rollout")
        if lost not in ("raise", "drop"):
            raise InvalidArgument(f"lost is {lost!r}; say 'raise' or 'drop'")
        self._calls = calls or RayCalls()
        about = (name, self._calls, timeout)
        self._trainers = Crew("trainer", dict(enumerate(trainers)), *about)
        self._rollouts = Crew("rollout", dict(enumerate(rollouts)), *about)
        self._first, self._joined = len(rollouts), 0
        self._leave, self._left = check_patterns(leave), tuple[str, ...]()
        self._formats = dict(formats or {})
        self._digest = digest
        self._relay = relay
        self._lost = lost
        self._timeout = timeout
        self._session: Session | None = None
        # The rank that each rollout holds; and those that were held by one who was dropped.
        self._ranks: dict[int, int] = {number: number for number in range(len(rollouts))}
        self._vacant: set[int] = set()
        # One call at a time; the actors would mix their stages up.
        self._turn = threading.RLock()
        self.version = 0
        """The version that all rollouts run; 0 before the first."""

    @property
    def plan(self) -> Plan:
        """The routing table: who sends which bytes to whom."""
        if self._session is None:
            raise InvalidArgument("there is no plan yet; call connect() first")
        return self._session.feeding.plan

    @property
    def rollouts(self) -> tuple[int, ...]:
        """Numbers of the rollouts that take part: their index, or what :meth:`join` gave them."""
        return tuple(self._rollouts.actors)

    def connect(self) -> ConnectReport:
        """Gathers metadata from all actors, computes the static route, and hands it out.

        Raises:
            PlanError: the layouts don't fit together; tensor, rank and remedy are named.
            WeightSyncError: an actor didn't answer; it is named.
        """
        with self._turn:
            return self._connect()

    def _connect(self) -> ConnectReport:
        clock = Clock()
        # Whatever fails from here on leaves nothing behind that a push could use.
        self._session = None
        trainers, rollouts = self._trainers, self._rollouts
        metas = trainers.all(stages.source_meta, "gather metadata", trainers.each())
        targets = rollouts.all(stages.target_meta, "gather metadata", rollouts.each())
        clock.lap("gather")
        _in_order("trainer", {number: rank for number, (rank, _, _) in metas.items()})
        self._ranks = {number: rank for number, (rank, _, _) in targets.items()}
        _in_order("rollout", {n: rank for n, rank in self._ranks.items() if n < self._first})
        said = [word for _, word, _ in metas.values()]
        target = target_side({n: (r, side) for n, (r, side, _) in targets.items()}, self._vacant)
        needed = first_twins(target) if self._relay else target
        if any(isinstance(word, ReplicaMeta) for word in said):
            source, needed, self._left = self._replica_sides(said, target, needed)
            sent, routes = source, plan(source, needed)
        else:
            source = source_side(said, self._given_side, needed)
            sent = converted(source, needed, self._formats)
            try:
                routes = plan(sent, needed, leave=self._leave)
            except DtypeMismatch as error:
                raise with_cast(error, sent, needed) from error
            self._left = left_of(sent, needed, self._leave) if self._leave else ()
        feeding = Feeding(
            routes,
            target,
            relay=self._relay,
            ranks=self._ranks,
            trainers=[address for _, _, address in metas.values()],
            rollouts={number: address for number, (_, _, address) in targets.items()},
        )
        clock.lap("plan")
        session = Session(
            trainers,
            rollouts,
            feeding,
            recipe=Recipe(source, self._formats) if self._formats else None,
            digest=self._digest,
            spare=self._lost == "drop",
            timeout=self._timeout,
            calls=self._calls,
        )
        session.distribute()
        clock.lap("distribute")
        self._session = session
        self.version = session.version = max(self.version, session.version)
        balance = routes.balance()
        return ConnectReport(
            balance.nbytes,
            routes.copy_count,
            session.plan_nbytes,
            balance.sender_imbalance,
            feeding.receiver_imbalance,
            clock.laps,
            len(set(sent.containers) - set(source.containers)),
            self._left,
        )

    def push(self, version: int | None = None) -> PushReport:
        """Moves every rollout from its version to the next, or none.

        Trainers write; then every rollout confirms that all bytes are there; then all put the
        version into use. If anything fails before that, the version advances nowhere.

        Args:
            version: must be larger than the last; by default the next integer.

        Raises:
            WeightSyncError: ``failed`` names who did not get the version and why. The rollouts that
                live keep theirs, and a further push may be tried.
        """
        with self._turn:
            dropped: dict[int, str] = {}
            while True:
                try:
                    report = self._push(version)
                except WeightSyncError as error:
                    dead = self._leave_out_the_dead()
                    dropped |= dead
                    if not dead or (self._session is not None and self._session.decided):
                        raise self._also(error, dropped) from error.__cause__
                    continue
                dropped |= self._leave_out_the_dead()
                return msgspec.structs.replace(report, dropped=dropped, left=self._left)

    def _push(self, version: int | None) -> PushReport:
        if self._session is None:
            self._connect()
        assert self._session is not None, "connected"
        try:
            self._session.prepare()
            # Somebody may have counted on meanwhile.
            self.version = max(self.version, self._session.version)
            version = self.version + 1 if version is None else version
            if version <= self.version:
                raise InvalidArgument(f"version {version} is not after {self.version}")
            return self._session.push(version)
        finally:
            self.version = self._session.version

    async def push_async(self, version: int | None = None) -> PushReport:
        """:meth:`push` without blocking the event loop."""
        return await asyncio.to_thread(self.push, version)

    def join(self, rollout: Any) -> JoinReport:
        """Takes a rollout in whose target holds the same as a rank of the layout: one more replica,
        or what replaces one that was dropped.

        It is given the version in use by another that holds the same; trainers go on meanwhile.
        From the next push on it gets every version. The plan stays as it is.

        Args:
            rollout: an actor with a :class:`WeightTarget` of the same side.

        Raises:
            InvalidArgument: it takes part already, or its target has another side.
            WeightSyncError: it didn't answer, or the version could not be given to it; it has no
                part in anything then.
        """
        with self._turn:
            if self._session is None:
                self._connect()
            assert self._session is not None, "connected"
            start = time.perf_counter()
            number = self._first + self._joined
            if rollout in self._rollouts.actors.values():
                raise InvalidArgument("this rollout takes part already; drop() it first")
            self._rollouts.actors[number] = rollout
            try:
                [(rank, side, address)] = self._rollouts.all(
                    stages.target_meta, "say what it holds", {number: ()}
                ).values()
                self._session.feeding.check(rank, side)
                self._ranks[number] = rank
                self._session.feeding.join(number, rank, address)
                giver = self._session.catch_up(number, rank)
            except BaseException:
                self._forget(number)
                raise
            self._joined += 1
            version = self._session.version if giver is not None else None
            return JoinReport(number, version, giver, time.perf_counter() - start)

    def drop(self, rollout: int) -> None:
        """Leaves a rollout out from now on, dead or alive. Who was fed by it is fed by another.

        Args:
            rollout: its number.

        Raises:
            InvalidArgument: no such rollout takes part, or it is the last.
        """
        with self._turn:
            if rollout not in self._rollouts.actors:
                raise InvalidArgument(
                    f"there is no rollout {rollout}; those that take part are {self.rollouts}"
                )
            if len(self._rollouts.actors) == 1:
                raise InvalidArgument(f"rollout {rollout} is the last; nothing could be pushed")
            self._vacant.add(self._ranks[rollout])
            self._forget(rollout)

    def explain(self, tensor_or_container: str | None = None) -> str:
        """The routing table in words."""
        return self.plan.explain(tensor_or_container)

    def _leave_out_the_dead(self) -> dict[int, str]:
        """Drops whom the last push found dead, if that is what the user wants."""
        dead = {n: why for n, why in self._rollouts.dead.items() if n in self._rollouts.actors}
        if self._lost == "raise" or len(dead) == len(self._rollouts.actors):
            return {}
        for number in dead:
            self.drop(number)
        return dead

    def _also(self, error: WeightSyncError, dropped: dict[int, str]) -> WeightSyncError:
        """The error, which also names who was left out before it."""
        if not dropped:
            return error
        left = {self._rollouts.who(number): cause for number, cause in dropped.items()}
        text = f"{error} ({names(left)} died before, and was left out)"
        failed = {**left, **error.fields.get("failed", {})}
        return WeightSyncError(text, version=error.fields.get("version"), failed=failed)

    def _forget(self, number: int) -> None:
        del self._rollouts.actors[number]
        self._rollouts.dead.pop(number, None)
        self._ranks.pop(number, None)
        if self._session is not None:
            self._session.forget(number)

    def _replica_sides(
        self, said: list[Any], target: Side, needed: Side
    ) -> tuple[Side, Side, tuple[str, ...]]:
        if self._formats:
            raise InvalidArgument("give the formats to every ReplicaSource, not to WeightSync")
        return replica_sides(said, target, needed, leave=self._leave)

    def _given_side(self) -> Side:
        first: dict[int, tuple[Any, ...]] = dict.fromkeys(list(self._trainers.actors)[:1], ())
        [side] = self._trainers.all(stages.source_side, "send its side", first).values()
        given: Side = side
        return given


def _in_order(role: str, ranks: dict[int, int]) -> None:
    if any(number != rank for number, rank in ranks.items()):
        raise InvalidArgument(
            f"the {role}s passed to WeightSync hold ranks {list(ranks.values())}; pass them in the "
            "order of ranks"
        )
