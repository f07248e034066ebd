"""How vLLM's workers answer a trainer: vLLM's own calls bring nothing back."""

from __future__ import annotations

import queue
import socket
import time
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import msgspec

from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import Message, Peer, TransferEngine
from fabric_ray.errors import DecodeError, WeightSyncError

# While workers are awaited, whether the call to them has failed is looked up so often.
_LOOK_S = 0.2
MORE_S = 0.2
"""Seconds in which workers that aren't awaited mostly say so, too."""
# Seconds after the end of a call in which a host that is busy with other work delivers messages.
_AFTER_S = 5.0
_ANY_PORT = 9


class Hello(msgspec.Struct, frozen=True):
    """What a worker tells the trainer at the begin of an update, or of a connection."""

    update: int
    """0 for a connection."""
    text: bytes
    """The invitation to send, or the session id by which the worker is called."""
    error: str = ""
    """Why the worker takes no part."""

    def send(self, engine: TransferEngine, trainer: Peer) -> None:
        engine.send(trainer, msgspec.msgpack.encode(self)).wait()


class Hellos:
    """Receives what workers say.

    Args:
        engine: the trainer's.
        workers: that are awaited.
    """

    def __init__(self, engine: TransferEngine, workers: int) -> None:
        self._workers = workers
        # Messages wait in it with their places in the pool: what peers can have kept is bounded.
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        engine.receive(self._messages.put, count=max(16, 2 * workers))

    def collect(
        self, update: int, call: Future[Any], timeout: float, *, what: str
    ) -> tuple[list[bytes], WeightSyncError | None]:
        """What all workers say about an update, and an error unless all have said it.

        Args:
            call: of vLLM, in which they say it.
            timeout: in seconds.
            what: they are awaited for.
        """
        found: list[bytes] = []
        ended, deadline = False, time.monotonic() + timeout
        while len(found) < self._workers:
            if not ended and call.done():
                # What was said in it may still be on its way.
                ended, deadline = True, min(deadline, time.monotonic() + _AFTER_S)
            try:
                hello = _read(self._messages.get(timeout=_LOOK_S).data)
            except queue.Empty:
                error = call.exception() if ended else None
                if error is None and time.monotonic() < deadline:
                    continue
                cause = (
                    f"{len(found)} of {self._workers} workers of vLLM are ready for {what}; see "
                    "whether `workers` counts the ranks of all engines"
                    + (f", and what ended the call to them: {error}" if error else "")
                )
                failure = WeightSyncError(cause, version=update)
                failure.__cause__ = error
                return found, failure
            if hello.update == update and hello.error:
                return found, WeightSyncError(f"a worker refused: {hello.error}", version=update)
            if hello.update == update:
                found.append(hello.text)
        return found, None

    def refuse_more(self, update: int, *, wait: float = 0.0) -> None:
        """Refuses workers that aren't awaited, which would keep old weights beside the others.

        Args:
            wait: seconds in which what they say may still come.

        Raises:
            WeightSyncError: more have said something about an update (RS-3).
        """
        while True:
            try:
                hello = _read(self._messages.get(block=wait > 0, timeout=wait).data)
            except queue.Empty:
                return
            if hello.update == update:
                raise WeightSyncError(
                    f"more workers of vLLM answer than `workers` says, which is {self._workers}; "
                    "count the ranks of all engines (TP x PP x DP), and call trainer_init again",
                    version=update,
                )


def own_host(client: Any) -> str:
    """The address by which the servers of vLLM's client reach this host."""
    url = getattr(client, "base_url", None)
    if isinstance(url, str) and (host := urlsplit(url).hostname):
        return host_towards(host)
    if getattr(client, "handles", None):
        from fabric_ray.runtime.process import node_address

        return node_address()
    return "127.0.0.1"


def host_towards(host: str) -> str:
    """This host's address on the route to another."""
    family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _read(data: bytes) -> Hello:
    try:
        return from_msgpack(data, Hello)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"not a worker's word: {error}") from error
