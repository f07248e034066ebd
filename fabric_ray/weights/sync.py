"""The controller: gathers metadata, plans once, pushes versions as transactions (RS-3)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal
from uuid import uuid4

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import ParamMeta, Plan, Side, plan, side_from_param_meta
from fabric_ray.weights import stages
from fabric_ray.weights.calls import Calls, RayCalls, Unanswered
from fabric_ray.weights.conversion import Recipe
from fabric_ray.weights.quant import ExchangeFailed, Formats, quantised_source
from fabric_ray.weights.quant.layout import scaled_tensors, tensor_names
from fabric_ray.weights.report import (
    Arm,
    ConnectReport,
    PushReport,
    Sent,
    SourceShare,
    Span,
    TargetShare,
)


class WeightSync:
    """Pushes a model's weights from trainer actors into rollout actors.

    Any actor will do: each trainer holds a :class:`WeightSource`, each rollout a
    :class:`WeightTarget`, under the same ``name``. Nothing else is asked of them.

    Args:
        trainers: actor handles; a trainer's rank is its index.
        rollouts: actor handles; a rollout's rank is its index.
        name: of the sources and targets.
        extra: what to do with trainer parameters that no rollout asks for.
        formats: what becomes of which tensors on the way, by patterns of their names, as for
            :func:`fabric_ray.weights.quant.quantised_target`, which made the rollouts' side. Each
            trainer converts its own shards; the result is that of converting whole tensors.
        digest: have every push compare digests of all bytes on both sides.
        timeout: seconds that a stage may take.
        calls: how the actors are reached; by default as Ray actors.
    """

    def __init__(
        self,
        trainers: Sequence[Any],
        rollouts: Sequence[Any],
        *,
        name: str = "default",
        extra: Literal["refuse", "ignore"] = "refuse",
        formats: Formats | None = None,
        digest: bool = False,
        timeout: float = 60.0,
        calls: Calls | None = None,
    ) -> None:
        if not trainers or not rollouts:
            raise InvalidArgument("a weight sync needs at least one trainer and one rollout")
        self._trainers = list(trainers)
        self._rollouts = list(rollouts)
        self._name = name
        self._extra: Literal["refuse", "ignore"] = extra
        self._formats = dict(formats or {})
        self._digest = digest
        self._timeout = timeout
        self._calls = calls or RayCalls()
        self._plan: Plan | None = None
        # One connect or push at a time; the actors would mix their stages up.
        self._turn = threading.RLock()
        self._arms: dict[int, Arm] = {}
        self._session = ""
        self._recipe: Recipe | None = None
        self._met = False
        self.version = 0
        """The version that all rollouts run; 0 before the first."""

    @property
    def plan(self) -> Plan:
        """The routing table: who sends which bytes to whom."""
        if self._plan is None:
            raise InvalidArgument("there is no plan yet; call connect() first")
        return self._plan

    def connect(self) -> ConnectReport:
        """Gathers metadata from all actors, computes the static route, and hands it out.

        Raises:
            PlanError: the layouts don't fit together; tensor, rank and remedy are named.
            WeightSyncError: an actor didn't answer; it is named.
        """
        with self._turn:
            return self._connect()

    def _connect(self) -> ConnectReport:
        clock = _Clock()
        # Whatever fails from here on leaves nothing behind that a push could use.
        self._plan, self._arms = None, {}
        metas = self._all("trainer", self._trainers, stages.source_meta, "gather metadata")
        targets = self._all("rollout", self._rollouts, stages.target_meta, "gather metadata")
        clock.lap("gather")
        _in_order("trainer", [rank for rank, _, _ in metas])
        _in_order("rollout", [rank for rank, _, _ in targets])
        source = self._source_side([said for _, said, _ in metas])
        sides = [side for _, side, _ in targets]
        for rank, side in enumerate(sides):
            if side != sides[0]:
                raise InvalidArgument(
                    f"rollout {rank} describes another target layout than rollout 0; give all of "
                    "them the same side"
                )
        if len(sides[0].ranks) != len(sides):
            raise InvalidArgument(
                f"the rollouts' layout has ranks {sides[0].ranks}, and WeightSync was given "
                f"{len(sides)}; pass one rollout for each rank"
            )
        converted = self._converted(source, sides[0])
        routes = plan(converted, sides[0], extra=self._extra)
        clock.lap("plan")
        encoded = routes.to_bytes()
        writers = self._writers(routes, [address for _, _, address in metas])
        count = len(routes.containers("target"))
        # From here on the actors listen to nobody else.
        self._session = uuid4().hex
        shares = [
            TargetShare(
                self._session,
                routes.local_containers("target", rank),
                count,
                routes.expected_pages(rank),
                tuple(writers[rank]),
                encoded if self._digest else None,
            )
            for rank in range(len(self._rollouts))
        ]
        each = [(share,) for share in shares]
        arms = self._all("rollout", self._rollouts, stages.target_accept, "make room", each)
        if self._formats:
            self._recipe = Recipe(source, self._formats)
            self._meet()
        names = routes.containers("source")
        share = SourceShare(self._session, encoded, names, tuple(arms), bool(self._formats))
        common = (self._calls.share(share), self._timeout)
        self._all(
            "trainer",
            self._trainers,
            stages.source_accept,
            "take the route",
            [common] * len(self._trainers),
        )
        clock.lap("distribute")
        self._plan = routes
        self._arms = {arm.rank: arm for arm in arms}
        self._catch_up(arms)
        balance = routes.balance()
        return ConnectReport(
            balance.nbytes,
            routes.copy_count,
            len(encoded),
            balance.sender_imbalance,
            balance.receiver_imbalance,
            clock.laps,
            len(set(converted.containers) - set(source.containers)),
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
            return self._push(version)

    def _push(self, version: int | None) -> PushReport:
        if self._plan is None:
            self._connect()
        elif self._formats and not self._met:
            self._meet(again=True)
        self._rearm()
        version = self.version + 1 if version is None else version
        if version <= self.version:
            raise InvalidArgument(f"version {version} is not after {self.version}")
        clock, spans = _Clock(), list[Span]()
        # An arm is good for one push. If this one is interrupted, wherever that may be, the next
        # has to ask for new ones: the old may name memory that is in use by then.
        arms, self._arms = list(self._arms.values()), {}
        sent = self._write(version, arms)
        clock.lap("write")
        try:
            digests = self._agree(version, sent)
            args = [
                (self._session, version, self._timeout, digests.get(rank))
                for rank in range(len(self._rollouts))
            ]
            confirmed = self._all("rollout", self._rollouts, stages.target_confirm, "confirm", args)
        except WeightSyncError as error:
            raise self._give_up(version, error) from None
        clock.lap("confirm")
        these = [(self._session, version)] * len(self._rollouts)
        # From here the version is decided: who fails now is named, the others run it (RS-3).
        following, failed = self._some("rollout", self._rollouts, stages.target_commit, these)
        self._keep(following)
        self.version = version
        clock.lap("commit")
        if failed:
            raise WeightSyncError(
                f"version {version} is in use, but not at {_names(failed)}: {_causes(failed)}",
                version=version,
                failed=failed,
            )
        if hooks := {f"rollout {a.rank}": a.hook for a in following if a and a.hook}:
            raise WeightSyncError(
                f"version {version} is in use everywhere, but a hook failed at {_names(hooks)}: "
                f"{_causes(hooks)}",
                version=version,
                failed=hooks,
            )
        for s in (*(s.spans for s in sent), *confirmed):
            spans.extend(s)
        links = tuple(link for s in sent for link in s.links)
        nbytes = sum(link.nbytes for link in links)
        return PushReport(
            version, nbytes, clock.began, clock.total, clock.laps, links, tuple(spans)
        )

    async def push_async(self, version: int | None = None) -> PushReport:
        """:meth:`push` without blocking the event loop."""
        return await asyncio.to_thread(self.push, version)

    def explain(self, tensor_or_container: str | None = None) -> str:
        """The routing table in words."""
        return self.plan.explain(tensor_or_container)

    def _converted(self, source: Side, target: Side) -> Side:
        """What trainers send instead of what they hold.

        Raises:
            InvalidArgument: nothing at all is converted, or rollouts hold a tensor without its
                scales.
        """
        if not self._formats:
            return source
        converted = quantised_source(source, self._formats)
        if converted == source:
            raise InvalidArgument(
                f"no tensor of the trainers fits any pattern of {sorted(self._formats)}, or all "
                "that do are of these dtypes; see fabric_ray.weights.quant.linear_formats"
            )
        wanted = set(tensor_names(target))
        for values, scales in scaled_tensors(source, self._formats):
            if values in wanted and scales not in wanted:
                raise InvalidArgument(
                    f"the rollouts hold `{values}` but not its scales `{scales}`; make their side "
                    "with quantised_target and the same formats"
                )
        return converted

    def _meet(self, *, again: bool = False) -> None:
        """Has trainers exchange block maxima with each other, from the next push on."""
        here = len(self._trainers)
        recipe = self._calls.share(self._recipe)
        args = [(self._session, again, recipe)] * here
        what = "get ready to convert"
        made = self._all("trainer", self._trainers, stages.source_convert, what, args)
        invited = [(self._session, self._calls.share(dict(enumerate(made))))] * here
        self._all("trainer", self._trainers, stages.source_join, what, invited)
        self._met = True

    def _source_side(self, said: list[list[ParamMeta] | bytes]) -> Side:
        """What trainers hold: by what each reports, or by the side that all of them were given."""
        reports = {rank: word for rank, word in enumerate(said) if not isinstance(word, bytes)}
        if len(reports) == len(said):
            return side_from_param_meta(reports)
        for rank, digest in enumerate(said):
            if digest != said[0]:
                raise InvalidArgument(
                    f"trainer {rank} was given another side than trainer 0, or none; give all of "
                    "them the same side"
                )
        first = self._trainers[:1]
        side: Side = self._all("trainer", first, stages.source_side, "send its side")[0]
        if sorted(side.ranks) != list(range(len(said))):
            raise InvalidArgument(
                f"the trainers' side has ranks {side.ranks}, and there are {len(said)} trainers; "
                "give the side of exactly these trainers"
            )
        return side

    def _writers(self, routes: Plan, addresses: list[bytes]) -> dict[int, list[bytes]]:
        """The engines that write to each rollout."""
        out: dict[int, list[bytes]] = {r: [] for r in range(len(self._rollouts))}
        for link in routes.links():
            out[link.dst].append(addresses[link.src])
        return out

    def _catch_up(self, arms: Iterable[Arm]) -> None:
        """Versions never run backwards, whoever counted them before."""
        self.version = max(self.version, *(arm.version or 0 for arm in arms), 0)

    def _keep(self, arms: list[Arm | None]) -> None:
        """Where to write next; unknown for those who didn't say."""
        self._arms = {rank: arm for rank, arm in enumerate(arms) if arm is not None}

    def _rearm(self) -> None:
        """Asks those again who didn't say where to write when they last could."""
        silent = [rank for rank in range(len(self._rollouts)) if rank not in self._arms]
        if not silent:
            return
        actors = [self._rollouts[rank] for rank in silent]
        session = [(self._session,)] * len(actors)
        arms, failed = self._some("rollout", actors, stages.target_abort, session, ranks=silent)
        self._arms |= {arm.rank: arm for arm in arms if arm is not None}
        self._catch_up(self._arms.values())
        if failed:
            raise WeightSyncError(
                f"nothing was pushed, since {_names(failed)} can't take it: {_causes(failed)}. "
                "Replace what has died, in a new WeightSync",
                version=self.version,
                failed=failed,
            )

    def _write(self, version: int, arms: list[Arm]) -> list[Sent]:
        written = False
        try:
            if not all(arm.staged for arm in arms):
                session = [(self._session,)] * len(self._rollouts)
                self._all("rollout", self._rollouts, stages.target_begin, "begin", session)
            written = True
            args = [(self._session, version, arms, self._digest, self._timeout)] * len(
                self._trainers
            )
            return self._all("trainer", self._trainers, stages.source_push, "push", args)
        except WeightSyncError as error:
            raise self._give_up(version, error, written=written) from None

    def _agree(self, version: int, sent: list[Sent]) -> dict[int, int]:
        """The digest that each rollout must find; raises if a trainer couldn't reach one."""
        failed: dict[str, str] = {}
        for trainer, s in enumerate(sent):
            for rollout, cause in s.failed.items():
                failed[f"rollout {rollout}"] = f"from trainer {trainer}: {cause}"
        if failed:
            raise WeightSyncError(
                f"version {version} did not reach {_names(failed)}: {_causes(failed)}",
                version=version,
                failed=failed,
            )
        digests: dict[int, int] = {}
        for s in sent:
            for rollout, digest in s.digests.items():
                digests[rollout] = (digests.get(rollout, 0) + digest) & ((1 << 64) - 1)
        return digests

    def _give_up(
        self, version: int, error: WeightSyncError, *, written: bool = True
    ) -> WeightSyncError:
        """Has all who live forget the version; returns what to raise."""
        # Trainers that stopped in the middle of an exchange can't take it up again.
        self._met = False
        these = [(self._session, written)] * len(self._rollouts)
        arms, failed = self._some("rollout", self._rollouts, stages.target_abort, these)
        self._keep(arms)
        hooks = {f"rollout {arm.rank}": arm.hook for arm in arms if arm and arm.hook}
        causes = {**hooks, **error.fields.get("failed", {}), **failed}
        text = f"version {version} was given up; all rollouts that live stay at {self.version}. "
        text += str(error) + (f"; then {_causes(hooks)}" if hooks else "")
        return WeightSyncError(text, version=version, failed=causes)

    def _all(
        self,
        role: str,
        actors: list[Any],
        function: Callable[..., Any],
        what: str,
        args: Sequence[tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        """What ``function`` returns in each actor; raises if one fails, naming it."""
        results, failed = self._some(role, actors, function, args)
        if failed:
            raise WeightSyncError(
                f"{_names(failed)} did not {what}: {_causes(failed)}",
                version=self.version,
                failed=failed,
            )
        return results

    def _some(
        self,
        role: str,
        actors: Sequence[Any],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> tuple[list[Any], dict[str, str]]:
        """Results in order (``None`` for failures), and who failed why."""
        each = [(self._name, *more) for more in args or [()] * len(actors)]
        results: list[Any] = []
        silent: list[tuple[str, Unanswered]] = []
        for i, answer in enumerate(self._calls.ask(actors, function, each, self._timeout)):
            if isinstance(answer, Unanswered):
                silent.append((f"{role} {i if ranks is None else ranks[i]}", answer))
                answer = None
            results.append(answer)
        # Who only missed another comes last.
        silent.sort(key=lambda who: who[1].kind == ExchangeFailed.__name__)
        return results, {who: answer.cause for who, answer in silent}


class _Clock:
    """Wall time by stages."""

    def __init__(self) -> None:
        self.began = time.time()
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._start


def _in_order(role: str, ranks: list[int]) -> None:
    if ranks != list(range(len(ranks))):
        raise InvalidArgument(
            f"the {role}s passed to WeightSync hold ranks {ranks}; pass them in the order of ranks"
        )


def _causes(failed: dict[str, str]) -> str:
    return "; ".join(f"{who}: {cause}" for who, cause in failed.items())


def _names(failed: dict[str, str]) -> str:
    return " and ".join(failed)
