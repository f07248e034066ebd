"""The engine of this process."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import Any

import ray
from ray.util import get_node_ip_address

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.runtime.directory import LEASE_S, directory
from fabric_ray.runtime.token import cluster_token

logger = logging.getLogger(__name__)

_lock = threading.Lock()


def _reset_lock() -> None:
    # The thread that held the lock does not exist in the child.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)

_current: _Resident | None = None


class _Resident:
    """An engine and the thread that keeps its lease."""

    def __init__(self, engine: TransferEngine, name: str | None) -> None:
        self.engine = engine
        self.name = name
        self.pid = os.getpid()
        self._node: str | None = None
        self._stop = threading.Event()

    def enter_cluster(self) -> None:
        """Publishes the engine, if it isn't.

        Raises:
            InvalidArgument: it was opened before Ray, and no engine of the cluster can reach it.
        """
        if self._node is not None:
            return
        if self.engine.config.token is None:
            raise InvalidArgument(
                f"{self.engine!r} was opened before ray.init() and has no token, so no engine of "
                "the cluster can reach it; call ray.init() first, or shutdown() to have it opened "
                "again"
            )
        self.name = self.name or process_name()
        self._publish()
        self._node = _node_id()
        threading.Thread(target=self._renew, name="fabric-lease", daemon=True).start()

    @property
    def in_other_cluster(self) -> bool:
        """Whether this process has left the cluster of the engine for another one."""
        return self._node is not None and ray.is_initialized() and _node_id() != self._node

    def _publish(self) -> None:
        context = ray.get_runtime_context()
        actor = context.get_actor_id()
        before = directory().publish(
            str(self.name), self.engine.address, actor_id=actor, node_id=context.get_node_id()
        )
        # A restarted actor keeps its id, and takes its own name over.
        if before is not None and (actor is None or before.actor_id != actor):
            owner = f"actor {before.actor_id}" if before.actor_id else "a driver or task"
            logger.warning(
                "engine %s takes its name over from engine %s of %s on node %s, whose lease has "
                "not ended; if that one lives, it is no longer found by name: give each its own",
                self.engine.address.id[:8] + " " + str(self.name),
                before.incarnation[:8],
                owner,
                before.node_id,
            )

    def _renew(self) -> None:
        while not self._stop.wait(LEASE_S / 3):
            # Between two clusters, or in another one, no peer looks for it.
            if not ray.is_initialized() or self.in_other_cluster:
                continue
            try:
                lease = directory().renew(str(self.name), self.engine.id)
                if lease == "unknown":
                    # The directory was restarted: publish again.
                    self._publish()
                    if self._stop.is_set():  # close() may have withdrawn it meanwhile
                        directory().withdraw(str(self.name), self.engine.id)
                elif lease == "superseded":
                    logger.warning(
                        "another engine was published as %s; this one is no longer found by name",
                        self.name,
                    )
                    return
            except Exception as error:
                logger.warning("the lease of engine %s was not renewed: %s", self.name, error)

    def close(self) -> None:
        self._stop.set()
        if self._node is not None and ray.is_initialized():
            try:
                directory().withdraw(str(self.name), self.engine.id)
            except Exception as error:
                # The lease ends by itself.
                logger.debug("engine %s was not withdrawn: %s", self.name, error)
        self.engine.close()


def engine(*, name: str | None = None, **overrides: Any) -> TransferEngine:
    """The one engine of this process, opened at first use; works inside any Ray actor or task.

    On Ray it knows the cluster's token, listens on the node's address, and is found in the
    directory under ``name`` (by default the actor's id; in drivers and tasks ``worker-`` and the
    id of the Ray worker). Without Ray it is an ordinary engine.
    After ``ray.shutdown()``, the first call in another cluster closes it and opens a new one. An
    engine that was opened before ``ray.init()`` with a token of its own is published by the first
    call after it.

    Args:
        name: how others find it; only the first call of a process decides.
        overrides: fields of :class:`fabric_ray.EngineConfig`; only the first call may name any.

    Raises:
        InvalidArgument: the engine is open already and the call asks for something else, or it was
            opened before ``ray.init()`` without a token.
    """
    global _current
    with _lock:
        if _current is not None and _current.pid == os.getpid() and _current.in_other_cluster:
            _current.close()
        if _current is None or _current.pid != os.getpid() or _current.engine.closed:
            _current = _open(name, overrides)
            atexit.register(shutdown)
        elif overrides or name not in (None, _current.name):
            raise InvalidArgument(
                f"this process has its engine already ({_current.engine!r}); call shutdown() "
                "before asking for another"
            )
        if ray.is_initialized():
            _current.enter_cluster()
        return _current.engine


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _open(name: str | None, overrides: dict[str, Any]) -> _Resident:
    if not ray.is_initialized():
        named: dict[str, Any] = {"name": name} if name else {}
        return _Resident(TransferEngine(**named, **overrides), name)
    found_by = name or process_name()
    return _Resident(cluster_engine(found_by, **overrides), found_by)


def process_name() -> str:
    """A name that no other process of the cluster has: the actor's id, or the Ray worker's. Process
    ids repeat between hosts and containers."""
    context = ray.get_runtime_context()
    return str(context.get_actor_id() or f"worker-{context.get_worker_id()}")


def cluster_engine(name: str, **overrides: Any) -> TransferEngine:
    """An engine with the cluster's token that listens on the node's address. It is not published
    in the directory."""
    if "token" not in overrides and not os.environ.get("FABRIC_RAY_TOKEN"):
        overrides["token"] = cluster_token()
    overrides.setdefault("bind", (node_address(),))
    return TransferEngine(name=name, **overrides)


def node_address() -> str:
    """The address by which other hosts of the cluster reach this one."""
    return str(get_node_ip_address())  # type: ignore[no-untyped-call]


def shutdown() -> None:
    """Closes this process's engine, if it has one. Peers see it as lost."""
    global _current
    with _lock:
        resident, _current = _current, None
    if resident is not None and resident.pid == os.getpid():
        resident.close()
