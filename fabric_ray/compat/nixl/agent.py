"""NIXL's ``nixl_agent`` over one engine, with the calls and results of NIXL's Python layer."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from fabric_ray.compat.addresses import Op
from fabric_ray.compat.inbox import MOST, MOST_BYTES
from fabric_ray.compat.nixl import exchange
from fabric_ray.compat.nixl.agent_memory import (
    PLUGINS,
    AgentMemory,
    as_text,
    is_plugin,
    nixl_backend_handle,
)
from fabric_ray.compat.nixl.descriptors import check_supported, nixlXferDList
from fabric_ray.compat.nixl.notifications import encoded
from fabric_ray.compat.nixl.prepared import Indices, Prepared, copies, nixl_prepped_dlist_handle
from fabric_ray.compat.nixl.request import Request, nixl_xfer_handle, nixlXferTelemetry
from fabric_ray.compat.nixl.status import (
    DEFAULT_COMM_PORT,
    as_nixl_errors,
    nixl_thread_sync_t,
    nixl_xfer_op_t,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotSupportedError,
)
from fabric_ray.engine import Region, RemoteRegion


class nixl_agent_config:
    """How an agent is opened. ``enable_prog_thread``, ``num_threads`` and ``sync_mode`` have no
    effect: the engine has threads of its own, and any thread may use an agent.

    Args:
        enable_listen_thread: other agents may send and fetch metadata at ``listen_port``.
        capture_telemetry: for :meth:`nixl_agent.get_xfer_telemetry`, unless
            ``NIXL_TELEMETRY_ENABLE`` says otherwise.
        backends: any of :meth:`nixl_agent.get_plugin_list`; all are one engine, which is configured
            by ``FABRIC_RAY_*``.
    """

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t, got {sync_mode!r}")
        self.backends = list(backends)
        self.enable_pthread, self.enable_listen = enable_prog_thread, enable_listen_thread
        self.port, self.capture_telemetry = listen_port, capture_telemetry
        self.num_threads, self.sync_mode = num_threads, sync_mode


class nixl_agent(AgentMemory):
    """An agent: registers memory, learns of others, reads and writes theirs.

    The first backend that is created opens its engine. Any thread may use it.

    Args:
        agent_name: what others call it by.
        instantiate_all: all backends, where no config is given.

    Raises:
        ValueError: ``agent_name`` is empty.
        nixlBackendError: the port to listen at is taken.
    """

    def __init__(
        self,
        agent_name: str,
        nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
    ) -> None:
        if not agent_name:
            raise ValueError("an agent needs a name that others can call it by")
        config = nixl_conf or nixl_agent_config()
        telemetry = os.environ.get("NIXL_TELEMETRY_ENABLE", "").lower()
        self._telemetry = telemetry in ("y", "yes", "on", "1", "true") or (
            config.capture_telemetry and not telemetry
        )
        super().__init__(agent_name)
        self.notifs: dict[str, list[bytes]] = {}
        self.nixl_ops = {"WRITE": nixl_xfer_op_t.NIXL_WRITE, "READ": nixl_xfer_op_t.NIXL_READ}
        self._notifs_lock = threading.RLock()
        if config.enable_listen:
            exchange.listen(self, config.port)
        for backend in PLUGINS if instantiate_all and nixl_conf is None else config.backends:
            if is_plugin(backend):
                self.create_backend(backend)

    # transfers

    def prep_xfer_dlist(
        self,
        agent_name: str,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> nixl_prepped_dlist_handle:
        """Prepares one side of transfers.

        Args:
            agent_name: whose memory it is; empty or ``NIXL_INIT_AGENT`` for the side that posts.
            xfer_list: what :meth:`get_xfer_descs` takes, or an Nx5 array of (address, bytes,
                device, stride, count).

        Raises:
            nixlNotFoundError: an agent that wasn't added, or memory that it hasn't registered.
        """
        self._dropped.release()
        owner = None if agent_name in ("", "NIXL_INIT_AGENT") else agent_name
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("an array of descriptors needs a mem_type")
            return nixl_prepped_dlist_handle(self._side(owner, xfer_list))
        descs = self.get_xfer_descs(xfer_list, mem_type)
        if descs is None:
            raise TypeError("no list of descriptors can be made of that")
        check_supported(descs)
        return nixl_prepped_dlist_handle(self._side(owner, descs.rows()))

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """A transfer of descriptors of two prepared sides: ``READ`` or ``WRITE``, seen from here.

        ``notif_msg`` reaches the other agent after the bytes.

        Raises:
            nixlInvalidParamError: lists that don't fit one another, or a side that isn't one.
        """
        op = self.nixl_ops[operation]
        local, remote = local_xfer_side._side, remote_xfer_side._side
        if local is None or local.owner is not None:
            raise nixlInvalidParamError("the local side was not prepared as one")
        if remote is None or remote.owner is None:
            raise nixlInvalidParamError("the remote side was not prepared for an agent")
        return self._new(op, (local, local_indices), (remote, remote_indices), notif_msg, backends)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        """As :meth:`make_prepped_xfer`, of two whole lists.

        Raises:
            nixlNotFoundError: an agent that wasn't added, or memory that is not registered.
            nixlInvalidParamError: lists that don't fit one another.
        """
        op = self.nixl_ops[operation]
        for descs in (local_descs, remote_descs):
            check_supported(descs)
        local = self._side(None, local_descs.rows())
        remote = self._side(remote_agent, remote_descs.rows())
        return self._new(op, (local, None), (remote, None), notif_msg, backends)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes = b"") -> str:
        """Begins it: ``DONE`` or ``PROC``.

        Raises:
            nixlRepostActiveError: it is under way.
            nixlRemoteDisconnectError: the other agent was lost, and is forgotten.
        """
        return "DONE" if handle._request.post(encoded(notif_msg)) else "PROC"

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """``DONE`` when the bytes are in memory and the other engine has the notification, else
        ``PROC``.

        Raises:
            nixlRemoteDisconnectError: the other agent was lost, and is forgotten: add it again.
            NixlError: what else it failed with.
        """
        return "DONE" if handle._request.check() else "PROC"

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        """Times in microseconds, bytes, descriptors.

        Raises:
            nixlNoTelemetryError: telemetry is off.
        """
        if not self._telemetry:
            raise nixlNoTelemetryError(
                "telemetry is off; set capture_telemetry or NIXL_TELEMETRY_ENABLE=y"
            )
        return handle._request.telemetry()

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """The name of its backend."""
        return handle._request.backend

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Cancels it if it is under way; returns when it touches no memory of this process.

        Raises:
            nixlBackendError: that can't be shown; keep its buffers.
        """
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Transfers that were made of it are not affected."""
        handle.release()

    # what NIXL has for storage and for kernels

    def _unsupported(self, *args: Any, **named: Any) -> Any:
        """
        Raises:
            nixlNotSupportedError: always.
        """
        raise nixlNotSupportedError(
            "files and objects, cost estimates and memory views for kernels aren't supported; use "
            "NIXL's own agent for them"
        )

    query_memory = estimate_xfer_cost = _unsupported
    get_remote_descs = prep_mem_view = release_mem_view = _unsupported

    # notifications

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """What has come since the last call, by agent."""
        return self._move_notifs({})

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """What has come and was not found by :meth:`check_remote_xfer_done`. So much of it is kept
        (65,536, and 64 MiB); more waits, and is dropped when as much waits again."""
        with self._notifs_lock:
            kept = [len(message) for messages in self.notifs.values() for message in messages]
            if len(kept) < MOST and sum(kept) < MOST_BYTES:
                self._move_notifs(self.notifs)
            return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Whether that agent has sent a notification with this beginning, or with this in it; takes
        it away."""
        with self._notifs_lock:
            messages = self.update_notifs(backends).get(remote_agent_name, [])
            for message in messages:
                if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                    messages.remove(message)
                    if not messages:  # Names are the peers' choice: none is kept for nothing.
                        self.notifs.pop(remote_agent_name, None)
                    return True
            return False

    def send_notif(
        self, remote_agent_name: str, notif_msg: bytes, backend: str | None = None
    ) -> None:
        """Returns when the other process has it; its agent finds it a moment later."""
        notify = self._notifications.notifier(self._engine, as_text(remote_agent_name))
        with as_nixl_errors():
            transfer = notify(encoded(notif_msg))
            if transfer is not None:
                transfer.wait()

    def _new(
        self,
        operation: nixl_xfer_op_t,
        local: tuple[Prepared[Region], Indices],
        remote: tuple[Prepared[RemoteRegion], Indices],
        message: bytes,
        backends: Sequence[str],
    ) -> nixl_xfer_handle:
        self._dropped.release()
        op: Op = "write" if operation is nixl_xfer_op_t.NIXL_WRITE else "read"
        batch = copies(op, local, remote)
        with self._lock:
            backend = backends[0] if backends else next(iter(self.backends))
            self.backends[backend]
        owner, lost = remote[0].owner or "", remote[0].remote
        request = Request(
            self._engine,
            op,
            batch,
            self._notifications.notifier(self._engine, owner),
            encoded(message),
            backend,
            None if lost is None else partial(self._remotes.forget_lost, owner, lost),
        )
        return nixl_xfer_handle(self, request)

    def _move_notifs(self, found: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
        self._dropped.release()
        self._notifications.move_to(found)
        return found


__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
