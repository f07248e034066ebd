"""Metadata between agents, one of which listens at a port."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import msgspec

from fabric_ray.compat.nixl.status import DEFAULT_COMM_PORT, as_nixl_errors, nixlNotSupportedError
from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import EngineConfig
from fabric_ray.errors import InvalidArgument
from fabric_ray.rpc import Server, call, key_of

if TYPE_CHECKING:
    from fabric_ray.compat.nixl.agent import nixl_agent


class MetadataRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to an agent that listens: ``load`` metadata, ``tell`` its own, or ``forget``."""

    what: str
    agent: str
    metadata: bytes = b""


def listen(agent: nixl_agent, port: int) -> None:
    """Answers requests until the agent is collected.

    Raises:
        nixlBackendError: the port is taken.
    """
    me = weakref.ref(agent)

    def answer(request: bytes) -> bytes:
        alive = me()
        if alive is None:
            raise InvalidArgument("the agent is gone")
        return alive._on_request(from_msgpack(request, MetadataRequest))

    with as_nixl_errors():
        config = EngineConfig.resolve(None, {})
        server = Server(
            answer, key=key_of(config.token), port=port, bind=config.bind, ports=config.ports
        )
    weakref.finalize(agent, server.close)


def send(request: MetadataRequest, host: str, port: int) -> bytes:
    """The answer of the agent that listens there.

    Raises:
        nixlNotSupportedError: no host.
        nixlRemoteDisconnectError: no agent listens there, or its token differs.
    """
    if not host:
        raise nixlNotSupportedError(
            "there is no central metadata server here; give the address and port of an agent that "
            "listens, or pass get_agent_metadata() on yourself"
        )
    with as_nixl_errors():
        key = key_of(EngineConfig.resolve(None, {}).token)
        return call(host, port or DEFAULT_COMM_PORT, msgspec.msgpack.encode(request), key=key)
