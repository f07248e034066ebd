"""How agents are opened: as NIXL's bindings say it, and as its Python layer does."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from fabric_ray.compat.nixl import status


class nixlAgentConfig:
    """How an agent is opened. What isn't said below has no effect: the engine has threads of its
    own, and an agent may be used from any thread.

    Args:
        useListenThread: whether other agents may send and fetch metadata at ``listenPort``.
        captureTelemetry: unless ``NIXL_TELEMETRY_ENABLE`` says otherwise.
    """

    def __init__(
        self,
        useProgThread: bool = False,
        useListenThread: bool = False,
        listenPort: int = status.DEFAULT_COMM_PORT,
        syncMode: status.nixl_thread_sync_t = status.nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT,
        numWorkers: int = 1,
        pthrDelay: int = 0,
        lthrDelay: int = 100000,
        captureTelemetry: bool = False,
    ) -> None:
        self.useProgThread, self.useListenThread = useProgThread, useListenThread
        self.listenPort, self.syncMode, self.numWorkers = listenPort, syncMode, numWorkers
        self.pthrDelay, self.lthrDelay = pthrDelay, lthrDelay
        self.captureTelemetry = captureTelemetry
        self.etcdWatchTimeout = 0


class nixl_thread_sync_t(Enum):
    """How threads share an agent; here they always may."""

    NIXL_THREAD_SYNC_NONE = status.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = status.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = status.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    NIXL_THREAD_SYNC_DEFAULT = status.nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT


class nixl_agent_config:
    """How an agent is opened.

    Args:
        enable_listen_thread: other agents may send and fetch metadata at ``listen_port``.
        capture_telemetry: for :meth:`nixl_agent.get_xfer_telemetry`.
        backends: any of `nixl_agent.get_plugin_list`; all are one engine, which is configured by
            ``FABRIC_RAY_*``.
        enable_prog_thread: without effect; the engine has threads of its own.
        num_threads: without effect.
        sync_mode: without effect; an agent may be used from any thread.
    """

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = status.DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(
                f"sync_mode must be a nixl_thread_sync_t, not a {type(sync_mode).__name__}"
            )
        self.backends = list(backends)
        self.enable_pthread, self.enable_listen = enable_prog_thread, enable_listen_thread
        self.port, self.capture_telemetry = listen_port, capture_telemetry
        self.num_threads, self.sync_mode = num_threads, sync_mode
