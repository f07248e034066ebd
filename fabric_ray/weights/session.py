"""One connection of trainers and rollouts: what each was told, and the stages of a push."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal
from uuid import uuid4

from fabric_ray.errors import WeightSyncError
from fabric_ray.weights import stages
from fabric_ray.weights.calls import Calls
from fabric_ray.weights.clock import Clock
from fabric_ray.weights.conversion import Recipe
from fabric_ray.weights.crew import Crew, causes, names
from fabric_ray.weights.feeding import Feeding
from fabric_ray.weights.report import Arm, Feed, PushReport, Sent, SourceShare, Span

# Rollouts keep new readers out for the timeout and this long, unless they are told otherwise.
_GATE_S = 10.0


class Session:
    """Has versions written, confirmed and put into use by those who were given its route.

    Args:
        feeding: who writes what to whom.
        recipe: what trainers convert, if anything.
        digest: whether all bytes are compared on both sides.
        spare: whether a rollout whose process has ended doesn't count, once a version is decided.
        timeout: seconds that a stage may take.
        calls: how the crews are reached.
    """

    def __init__(
        self,
        trainers: Crew,
        rollouts: Crew,
        feeding: Feeding,
        *,
        recipe: Recipe | None,
        digest: bool,
        spare: bool,
        timeout: float,
        calls: Calls,
    ) -> None:
        self.feeding = feeding
        self.version = 0
        self.decided = False
        """Whether the last push came so far that its version is in use."""
        self._id = uuid4().hex
        self._trainers = trainers
        self._rollouts = rollouts
        self._recipe = recipe
        self._digest = digest
        self._spare = spare
        self._timeout = timeout
        self._calls = calls
        self._met = False
        self._encoded = feeding.plan.to_bytes()
        # What each rollout said last, and was told last.
        self._arms: dict[int, Arm] = {}
        self._fed: dict[int, Feed] = {}

    @property
    def plan_nbytes(self) -> int:
        return len(self._encoded)

    def distribute(self) -> None:
        """Hands the route out. From then on the actors listen to nobody else.

        Raises:
            WeightSyncError: somebody didn't take it.
        """
        self._accept({number: self.feeding.feed(number) for number in self._rollouts.actors})
        self._learn_version()
        if self._recipe is not None:
            self._meet()
        arms = tuple(self._arms[number] for number in self.feeding.heads.values())
        containers = self.feeding.plan.containers("source")
        converted = self._recipe is not None
        share = SourceShare(self._id, self._encoded, containers, arms, converted)
        args = self._trainers.each(self._calls.share(share), self._timeout)
        self._trainers.all(stages.source_accept, "take the route", args)

    def prepare(self) -> None:
        """Has everybody ready for a push; afterwards ``version`` is what they run.

        Raises:
            WeightSyncError: somebody can't take part.
        """
        self.decided = False
        if self._recipe is not None and not self._met:
            self._meet(again=True)
        self._ask_the_silent()
        self._feed_anew()

    def push(self, version: int) -> PushReport:
        """Moves every rollout from its version to the next, or none.

        Raises:
            WeightSyncError: as for :meth:`WeightSync.push`.
        """
        clock, spans = Clock(), list[Span]()
        # An arm is good for one push. If this one is interrupted, wherever that may be, the next
        # has to ask for new ones: the old may name memory that is in use by then.
        arms, self._arms = self._arms, {}
        try:
            self._announce(arms)
        except WeightSyncError as error:
            raise self._given_up(version, error, written=False) from error.__cause__
        try:
            sent = self._write(version, arms)
            clock.lap("write")
            digests = self._agree(version, sent)
            args = {
                number: (self._id, version, self._timeout, digests.get(self.feeding.place(number)))
                for number in self._rollouts.actors
            }
            confirmed = self._rollouts.all(stages.target_confirm, "confirm", args)
            clock.lap("confirm")
            self._quiesce("commit", self._rollouts.actors)
        except WeightSyncError as error:
            raise self._given_up(version, error) from error.__cause__
        clock.lap("quiesce")
        # From here the version is decided: who fails now is named, the others run it (RS-3).
        self.decided = True
        these = self._rollouts.each(self._id, version)
        self._arms, failed = self._rollouts.some(stages.target_commit, these)
        self.version = version
        clock.lap("commit")
        if self._spare and self._arms:
            for number in self._rollouts.dead:
                failed.pop(self._rollouts.who(number), None)
        self._name_failures(version, failed, self._rollouts.raised)
        for s in (*(s.spans for s in sent), *confirmed.values()):
            spans.extend(s)
        links = tuple(link for s in sent for link in s.links)
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
        )

    def catch_up(self, number: int, rank: int) -> int | None:
        """Gives one who has joined the version in use, from another who holds the same; returns
        whom, or ``None`` if nobody could.

        Raises:
            WeightSyncError: that failed.
        """
        alike = [one for one in self.feeding.alike(rank) if one in self._arms and one != number]
        able = [one for one in alike if self._arms[one].usable]
        givers = [one for one in able if self.version and self._arms[one].version == self.version]
        for giver in givers:
            try:
                self._take_from(giver, number)
            except WeightSyncError:
                # Another may hold the same.
                if giver == givers[-1] or number in self._rollouts.dead:
                    raise
            else:
                return giver
        self._accept({number: self.feeding.feed(number)})
        return None

    def _take_from(self, giver: int, number: int) -> None:
        who = self._rollouts.who(number)
        self._accept({number: self.feeding.given_by(number, giver)})
        arm = self._arms.pop(number)
        if (arm.version or 0) > self.version:
            raise WeightSyncError(
                f"{who} runs version {arm.version}, and here {self.version} is the latest; let a "
                "new WeightTarget join",
                version=self.version,
                failed={who: f"it runs version {arm.version}"},
            )
        if not arm.staged:
            self._quiesce("write", (number,))
            self._rollouts.all(stages.target_begin, "begin", {number: (self._id,)})
        args: tuple[Any, ...] = (self._id, arm, self.version, self._timeout)
        given = self._rollouts.all(stages.target_give, "give its version", {giver: args})
        args = (self._id, self.version, self._timeout, given[giver])
        self._rollouts.all(stages.target_confirm, "confirm", {number: args})
        try:
            self._quiesce("commit", (number,))
        except WeightSyncError:
            self._rollouts.some(stages.target_abort, {number: (self._id,)})
            raise
        args = (self._id, self.version, True)
        arms = self._rollouts.all(stages.target_commit, "use the version", {number: args})
        if cause := arms[number].hook:
            raise WeightSyncError(f"a hook failed at {who}: {cause}", failed={who: cause})
        self._arms |= arms

    def forget(self, number: int) -> None:
        """Somebody doesn't take part any more."""
        self.feeding.leave(number)
        self._arms.pop(number, None)
        self._fed.pop(number, None)

    def _accept(self, feeds: dict[int, Feed]) -> None:
        """Has rollouts make room."""
        encoded, who = self._encoded if self._digest else None, self._rollouts.who
        shares = {
            number: (self.feeding.share(self._id, number, who(number), feed, encoded),)
            for number, feed in feeds.items()
        }
        self._arms |= self._rollouts.all(stages.target_accept, "make room", shares)
        self._fed |= feeds

    def _feed_anew(self) -> None:
        """Tells those who are fed by others than before."""
        feeds = {number: self.feeding.feed(number) for number in self._rollouts.actors}
        other = {n: (self._id, feed) for n, feed in feeds.items() if self._fed.get(n) != feed}
        if other:
            self._arms |= self._rollouts.all(stages.target_feed, "take another feed", other)
            self._fed |= {number: feeds[number] for number in other}

    def _ask_the_silent(self) -> None:
        """Asks those again who didn't say where to write when they last could."""
        silent = {n: (self._id,) for n in self._rollouts.actors if n not in self._arms}
        arms, failed = self._rollouts.some(stages.target_abort, silent)
        raised = self._rollouts.raised
        self._arms |= arms
        self._learn_version()
        if failed:
            raise WeightSyncError(
                f"nothing was pushed, since {names(failed)} can't take it: {causes(failed)}. "
                "drop() what has died; what replaces it may join()",
                version=self.version,
                failed=failed,
            ) from raised

    def _announce(self, arms: dict[int, Arm]) -> None:
        """Tells rollouts of a push; no byte is written before all of them are ready."""
        if not all(arm.staged for arm in arms.values()):
            self._quiesce("write", self._rollouts.actors)
            self._rollouts.all(stages.target_begin, "begin", self._rollouts.each(self._id))
        relays = {
            number: (self._id, [arms[child] for child in children], self._timeout)
            for number, children in self.feeding.fed_by.items()
        }
        self._rollouts.all(stages.target_pass_on, "get ready to pass the version on", relays)

    def _quiesce(self, before: Literal["write", "commit"], numbers: Iterable[int]) -> None:
        """Waits until nobody reads the version in use at these rollouts (RS-1).

        Each call answers at once: readers may share the thread that it runs in.

        Raises:
            WeightSyncError: somebody reads longer than the timeout.
        """
        waits = dict.fromkeys(numbers, (self._id, before, self._timeout + _GATE_S))
        deadline, pause = time.monotonic() + self._timeout, 1e-3
        while waits:
            readers = self._rollouts.all(stages.target_quiesce, "wait for its readers", waits)
            waits = {number: waits[number] for number, inside in readers.items() if inside}
            if waits and time.monotonic() > deadline:
                failed = {self._rollouts.who(n): "; ".join(readers[n]) for n in waits}
                raise WeightSyncError(
                    f"{names(failed)} did not stop reading within {self._timeout:g} s: "
                    f"{causes(failed)}",
                    failed=failed,
                )
            if waits:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)

    def _write(self, version: int, arms: dict[int, Arm]) -> list[Sent]:
        heads = [arms[number] for number in self.feeding.heads.values()]
        args = self._trainers.each(self._id, version, heads, self._digest, self._timeout)
        return list(self._trainers.all(stages.source_push, "push", args).values())

    def _agree(self, version: int, sent: list[Sent]) -> dict[int, int]:
        """The digest of each place; raises if a trainer couldn't reach one."""
        heads, failed = self.feeding.heads, dict[str, str]()
        for trainer, s in enumerate(sent):
            for place, cause in s.failed.items():
                failed[self._rollouts.who(heads[place])] = f"from trainer {trainer}: {cause}"
        if failed:
            raise WeightSyncError(
                f"version {version} did not reach {names(failed)}: {causes(failed)}", failed=failed
            )
        digests: dict[int, int] = {}
        for s in sent:
            for place, digest in s.digests.items():
                digests[place] = (digests.get(place, 0) + digest) & ((1 << 64) - 1)
        return digests

    def _given_up(
        self, version: int, error: WeightSyncError, *, written: bool = True
    ) -> WeightSyncError:
        """Has all who live forget the version; returns what to raise."""
        # Trainers that stopped in the middle of an exchange can't take it up again.
        self._met = False
        these = self._rollouts.each(self._id, written)
        self._arms, failed = self._rollouts.some(stages.target_abort, these)
        hooks = self._failed_hooks()
        named = {**hooks, **error.fields.get("failed", {}), **failed}
        text = f"version {version} was given up; all rollouts that live stay at {self.version}. "
        text += str(error) + (f"; then {causes(hooks)}" if hooks else "")
        return WeightSyncError(text, version=version, failed=named)

    def _name_failures(
        self, version: int, failed: dict[str, str], raised: BaseException | None
    ) -> None:
        """Raises if a decided version isn't in use somewhere, or a hook didn't do its part."""
        if failed:
            raise WeightSyncError(
                f"version {version} is in use, but not at {names(failed)}: {causes(failed)}",
                version=version,
                failed=failed,
            ) from raised
        if hooks := self._failed_hooks():
            raise WeightSyncError(
                f"version {version} is in use everywhere, but a hook failed at {names(hooks)}: "
                f"{causes(hooks)}",
                version=version,
                failed=hooks,
            )

    def _failed_hooks(self) -> dict[str, str]:
        return {self._rollouts.who(n): arm.hook for n, arm in self._arms.items() if arm.hook}

    def _meet(self, *, again: bool = False) -> None:
        """Has trainers exchange block maxima with each other, from the next push on."""
        recipe = self._calls.share(self._recipe)
        what = "get ready to convert"
        args = self._trainers.each(self._id, again, recipe)
        made = self._trainers.all(stages.source_convert, what, args)
        invited = self._trainers.each(self._id, self._calls.share(made))
        self._trainers.all(stages.source_join, what, invited)
        self._met = True

    def _learn_version(self) -> None:
        """Versions never run backwards, whoever counted them before."""
        self.version = max(self.version, *(arm.version or 0 for arm in self._arms.values()), 0)
