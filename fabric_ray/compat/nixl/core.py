"""NIXL's ``nixlAgent``, the class that its ``nixl_agent`` wraps, over one engine."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from fabric_ray.compat.addresses import Op, Registered, add_copies
from fabric_ray.compat.inbox import Inbox
from fabric_ray.compat.nixl import exchange
from fabric_ray.compat.nixl.config import nixlAgentConfig
from fabric_ray.compat.nixl.descriptors import (
    DescriptorList,
    nixlRegDList,
    nixlXferDList,
)
from fabric_ray.compat.nixl.metadata import Memory, Metadata, Remote
from fabric_ray.compat.nixl.prepared import Prepared
from fabric_ray.compat.nixl.request import Request, nixlXferTelemetry
from fabric_ray.compat.nixl.status import (
    as_nixl,
    nixl_mem_t,
    nixl_status_t,
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

_log = logging.getLogger("nixl.fabric_ray")

PLUGINS = ("UCX", "LIBFABRIC", "FABRIC")
"""Names of backends that callers of NIXL ask for; all are this engine."""
_MEMORY = ["DRAM_SEG", "VRAM_SEG"]
_SUCCESS, _IN_PROG = nixl_status_t.NIXL_SUCCESS, nixl_status_t.NIXL_IN_PROG
_QUIESCE_S = 10.0
_LONGEST_NOTIFICATION = 65536 - 1024
Name: TypeAlias = str | bytes
T = TypeVar("T")


class _Notification(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    message: bytes


class nixlAgent:
    """An agent. The first backend that is created opens its engine.

    Raises:
        ValueError: no name.
        nixlBackendError: the port to listen at is taken.
    """

    def __init__(self, agent_name: str, config: nixlAgentConfig) -> None:
        if not agent_name:
            raise ValueError("an agent needs a name that others can call it by")
        self._name = agent_name
        telemetry = os.environ.get("NIXL_TELEMETRY_ENABLE", "").lower()
        self._telemetry = telemetry in ("y", "yes", "on", "1", "true") or (
            config.captureTelemetry and not telemetry
        )
        self._engine_or_none: TransferEngine | None = None
        self._backends: dict[int, str] = {}
        self._registered = Registered()
        self._remotes: dict[str, Remote] = {}
        self._prepared: dict[int, Prepared[Any]] = {}
        self._requests: dict[int, Request] = {}
        self._dropped: deque[int] = deque()
        self._notifications = Inbox[tuple[str, bytes]](_log)
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        if config.useListenThread:
            exchange.listen(self, config.listenPort)

    # backends

    def getAvailPlugins(self) -> list[str]:
        return list(PLUGINS)

    def getPluginParams(self, type: str) -> tuple[dict[str, str], list[str]]:
        if type not in PLUGINS:
            raise nixlNotFoundError(f"there is no backend {type!r} here; there are {PLUGINS}")
        return {"device_list": ""}, list(_MEMORY)

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        return self.getPluginParams(self._backend(backend))

    def createBackend(self, type: str, initParams: dict[str, str]) -> int:
        """Opens the engine, if this is the first.

        Args:
            initParams: ``device_list`` names NICs; others are for NIXL's own backends.

        Raises:
            nixlNotFoundError: there is no such backend.
            nixlInvalidParamError: it was created before.
            NixlError: the engine can't be opened; the message says why.
        """
        self.getPluginParams(type)
        without = sorted(initParams.keys() - {"device_list"})
        if without:
            _log.info("parameters of %s that have no effect here: %s", type, ", ".join(without))
        with self._lock:
            if type in self._backends.values():
                raise nixlInvalidParamError(
                    f"backend {type} was created before; use the one that there is"
                )
            if self._engine_or_none is None:
                self._engine_or_none = _engine(self, initParams.get("device_list", ""))
            handle = next(self._numbers)
            self._backends[handle] = type
        return handle

    def queryXferBackend(self, reqh: int) -> int:
        return self._request(reqh).backend

    def makeConnection(self, remote_agent: Name, backends: Sequence[int] = ()) -> nixl_status_t:
        remote = self._remote(remote_agent)
        _asked(lambda: self._engine.connect(remote.peer))
        return _SUCCESS

    # memory

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        """All of them, or none; the caller keeps the memory until it is deregistered.

        Raises:
            nixlNotSupportedError: neither DRAM nor VRAM.
        """
        _check_memory(descs)
        self._release_dropped()
        engine, done = self._engine, list[tuple[int, Region]]()
        for first, nbytes, _ in descs.rows().tolist():
            try:
                done.append((first, engine.register_address(first, nbytes)))
            except FabricError as error:
                for _, region in done:
                    region.deregister(_QUIESCE_S)  # Nobody was told of it.
                raise as_nixl(error) from error
        for first, region in done:
            self._registered.add(first, region)
        return _SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        """Returns when nobody can reach the memory any more.

        Raises:
            nixlNotFoundError: something was not registered; the rest is deregistered.
            nixlBackendError: a peer may still write to it; keep it, and try again.
        """
        self._release_dropped()
        failed: FabricError | None = None
        for first, nbytes, _ in descs.rows().tolist():
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
        return _SUCCESS

    def queryMem(self, descs: DescriptorList, backend: int) -> list[dict[str, str] | None]:
        raise nixlNotSupportedError("files and objects can't be queried; use the file's own path")

    def prepMemView(self, dlist: DescriptorList, backends: Sequence[int] = ()) -> int:
        raise nixlNotSupportedError("there are no memory views for GPU kernels here")

    def releaseMemView(self, mvh: int) -> None:
        raise nixlNotSupportedError("there are no memory views for GPU kernels here")

    # transfers

    def prepXferDlist(self, *args: Any) -> int:
        """``(descs)`` for the local side, or ``(agent, descs)``, or ``(agent, memory, rows)`` with
        rows of (address, bytes, device, stride, count); backends last.

        Raises:
            nixlNotFoundError: an agent that wasn't added, or memory that it hasn't told of.
        """
        self._release_dropped()
        named = isinstance(args[0], str | bytes)
        name: Name = args[0] if named else ""
        rest = args[named:]
        if isinstance(rest[0], DescriptorList):
            _check_memory(rest[0])
            rows = rest[0].rows()
        else:
            rows = np.asarray(rest[1])
        prepared = self._side(_text(name) or None, rows)
        with self._lock:
            handle = next(self._numbers)
            self._prepared[handle] = prepared
        return handle

    def releasedDlistH(self, handle: int) -> nixl_status_t:
        with self._lock:
            if self._prepared.pop(handle, None) is None:
                raise nixlInvalidParamError(f"there is no prepared list {handle}")
        return _SUCCESS

    def makeXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_side: int,
        local_indices: Sequence[int],
        remote_side: int,
        remote_indices: Sequence[int],
        notif_msg: Name = b"",
        backend: Sequence[int] = (),
        skip_desc_merge: bool = False,
    ) -> int:
        """
        Raises:
            nixlInvalidParamError: lists that don't fit one another, or a side that isn't one.
        """
        with self._lock:
            local, remote = self._prepared.get(local_side), self._prepared.get(remote_side)
        if local is None or local.owner is not None:
            raise nixlInvalidParamError("the local side was not prepared as one")
        if remote is None or remote.owner is None:
            raise nixlInvalidParamError("the remote side was not prepared for an agent")
        return self._new(
            operation, (local, local_indices), (remote, remote_indices), notif_msg, backend
        )

    def createXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: Name,
        notif_msg: Name = b"",
        backend: Sequence[int] = (),
    ) -> int:
        """
        Raises:
            nixlNotFoundError: an agent that wasn't added, or memory that is not registered.
            nixlInvalidParamError: lists that don't fit one another.
        """
        for descs in (local_descs, remote_descs):
            _check_memory(descs)
        local = self._side(None, local_descs.rows())
        remote = self._side(_text(remote_agent), remote_descs.rows())
        return self._new(operation, (local, None), (remote, None), notif_msg, backend)

    def postXferReq(self, reqh: int, notif_msg: Name = b"") -> nixl_status_t:
        request = self._request(reqh)
        return _SUCCESS if request.post(_message(notif_msg)) else _IN_PROG

    def getXferStatus(self, reqh: int) -> nixl_status_t:
        return _SUCCESS if self._request(reqh).check() else _IN_PROG

    def getXferTelemetry(self, reqh: int) -> nixlXferTelemetry:
        if not self._telemetry:
            raise nixlNoTelemetryError(
                "telemetry is off; set capture_telemetry or NIXL_TELEMETRY_ENABLE=y"
            )
        return self._request(reqh).telemetry()

    def estimateXferCost(self, req_handle: int) -> tuple[int, int, int]:
        raise nixlNotSupportedError("the cost of a transfer can't be estimated here; measure it")

    def releaseXferReq(self, reqh: int) -> nixl_status_t:
        """Cancels it if it is under way.

        Raises:
            nixlBackendError: it may still write; the handle stays.
        """
        self._request(reqh).cancel()
        with self._lock:
            self._requests.pop(reqh, None)
        return _SUCCESS

    def drop(self, handle: int) -> None:
        """Has a prepared list or a request released soon: with the next call that makes one, or
        that is about memory or notifications.

        Takes no lock and doesn't wait: for the garbage collector, which may come while this thread
        holds a lock of the agent or of the request.
        """
        request = self._requests.get(handle)
        if request is not None:
            request.give_up()
        self._dropped.append(handle)

    def _release_dropped(self) -> None:
        for _ in range(len(self._dropped)):
            try:
                handle = self._dropped.popleft()
            except IndexError:  # another thread was faster
                return
            with self._lock:
                if self._prepared.pop(handle, None) is not None or handle not in self._requests:
                    continue
            # What may still write stays until the agent is closed.
            with suppress(nixlBackendError, nixlInvalidParamError):
                self.releaseXferReq(handle)

    # notifications

    def getNotifs(
        self, notif_map: dict[str, list[bytes]], backends: Sequence[int] = ()
    ) -> dict[str, list[bytes]]:
        """Adds what has come and was kept: 65,536, and 64 MiB, are the most."""
        self._release_dropped()
        for agent, message in self._notifications.take():
            notif_map.setdefault(agent, []).append(message)
        return notif_map

    def genNotif(self, remote_agent: Name, msg: Name, backends: Any = ()) -> nixl_status_t:
        """Returns when the other process has it; its agent finds it a moment later."""
        transfer = self._notifier(_text(remote_agent))(_message(msg))
        if transfer is not None:
            _asked(transfer.wait)
        return _SUCCESS

    # metadata

    def getLocalMD(self) -> bytes:
        _, regions = self._registered.listed()
        return self._metadata([_told(first, region) for first, region in regions], whole=True)

    def getLocalPartialMD(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        """
        Raises:
            nixlNotFoundError: memory that is not registered.
        """
        memory = list[Memory]()
        for first, nbytes, _ in descs.rows().tolist():
            side = self._side(None, np.array([[first, nbytes, 0]], dtype=np.int64))
            places, _ = side.take()
            region = side.space.regions[int(places.region[0])]
            memory.append(_told(first, region.slice(int(places.offset[0]), nbytes)))
        return self._metadata(memory, address=inc_conn_info, whole=False)

    def loadRemoteMD(self, remote_metadata: bytes) -> bytes:
        """The agent's name.

        Raises:
            nixlMismatchError: not metadata.
        """
        metadata = Metadata.from_bytes(remote_metadata)
        with self._lock:
            known = self._remotes.get(metadata.name)
            self._remotes[metadata.name] = Remote.loaded(self._engine, metadata, known)
        return metadata.name.encode()

    def invalidateRemoteMD(self, remote_agent: Name) -> nixl_status_t:
        with self._lock:
            if self._remotes.pop(_text(remote_agent), None) is None:
                raise nixlNotFoundError(f"agent {_text(remote_agent)!r} was not added")
        return _SUCCESS

    def checkRemoteMD(self, remote_agent: Name, descs: nixlXferDList) -> nixl_status_t:
        try:
            self._side(_text(remote_agent), descs.rows())
        except nixlNotFoundError:
            return nixl_status_t.NIXL_ERR_NOT_FOUND
        return _SUCCESS

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        exchange.run(exchange.Errand("load", self._name, self.getLocalMD()), ip_addr, port)

    def sendLocalPartialMD(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[int] = (),
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        part = self.getLocalPartialMD(descs, inc_conn_info)
        exchange.run(exchange.Errand("load", self._name, part), ip_addr, port)

    def fetchRemoteMD(
        self, remote_agent: Name, ip_addr: str = "", port: int = 0, label: str = ""
    ) -> None:
        errand = exchange.Errand("tell", _text(remote_agent))
        self.loadRemoteMD(exchange.run(errand, ip_addr, port))

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        exchange.run(exchange.Errand("forget", self._name), ip_addr, port)

    @property
    def _engine(self) -> TransferEngine:
        if self._engine_or_none is None:
            raise nixlInvalidParamError("the agent has no backend; call create_backend() first")
        return self._engine_or_none

    def _backend(self, handle: int) -> str:
        with self._lock:
            if handle not in self._backends:
                raise nixlInvalidParamError(f"there is no backend with handle {handle}")
            return self._backends[handle]

    def _remote(self, name: Name) -> Remote:
        with self._lock:
            found = self._remotes.get(_text(name))
        if found is None:
            raise nixlNotFoundError(f"agent {_text(name)!r} was not added; load its metadata first")
        return found

    def _request(self, handle: int) -> Request:
        with self._lock:
            found = self._requests.get(handle)
        if found is None:
            raise nixlInvalidParamError(f"there is no request {handle}, or it was released")
        return found

    def _side(self, agent: str | None, rows: Any) -> Prepared[Any]:
        if agent is None:
            return Prepared(None, self._registered.space, rows)
        if agent == self._name:
            return Prepared(agent, self._mirrored(), rows)
        return Prepared(agent, self._remote(agent).space, rows)

    def _mirrored(self) -> Any:
        """This agent's own memory as others see it."""
        own = Metadata.from_bytes(self.getLocalMD())
        return Remote.loaded(self._engine, own, None).space

    def _new(
        self,
        operation: nixl_xfer_op_t,
        local: tuple[Prepared[Region], Sequence[int] | None],
        remote: tuple[Prepared[RemoteRegion], Sequence[int] | None],
        notif_msg: Name,
        backends: Sequence[int],
    ) -> int:
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
            backend = backends[0] if backends else next(iter(self._backends))
        self._backend(backend)
        batch = Batch()
        op = nixl_xfer_op_t(operation)
        way: Op = "write" if op is nixl_xfer_op_t.NIXL_WRITE else "read"
        sides = (local[0].space.regions, here), (remote[0].space.regions, there)
        _asked(lambda: add_copies(batch, way, *sides, nbytes))
        size = (int(nbytes.sum()), len(nbytes))
        notify = self._notifier(remote[0].owner or "")
        request = Request(engine, batch, size, notify, _message(notif_msg), backend)
        with self._lock:
            handle = next(self._numbers)
            self._requests[handle] = request
        return handle

    def _notifier(self, agent: str) -> Callable[[bytes], Any]:
        engine, me = self._engine, self._name
        if agent == me:
            return lambda message: self._keep(me, message)
        peer = self._remote(agent).peer
        return lambda message: engine.send(peer, msgspec.msgpack.encode(_Notification(me, message)))

    def _keep(self, agent: str, message: bytes) -> None:
        self._notifications.add((agent, message), len(agent) + len(message))

    def _hear(self, message: Message) -> None:
        try:
            said = from_msgpack(message.data, _Notification)
        except msgspec.MsgspecError as error:
            _log.warning("a notification was dropped: %s", error)
            return
        with self._lock:
            known = self._remotes.get(said.agent)
        if said.agent == self._name or (known is not None and known.peer.id != message.sender):
            _log.warning("a notification was dropped: its sender is not agent %r", said.agent)
            return
        self._keep(said.agent, said.message)

    def _metadata(self, memory: list[Memory], *, whole: bool, address: bool = True) -> bytes:
        own = self._engine.address.to_bytes() if address else b""
        return Metadata.of(self._name, own, whole, memory).to_bytes()

    def attend(self, errand: exchange.Errand) -> bytes:
        """What another agent asks of this one."""
        if errand.what == "load":
            self.loadRemoteMD(errand.metadata)
        elif errand.what == "forget":
            with self._lock:
                self._remotes.pop(errand.agent, None)
        elif errand.what == "tell" and errand.agent == self._name:
            return self.getLocalMD()
        else:
            raise InvalidArgument(f"this is agent {self._name!r}, not {errand.agent!r}")
        return b""


