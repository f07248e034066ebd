"""The calls around a weight update of vLLM: pause, discard of cached results, resume.

vLLM's clients have the calls of the update itself. These are on the same server.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any, Protocol

from fabric_ray.errors import InvalidArgument, Unsupported, WeightSyncError

logger = logging.getLogger(__name__)

PAUSES = ("keep", "abort")
_CALLS = (
    "is_paused",
    "pause_generation",
    "reset_prefix_cache",
    "reset_encoder_cache",
    "resume_generation",
)
_RETRY_S = 0.2
# So long a server runs that must admit requests to take their blocks back.
_RUN_S = 0.2


class ServerControl(Protocol):
    """A server's calls around an update; the names are those of ``AsyncLLM``."""

    def is_paused(self) -> bool: ...

    def pause_generation(self, mode: str) -> None: ...

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool: ...

    def reset_encoder_cache(self) -> None: ...

    def resume_generation(self) -> None: ...


class ServerGroup:
    """The servers that a client talks to. A call is made at all of them at once.

    Args:
        controls: of the servers, by the names that errors have.
        timeout: seconds that a server may take for a call.
    """

    resumed_by: str | None = None
    """The program that resumes the servers, whatever came of an update."""

    def __init__(self, controls: Mapping[str, ServerControl], timeout: float) -> None:
        self._controls, self._timeout = dict(controls), timeout
        self.paused_here: Set[str] = frozenset()
        """Servers that an update of this client has paused, and that are not resumed yet."""

    @property
    def names(self) -> Set[str]:
        return self._controls.keys()

    def paused(self) -> set[str]:
        """The servers that are paused."""
        return {server for server, is_paused in self.call("is_paused").items() if is_paused}

    def call(self, name: str, *args: Any, at: Set[str] | None = None) -> dict[str, Any]:
        """Calls a method of :class:`ServerControl`; returns the answers by server.

        Args:
            at: the servers; ``None`` for all.

        Raises:
            WeightSyncError: servers did not answer in time; the message names them.
        """
        calls = {
            server: begin_call(control, name, *args)
            for server, control in self._controls.items()
            if at is None or server in at
        }
        if late := wait_for(calls.values(), self._timeout).not_done:
            stuck = " and ".join(server for server, call in calls.items() if call in late)
            raise WeightSyncError(
                f"{stuck} did not answer {name} within {self._timeout:g} s; see whether it is stuck"
            )
        return {server: call.result() for server, call in calls.items()}


def control_of(client: Any, timeout: float) -> ServerGroup:
    """The servers that a client talks to.

    Args:
        timeout: as for :func:`call_client`.

    Raises:
        InvalidArgument: the client can't pause its servers; the message names the missing calls.
    """
    if isinstance(client, ServerGroup):
        return client
    controls: Sequence[ServerControl]
    missing = [name for name in _CALLS if not callable(getattr(client, name, None))]
    names, seconds = server_names(client), call_seconds(client, timeout)
    if not missing:
        return ServerGroup({" and ".join(names): client}, seconds)
    if isinstance(getattr(client, "base_url", None), str):
        controls = [control_at(client.base_url, getattr(client, "timeout", 300.0))]
    elif isinstance(getattr(client, "handles", None), list):
        controls = [_ActorControl(handle) for handle in client.handles]
    else:
        raise InvalidArgument(
            f"{type(client).__name__} can't pause its servers during an update: got a client "
            f"without {', '.join(missing)}; add these methods, or use HTTPVLLMWeightSyncClient or "
            "RayVLLMWeightSyncClient"
        )
    return ServerGroup(dict(zip(names, controls, strict=True)), seconds)


def control_at(base_url: str, timeout: float) -> ServerControl:
    """The control of a server by its routes.

    Args:
        timeout: seconds that the server may take for a call.
    """
    return _HttpControl(base_url, timeout)


def call_seconds(client: Any, timeout: float) -> float:
    """How long a call of vLLM's client may take: a client over HTTP has its own timeout.

    Args:
        timeout: the trainer's.
    """
    own = getattr(client, "timeout", None)
    return max(timeout, own) if isinstance(own, (int, float)) else timeout


