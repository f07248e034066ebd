"""An agent's engine and memory, and the agents that it knows: backends, registration, lists of
descriptors, metadata."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from fabric_ray.compat.addresses import Registered
from fabric_ray.compat.nixl import exchange
from fabric_ray.compat.nixl.descriptors import (
    DescriptorList,
    check_supported,
    descriptors_from_bytes,
    listed,
    nixlRegDList,
    nixlXferDList,
)
from fabric_ray.compat.nixl.metadata import Memory, Metadata, Remote, RemoteAgents
from fabric_ray.compat.nixl.notifications import Notifications
from fabric_ray.compat.nixl.prepared import Prepared
from fabric_ray.compat.nixl.request import DroppedRequests
from fabric_ray.compat.nixl.status import (
    DEFAULT_COMM_PORT,
    as_nixl,
    as_nixl_errors,
    nixl_mem_t,
    nixlInvalidParamError,
    nixlNotFoundError,
)
from fabric_ray.engine import Region, TransferEngine
from fabric_ray.errors import FabricError, InvalidArgument, NotQuiesced

_log = logging.getLogger("nixl.fabric_ray")

PLUGINS = ("UCX", "LIBFABRIC", "FABRIC")
"""Names of backends that callers of NIXL ask for; all are one engine."""
_PARAMETERS = {"device_list": ""}
_MEMORY = ["DRAM_SEG", "VRAM_SEG"]
_QUIESCE_S = 10.0

nixl_backend_handle = int


class AgentMemory:
    """The calls of :class:`nixl_agent` that move no bytes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backends: dict[str, nixl_backend_handle] = {}
        self.plugin_list = list(PLUGINS)
        self.nixl_mems = {kind.name.removesuffix("_SEG"): kind for kind in nixl_mem_t}
        self.nixl_mems |= {"BLOCK": nixl_mem_t.BLK_SEG}
        self.nixl_mems |= {"cpu": nixl_mem_t.DRAM_SEG, "cuda": nixl_mem_t.VRAM_SEG}
        self._engine_or_none: TransferEngine | None = None
        self._registered = Registered()
        self._remotes = RemoteAgents()
        self._notifications = Notifications(name, self._remotes)
        self._dropped = DroppedRequests()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    # backends

    def get_plugin_list(self) -> list[str]:
        """Backends that there are."""
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """The kinds of memory that a backend takes; none for an unknown backend."""
        return list(_MEMORY) if is_plugin(backend) else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """The parameters that a backend takes; none for an unknown backend."""
        return dict(_PARAMETERS) if is_plugin(backend) else {}

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
                engine = self._engine_or_none = _open_engine(self.name, given)
                self._notifications.receive(engine)
                weakref.finalize(self, engine.close)
            self.backends[backend] = next(self._numbers)

    def make_connection(self, remote_agent: str, backends: Sequence[str] = ()) -> None:
        """Begins to connect, so that the first transfer doesn't have to."""
        remote = self._remotes[as_text(remote_agent)]
        with as_nixl_errors():
            self._engine.connect(remote.peer)

    # memory

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixlRegDList:
        """Registers all of these tensors, tuples or descriptors, or none; the caller keeps the
        memory until it is deregistered. Until then tensors refuse to move (MR-1), as those of
        :meth:`TransferEngine.register` do.

        Raises:
            TypeError: what :meth:`get_reg_descs` makes no list of.
            nixlNotSupportedError: neither DRAM nor VRAM.
        """
        descs = self.get_reg_descs(reg_list, mem_type)
        if descs is None:
            raise TypeError("no list of descriptors can be made of that")
        check_supported(descs)
        self._dropped.release()
        engine, done = self._engine, list[tuple[int, Region]]()
        for first, nbytes in descs.ranges():
            try:
                keep = descs.fixed.get(first)
                done.append((first, engine.register_address(first, nbytes, keep=keep)))
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
        self._dropped.release()
        failed: FabricError | None = None
        for first, nbytes in dereg_list.ranges():
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
        return listed(nixlXferDList, descs, mem_type, self.nixl_mems)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList | None:
        """As :meth:`get_xfer_descs`; tuples have a label as well."""
        return listed(nixlRegDList, descs, mem_type, self.nixl_mems)

    def get_serialized_descs(self, descs: DescriptorList) -> bytes:
        """The encoded form; nothing is pickled."""
        return descs.to_bytes()

    def deserialize_descs(self, serialized_descs: bytes) -> DescriptorList:
        """
        Raises:
            nixlMismatchError: anything but what :meth:`get_serialized_descs` makes.
        """
        return descriptors_from_bytes(serialized_descs)

    # metadata

    def get_agent_metadata(self) -> bytes:
        """What others need to reach all that is registered now."""
        changes, regions = self._registered.listed()
        memory = [_described(first, region) for first, region in regions]
        return self._metadata(memory, whole=True, changes=changes)

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """What others need to reach these parts, and this agent if ``inc_conn_info``.

        Raises:
            nixlNotFoundError: memory that is not registered.
        """
        memory = list[Memory]()
        for first, nbytes in descs.ranges():
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
        self._remotes.load(self._engine, found)
        return found.name.encode()

    def remove_remote_agent(self, agent: str) -> None:
        """Forgets it. An agent that is not known is no error, as in NIXL: it may have been lost."""
        self._remotes.forget(as_text(agent))

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Tells the agent that listens there of this one.

        Raises:
            nixlNotSupportedError: without an address; there is no central server.
            nixlRemoteDisconnectError: no agent listens there.
        """
        metadata = self.get_agent_metadata()
        exchange.send(exchange.MetadataRequest("load", self.name, metadata), ip_addr, port)

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
        exchange.send(exchange.MetadataRequest("load", self.name, part), ip_addr, port)

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Learns of the agent that listens there; it is known when this returns."""
        request = exchange.MetadataRequest("tell", as_text(remote_agent))
        self.add_remote_agent(exchange.send(request, ip_addr, port))

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Has the agent that listens there forget this one."""
        exchange.send(exchange.MetadataRequest("forget", self.name), ip_addr, port)

    def check_remote_metadata(self, agent: str, descs: nixlXferDList | None = None) -> bool:
        """Whether an agent is known, and all of these descriptors of it.

        A transfer that ends with :class:`nixlRemoteDisconnectError` has its agent forgotten.
        """
        rows = np.zeros((0, 3), dtype=np.uint64) if descs is None else descs.rows()
        try:
            self._side(as_text(agent), rows)
        except nixlNotFoundError:
            return False
        return True

    def _on_request(self, request: exchange.MetadataRequest) -> bytes:
        """Answers another agent, at the port where this one listens."""
        if request.what == "load":
            self.add_remote_agent(request.metadata)
        elif request.what == "forget":
            self._remotes.forget(request.agent)
        elif request.what == "tell" and request.agent == self.name:
            return self.get_agent_metadata()
        else:
            raise InvalidArgument(f"this is agent {self.name!r}, not {request.agent!r}")
        return b""

    @property
    def _engine(self) -> TransferEngine:
        if self._engine_or_none is None:
            raise nixlInvalidParamError("the agent has no backend; call create_backend() first")
        return self._engine_or_none

    def _side(self, agent: str | bytes | None, rows: Any) -> Prepared[Any]:
        if agent is None:
            return Prepared(None, self._registered.space, rows)
        name = as_text(agent)
        if name != self.name:
            remote = self._remotes[name]
            return Prepared(name, remote.space, rows, remote)
        # Its own memory, as others see it.
        mirrored = Remote.loaded(self._engine, Metadata.from_bytes(self.get_agent_metadata()), None)
        return Prepared(name, mirrored.space, rows)

    def _metadata(
        self, memory: list[Memory], *, whole: bool, address: bool = True, changes: int = 0
    ) -> bytes:
        own = self._engine.address.to_bytes() if address else b""
        return Metadata.of(self.name, own, whole, memory, changes).to_bytes()


def _described(first: int, region: Region) -> Memory:
    return Memory(first, region.nbytes, region.descriptor().to_bytes())


def as_text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def is_plugin(backend: str) -> bool:
    """Whether there is such a backend; a line in the log if not."""
    if backend not in PLUGINS:
        _log.warning("there is no backend %s here; there are %s", backend, ", ".join(PLUGINS))
    return backend in PLUGINS


def _open_engine(name: str, parameters: dict[str, str]) -> TransferEngine:
    """An agent's engine, over the NICs of ``device_list`` if it names any.

    Raises:
        NixlError: it can't be opened; the message says why.
    """
    devices = parameters.get("device_list", "").split(",")
    nics = tuple(filter(None, (device.strip().partition(":")[0] for device in devices)))
    given: dict[str, Any] = {"name": name[:128]} | ({"nics": nics} if nics else {})
    with as_nixl_errors():
        return TransferEngine(**given)
