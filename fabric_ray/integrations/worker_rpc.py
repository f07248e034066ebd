"""Calls of a push's phases at an engine's workers, which are no Ray actors."""

from __future__ import annotations

import re
import secrets
import threading
from typing import Any

import msgspec

from fabric_ray import rpc
from fabric_ray.decoding import from_msgpack
from fabric_ray.errors import FabricError, HandshakeError, InvalidArgument, TransferTimeout
from fabric_ray.integrations.named_functions import (
    Function,
    NamedFunctions,
    phases_of,
    result_type,
)
from fabric_ray.weights.calls import DIED, CallFailure, call_failure

_SCHEME = "fabric://"
PHASES = phases_of("target")


class WorkerServer:
    """Answers calls to a few functions, one at a time; arguments and results are msgpack.

    Args:
        functions: by name; arguments are decoded as the types of their annotations.
        host: where to listen, as trainers reach it.
        name: of this process's target; names in calls are ignored.
    """

    def __init__(self, functions: dict[str, Function], host: str, name: str) -> None:
        self._functions, self._name = NamedFunctions(functions), name
        self._one_at_a_time = threading.Lock()
        secret = secrets.token_bytes(16)
        self._server = rpc.Server(self._answer, key=secret, bind=[host])
        self.session_id = f"{_SCHEME}{secret.hex()}@{host}:{self._server.port}"

    def close(self) -> None:
        """Accepts no more callers, and releases what the functions refer to."""
        self._server.close()
        self._functions = NamedFunctions({})

    def _answer(self, request: bytes) -> bytes:
        try:
            name, args = from_msgpack(request, tuple[str, list[msgspec.Raw]])
            function, values = self._functions.named(name, args)
            with self._one_at_a_time:
                result = function(None, self._name, *values)
            return msgspec.msgpack.encode((True, result))
        except Exception as error:
            cause, kind, _ = call_failure(error)
            return msgspec.msgpack.encode((False, (cause, kind)))


class WorkerClient:
    """Calls a worker.

    Args:
        session_id: of a :class:`WorkerServer`.

    Raises:
        InvalidArgument: it is another library's.
    """

    def __init__(self, session_id: str) -> None:
        found = re.fullmatch(rf"{_SCHEME}((?:[0-9a-f]{{2}})+)@(.+):(\d+)", session_id)
        if found is None:
            raise InvalidArgument(
                f"session id {session_id!r} is not fabric-ray's; attach a FabricWorker of "
                "fabric_ray.integrations.sglang in each of the engine's processes"
            )
        self._secret, self._at = bytes.fromhex(found[1]), (found[2], int(found[3]))

    def ask(self, function: Function, args: tuple[Any, ...], timeout: float) -> Any:
        """Calls ``function`` there; returns its result, or a :class:`CallFailure`."""
        request = msgspec.msgpack.encode((function.__name__, args))
        try:
            # A worker's own timeout error should arrive first.
            answer = rpc.call(*self._at, request, key=self._secret, timeout=timeout + 5.0)
        except TransferTimeout:
            return CallFailure(f"it did not answer within {timeout:g} s; see whether it is stuck")
        except HandshakeError:
            return CallFailure(
                "its process can't be reached: it hung up, or has another secret than its session "
                "id; see whether it has ended or restarted"
            )
        except FabricError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                return CallFailure("its process has ended", DIED)
            return CallFailure(f"its process can't be reached: {error}")
        done, result = from_msgpack(answer, tuple[bool, msgspec.Raw])
        if not done:
            return CallFailure(*from_msgpack(result, tuple[str, str]))
        return from_msgpack(result, result_type(function))
