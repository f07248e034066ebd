"""Notifications from agent to agent, as messages of their engines."""

from __future__ import annotations

import logging
import weakref

import msgspec

from fabric_ray.compat.inbox import Inbox
from fabric_ray.compat.nixl.metadata import RemoteAgents
from fabric_ray.compat.nixl.request import Notify
from fabric_ray.compat.nixl.status import nixlInvalidParamError
from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import Message, TransferEngine

_log = logging.getLogger("nixl.fabric_ray")

_MAX_BYTES = 65536 - 1024


class _Notification(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    message: bytes


class Notifications:
    """Sends an agent's notifications, and keeps those that it has not asked for yet.

    Args:
        name: the agent's.
        remotes: the agents that it knows.
    """

    def __init__(self, name: str, remotes: RemoteAgents) -> None:
        self._name, self._remotes = name, remotes
        self._inbox = Inbox[tuple[str, bytes]](_log)

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
        return lambda message: engine.send(
            peer, msgspec.msgpack.encode(_Notification(self._name, message))
        )

    def move_to(self, found: dict[str, list[bytes]]) -> None:
        """Adds all that are kept, by agent, and forgets them."""
        for agent, message in self._inbox.take():
            found.setdefault(agent, []).append(message)

    def _on_message(self, message: Message) -> None:
        try:
            said = from_msgpack(message.data, _Notification)
        except msgspec.MsgspecError as error:
            _log.warning("a notification was dropped: %s", error)
            return
        known = self._remotes.get(said.agent)
        if said.agent == self._name or (known is not None and known.peer.id != message.sender):
            _log.warning("a notification was dropped: its sender is not agent %r", said.agent)
            return
        self._keep(said.agent, said.message)

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
