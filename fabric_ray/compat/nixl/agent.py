"""NIXL's ``nixl_agent`` and what goes with it, with the calls and results that it has there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from fabric_ray.compat.inbox import MOST, MOST_BYTES
from fabric_ray.compat.nixl import bindings
from fabric_ray.compat.nixl.config import nixl_agent_config, nixl_thread_sync_t
from fabric_ray.compat.nixl.descriptors import (
    DescriptorList,
    nixlRegDList,
    nixlRemoteDList,
    nixlXferDList,
)
from fabric_ray.compat.nixl.handles import nixl_prepped_dlist_handle, nixl_xfer_handle
from fabric_ray.compat.nixl.request import nixlXferTelemetry
from fabric_ray.compat.nixl.status import (
    DEFAULT_COMM_PORT,
    NixlError,
    nixl_mem_t,
    nixl_status_t,
    nixl_xfer_op_t,
)
from fabric_ray.errors import InvalidArgument
from fabric_ray.tensors import check_memory

_log = logging.getLogger("nixl.fabric_ray")

nixl_backend_handle = int
L = TypeVar("L", bound=DescriptorList)


class nixl_agent:
    """An agent: registers memory, learns of others, reads and writes theirs.

    Args:
        agent_name: what others call it by; not empty.
        instantiate_all: all backends, where no config is given.
    """

    def __init__(
        self,
        agent_name: str,
        nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
    ) -> None:
        config = nixl_conf or nixl_agent_config()
        kinds = nixl_thread_sync_t
        default = kinds.NIXL_THREAD_SYNC_NONE
        if config.enable_listen:
            default = kinds.NIXL_THREAD_SYNC_STRICT
        native = bindings.nixlAgentConfig()
        native.useProgThread, native.useListenThread = config.enable_pthread, config.enable_listen
        native.listenPort = config.port
        native.syncMode = (config.sync_mode or default).value
        native.captureTelemetry = config.capture_telemetry
        self.name = agent_name
        self.agent = bindings.nixlAgent(agent_name, native)
        self.notifs: dict[str, list[bytes]] = {}
        self._notifs_lock = threading.RLock()
        self.backends: dict[str, nixl_backend_handle] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.plugin_list = self.agent.getAvailPlugins()
        self.nixl_mems = {
            "DRAM": nixl_mem_t.DRAM_SEG,
            "VRAM": nixl_mem_t.VRAM_SEG,
            "FILE": nixl_mem_t.FILE_SEG,
            "BLOCK": nixl_mem_t.BLK_SEG,
            "OBJ": nixl_mem_t.OBJ_SEG,
            "cpu": nixl_mem_t.DRAM_SEG,
            "cuda": nixl_mem_t.VRAM_SEG,
        }
        self.nixl_ops = {"WRITE": nixl_xfer_op_t.NIXL_WRITE, "READ": nixl_xfer_op_t.NIXL_READ}
        wanted = self.plugin_list if instantiate_all and nixl_conf is None else config.backends
        for backend in wanted:
            if backend in self.plugin_list:
                self.create_backend(backend)
            else:
                _log.warning("there is no backend %s here; it is left out", backend)

    # backends

    def get_plugin_list(self) -> list[str]:
        """Backends that there are."""
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Of what memory it can be; none for a backend that there isn't."""
        return self._plugin(backend)[1]

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """What it can be told when it is created; nothing for a backend that there isn't."""
        return self._plugin(backend)[0]

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """As :meth:`get_plugin_mem_types`, of one that was created."""
        return self.backend_mems.get(backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """As :meth:`get_plugin_params`, of one that was created."""
        return self.backend_options.get(backend, {})

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        """Opens the engine, if it is the first; see `nixlAgent.createBackend`."""
        handle = self.agent.createBackend(backend, initParams or {})
        self.backends[backend] = handle
        self.backend_options[backend], self.backend_mems[backend] = self.agent.getBackendParams(
            handle
        )

    # memory

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixlRegDList | None:
        """Registers tensors, tuples or a list of descriptors; the caller keeps the memory."""
        descs = self.get_reg_descs(reg_list, mem_type)
        if descs is not None:
            self.agent.registerMem(descs, self._handles(backends))
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: Sequence[str] = ()) -> None:
        """Returns when nobody can reach the memory any more."""
        self.agent.deregisterMem(dereg_list, self._handles(backends))

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """
        Raises:
            nixlNotSupportedError: files and objects are not registered here.
        """
        descs = self.get_reg_descs(reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError(f"there is no backend {backend!r}; there are {list(self.backends)}")
        return self.agent.queryMem(descs or nixlRegDList(nixl_mem_t.DRAM_SEG), 0)

    def make_connection(self, remote_agent: str, backends: Sequence[str] = ()) -> None:
        """Begins to connect, so that the first transfer doesn't have to."""
        self.agent.makeConnection(remote_agent, self._handles(backends))

    # descriptors

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList | None:
        """A list of what is given: (address, bytes, device) as tuples or an Nx3 array, with the
        kind of memory; a contiguous tensor, or several of one device. ``None`` for anything else.
        """
        return self._listed(nixlXferDList, descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList | None:
        """As :meth:`get_xfer_descs`; tuples have a label as well."""
        return self._listed(nixlRegDList, descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlRemoteDList | None:
        """As :meth:`get_reg_descs`, of tuples alone; the label is an agent's name."""
        return self._listed(nixlRemoteDList, descs, mem_type)

    def get_serialized_descs(self, descs: DescriptorList) -> bytes:
        """The encoded form; nothing is pickled."""
        return descs.to_bytes()

    def deserialize_descs(self, serialized_descs: bytes) -> DescriptorList:
        """
        Raises:
            nixlMismatchError: anything but what :meth:`get_serialized_descs` makes.
        """
        return bindings.descriptors_from_bytes(serialized_descs)

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
        """
        handles = self._handles(backends)
        who = () if agent_name in ("", "NIXL_INIT_AGENT") else (agent_name,)
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("an array of descriptors needs a mem_type")
            handle = self.agent.prepXferDlist(*who, self.nixl_mems[mem_type], xfer_list, handles)
        else:
            descs = self.get_xfer_descs(xfer_list, mem_type)
            if descs is None:
                raise TypeError("no list of descriptors can be made of that")
            handle = self.agent.prepXferDlist(*who, descs, handles)
        return nixl_prepped_dlist_handle(self.agent, handle)

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
        """
        op = self.nixl_ops[operation]
        handle = self.agent.makeXferReq(
            op,
            local_xfer_side._handle,
            local_indices,
            remote_xfer_side._handle,
            remote_indices,
            notif_msg,
            self._handles(backends),
            skip_desc_merge,
        )
        return nixl_xfer_handle(self.agent, handle)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        """As :meth:`make_prepped_xfer`, of two whole lists."""
        op = self.nixl_ops[operation]
        handle = self.agent.createXferReq(
            op, local_descs, remote_descs, remote_agent, notif_msg, self._handles(backends)
        )
        return nixl_xfer_handle(self.agent, handle)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes = b"") -> str:
        """Begins it: ``DONE`` or ``PROC``.

        Raises:
            nixlRepostActiveError: it is under way.
        """
        return _word(self.agent.postXferReq(handle._handle, notif_msg))

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """``DONE`` when the bytes are in place and the other engine has the notification, else
        ``PROC``.

        Raises:
            nixlRemoteDisconnectError: the other agent was lost.
            NixlError: what else it failed with.
        """
        return _word(self.agent.getXferStatus(handle._handle))

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        """Times in microseconds, bytes, descriptors.

        Raises:
            nixlNoTelemetryError: telemetry is off.
        """
        return self.agent.getXferTelemetry(handle._handle)

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, int]:
        """
        Raises:
            nixlNotSupportedError: always.
        """
        return self.agent.estimateXferCost(req_handle._handle)

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """The name of its backend."""
        backend = self.agent.queryXferBackend(handle._handle)
        return next(name for name, value in list(self.backends.items()) if value == backend)

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Cancels it if it is under way; returns when nothing of it can land any more.

        Raises:
            nixlBackendError: that can't be shown; keep its buffers.
        """
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Transfers that were made of it are not affected."""
        handle.release()

    def prep_mem_view(self, dlist: DescriptorList, *, backends: Sequence[str] | None = None) -> int:
        """
        Raises:
            nixlNotSupportedError: always.
        """
        return self.agent.prepMemView(dlist, self._handles(backends or ()))

    def release_mem_view(self, mvh: int) -> None:
        """
        Raises:
            nixlNotSupportedError: always.
        """
        self.agent.releaseMemView(mvh)

    # notifications

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """What has come since the last call, by agent."""
        return self.agent.getNotifs({}, self._handles(backends))

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """What has come and was not found by :meth:`check_remote_xfer_done`. So much of it is kept
        (65,536, and 64 MiB); more waits, and is dropped when as much waits again."""
        with self._notifs_lock:
            kept = [len(message) for messages in self.notifs.values() for message in messages]
            if len(kept) < MOST and sum(kept) < MOST_BYTES:
                self.notifs = self.agent.getNotifs(self.notifs, self._handles(backends))
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
        self.agent.genNotif(
            remote_agent_name, notif_msg, self._handles([backend] if backend else [])
        )

    # metadata

    def get_agent_metadata(self) -> bytes:
        """What others need to reach all that is registered now."""
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """What others need to reach these parts, and this agent if ``inc_conn_info``."""
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._handles(backends))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Learns of another agent, or more of it; returns its name.

        Raises:
            nixlMismatchError: not metadata of an agent of fabric-ray.
        """
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: str) -> None:
        """Forgets it.

        Raises:
            nixlNotFoundError: it wasn't added.
        """
        self.agent.invalidateRemoteMD(agent)

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Tells the agent that listens there of this one.

        Raises:
            nixlNotSupportedError: without an address; there is no central server.
            nixlRemoteDisconnectError: nobody listens there.
        """
        self.agent.sendLocalMD(ip_addr, port)

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
        self.agent.sendLocalPartialMD(
            descs, inc_conn_info, self._handles(backends), ip_addr, port, label
        )

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Learns of the agent that listens there; it is known when this returns."""
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Has the agent that listens there forget this one."""
        self.agent.invalidateLocalMD(ip_addr, port)

    def check_remote_metadata(self, agent: str, descs: nixlXferDList | None = None) -> bool:
        """Whether an agent is known, and all of these descriptors of it."""
        wanted = nixlXferDList(nixl_mem_t.DRAM_SEG) if descs is None else descs
        return self.agent.checkRemoteMD(agent, wanted) == nixl_status_t.NIXL_SUCCESS

    def _plugin(self, backend: str) -> tuple[dict[str, str], list[str]]:
        try:
            return self.agent.getPluginParams(backend)
        except NixlError as error:
            _log.warning("%s", error)
            return {}, []

    def _handles(self, backends: Sequence[str]) -> list[int]:
        return [self.backends[name] for name in backends]

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


def _word(status: nixl_status_t) -> str:
    return "DONE" if status == nixl_status_t.NIXL_SUCCESS else "PROC"


__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
