"""NIXL's ``nixl_agent`` over one engine, with the calls and results of NIXL's Python layer."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from fabric_ray.compat.addresses import Op, Registered, add_copies
from fabric_ray.compat.inbox import MOST, MOST_BYTES, Inbox
from fabric_ray.compat.nixl import exchange
from fabric_ray.compat.nixl.descriptors import (
    DescriptorList,
    descriptors_from_bytes,
    nixlRegDList,
    nixlXferDList,
)
from fabric_ray.compat.nixl.metadata import Memory, Metadata, Remote
from fabric_ray.compat.nixl.prepared import Prepared
from fabric_ray.compat.nixl.request import Request, nixlXferTelemetry
from fabric_ray.compat.nixl.status import (
    DEFAULT_COMM_PORT,
    as_nixl,
    nixl_mem_t,
    nixl_thread_sync_t,
    nixl_xfer_op_t,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotSupportedError,
)
from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import Batch, Message, Region, RemoteRegion, TransferEngine
from fabric_ray.errors import FabricError, InvalidArgument, NotQuiesced
from fabric_ray.tensors import check_memory

_log = logging.getLogger("nixl.fabric_ray")

PLUGINS = ("UCX", "LIBFABRIC", "FABRIC")
"""Names of backends that callers of NIXL ask for; all are this engine."""
_PARAMETERS = {"device_list": ""}
_MEMORY = ["DRAM_SEG", "VRAM_SEG"]
_QUIESCE_S = 10.0
_LONGEST_NOTIFICATION = 65536 - 1024

nixl_backend_handle = int
L = TypeVar("L", bound=DescriptorList)
T = TypeVar("T")


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


class nixl_prepped_dlist_handle:
    """A prepared list of descriptors."""

    def __init__(self, side: Prepared[Any]) -> None:
        self._side: Prepared[Any] | None = side

    def release(self) -> None:
        """Transfers that were made of it are not affected."""
        self._side = None


class nixl_xfer_handle:
    """A transfer."""

    def __init__(self, agent: nixl_agent, request: Request) -> None:
        self._agent, self._made, self._released = agent, request, False
        self._releasing = threading.Lock()

    @property
    def _request(self) -> Request:
        if self._released:
            raise nixlInvalidParamError("the transfer was released; make another")
        return self._made

    def release(self) -> None:
        """See :meth:`nixl_agent.release_xfer_handle`. Any thread may call it more than once."""
        with self._releasing:
            if not self._released:
                self._made.cancel()
                self._released = True

    def __del__(self) -> None:
        # The garbage collector may run while this thread holds a lock of the request: cancel
        # without one, and leave waiting for it to the agent's next call.
        if not self._released:
            self._made.give_up()
            self._agent._dropped.append(self._made)


class _Notification(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    message: bytes


class nixl_agent:
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
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, nixl_backend_handle] = {}
        self.plugin_list = list(PLUGINS)
        self.nixl_mems = {kind.name.removesuffix("_SEG"): kind for kind in nixl_mem_t}
        self.nixl_mems |= {"BLOCK": nixl_mem_t.BLK_SEG}
        self.nixl_mems |= {"cpu": nixl_mem_t.DRAM_SEG, "cuda": nixl_mem_t.VRAM_SEG}
        self.nixl_ops = {"WRITE": nixl_xfer_op_t.NIXL_WRITE, "READ": nixl_xfer_op_t.NIXL_READ}
        self._engine_or_none: TransferEngine | None = None
        self._registered = Registered()
        self._remotes: dict[str, Remote] = {}
        self._inbox = Inbox[tuple[str, bytes]](_log)
        self._dropped: deque[Request] = deque()
        self._may_land: list[Request] = []
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._notifs_lock = threading.RLock()
        if config.enable_listen:
            exchange.listen(self, config.port)
        for backend in PLUGINS if instantiate_all and nixl_conf is None else config.backends:
            if self._is_plugin(backend):
                self.create_backend(backend)

    # backends

    def get_plugin_list(self) -> list[str]:
        """Backends that there are."""
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """The kinds of memory that a backend takes; none for an unknown backend."""
        return list(_MEMORY) if self._is_plugin(backend) else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """The parameters that a backend takes; none for an unknown backend."""
        return dict(_PARAMETERS) if self._is_plugin(backend) else {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """As :meth:`get_plugin_mem_types`, of a backend that was created."""
        return list(_MEMORY) if backend in self.backends else []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """As :meth:`get_plugin_params`, of a backend that was created."""
        return dict(_PARAMETERS) if backend in self.backends else {}

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        """Opens the engine, if it is the first.

        Args:
            initParams: ``device_list`` names NICs; others are for NIXL's own backends.

        Raises:
            nixlNotFoundError: there is no such backend.
            nixlInvalidParamError: it was created before.
            NixlError: the engine can't be opened; the message says why.
        """
        given = initParams or {}
        if backend not in PLUGINS:
            raise nixlNotFoundError(f"there is no backend {backend!r} here; there are {PLUGINS}")
        if unused := sorted(given.keys() - _PARAMETERS.keys()):
            _log.info("parameters of %s that have no effect here: %s", backend, ", ".join(unused))
        with self._lock:
            if backend in self.backends:
                raise nixlInvalidParamError(f"backend {backend} was created before; use it")
            if self._engine_or_none is None:
                self._engine_or_none = _engine(self, given.get("device_list", ""))
            self.backends[backend] = next(self._numbers)

    def make_connection(self, remote_agent: str, backends: Sequence[str] = ()) -> None:
        """Begins to connect, so that the first transfer doesn't have to."""
        remote = self._remote(remote_agent)
        _translated(lambda: self._engine.connect(remote.peer))

    # memory

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixlRegDList | None:
        """Registers all of these tensors, tuples or descriptors, or none; the caller keeps the
        memory until it is deregistered.

        Raises:
            nixlNotSupportedError: neither DRAM nor VRAM.
        """
        descs = self.get_reg_descs(reg_list, mem_type)
        if descs is None:
            return None
        _check_memory(descs)
        self._release_dropped()
        engine, done = self._engine, list[tuple[int, Region]]()
        for first, nbytes, _ in descs.rows().tolist():
            try:
                done.append((first, engine.register_address(first, nbytes)))
            except FabricError as error:
                for _, region in done:
                    region.deregister(_QUIESCE_S)  # No peer knows it yet.
                raise as_nixl(error) from error
        for first, region in done:
            self._registered.add(first, region)
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: Sequence[str] = ()) -> None:
        """Returns when no peer can reach the memory any more.

        Raises:
            nixlNotFoundError: something was not registered; the rest is deregistered.
            nixlBackendError: a peer may still write to it; keep it, and try again.
        """
        self._release_dropped()
        failed: FabricError | None = None
        for first, nbytes, _ in dereg_list.rows().tolist():
            region = self._registered.take(first, nbytes)
            if region is None:
                failed = nixlNotFoundError(f"{nbytes} bytes at {first:#x} were not registered")
                continue
            try:
                region.deregister(_QUIESCE_S)
            except NotQuiesced as error:
                self._registered.add(first, region)
                failed = error
        if failed is not None:
            raise as_nixl(failed)

    # descriptors

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList | None:
        """A list of what is given: (address, bytes, device) as tuples or an Nx3 array, with the
        kind of memory; a contiguous tensor, or several of one device. ``None`` for anything else.
        """
        return self._listed(nixlXferDList, descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList | None:
        """As :meth:`get_xfer_descs`; tuples have a label as well."""
        return self._listed(nixlRegDList, descs, mem_type)

    def get_serialized_descs(self, descs: DescriptorList) -> bytes:
        """The encoded form; nothing is pickled."""
        return descs.to_bytes()

    def deserialize_descs(self, serialized_descs: bytes) -> DescriptorList:
        """
        Raises:
            nixlMismatchError: anything but what :meth:`get_serialized_descs` makes.
        """
        return descriptors_from_bytes(serialized_descs)

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
        self._release_dropped()
        owner = None if agent_name in ("", "NIXL_INIT_AGENT") else agent_name
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("an array of descriptors needs a mem_type")
            return nixl_prepped_dlist_handle(self._side(owner, xfer_list))
        descs = self.get_xfer_descs(xfer_list, mem_type)
        if descs is None:
            raise TypeError("no list of descriptors can be made of that")
        _check_memory(descs)
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
            _check_memory(descs)
        local = self._side(None, local_descs.rows())
        remote = self._side(remote_agent, remote_descs.rows())
        return self._new(op, (local, None), (remote, None), notif_msg, backends)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes = b"") -> str:
        """Begins it: ``DONE`` or ``PROC``.

        Raises:
            nixlRepostActiveError: it is under way.
        """
        return "DONE" if handle._request.post(_checked(notif_msg)) else "PROC"

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """``DONE`` when the bytes are in memory and the other engine has the notification, else
        ``PROC``.

        Raises:
            nixlRemoteDisconnectError: the other agent was lost.
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
        """Cancels it if it is under way; returns when nothing of it can land any more.

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
        return self._add_notifs({})

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """What has come and was not found by :meth:`check_remote_xfer_done`. So much of it is kept
        (65,536, and 64 MiB); more waits, and is dropped when as much waits again."""
        with self._notifs_lock:
            kept = [len(message) for messages in self.notifs.values() for message in messages]
            if len(kept) < MOST and sum(kept) < MOST_BYTES:
                self._add_notifs(self.notifs)
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
        transfer = self._notifier(_text(remote_agent_name))(_checked(notif_msg))
        if transfer is not None:
            _translated(transfer.wait)

    # metadata

    def get_agent_metadata(self) -> bytes:
        """What others need to reach all that is registered now."""
        _, regions = self._registered.listed()
        return self._metadata([_described(first, region) for first, region in regions], whole=True)

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """What others need to reach these parts, and this agent if ``inc_conn_info``.

        Raises:
            nixlNotFoundError: memory that is not registered.
        """
        memory = list[Memory]()
        for first, nbytes, _ in descs.rows().tolist():
            side = self._side(None, np.array([[first, nbytes, 0]], dtype=np.int64))
            places, _ = side.take()
            region = side.space.regions[int(places.region[0])]
            memory.append(_described(first, region.slice(int(places.offset[0]), nbytes)))
        return self._metadata(memory, address=inc_conn_info, whole=False)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Learns of another agent, or more of it; returns its name.

        Raises:
            nixlMismatchError: not metadata of an agent of fabric-ray.
        """
        found = Metadata.from_bytes(metadata)
        with self._lock:
            known = self._remotes.get(found.name)
            self._remotes[found.name] = Remote.loaded(self._engine, found, known)
        return found.name.encode()

    def remove_remote_agent(self, agent: str) -> None:
        """Forgets it.

        Raises:
            nixlNotFoundError: it wasn't added.
        """
        with self._lock:
            if self._remotes.pop(_text(agent), None) is None:
                raise nixlNotFoundError(f"agent {_text(agent)!r} was not added")

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Tells the agent that listens there of this one.

        Raises:
            nixlNotSupportedError: without an address; there is no central server.
            nixlRemoteDisconnectError: no agent listens there.
        """
        exchange.run(exchange.Errand("load", self.name, self.get_agent_metadata()), ip_addr, port)

    def send_partial_agent_metadata(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """As :meth:`send_local_metadata`, of parts."""
        part = self.get_partial_agent_metadata(descs, inc_conn_info)
        exchange.run(exchange.Errand("load", self.name, part), ip_addr, port)

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Learns of the agent that listens there; it is known when this returns."""
        errand = exchange.Errand("tell", _text(remote_agent))
        self.add_remote_agent(exchange.run(errand, ip_addr, port))

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Has the agent that listens there forget this one."""
        exchange.run(exchange.Errand("forget", self.name), ip_addr, port)

    def check_remote_metadata(self, agent: str, descs: nixlXferDList | None = None) -> bool:
        """Whether an agent is known, and all of these descriptors of it."""
        rows = np.zeros((0, 3), dtype=np.uint64) if descs is None else descs.rows()
        try:
            self._side(_text(agent), rows)
        except nixlNotFoundError:
            return False
        return True

    def _attend(self, errand: exchange.Errand) -> bytes:
        """Answers another agent, over the port that this one listens at."""
        if errand.what == "load":
            self.add_remote_agent(errand.metadata)
        elif errand.what == "forget":
            with self._lock:
                self._remotes.pop(errand.agent, None)
        elif errand.what == "tell" and errand.agent == self.name:
            return self.get_agent_metadata()
        else:
            raise InvalidArgument(f"this is agent {self.name!r}, not {errand.agent!r}")
        return b""

    @property
    def _engine(self) -> TransferEngine:
        if self._engine_or_none is None:
            raise nixlInvalidParamError("the agent has no backend; call create_backend() first")
        return self._engine_or_none

    def _is_plugin(self, backend: str) -> bool:
        if backend not in PLUGINS:
            _log.warning("there is no backend %s here; there are %s", backend, ", ".join(PLUGINS))
        return backend in PLUGINS

    def _remote(self, name: str | bytes) -> Remote:
        with self._lock:
            found = self._remotes.get(_text(name))
        if found is None:
            raise nixlNotFoundError(f"agent {_text(name)!r} was not added; load its metadata first")
        return found

    def _side(self, agent: str | bytes | None, rows: Any) -> Prepared[Any]:
        if agent is None:
            return Prepared(None, self._registered.space, rows)
        name = _text(agent)
        if name != self.name:
            return Prepared(name, self._remote(name).space, rows)
        # Its own memory, as others see it.
        mirrored = Remote.loaded(self._engine, Metadata.from_bytes(self.get_agent_metadata()), None)
        return Prepared(name, mirrored.space, rows)

    def _new(
        self,
        op: nixl_xfer_op_t,
        local: tuple[Prepared[Region], Sequence[int] | None],
        remote: tuple[Prepared[RemoteRegion], Sequence[int] | None],
        message: bytes,
        backends: Sequence[str],
    ) -> nixl_xfer_handle:
        self._release_dropped()
        here, nbytes = local[0].take(local[1])
        there, lengths = remote[0].take(remote[1])
        if not len(nbytes) or not np.array_equal(nbytes, lengths):
            raise nixlInvalidParamError(
                f"{len(nbytes)} local and {len(lengths)} remote descriptors don't fit: as many, of "
                "the same lengths, and one at least are needed"
            )
        engine = self._engine
        with self._lock:
            backend = backends[0] if backends else next(iter(self.backends))
            self.backends[backend]
        batch = Batch()
        sides = (local[0].space.regions, here), (remote[0].space.regions, there)
        word: Op = "write" if op is nixl_xfer_op_t.NIXL_WRITE else "read"
        _translated(lambda: add_copies(batch, word, *sides, nbytes))
        size = (int(nbytes.sum()), len(nbytes))
        notify = self._notifier(remote[0].owner or "")
        request = Request(engine, batch, size, notify, _checked(message), backend)
        return nixl_xfer_handle(self, request)

    def _release_dropped(self) -> None:
        """Waits for transfers whose handles were dropped without a release."""
        while self._dropped:
            try:
                request = self._dropped.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                request.cancel()
            except nixlBackendError:
                self._may_land.append(request)  # stays until the agent is closed

    def _add_notifs(self, found: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
        self._release_dropped()
        for agent, message in self._inbox.take():
            found.setdefault(agent, []).append(message)
        return found

    def _notifier(self, agent: str) -> Callable[[bytes], Any]:
        engine, me = self._engine, self.name
        if agent == me:
            return lambda message: self._keep(me, message)
        peer = self._remote(agent).peer
        return lambda message: engine.send(peer, msgspec.msgpack.encode(_Notification(me, message)))

    def _keep(self, agent: str, message: bytes) -> None:
        self._inbox.add((agent, message), len(agent) + len(message))

    def _on_message(self, message: Message) -> None:
        try:
            said = from_msgpack(message.data, _Notification)
        except msgspec.MsgspecError as error:
            _log.warning("a notification was dropped: %s", error)
            return
        with self._lock:
            known = self._remotes.get(said.agent)
        if said.agent == self.name or (known is not None and known.peer.id != message.sender):
            _log.warning("a notification was dropped: its sender is not agent %r", said.agent)
            return
        self._keep(said.agent, said.message)

    def _metadata(self, memory: list[Memory], *, whole: bool, address: bool = True) -> bytes:
        own = self._engine.address.to_bytes() if address else b""
        return Metadata.of(self.name, own, whole, memory).to_bytes()

    def _listed(self, kind: type[L], descs: Any, mem_type: str | None) -> L | None:
        if isinstance(descs, kind):
            return descs
        if isinstance(descs, DescriptorList):
            _log.error("a %s is wanted, not a %s", kind.kind, descs.kind)
            return None
        if hasattr(descs, "data_ptr"):
            descs = [descs]
        if len(descs) and hasattr(descs[0], "data_ptr"):
            return _of_tensors(kind, descs)
        if mem_type is None:
            _log.error("descriptors that aren't tensors need a mem_type")
            return None
        memory = self.nixl_mems[mem_type]
        wanted = 3 + kind.labelled
        if not isinstance(descs, np.ndarray) and any(
            not isinstance(desc, tuple) or len(desc) != wanted for desc in descs
        ):
            _log.error("descriptors of %s are tuples of %d", kind.kind, wanted)
            return None
        return kind(memory, descs)


def _of_tensors(kind: type[L], tensors: Sequence[Any]) -> L | None:
    device = tensors[0].device
    if any(tensor.device != device or not tensor.is_contiguous() for tensor in tensors):
        _log.error("tensors must be contiguous and on one device")
        return None
    try:
        for tensor in tensors:
            check_memory("a tensor", tensor)
    except InvalidArgument as error:
        _log.error("%s", error)
        return None
    memory = nixl_mem_t.DRAM_SEG if device.type == "cpu" else nixl_mem_t.VRAM_SEG
    number = max(0, tensors[0].get_device())
    rows = [(t.data_ptr(), t.numel() * t.element_size(), number) for t in tensors]
    return kind(memory, np.array(rows, dtype=np.uint64))


def _engine(agent: nixl_agent, devices: str) -> TransferEngine:
    names = (name.strip().partition(":")[0] for name in devices.split(","))
    nics = tuple(name for name in names if name)
    given: dict[str, Any] = {"name": agent.name[:128]} | ({"nics": nics} if nics else {})
    engine = _translated(lambda: TransferEngine(**given))
    me = weakref.ref(agent)

    def on_message(message: Message) -> None:
        if (alive := me()) is not None:
            alive._on_message(message)

    engine.receive(on_message)
    weakref.finalize(agent, engine.close)
    return engine


def _described(first: int, region: Region) -> Memory:
    return Memory(first, region.nbytes, region.descriptor().to_bytes())


def _check_memory(descs: DescriptorList) -> None:
    if descs.getType() not in (nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG):
        raise nixlNotSupportedError(
            f"{descs.getType().name} can't be registered here; only DRAM and VRAM can"
        )


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _checked(message: str | bytes) -> bytes:
    data = message if isinstance(message, bytes) else message.encode()
    if len(data) > _LONGEST_NOTIFICATION:
        raise nixlInvalidParamError(
            f"a notification of {len(data)} bytes is too long; {_LONGEST_NOTIFICATION} are the most"
        )
    return data


def _translated(call: Callable[[], T]) -> T:
    """What an engine's call returns; its errors as NIXL's."""
    try:
        return call()
    except FabricError as error:
        raise as_nixl(error) from error


__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
