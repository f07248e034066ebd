"""The phases of a push in an actor: plain functions, which any Ray actor can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Side
from fabric_ray.weights.conversion import Recipe
from fabric_ray.weights.quant import Invitation
from fabric_ray.weights.report import (
    Arrival,
    Confirmed,
    InboundPlan,
    PushTarget,
    Sent,
    SourceShare,
    TargetShare,
)
from fabric_ray.weights.sources import SOURCES, TrainerMeta
from fabric_ray.weights.target import TARGETS, WeightTarget

_IN_ORDER = "pass WeightSync(trainers, rollouts) in this order"


def source_meta(_: Any, name: str) -> tuple[int, TrainerMeta, bytes]:
    if name in TARGETS and name not in SOURCES:
        raise InvalidArgument(
            f"it holds a WeightTarget called {name!r}, expected a WeightSource; {_IN_ORDER}"
        )
    return SOURCES.get(name).meta()


def source_side(_: Any, name: str) -> Side | None:
    return SOURCES.get(name).side


def source_convert(_: Any, name: str, session: str, again: bool, recipe: Recipe) -> Invitation:
    return SOURCES.get(name).convert(session, recipe, again=again)


def source_join(_: Any, name: str, session: str, invitations: dict[int, Invitation]) -> None:
    SOURCES.get(name).join(session, invitations)


def source_accept(_: Any, name: str, share: SourceShare, timeout: float) -> bool:
    return SOURCES.get(name).accept(share, timeout=timeout)


def source_ready(_: Any, name: str, session: str) -> None:
    SOURCES.get(name).ready(session)


def source_push(
    _: Any,
    name: str,
    session: str,
    version: int,
    push_targets: list[PushTarget],
    digest: bool,
    timeout: float,
) -> Sent:
    return SOURCES.get(name).push(session, version, push_targets, digest=digest, timeout=timeout)


def target_meta(_: Any, name: str) -> tuple[int, Side, bytes]:
    if name in SOURCES and name not in TARGETS:
        raise InvalidArgument(
            f"it holds a WeightSource called {name!r}, expected a WeightTarget; {_IN_ORDER}"
        )
    target = TARGETS.get(name)
    return target.rank, target.side, target.address()


def target_accept(_: Any, name: str, share: TargetShare) -> PushTarget:
    with _changing(name) as target:
        return target.accept(share)


def target_set_inbound(_: Any, name: str, session: str, inbound: InboundPlan) -> PushTarget:
    with _changing(name, session) as target:
        return target.set_inbound(inbound)


def target_pass_on(
    _: Any, name: str, session: str, serial: int, to: list[PushTarget], timeout: float
) -> None:
    with _changing(name, session, serial) as target:
        target.pass_on(to, timeout=timeout)


def target_give(
    _: Any, name: str, session: str, push_target: PushTarget, version: int, timeout: float
) -> int | None:
    return _target(name, session).give(push_target, version, timeout=timeout)


def target_begin(_: Any, name: str, session: str, serial: int) -> None:
    with _changing(name, session, serial) as target:
        target.begin()


def target_confirm(
    _: Any,
    name: str,
    session: str,
    serial: int,
    version: int,
    timeout: float,
    digest: int | None,
    changes: Arrival | None = None,
) -> Confirmed:
    target = _target(name, session)
    return target.confirm(version, timeout=timeout, digest=digest, changes=changes, serial=serial)


def target_quiesce(
    _: Any, name: str, session: str, serial: int, before: Literal["write", "commit"], seconds: float
) -> tuple[str, ...]:
    target = TARGETS.get(name)
    with target.calls_lock.between_calls():
        # After the abort, no call would open the gate again.
        target.check_current(session, serial)
        return target.quiesce(before, seconds)


def target_commit(
    _: Any, name: str, session: str, version: int, joining: bool = False
) -> PushTarget:
    with _changing(name, session) as target:
        return target.commit(version, joining=joining)


def target_abort(_: Any, name: str, session: str, written: bool = True) -> PushTarget:
    with _changing(name, session) as target:
        return target.abort(written=written)


@contextmanager
def _changing(
    name: str, session: str | None = None, serial: int | None = None
) -> Iterator[WeightTarget]:
    """A target, for a call that changes it: one at a time, since a call goes on in an actor of
    several threads when its controller has stopped waiting (RS-3).

    Raises:
        Stale: another controller has connected, the push of the push target ``serial`` has ended,
            or a later call came while this one waited.
    """
    target = TARGETS.get(name) if session is None else _target(name, session)
    with target.calls_lock.acquire() as check_latest:
        check_latest()
        if session is not None:
            target.check_current(session, serial)
        yield target


def _target(name: str, session: str) -> WeightTarget:
    target = TARGETS.get(name)
    target.check_current(session)
    return target
