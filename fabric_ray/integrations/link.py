"""A push's stages at an engine's workers: processes that are no Ray actors, reached by a socket."""

from __future__ import annotations

import inspect
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, get_type_hints

import msgspec

from fabric_ray.decoding import from_msgpack
from fabric_ray.errors import InvalidArgument
from fabric_ray.weights import phases
from fabric_ray.weights.calls import DIED, CallFailure, call_failure

_SCHEME = "fabric://"
_MOST_UNPROVEN = 64
"""Callers that haven't proven the secret, at a time; others wait in the kernel's queue."""
_HANDSHAKE_S = 5.0
_REST_S = 0.1
"""Before the next try where the system has no file to give."""
Function = Callable[..., Any]
STAGES: dict[str, Function] = {
    name: function
    for name, function in vars(phases).items()
    if name.startswith("target_") and inspect.isfunction(function)
}


class Server:
    """Answers calls to a few functions, one at a time; arguments and results are msgpack.

    Args:
        functions: by name; what they are annotated with is what is decoded.
        host: where to listen, as trainers reach it.
        name: of this process's target; names in calls are ignored.
    """

    def __init__(self, functions: dict[str, Function], host: str, name: str) -> None:
        self._functions, self._name = functions, name
        self._types = {name: _types(function) for name, function in functions.items()}
        self._secret = secrets.token_hex(16)
        self._listener = Listener((host, 0))
        self.session_id = f"{_SCHEME}{self._secret}@{host}:{self._listener.address[1]}"
        self._turn = threading.Lock()
        self._unproven = threading.BoundedSemaphore(_MOST_UNPROVEN)
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="fabric-link", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Takes no more callers."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            Client(self._listener.address).close()  # Wakes the accept loop.
        # While a thread is in accept(), the kernel takes connections on a closed socket, too.
        self._accepting.join(_HANDSHAKE_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_REST_S)
                continue
            self._unproven.acquire()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            if self._closed:
                return

    def _serve(self, connection: Connection) -> None:
        with suppress(EOFError, OSError, AuthenticationError), connection:
            late = threading.Timer(_HANDSHAKE_S, _hang_up, (connection,))
            late.start()
            try:
                deliver_challenge(connection, self._secret.encode())
                answer_challenge(connection, self._secret.encode())
            finally:
                late.cancel()
                late.join()
                self._unproven.release()
            while True:
                request = connection.recv_bytes()
                if self._closed:
                    return
                with self._turn:
                    answer = self._answer(request)
                connection.send_bytes(answer)

    def _answer(self, request: bytes) -> bytes:
        try:
            name, args = from_msgpack(request, tuple[str, list[msgspec.Raw]])
            types = self._types[name]
            values = [from_msgpack(a, t) for a, t in zip(args, types, strict=False)]
            result = self._functions[name](None, self._name, *values)
            return msgspec.msgpack.encode((True, result))
        except Exception as error:
            cause, kind, _ = call_failure(error)
            return msgspec.msgpack.encode((False, (cause, kind)))


def _hang_up(connection: Connection) -> None:
    """Ends what another thread reads from."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


class Link:
    """The caller's end. One that breaks is made anew by the next call.

    Args:
        session_id: a server's.

    Raises:
        InvalidArgument: it isn't one.
    """

    def __init__(self, session_id: str) -> None:
        found = re.fullmatch(rf"{_SCHEME}([0-9a-f]+)@(.+):(\d+)", session_id)
        if found is None:
            raise InvalidArgument(
                f"session id {session_id!r} is not fabric-ray's; attach a FabricWorker of "
                "fabric_ray.integrations.sglang in each of the engine's processes"
            )
        self._secret = found[1].encode()
        self._address = (found[2], int(found[3]))
        self._connection: Connection | None = None

    def ask(self, function: Function, args: tuple[Any, ...], timeout: float) -> Any:
        """What ``function`` returns there, or :class:`CallFailure`."""
        try:
            if self._connection is None:
                self._connection = Client(self._address, authkey=self._secret)
            self._connection.send_bytes(msgspec.msgpack.encode((function.__name__, args)))
            # A worker's own timeout error should arrive first.
            if not self._connection.poll(timeout + 5.0):
                self.close()  # A late answer would be taken for the next.
                return CallFailure(
                    f"it did not answer within {timeout:g} s; see whether it is stuck"
                )
            answer = self._connection.recv_bytes()
        except ConnectionRefusedError:
            return CallFailure("its process has ended", DIED)
        except (EOFError, OSError, AuthenticationError) as error:
            self.close()
            return CallFailure(f"its process can't be reached: {error or 'it hung up'}")
        done, result = from_msgpack(answer, tuple[bool, msgspec.Raw])
        if not done:
            return CallFailure(*from_msgpack(result, tuple[str, str]))
        return from_msgpack(result, get_type_hints(function)["return"])

    def close(self) -> None:
        """Ends it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _types(function: Function) -> list[Any]:
    """Of a stage's arguments after the actor and the name."""
    hints = get_type_hints(function)
    names = list(inspect.signature(function).parameters)
    return [hints[name] for name in names[2:]]
