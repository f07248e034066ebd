"""The directory: an actor that holds the addresses of a cluster's engines, by name, with leases.

An entry is one incarnation of an engine. It ends when its lease expires, or when an engine of the
same name is published. The old address then raises ``Stale`` or ``PeerLost``, and never reaches the
new engine.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
import ray

from fabric_ray._native import EngineAddress
from fabric_ray.errors import InvalidArgument, Stale

NAMESPACE = "fabric_ray"
LEASE_S = 30.0


Lease = Literal["renewed", "unknown", "superseded"]
"""``unknown``: no living engine has that name, publish it again. ``superseded``: another has it."""


class Entry(msgspec.Struct, frozen=True):
    """One engine in the directory."""

    name: str
    address: bytes
    """An encoded :class:`EngineAddress`."""
    incarnation: str
    """The engine's id; differs between incarnations of one name."""
    actor_id: str | None
    """The Ray actor of the engine, if any."""
    node_id: str | None
    expires: float
    """Seconds on the directory's clock."""


class DirectoryState:
    """The directory's state, without Ray."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._entries: dict[str, Entry] = {}

    def publish(
        self,
        name: str,
        address: bytes,
        *,
        actor_id: str | None = None,
        node_id: str | None = None,
        now: float | None = None,
    ) -> Entry | None:
        """Adds an engine or renews its lease. A new incarnation takes over the name.

        Returns:
            the living engine that had the name before, if it is another one.
        """
        now = time.monotonic() if now is None else now
        incarnation = EngineAddress.from_bytes(address).id
        if not name:
            raise InvalidArgument("engine name is empty; give a name")
        before = self.lookup(name, now=now)
        entry = Entry(name, address, incarnation, actor_id, node_id, now + self._lease_s)
        self._entries[name] = entry
        return before if before is not None and before.incarnation != incarnation else None

    def lookup(self, name: str, *, now: float | None = None) -> Entry | None:
        """The living engine of that name."""
        now = time.monotonic() if now is None else now
        entry = self._entries.get(name)
        if entry is not None and entry.expires <= now:
            del self._entries[name]
            return None
        return entry

    def renew(self, name: str, incarnation: str, *, now: float | None = None) -> Lease:
        """Extends the lease of an incarnation, if it has not ended."""
        now = time.monotonic() if now is None else now
        entry = self.lookup(name, now=now)
        if entry is None:
            return "unknown"
        if entry.incarnation != incarnation:
            return "superseded"
        self._entries[name] = msgspec.structs.replace(entry, expires=now + self._lease_s)
        return "renewed"

    def withdraw(self, name: str, incarnation: str) -> bool:
        """Removes an incarnation; a newer one of the same name stays."""
        entry = self._entries.get(name)
        if entry is None or entry.incarnation != incarnation:
            return False
        del self._entries[name]
        return True

    def entries(self, *, now: float | None = None) -> list[Entry]:
        """All living engines, by name."""
        return [e for n in sorted(self._entries) if (e := self.lookup(n, now=now)) is not None]


class Directory:
    """A handle on the cluster's directory actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def publish(
        self,
        name: str,
        address: EngineAddress,
        *,
        actor_id: str | None = None,
        node_id: str | None = None,
    ) -> Entry | None:
        before: Entry | None = ray.get(
            self._actor.publish.remote(name, address.to_bytes(), actor_id=actor_id, node_id=node_id)
        )
        return before

    def renew(self, name: str, incarnation: str) -> Lease:
        lease: Lease = ray.get(self._actor.renew.remote(name, incarnation))
        return lease

    def withdraw(self, name: str, incarnation: str) -> bool:
        return bool(ray.get(self._actor.withdraw.remote(name, incarnation)))

    def lookup(self, name: str, *, timeout: float = 0.0) -> EngineAddress:
        """The address of the engine called ``name``; waits up to ``timeout`` seconds for it.

        Raises:
            Stale: no live engine has that name.
        """
        deadline = time.monotonic() + timeout
        while True:
            entry: Entry | None = ray.get(self._actor.lookup.remote(name))
            if entry is not None:
                return EngineAddress.from_bytes(entry.address)
            if time.monotonic() >= deadline:
                known = ", ".join(e.name for e in self.entries()) or "none"
                raise Stale(f"no living engine is called {name!r}; the directory knows {known}")
            time.sleep(0.05)

    def entries(self) -> list[Entry]:
        entries: list[Entry] = ray.get(self._actor.entries.remote())
        return entries


def directory() -> Directory:
    """The directory of this Ray cluster, started with its first use."""
    if not ray.is_initialized():
        raise InvalidArgument("call ray.init() first: the directory is a Ray actor")
    remote: Any = ray.remote(DirectoryState)
    # Detached, so that it outlives whichever actor or driver happened to ask first.
    actor = remote.options(
        num_cpus=0,
        max_restarts=-1,
        name="directory",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
    ).remote()
    return Directory(actor)
