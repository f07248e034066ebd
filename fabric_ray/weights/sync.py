"""The controller: gathers metadata, plans once, pushes versions as transactions (RS-3)."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Plan, Side, first_replicas, plan
from fabric_ray.plan.errors import DtypeMismatch, MissingTensors, PlanError
from fabric_ray.plan.leaving import check_patterns
from fabric_ray.plan.planner import left_of
from fabric_ray.weights import phases
from fabric_ray.weights.actor_group import ActorGroup, names
from fabric_ray.weights.calls import Calls, RayCalls, check_handles
from fabric_ray.weights.casts import found_casts, with_cast
from fabric_ray.weights.clock import Clock
from fabric_ray.weights.conversion import Recipe
from fabric_ray.weights.fanout import Fanout
from fabric_ray.weights.findings import Findings, findings, in_words
from fabric_ray.weights.quant import Formats
from fabric_ray.weights.replica.sides import ReplicaMeta, replica_sides
from fabric_ray.weights.report import ConnectReport, JoinReport, PushReport
from fabric_ray.weights.session import Session, check_going_on
from fabric_ray.weights.sides import as_replicas, converted, lacking, source_side, target_side


class WeightSync:
    """Pushes a model's weights from trainer actors into rollout actors.

    Any actor works: each trainer holds a :class:`WeightSource`, each rollout a
    :class:`WeightTarget`, under the same ``name``.

    Args:
        trainers: actor handles; a trainer's rank is its index.
        rollouts: actor handles; a rollout's rank is its index. Others may :meth:`join`.
        name: of the sources and targets.
        leave: patterns of names of trainers' tensors that no rollout needs; pushes don't send
            them. Without a pattern, such a tensor is an error.
        formats: formats by patterns of tensor names, as given to
            :func:`fabric_ray.weights.quant.quantised_target` for the rollouts' side. Each trainer
            converts its own shards; the result equals that of converting whole tensors. By default
            trainers cast float32 and bfloat16 to each other as the rollouts need; ``{}`` refuses
            tensors of other dtypes.
        digest: compare digests of all bytes on both sides in every push.
        delta: send only what changed since the version in use, where that is at most 1/4 of a
            tensor's bytes; a digest of the tensor proves the result. Each trainer keeps a copy of
            what it sends, and 1/4 more; each rollout takes 1/4 of a version more. On a fast link,
            whole pushes may take less time: ``True`` measures that and goes over to them,
            ``"always"`` sends the fewest bytes.
        relay: trainers send to one of several replicas, which relay to each other while the version
            arrives. Faster where a trainer sends more than a rollout receives.
        lost: what a push does when a rollout's process has ended: ``"raise"`` fails; ``"drop"``
            drops that rollout and pushes again.
        timeout: of each phase, in seconds.
        calls: runs functions in the actors; by default in Ray actors.
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
        delta: bool | Literal["always"] = False,
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
            raise InvalidArgument(f"lost is {lost!r}, expected 'raise' or 'drop'")
        if delta not in (True, False, "always"):
            raise InvalidArgument(f"delta is {delta!r}, expected True, False or 'always'")
        self._leave, self._left = check_patterns(leave), tuple[str, ...]()
        self._calls = calls or RayCalls()
        if isinstance(self._calls, RayCalls):
            check_handles("trainers", trainers)
            check_handles("rollouts", rollouts)
        common = (name, self._calls, timeout)
        self._trainers = ActorGroup("trainer", dict(enumerate(trainers)), *common)
        self._rollouts = ActorGroup("rollout", dict(enumerate(rollouts)), *common)
        self._first, self._joined = len(rollouts), 0
        self._formats = None if formats is None else dict(formats)
        self._findings: Findings = {}
        self._digest, self._delta = digest, delta
        self._relay = relay
        self._lost = lost
        self._timeout = timeout
        self._session: Session | None = None
        # The rank of each rollout, and the ranks of dropped rollouts.
        self._ranks: dict[int, int] = {number: number for number in range(len(rollouts))}
        self._vacant: set[int] = set()
        # Serialises calls: actors run one phase at a time.
        self._lock = threading.RLock()
        self.version = 0
        """The latest version in use at a rollout; 0 before the first."""

    @property
    def plan(self) -> Plan:
        """The routing table: which trainer sends which bytes to which rollout."""
        if self._session is None:
            raise InvalidArgument("there is no plan yet; call connect() first")
        return self._session.fanout.plan

    @property
    def rollouts(self) -> tuple[int, ...]:
        """Numbers of the current rollouts: their index, or the number from :meth:`join`."""
        return tuple(self._rollouts.actors)

    def connect(self) -> ConnectReport:
        """Gathers metadata from all actors, computes the plan, and distributes it.

        Raises:
            PlanError: the layouts don't match; the error names tensor, rank and remedy.
            WeightSyncError: an actor didn't answer; the error names it.
        """
        with self._lock:
            return self._connect()

    def _connect(self) -> ConnectReport:
        clock = Clock()
        # If anything fails below, the next push connects anew.
        self._session = None
        trainers, rollouts = self._trainers, self._rollouts
        metas = trainers.call_all(phases.source_meta, "gather metadata", trainers.same_args())
        targets = rollouts.call_all(phases.target_meta, "gather metadata", rollouts.same_args())
        clock.lap("gather")
        _check_order("trainer", {number: rank for number, (rank, _, _) in metas.items()})
        held = {number: (rank, side) for number, (rank, side, _) in targets.items()}
        held = as_replicas(held, self._ranks, self._first)
        self._ranks = {number: rank for number, (rank, _) in held.items()}
        _check_order("rollout", {n: rank for n, rank in self._ranks.items() if n < self._first})
        reports = [report for _, report, _ in metas.values()]
        target = target_side(held, self._vacant)
        needed = first_replicas(target) if self._relay else target
        if any(isinstance(report, ReplicaMeta) for report in reports):
            source, needed, self._left = self._replica_sides(reports, target, needed)
            formats: Formats = {}
            sent, routes = source, plan(source, needed)
        else:
            source = source_side(reports, self._given_side, needed)
            formats = found_casts(source, needed) if self._formats is None else self._formats
            sent = converted(source, needed, formats)
            try:
                routes = plan(sent, needed, leave=self._leave)
            except MissingTensors as error:
                raise lacking(error, sent, needed) from error
            except DtypeMismatch as error:
                raise with_cast(error, source, needed, formats) from error
            self._left = left_of(sent, needed, self._leave) if self._leave else ()
        self._findings = findings(reports, source, sent, self._left)
        fanout = Fanout(
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
            fanout,
            recipe=Recipe(source, formats) if formats else None,
            digest=self._digest,
            delta=self._delta,
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
            fanout.receiver_imbalance,
            clock.laps,
            len(set(sent.containers) - set(source.containers)),
            self._left,
        )

    def push(self, version: int | None = None) -> PushReport:
        """Moves all rollouts to the next version, or none.

        Trainers write; all rollouts confirm that all bytes have arrived; all rollouts commit. If
        anything fails before the commit, all rollouts keep their version.

        Trainers must not train between the call and its return: no other call to them may be
        under way that changes their tensors, or a version is of two steps. A trainer that notices
        a change of what it reads fails the push.

        Args:
            version: must be larger than the last; by default the next integer.

        Raises:
            WeightSyncError: ``failed`` maps actors to causes. Live rollouts keep their version; a
                further push may succeed.
        """
        return self._push_all(version, threading.Event())

    def _push_all(self, version: int | None, cancelled: threading.Event) -> PushReport:
        """As :meth:`push`, until it is cancelled or its version is decided."""
        with self._lock:
            dropped: dict[int, str] = {}
            while True:
                try:
                    report = self._push(version, cancelled)
                except WeightSyncError as error:
                    dead = self._drop_dead()
                    dropped |= dead
                    if not dead or (self._session is not None and self._session.decided):
                        raise self._with_dropped(error, dropped) from error.__cause__
                    continue
                dropped |= self._drop_dead()
                return msgspec.structs.replace(report, dropped=dropped, left=self._left)

    def _push(self, version: int | None, cancelled: threading.Event) -> PushReport:
        check_going_on(cancelled)
        if self._session is None:
            self._connect()
        assert self._session is not None, "connected"
        try:
            self._session.prepare()
            # Another controller may have pushed meanwhile.
            self.version = max(self.version, self._session.version)
            version = self.version + 1 if version is None else version
            if version <= self.version:
                raise InvalidArgument(
                    f"version is {version}, expected more than {self.version}, the version in use"
                )
            return self._session.push(version, cancelled)
        finally:
            self.version = self._session.version

    async def push_async(self, version: int | None = None) -> PushReport:
        """:meth:`push` without blocking the event loop. Trainers must not train until it ends.

        If it is cancelled, it ends the push first: all rollouts keep their version, unless all have
        confirmed the next one and it is committed; :attr:`version` tells. Then it raises
        ``CancelledError``, and trainers may train.
        """
        cancelled = threading.Event()
        # Not a task: when the loop ends, it cancels all tasks at once.
        run, loop = contextvars.copy_context().run, asyncio.get_running_loop()
        push = loop.run_in_executor(None, run, self._push_all, version, cancelled)
        try:
            return await asyncio.shield(push)
        except asyncio.CancelledError as error:
            cancelled.set()
            while not push.done():
                # RS-3: a trainer that trained now would send another step than the others.
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([push])
            raise error from push.exception()

    def join(self, rollout: Any) -> JoinReport:
        """Adds a rollout that holds the bytes of a rank of the target side: a further replica, or
        the replacement of a dropped one.

        Another replica copies the version in use to it; trainers keep training meanwhile. The next
        push includes it. The plan does not change.

        Args:
            rollout: an actor with a :class:`WeightTarget` of the same side.

        Raises:
            InvalidArgument: it has joined already, or its target has another side.
            WeightSyncError: it didn't answer, or no replica could copy the version to it. It has
                not joined then.
        """
        if isinstance(self._calls, RayCalls):
            check_handles("rollout", [rollout])
        with self._lock:
            if self._session is None:
                self._connect()
            assert self._session is not None, "connected"
            start = time.perf_counter()
            number = self._first + self._joined
            if rollout in self._rollouts.actors.values():
                raise InvalidArgument("this rollout has joined already; drop() it first")
            self._rollouts.actors[number] = rollout
            try:
                [(rank, side, address)] = self._rollouts.call_all(
                    phases.target_meta, "say what it holds", {number: ()}
                ).values()
                numbers = {number: min(self._vacant, default=0)}
                rank, side = as_replicas({number: (rank, side)}, numbers, self._first)[number]
                self._session.fanout.check(rank, side)
                self._ranks[number] = rank
                self._session.fanout.join(number, rank, address)
                giver = self._session.catch_up(number, rank)
            except BaseException:
                self._forget(number)
                raise
            self._joined += 1
            version = self._session.version if giver is not None else None
            return JoinReport(number, version, giver, time.perf_counter() - start)

    def drop(self, rollout: int) -> None:
        """Removes a rollout, dead or alive. Its relay children get another parent.

        Args:
            rollout: its number.

        Raises:
            InvalidArgument: there is no such rollout, or it is the last.
        """
        with self._lock:
            if rollout not in self._rollouts.actors:
                raise InvalidArgument(
                    f"rollout can't be dropped: got {rollout}, expected one of {self.rollouts}"
                )
            if len(self._rollouts.actors) == 1:
                raise InvalidArgument(
                    f"rollout {rollout} can't be dropped: it is the last; join() another first"
                )
            self._vacant.add(self._ranks[rollout])
            self._forget(rollout)

    def explain(self, tensor_or_container: str | None = None) -> str:
        """The routing table as text, and what was found by looking: what is cast, to what adapters
        are added, what is tied, and what isn't sent.

        Args:
            tensor_or_container: all about this one, instead of a summary.

        Raises:
            PlanError: nothing has that name.
        """
        plan, found = self.plan, in_words(self._findings, tensor_or_container)
        try:
            return f"{plan.explain(tensor_or_container)}{found}"
        except PlanError:
            if not found:
                raise
            return found

    def _drop_dead(self) -> dict[int, str]:
        """With ``lost="drop"``, drops the rollouts that the last push found dead."""
        dead = {n: why for n, why in self._rollouts.dead.items() if n in self._rollouts.actors}
        if self._lost == "raise" or len(dead) == len(self._rollouts.actors):
            return {}
        for number in dead:
            self.drop(number)
        return dead

    def _with_dropped(self, error: WeightSyncError, dropped: dict[int, str]) -> WeightSyncError:
        """The error, with the rollouts that were dropped before it, and advice on dead actors."""
        advice = self._advice_on_dead()
        if not dropped and not advice:
            return error
        dead = {self._rollouts.label(number): cause for number, cause in dropped.items()}
        before = f" ({names(dead)} died before and was dropped)" if dead else ""
        failed = {**dead, **error.fields.get("failed", {})}
        text = f"{error}{before}{advice}"
        return WeightSyncError(text, version=error.fields.get("version"), failed=failed)

    def _advice_on_dead(self) -> str:
        """What to do about actors that have died and take part still."""
        if self._trainers.dead:
            died = _listed("trainer", sorted(self._trainers.dead))
            return f"; restart {died}, and make a WeightSync of the trainers anew"
        if not (dead := sorted(self._rollouts.dead)):
            return ""
        died = _listed("rollout", dead)
        if len(dead) == len(self._rollouts.actors):
            return f"; restart {died}, and make a WeightSync of the rollouts anew"
        again = "" if self._lost == "drop" else ', or let pushes do so: WeightSync(lost="drop")'
        return f"; drop() {died}, and join() a replacement{again}"

    def _forget(self, number: int) -> None:
        del self._rollouts.actors[number]
        self._rollouts.dead.pop(number, None)
        self._ranks.pop(number, None)
        if self._session is not None:
            self._session.forget(number)

    def _replica_sides(
        self, reports: list[Any], target: Side, needed: Side
    ) -> tuple[Side, Side, tuple[str, ...]]:
        if self._formats:
            raise InvalidArgument("give the formats to every ReplicaSource, not to WeightSync")
        if self._delta:
            raise InvalidArgument("a ReplicaSource sends whole tensors; leave delta=True away")
        return replica_sides(reports, target, needed, leave=self._leave)

    def _given_side(self) -> Side:
        first: dict[int, tuple[Any, ...]] = dict.fromkeys(list(self._trainers.actors)[:1], ())
        [side] = self._trainers.call_all(phases.source_side, "send its side", first).values()
        given: Side = side
        return given


def _check_order(role: str, ranks: dict[int, int]) -> None:
    """Raises InvalidArgument unless each actor holds its own number as rank."""
    if all(number == rank for number, rank in ranks.items()):
        return
    held, numbers = list(ranks.values()), sorted(ranks)
    found = f"the {role}s passed to WeightSync hold ranks {held}"
    if twice := sorted({rank for rank in held if held.count(rank) > 1}):
        raise InvalidArgument(
            f"{found}: {_listed('rank', twice)} more than once, expected each of {numbers} once; "
            f"give each {role} its index in WeightSync({role}s=...) as rank"
        )
    if sorted(held) != numbers:
        raise InvalidArgument(
            f"{found}, expected {numbers}; pass one {role} for each rank, in the order of ranks"
        )
    raise InvalidArgument(f"{found}; pass them in the order of ranks, and keep the ranks")


def _listed(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
