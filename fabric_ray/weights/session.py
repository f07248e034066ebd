"""One connection of trainers and rollouts: distributes the plan and runs the phases of a push."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, Literal
from uuid import uuid4

import msgspec

from fabric_ray.errors import WeightSyncError
from fabric_ray.weights import phases
from fabric_ray.weights.actor_group import ActorGroup, causes, names
from fabric_ray.weights.calls import Calls
from fabric_ray.weights.clock import Clock
from fabric_ray.weights.conversion import Recipe
from fabric_ray.weights.delta import DeltaChoice
from fabric_ray.weights.delta.choice import Kind
from fabric_ray.weights.fanout import Fanout
from fabric_ray.weights.report import (
    Arrival,
    Confirmed,
    InboundPlan,
    LinkReport,
    PushReport,
    PushTarget,
    Sent,
    SourceShare,
    Span,
)

# After quiesce, rollouts block new readers for the timeout plus this.
_GATE_S = 10.0


def check_going_on(cancelled: threading.Event) -> None:
    """Raises WeightSyncError for a push that was cancelled."""
    if cancelled.is_set():
        raise WeightSyncError("the push was cancelled")


class BaseDiffers(WeightSyncError):
    """Changes were applied to other bytes than the trainers sent before. The push is aborted."""


def _arrival(plan_rank: int, sent: list[Sent]) -> Arrival | None:
    """What a rollout has to apply; ``None`` if it got all tensors whole."""
    trainers = enumerate(sent)
    changes = {trainer: s.changes[plan_rank] for trainer, s in trainers if plan_rank in s.changes}
    if not changes:
        return None
    return Arrival(sum(s.counts.get(plan_rank, 0) for s in sent), changes)


class Session:
    """Writes, confirms and commits versions at the actors that have its plan.

    Args:
        fanout: the writers of each rollout.
        recipe: the conversions of trainers, if any.
        digest: whether pushes compare digests of all bytes.
        delta: whether trainers send what changed; ``"always"``, also where that takes longer.
        spare: whether dead rollouts don't fail a push once its version is decided.
        timeout: of each phase, in seconds.
        calls: runs functions in the actors.
    """

    def __init__(
        self,
        trainers: ActorGroup,
        rollouts: ActorGroup,
        fanout: Fanout,
        *,
        recipe: Recipe | None,
        digest: bool,
        delta: bool | Literal["always"],
        spare: bool,
        timeout: float,
        calls: Calls,
    ) -> None:
        self.fanout = fanout
        self.version = 0
        self.decided = False
        """Whether the last push has begun to commit."""
        self._id = uuid4().hex
        self._trainers = trainers
        self._rollouts = rollouts
        self._recipe = recipe
        self._digest = digest
        self._delta = bool(delta)
        self._choice = DeltaChoice() if delta is True else None
        self._spare = spare
        self._timeout = timeout
        self._calls = calls
        self._exchange_connected = False
        # Whether trainers gather from each other in a push.
        self._gathers = False
        self._encoded = fanout.plan.to_bytes()
        # The latest of each rollout.
        self._push_targets: dict[int, PushTarget] = {}
        self._inbound_plans: dict[int, InboundPlan] = {}
        # Joined without a copy: a version there may be another controller's of the same number.
        self._strange: set[int] = set()

    @property
    def plan_nbytes(self) -> int:
        return len(self._encoded)

    def distribute(self) -> None:
        """Distributes the plan. From then on the actors refuse earlier sessions.

        Raises:
            WeightSyncError: an actor failed; the error names it.
        """
        self._accept({number: self.fanout.inbound(number) for number in self._rollouts.actors})
        self._learn_version()
        if self._recipe is not None:
            self._connect_exchange()
        push_targets = tuple(self._push_targets[number] for number in self.fanout.heads.values())
        containers = self.fanout.plan.containers("source")
        converted = self._recipe is not None
        share = SourceShare(
            self._id, self._encoded, containers, push_targets, converted, self._delta
        )
        args = self._trainers.same_args(self._calls.share(share), self._timeout)
        gathering = self._trainers.call_all(phases.source_accept, "take the route", args)
        self._gathers = any(gathering.values())

    def prepare(self) -> None:
        """Gets all actors ready for a push and updates ``version``.

        Raises:
            WeightSyncError: an actor failed; the error names it.
        """
        self.decided = False
        if self._recipe is not None and not self._exchange_connected:
            self._connect_exchange(again=True)
        self._recover_push_targets()
        self._update_inbound()

    def push(self, version: int, cancelled: threading.Event) -> PushReport:
        """As :meth:`WeightSync.push`; one that is cancelled before it is decided is aborted."""
        try:
            return self._push(version, cancelled)
        except BaseDiffers as error:
            # The trainers' kept copy is of no version that a rollout runs: all is sent whole.
            self.prepare()
            check_going_on(cancelled)
            report = self._push(version, cancelled)
            return msgspec.structs.replace(report, differed=tuple(error.fields["failed"]))

    def _push(self, version: int, cancelled: threading.Event) -> PushReport:
        clock, spans = Clock(), list[Span]()
        # A push target serves one push. After an interrupt, the next push asks for new ones, since
        # the old may name memory that is in use.
        push_targets, self._push_targets = self._push_targets, {}
        try:
            self._announce(push_targets)
            check_going_on(cancelled)
        except WeightSyncError as error:
            raise self._abort(version, error, written=False) from error.__cause__
        except BaseException:
            self._abort_interrupted(written=False)
            raise
        try:
            sent = self._write(version, push_targets)
            clock.lap("write")
            digests = self._merge_digests(version, sent)
            confirmed = self._confirm(version, push_targets, sent, digests)
            clock.lap("confirm")
            self._quiesce("commit", push_targets)
            check_going_on(cancelled)
        except WeightSyncError as error:
            aborted = self._abort(version, error)
            if isinstance(error, BaseDiffers):
                raise error
            raise aborted from error.__cause__
        except BaseException:
            self._abort_interrupted()
            raise
        clock.lap("quiesce")
        # The version is decided: rollouts that fail now are named, the others run it (RS-3).
        self.decided = True
        commits = self._rollouts.same_args(self._id, version)
        self._push_targets, failed = self._rollouts.call(phases.target_commit, commits)
        self._strange -= self._push_targets.keys()
        self.version = version
        clock.lap("commit")
        if self._spare and self._push_targets:
            for number in self._rollouts.dead:
                failed.pop(self._rollouts.label(number), None)
        self._name_failures(version, failed, self._rollouts.raised)
        for s in (*(s.spans for s in sent), *(c.spans for c in confirmed.values())):
            spans.extend(s)
        links = self._compared_links(sent, clock.laps["write"] + clock.laps["confirm"])
        nbytes = sum(link.nbytes for link in links)
        return PushReport(
            version,
            nbytes,
            clock.began,
            clock.total,
            clock.laps,
            links,
            tuple(spans),
            temporary=tuple(s.temporary for s in sent if s.temporary),
            version_nbytes=self._version_nbytes(),
        )

    def catch_up(self, number: int, rank: int) -> int | None:
        """Has a replica copy the version in use to a rollout that joins; returns the replica's
        number, or ``None`` if no replica has the version.

        Raises:
            WeightSyncError: no replica could copy it.
        """
        replicas = [
            n for n in self.fanout.replicas(rank) if n in self._push_targets and n != number
        ]
        targets = self._push_targets
        able = [n for n in replicas if targets[n].usable]
        own = [n for n in able if n not in self._strange]
        givers = [n for n in own if self.version and targets[n].version == self.version]
        for giver in givers:
            try:
                self._copy_from(giver, number)
            except WeightSyncError:
                # Try the next replica.
                if giver == givers[-1] or number in self._rollouts.dead:
                    raise
            else:
                return giver
        self._accept({number: self.fanout.inbound(number)})
        self._strange.add(number)
        return None

    def _copy_from(self, giver: int, number: int) -> None:
        label = self._rollouts.label(number)
        self._accept({number: self.fanout.copied_by(number, giver)})
        push_target = self._push_targets.pop(number)
        if (push_target.version or 0) > self.version:
            raise WeightSyncError(
                f"{label} runs version {push_target.version}, expected at most {self.version}; "
                "join with a new WeightTarget",
                version=self.version,
                failed={label: f"it runs version {push_target.version}"},
            )
        try:
            self._begin({number: push_target})
        except BaseException:
            self._rollouts.call(phases.target_abort, {number: (self._id, False)})
            raise
        args: tuple[Any, ...] = (self._id, push_target, self.version, self._timeout)
        try:
            copied = self._rollouts.call_all(phases.target_give, "give its version", {giver: args})
            args = (self._id, push_target.serial, self.version, self._timeout, copied[giver])
            self._rollouts.call_all(phases.target_confirm, "confirm", {number: args})
            self._quiesce("commit", {number: push_target})
            args = (self._id, self.version, True)
            push_targets = self._rollouts.call_all(
                phases.target_commit, "use the version", {number: args}
            )
        except BaseException:
            self._rollouts.call(phases.target_abort, {number: (self._id,)})
            raise
        if cause := push_targets[number].hook:
            raise WeightSyncError(f"a hook failed at {label}: {cause}", failed={label: cause})
        self._push_targets |= push_targets

    def forget(self, number: int) -> None:
        """Removes a rollout."""
        self.fanout.leave(number)
        self._strange.discard(number)
        self._push_targets.pop(number, None)
        self._inbound_plans.pop(number, None)

    def _accept(self, plans: dict[int, InboundPlan]) -> None:
        """Sends rollouts their share of the plan; they allocate memory."""
        encoded = self._encoded if self._digest or self._delta else None
        label, delta = self._rollouts.label, self._delta
        shares = {
            number: (self.fanout.share(self._id, number, label(number), inbound, encoded, delta),)
            for number, inbound in plans.items()
        }
        self._push_targets |= self._rollouts.call_all(phases.target_accept, "make room", shares)
        self._inbound_plans |= plans

    def _update_inbound(self) -> None:
        """Sends rollouts whose writers have changed their new inbound plan."""
        plans = {number: self.fanout.inbound(number) for number in self._rollouts.actors}
        other = {
            n: (self._id, inbound)
            for n, inbound in plans.items()
            if self._inbound_plans.get(n) != inbound
        }
        if other:
            for number in other:  # those that answer have another push target, even if one doesn't
                self._inbound_plans.pop(number, None)
            self._push_targets |= self._rollouts.call_all(
                phases.target_set_inbound, "take its inbound plan", other
            )
            self._inbound_plans |= {number: plans[number] for number in other}

    def _recover_push_targets(self) -> None:
        """Aborts at rollouts without a push target, which returns one."""
        silent = {n: (self._id,) for n in self._rollouts.actors if n not in self._push_targets}
        push_targets, failed = self._rollouts.call(phases.target_abort, silent)
        raised = self._rollouts.raised
        self._push_targets |= push_targets
        self._learn_version()
        if failed:
            raise WeightSyncError(
                f"push failed before any write: {names(failed)} can't receive: {causes(failed)}",
                version=self.version,
                failed=failed,
            ) from raised

    def _announce(self, push_targets: dict[int, PushTarget]) -> None:
        """Announces a push. Returns when all actors are ready, before any byte is written."""
        if self._gathers:
            # A trainer that fails alone before its gather leaves the others waiting in theirs.
            args = self._trainers.same_args(self._id)
            self._trainers.call_all(phases.source_ready, "get ready to gather", args)
        self._begin(push_targets)
        serials = {number: target.serial for number, target in push_targets.items()}
        relays = {
            n: (self._id, serials[n], [push_targets[child] for child in children], self._timeout)
            for n, children in self.fanout.children.items()
        }
        self._rollouts.call_all(phases.target_pass_on, "prepare to relay", relays)

    def _begin(self, push_targets: dict[int, PushTarget]) -> None:
        """Announces writes to memory that is in use."""
        if not all(target.staged for target in push_targets.values()):
            self._quiesce("write", push_targets)
            args = {number: (self._id, target.serial) for number, target in push_targets.items()}
            self._rollouts.call_all(phases.target_begin, "begin", args)

    def _quiesce(
        self, before: Literal["write", "commit"], push_targets: dict[int, PushTarget]
    ) -> None:
        """Waits until these rollouts have no reader of the version in use (RS-1).

        Polls, since readers may share the thread in which the actor runs the call.

        Raises:
            WeightSyncError: a reader stays longer than the timeout; the error names it.
        """
        waits = {
            number: (self._id, target.serial, before, self._timeout + _GATE_S)
            for number, target in push_targets.items()
        }
        deadline, pause = time.monotonic() + self._timeout, 1e-3
        while waits:
            readers = self._rollouts.call_all(phases.target_quiesce, "wait for its readers", waits)
            waits = {number: waits[number] for number, inside in readers.items() if inside}
            if waits and time.monotonic() > deadline:
                failed = {self._rollouts.label(n): "; ".join(readers[n]) for n in waits}
                raise WeightSyncError(
                    f"{names(failed)} did not stop reading within {self._timeout:g} s: "
                    f"{causes(failed)}",
                    failed=failed,
                )
            if waits:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)

    def _write(self, version: int, push_targets: dict[int, PushTarget]) -> list[Sent]:
        heads = [push_targets[number] for number in self.fanout.heads.values()]
        if self._choice is not None and not self._choice.compares:
            heads = [msgspec.structs.replace(head, inbox=None) for head in heads]
        args = self._trainers.same_args(self._id, version, heads, self._digest, self._timeout)
        return list(self._trainers.call_all(phases.source_push, "push", args).values())

    def _confirm(
        self,
        version: int,
        push_targets: dict[int, PushTarget],
        sent: list[Sent],
        digests: dict[int, int],
    ) -> dict[int, Confirmed]:
        """Has all rollouts confirm a version.

        Raises:
            BaseDiffers: changes did not lead to the trainers' bytes.
            WeightSyncError: a rollout failed; the error names it.
        """
        args: dict[int, tuple[Any, ...]] = {}
        for number, target in push_targets.items():
            rank = self.fanout.plan_rank(number)
            here = (self._id, target.serial, version, self._timeout)
            args[number] = (*here, digests.get(rank), _arrival(rank, sent))
        confirmed = self._rollouts.call_all(phases.target_confirm, "confirm", args)
        differ = [number for number, answer in confirmed.items() if answer.differs]
        if failed := {self._rollouts.label(n): "its bytes differ" for n in differ}:
            raise BaseDiffers(
                f"{names(failed)} held other bytes than the trainers sent before", failed=failed
            )
        return confirmed

    def _compared_links(self, sent: list[Sent], seconds: float) -> tuple[LinkReport, ...]:
        """The links of a push that took ``seconds``. The next is chosen by that."""
        links = tuple(link for s in sent for link in s.links)
        if self._choice is None:
            return links
        if self._choice.compares:
            kind: Kind = "changes" if all(s.compared for s in sent) else "kept"
        else:
            kind, why = "whole", self._choice.why_whole
            links = tuple(msgspec.structs.replace(link, whole=why) for link in links)
        self._choice.took(kind, seconds, max(s.comparing for s in sent))
        return links

    def _version_nbytes(self) -> int:
        """Bytes of a whole version, over all links that trainers write."""
        heads = self.fanout.heads
        return sum(link.nbytes for link in self.fanout.plan.links() if link.dst in heads)

    def _merge_digests(self, version: int, sent: list[Sent]) -> dict[int, int]:
        """The digest of each plan rank; raises if a trainer couldn't reach one."""
        heads, failed = self.fanout.heads, dict[str, str]()
        for trainer, s in enumerate(sent):
            for plan_rank, cause in s.failed.items():
                failed[self._rollouts.label(heads[plan_rank])] = f"from trainer {trainer}: {cause}"
        if failed:
            raise WeightSyncError(
                f"version {version} did not reach {names(failed)}: {causes(failed)}", failed=failed
            )
        digests: dict[int, int] = {}
        for s in sent:
            for plan_rank, digest in s.digests.items():
                digests[plan_rank] = (digests.get(plan_rank, 0) + digest) & ((1 << 64) - 1)
        return digests

    def _abort(
        self, version: int, error: WeightSyncError, *, written: bool = True
    ) -> WeightSyncError:
        """Aborts the version at all live rollouts; returns the error to raise."""
        failed, hooks = self._abort_all(written), self._failed_hooks()
        named = {**hooks, **error.fields.get("failed", {}), **failed}
        stay = f"version {version} was aborted; all live rollouts stay at {self.version}"
        text = f"version {version} was aborted" if self._rollouts.stale else stay
        for number, target in self._push_targets.items():
            if (target.version or 0) != self.version:
                text += f", {self._rollouts.label(number)} at {target.version or 'none'}"
        text += f": {error}" + (f"; then {causes(hooks)}" if hooks else "")
        return WeightSyncError(text, version=version, failed=named)

    def _abort_interrupted(self, *, written: bool = True) -> None:
        """Aborts after Ctrl-C: engines and readers go on now, not when the gate's time is over."""
        with suppress(WeightSyncError):  # the interrupt is raised
            self._abort_all(written)

    def _abort_all(self, written: bool) -> dict[str, str]:
        """Aborts at all live rollouts; returns causes of failures by label."""
        self._exchange_connected = False  # one that was interrupted can't be resumed
        args = self._rollouts.same_args(self._id, written)
        self._push_targets, failed = self._rollouts.call(phases.target_abort, args)
        return failed

    def _name_failures(
        self, version: int, failed: dict[str, str], raised: BaseException | None
    ) -> None:
        """Raises if a rollout did not commit a decided version, or a hook failed."""
        if failed:
            raise WeightSyncError(
                f"version {version} is in use, but not at {names(failed)}: {causes(failed)}",
                version=version,
                failed=failed,
            ) from raised
        if hooks := self._failed_hooks():
            raise WeightSyncError(
                f"version {version} is in use everywhere, but a hook failed at {names(hooks)}: "
                f"{causes(hooks)}; an engine that is paused there stays so until a push whose "
                "hooks succeed",
                version=version,
                failed=hooks,
            )

    def _failed_hooks(self) -> dict[str, str]:
        return {
            self._rollouts.label(n): target.hook
            for n, target in self._push_targets.items()
            if target.hook
        }

    def _connect_exchange(self, *, again: bool = False) -> None:
        """Connects the trainers for the exchange of block maxima."""
        recipe = self._calls.share(self._recipe)
        what = "get ready to convert"
        args = self._trainers.same_args(self._id, again, recipe)
        made = self._trainers.call_all(phases.source_convert, what, args)
        invited = self._trainers.same_args(self._id, self._calls.share(made))
        self._trainers.call_all(phases.source_join, what, invited)
        self._exchange_connected = True

    def _learn_version(self) -> None:
        """Adopts the highest version of the rollouts, so that versions never decrease."""
        self.version = max(self.version, *(t.version or 0 for t in self._push_targets.values()), 0)