def discard_cached(
    servers: ServerGroup, timeout: float, let_run: Callable[[], object] = lambda: None
) -> None:
    """Discards everything that was computed with the present weights (RS-3). Running requests
    compute their tokens' pages again when they go on.

    Args:
        let_run: called before each further attempt, between which the servers may run.

    Raises:
        WeightSyncError: vLLM still holds blocks after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    # Blocks that a KV connector sends or loads can't be discarded yet.
    while not all(servers.call("reset_prefix_cache", True, True).values()):
        if time.monotonic() >= deadline:
            raise WeightSyncError(
                f"vLLM did not reset its prefix cache: got success=false for {timeout:.3g} s, "
                "expected true; wait until its KV connector has sent and loaded all blocks, and "
                "send again"
            )
        let_run()
        time.sleep(_RETRY_S)
    servers.call("reset_encoder_cache")


class UpdatePause:
    """The pause of servers around a change of weights. Servers that others have paused stay so.

    Args:
        mode: what running requests do: ``keep`` or ``abort``.
        timeout: seconds that vLLM may take to discard what was computed.
    """

    def __init__(self, servers: ServerGroup, mode: str, timeout: float) -> None:
        self._servers, self._mode, self._timeout = servers, mode, timeout
        self._ran: Set[str] = frozenset()

    def begin(self) -> None:
        """Pauses the servers, and discards what was computed with the old weights."""
        servers = self._servers
        paused = servers.paused()
        self._ran |= servers.names - paused
        # An update that failed may have left some paused, with parts of two versions.
        servers.paused_here = servers.paused_here & paused | self._ran
        servers.call("pause_generation", self._mode)
        discard_cached(servers, self._timeout, self._let_loads_end)

    def discard(self) -> None:
        """Discards again: another client may have resumed a server in between."""
        discard_cached(self._servers, self._timeout)

    def end(self) -> None:
        """Resumes the servers, which have all of one version; not those that others have paused:
        their memory may be asleep."""
        servers = self._servers
        servers.call("resume_generation", at=servers.paused_here)
        others = sorted(servers.names - servers.paused_here)
        servers.paused_here = frozenset()
        if others and servers.resumed_by is None:
            logger.warning(
                "%s was paused before the update, and stays paused; POST /resume, or call "
                "resume_generation()",
                " and ".join(others),
            )

    def cancel(self) -> None:
        """Resumes the servers that ran before: they have the old weights."""
        with suppress(Exception):
            self._servers.call("resume_generation", at=self._ran)
            self._servers.paused_here -= self._ran

    def _let_loads_end(self) -> None:
        """A paused vLLM keeps the blocks of requests that wait for a connector's pages; running, it
        admits them, and can take their blocks back."""
        if self._ran:
            self._servers.call("resume_generation", at=self._ran)
            time.sleep(_RUN_S)
            self._servers.call("pause_generation", self._mode, at=self._ran)


def stays_paused(error: Exception, version: int, servers: ServerGroup) -> WeightSyncError:
    """The error of an update after which workers may differ."""
    parts = "workers may hold parts of two versions"
    other = servers.resumed_by
    what = (
        f"{parts}, and {other} resumes vLLM all the same; end the job, or restart the servers"
        if other
        else f"vLLM stays paused, because its {parts}; call send_weights() again, or restart the "
        "server"
    )
    return WeightSyncError(
        f"update {version} failed after tensors were sent: {error}; {what}",
        version=version,
        failed=getattr(error, "failed", {}),
    )


def start_update(client: Any, timeout: float) -> None:
    """Starts an update at all workers. An earlier one may be open at some of them: its trainer has
    died, or another worker has failed. vLLM starts none beside it, so it is finished first; that
    changes no weights.

    Args:
        timeout: as for :func:`call_client`.

    Raises:
        WeightSyncError: as for :func:`call_client`.
    """
    call = begin_call(client, "start_weight_update")
    try:
        end_call(call, client, timeout, "start_weight_update")
    except Exception:
        if not call.done():
            raise  # a stuck worker answers no further call
        with suppress(Exception):  # of workers that have none open
            call_client(client, timeout, "finish_weight_update")
        call_client(client, timeout, "start_weight_update")


def call_client(client: Any, timeout: float, name: str, *args: Any) -> Any:
    """Makes a call of vLLM's client, which may wait for its servers without a limit of its own.

    Args:
        timeout: the trainer's; see :func:`call_seconds`.
        name: of the client's method.

    Raises:
        WeightSyncError: the servers did not end the call in time; the message names both. Or one
            answered with an error; the message has what it said.
    """
    return end_call(begin_call(client, name, *args), client, timeout, name)


def begin_call(client: Any, name: str, *args: Any) -> Future[Any]:
    """Begins a call of vLLM's client, on a thread of its own. A call that never ends does not keep
    the process from ending."""
    call: Future[Any] = Future()
    # No closure, which would be a cycle with the error that the call ends with.
    threading.Thread(
        target=_run, args=(call, getattr(client, name), args), name=f"fabric-{name}", daemon=True
    ).start()
    return call


def end_call(call: Future[Any], client: Any, timeout: float, name: str) -> Any:
    """The result of a call that was begun; arguments and errors as for :func:`call_client`."""
    seconds = call_seconds(client, timeout)
    if not wait_for([call], seconds).done:
        raise WeightSyncError(
            f"{' and '.join(server_names(client))} did not end {name} within {seconds:g} s; see "
            "whether a worker is stuck there, or raise the timeout"
        )
    return call.result()


def version_fields(client: Any, weight_version: str | None) -> dict[str, str]:
    """What vLLM is told of an update that has a version of the user's: one field or none.

    Raises:
        InvalidArgument: vLLM can't take the version, or the client does not.
    """
    if weight_version is None:
        return {}
    if not isinstance(weight_version, str) or not weight_version:
        raise InvalidArgument(
            f"weight_version: got {weight_version!r}, expected a str that is not empty, such as "
            "'step 12'"
        )
    try:
        inspect.signature(client.finish_weight_update).bind(weight_version)
    except TypeError as error:
        raise InvalidArgument(
            f"{type(client).__name__}.finish_weight_update takes no weight_version, got "
            f"{weight_version!r}; add the parameter to the client, or leave weight_version out"
        ) from error
    return {"weight_version": weight_version}


def server_names(client: Any) -> list[str]:
    """The servers of a client, as errors name them."""
    if isinstance(client, ServerGroup):
        return list(client.names)
    if isinstance(handles := getattr(client, "handles", None), list):
        return [f"server {number}" for number in range(len(handles))]
    url = getattr(client, "base_url", None)
    return [url if isinstance(url, str) else "vLLM"]


def _run(call: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        call.set_result(_explained(function, *args))
    except BaseException as error:
        call.set_exception(error)
    finally:
        del call


def _explained(call: Callable[..., Any], *args: Any) -> Any:
    """Makes a call of vLLM's client.

    Raises:
        WeightSyncError: the server answered with an error; the message has what it said.
    """
    try:
        return call(*args)
    except Exception as error:
        response = getattr(error, "response", None)
        if response is None:
            raise
        raise WeightSyncError(
            f"{response.url} answered {response.status_code}: {response.text[:500]}"
        ) from error


class _HttpControl:
    """A server's routes, which it has in development mode only."""

    def __init__(self, base_url: str, timeout: float) -> None:
        self._base_url = base_url
        self._timeout = timeout

    def is_paused(self) -> bool:
        return bool(self._call("GET", "is_paused").json()["is_paused"])

    def pause_generation(self, mode: str) -> None:
        self._call("POST", "pause", mode=mode, clear_cache="false")

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        answer = self._call(
            "POST",
            "reset_prefix_cache",
            reset_running_requests=str(reset_running_requests).lower(),
            reset_external=str(reset_connector).lower(),
            may_fail=True,
        )
        # vLLM fails where it asks for patience: requests hold blocks that a connector loads.
        return answer.ok and bool(answer.json()["success"])

    def reset_encoder_cache(self) -> None:
        self._call("POST", "reset_encoder_cache")

    def resume_generation(self) -> None:
        self._call("POST", "resume")

    def _call(self, method: str, route: str, *, may_fail: bool = False, **query: str) -> Any:
        import requests

        url = f"{self._base_url}/{route}"
        try:
            answer = requests.request(method, url, params=query, timeout=self._timeout)
        except requests.RequestException as error:
            raise WeightSyncError(
                f"{method} {url} got no answer: {error}; see whether the server runs"
            ) from error
        if answer.status_code == 404:
            raise Unsupported(
                f"{method} {url} answered 404: the server has no routes for weight updates; start "
                "it with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        if not answer.ok and not (may_fail and answer.status_code == 500):
            raise WeightSyncError(
                f"{method} {url} answered {answer.status_code}: {answer.text[:500]}"
            )
        return answer


class _ActorControl:
    """``AsyncLLM`` in a Ray actor."""

    def __init__(self, handle: Any) -> None:
        missing = [name for name in _CALLS if not hasattr(handle, name)]
        if missing:
            raise InvalidArgument(
                f"{handle} can't pause during an update: got an actor without "
                f"{', '.join(missing)}; make it of vllm.v1.engine.async_llm.AsyncLLM"
            )
        self._handle = handle

    def is_paused(self) -> bool:
        return bool(self._call("is_paused"))

    def pause_generation(self, mode: str) -> None:
        self._call("pause_generation", mode=mode, clear_cache=False)

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        import ray

        try:
            return bool(self._call("reset_prefix_cache", reset_running_requests, reset_connector))
        except ray.exceptions.RayTaskError:  # the same as over HTTP
            return False

    def reset_encoder_cache(self) -> None:
        self._call("reset_encoder_cache")

    def resume_generation(self) -> None:
        self._call("resume_generation")

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        import ray

        return ray.get(getattr(self._handle, name).remote(*args, **options))
