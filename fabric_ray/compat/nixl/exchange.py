"""Metadata from agent to agent, where one of them listens."""

from __future__ import annotations

import weakref
from typing import Protocol

import msgspec

from fabric_ray.compat.nixl.status import DEFAULT_COMM_PORT, as_nixl, nixlNotSupportedError
from fabric_ray.compat.rendezvous import Rendezvous, ask
from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import EngineConfig
from fabric_ray.errors import FabricError, InvalidArgument


class Errand(msgspec.Struct, frozen=True, array_like=True):
    """What is asked of an agent that listens: ``load`` metadata, ``tell`` its own, ``forget``."""

    what: str
    agent: str
    metadata: bytes = b""


class Attending(Protocol):
    """An agent that can be asked."""

    def _attend(self, errand: Errand) -> bytes: ...


def listen(agent: Attending, port: int) -> None:
    """Answers errands until the agent is collected.

    Raises:
        nixlBackendError: the port is taken.
    """
    me = weakref.ref(agent)

    def answer(request: bytes) -> bytes:
        alive = me()
        if alive is None:
            raise InvalidArgument("the agent is gone")
        return alive._attend(from_msgpack(request, Errand))

    try:
        config = EngineConfig.resolve(None, {})
        rendezvous = Rendezvous(
            answer, port=port, token=config.token, bind=config.bind, ports=config.ports
        )
    except FabricError as error:
        raise as_nixl(error) from error
    weakref.finalize(agent, rendezvous.close)


def run(errand: Errand, host: str, port: int) -> bytes:
    """The answer of the agent that listens there.

    Raises:
        nixlNotSupportedError: no host.
        nixlRemoteDisconnectError: no agent listens, or with another token.
    """
    if not host:
        raise nixlNotSupportedError(
            "there is no central metadata server here; give the address and port of an agent that "
            "listens, or pass get_agent_metadata() on yourself"
        )
    try:
        token = EngineConfig.resolve(None, {}).token
        request = msgspec.msgpack.encode(errand)
        return ask(host, port or DEFAULT_COMM_PORT, request, token=token)
    except FabricError as error:
        raise as_nixl(error) from error
