"""Notifications from agent to agent, as messages of their engines."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref

import msgspec

from fabric_ray.compat.inbox import MOST_BYTES, Inbox
from fabric_ray.compat.nixl.metadata import RemoteAgents
from fabric_ray.compat.nixl.request import Notify
from fabric_ray.compat.nixl.status import nixlInvalidParamError
from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import Batch, Message, Peer, Transfer, TransferEngine

_log = logging.getLogger("nixl.fabric_ray")

_PART_BYTES = 65536 - 1024
"""Of a notification in one message of the engines."""
_MOST_PARTS = MOST_BYTES // _PART_BYTES
_MAX_BYTES = 16 << 20


class _Notification(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    message: bytes
    number: int = 0
    """The notification's, among those of its sender."""
    part: int = 0
    parts: int = 1


class PartialNotifications:
    """Long notifications until their last part has come, in any order; a bounded number of parts,
    of which the oldest go first. For any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int], dict[int, bytes]] = {}

    def add(self, sender: str, said: _Notification) -> bytes | None:
        """The whole message, once this part completes it."""
        if said.parts <= 1:
            return said.message
        key = sender, said.number
        with self._lock:
            found = self._kept.setdefault(key, {})
            found[said.part] = said.message
            if len(found) >= said.parts:
                del self._kept[key]
                return b"".join(found[part] for part in sorted(found))
            while sum(map(len, self._kept.values())) > _MOST_PARTS:
                del self._kept[next(iter(self._kept))]
                _log.warning("a notification was dropped: too many others lack parts as well")
        return None


class Notifications:
    """Sends an agent's notifications, and keeps those that it has not asked for yet.

    Args:
        name: the agent's.
        remotes: the agents that it knows.
    """

    def __init__(self, name: str, remotes: RemoteAgents) -> None:
        self._name, self._remotes = name, remotes
        self._inbox = Inbox[tuple[str, bytes]](_log)
        self._partial = PartialNotifications()
        self._numbers = itertools.count()

    def receive(self, engine: TransferEngine) -> None:
        """Keeps what arrives at the agent's engine. The engine keeps no reference to it."""
        me = weakref.ref(self)

        def on_message(message: Message) -> None:
            if (alive := me()) is not None:
                alive._on_message(message)

        engine.receive(on_message)

    def notifier(self, engine: TransferEngine, agent: str) -> Notify:
        """Sends to that agent; what an agent sends to itself is there at once.

        Raises:
            nixlNotFoundError: the agent was not added.
        """
        if agent == self._name:
            return self._keep_own
        peer = self._remotes[agent].peer
        return lambda message: self._send(engine, peer, message)

    def move_to(self, found: dict[str, list[bytes]]) -> None:
        """Adds all that are kept, by agent, and forgets them."""
        for agent, message in self._inbox.take():
            found.setdefault(agent, []).append(message)

    def _send(self, engine: TransferEngine, peer: Peer, message: bytes) -> Transfer:
        number, batch = next(self._numbers), Batch()
        pieces = [message[i : i + _PART_BYTES] for i in range(0, len(message) or 1, _PART_BYTES)]
        for part, piece in enumerate(pieces):
            said = _Notification(self._name, piece, number, part, len(pieces))
            batch.send(peer, msgspec.msgpack.encode(said))
        return engine.submit(batch)

    def _on_message(self, message: Message) -> None:
        try:
            said = from_msgpack(message.data, _Notification)
        except msgspec.MsgspecError as error:
            _log.warning("a notification was dropped: %s", error)
            return
        # An agent that has restarted may notify before its new metadata is here.
        if said.agent == self._name or self._remotes.is_replaced(message.sender):
            _log.warning("a notification was dropped: its sender is not agent %r", said.agent)
            return
        if (whole := self._partial.add(message.sender, said)) is not None:
            self._keep(said.agent, whole)

    def _keep_own(self, message: bytes) -> None:
        self._keep(self._name, message)

    def _keep(self, agent: str, message: bytes) -> None:
        self._inbox.add((agent, message), len(agent) + len(message))


def encoded(message: str | bytes) -> bytes:
    """A notification's bytes.

    Raises:
        nixlInvalidParamError: it is too long.
    """
    data = message if isinstance(message, bytes) else message.encode()
    if len(data) > _MAX_BYTES:
        raise nixlInvalidParamError(
            f"a notification of {len(data)} bytes is too long; {_MAX_BYTES} are the most"
        )
    return data