def _engine(agent: nixlAgent, devices: str) -> TransferEngine:
    names = (name.strip().partition(":")[0] for name in devices.split(","))
    nics = tuple(name for name in names if name)
    given: dict[str, Any] = {"name": agent._name[:128]} | ({"nics": nics} if nics else {})
    engine = _asked(lambda: TransferEngine(**given))
    me = weakref.ref(agent)

    def hear(message: Message) -> None:
        if (alive := me()) is not None:
            alive._hear(message)

    engine.receive(hear)
    weakref.finalize(agent, engine.close)
    return engine


def _told(first: int, region: Region) -> Memory:
    return Memory(first, region.nbytes, region.descriptor().to_bytes())


def _check_memory(descs: DescriptorList) -> None:
    if descs.getType() not in (nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG):
        raise nixlNotSupportedError(
            f"{descs.getType().name} can't be registered here; only DRAM and VRAM can"
        )


def _text(name: Name) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _message(message: Name) -> bytes:
    data = message if isinstance(message, bytes) else message.encode()
    if len(data) > _LONGEST_NOTIFICATION:
        raise nixlInvalidParamError(
            f"a notification of {len(data)} bytes is too long; {_LONGEST_NOTIFICATION} are the most"
        )
    return data


def _asked(call: Callable[[], T]) -> T:
    """What an engine's call returns; its errors as NIXL's."""
    try:
        return call()
    except FabricError as error:
        raise as_nixl(error) from error


__all__ = ["PLUGINS", "nixlAgent", "nixlAgentConfig", "nixlBackendError"]
