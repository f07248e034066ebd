"""Mooncake's classic ``TransferEngine``: addresses and status as whole numbers, peers as
``host:port``.

Calls return what Mooncake's return, and log why they fail. Peers are this class in other processes,
not Mooncake's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial, partialmethod, wraps
from typing import Any, ParamSpec, TypeVar

import msgspec

from fabric_ray.compat.addresses import DisjointRanges, Op, Registered
from fabric_ray.compat.inbox import Inbox
from fabric_ray.compat.moves import Copies, Move, move_and_wait
from fabric_ray.compat.sessions import Sessions, host_and_port
from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import EngineConfig, Message
from fabric_ray.errors import (
    FabricError,
    InvalidArgument,
    NotQuiesced,
    TransferTimeout,
    Unsupported,
)

_log = logging.getLogger(__name__)

_FAILED = -1
_TOO_LATE = -2
_NOT_REGISTERED = -3
_OVERLAPPED = -7
_NO_METADATA = -200
_QUIESCE_S = 10.0
_LONGEST_NOTE = 65536
_PROTOCOLS: dict[str, dict[str, Any]] = {
    "rdma": {"require": "rdma"},
    "efa": {"require": "libfabric"},
    "tcp": {"transport": ("shm", "tcp")},
    "nvlink": {},
    "nvlink_intra": {},
    "": {},
}
P = ParamSpec("P")
T = TypeVar("T")


def _logged(failed: T) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Has a call return ``failed`` and log why, where it would raise a ``FabricError``."""

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def logged(*args: P.args, **named: P.kwargs) -> T:
            try:
                return call(*args, **named)
            except FabricError as error:
                _log.error("%s: %s", call.__name__, error)
                return failed

        return logged

    return decorate


class TransferOpcode(enum.IntEnum):
    """What a transfer does, seen from the caller."""

    Read = 0
    Write = 1


class TransferNotify:
    """A short message that arrives after a transfer's bytes."""

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name, self.msg = name, msg


class TransferEngine:
    """Mooncake's class of this name. May be used from any thread."""

    def __init__(self) -> None:
        self._registered = Registered()
        self._ranges = DisjointRanges()
        """Of the registrations, until each has ended."""
        self._sessions: Sessions | None = None
        self._batches: dict[int, Move] = {}
        self._numbers = itertools.count(1)
        self._notifies = Inbox[TransferNotify](_log)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._timeout = max(5.0, float(os.environ.get("MC_TRANSFER_TIMEOUT", "30")))

    @_logged(_FAILED)
    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        """Opens the engine and listens for peers.

        Args:
            local_hostname: how peers reach this host, with ``:port`` for one of one's own choice.
            metadata_server: ``P2PHANDSHAKE``; there is no other.
            protocol: ``rdma`` and ``efa`` demand such a NIC (design promise RS-2), unless
                ``MC_FORCE_TCP=1``, ``FABRIC_RAY_REQUIRE`` or ``FABRIC_RAY_TRANSPORT`` says
                otherwise; ``tcp`` takes none.
            device_name: NICs, with commas between; by topology when empty.

        Returns:
            0, or -1.
        """
        with self._opening:  # two threads that call it get one engine, and one of them -1
            if self._sessions is not None:
                raise InvalidArgument("it is initialized; make another TransferEngine")
            if metadata_server != "P2PHANDSHAKE":
                raise Unsupported(
                    "there is no metadata server here; give 'P2PHANDSHAKE', not "
                    f"{metadata_server!r}"
                )
            host, port = host_and_port(local_hostname)
            config = EngineConfig.resolve(None, _options(protocol, device_name))
            sessions = Sessions(host, port, config, self._registered)
            sessions.engine.receive(partial(_keep_notify, self._notifies))
            self._sessions = sessions
        return 0

    def get_rpc_port(self) -> int:
        """The port of this engine's session id."""
        return self._opened().port

    # memory

    @_logged(_FAILED)
    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Lets peers read and write ``capacity`` bytes; the caller keeps them until
        :meth:`unregister_memory`. Where they lie is found out, whatever ``location`` says.

        Returns:
            0; -7 if registered memory overlaps it (MR-1); -1 for another failure.
        """
        engine = self._opened().engine
        if not self._ranges.add(buffer_addr, capacity):
            _log.error(
                "register_memory: %d bytes at %#x overlap registered memory; unregister it first",
                capacity,
                buffer_addr,
            )
            return _OVERLAPPED
        try:
            region = engine.register_address(buffer_addr, capacity)
        except BaseException:
            self._ranges.discard(buffer_addr)
            raise
        self._registered.add(buffer_addr, region)
        return 0

    @_logged(_FAILED)
    def unregister_memory(self, buffer_addr: int) -> int:
        """Returns 0 when no peer can reach the memory any more."""
        region = self._registered.take(buffer_addr)
        if region is None:
            _log.error("unregister_memory: nothing was registered at %#x", buffer_addr)
            return _NOT_REGISTERED
        try:
            region.deregister(_QUIESCE_S)
        except NotQuiesced:
            self._registered.add(buffer_addr, region)  # It may be tried again.
            raise
        self._ranges.discard(buffer_addr)
        return 0

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """All, or none of them."""
        if len(buffer_addresses) != len(capacities):
            _log.error("batch_register_memory: not as many addresses as capacities")
            return _FAILED
        for i, (address, capacity) in enumerate(zip(buffer_addresses, capacities, strict=True)):
            if code := self.register_memory(address, capacity, location):
                self.batch_unregister_memory(buffer_addresses[:i])
                return code
        return 0

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """All that can be; the first failure's code."""
        codes = [self.unregister_memory(address) for address in buffer_addresses]
        return next((code for code in codes if code), 0)

    @_logged(0)
    def allocate_managed_buffer(self, length: int) -> int:
        """The address of memory that peers of this host can map, zeroed and registered; 0 if there
        is none."""
        region = self._opened().engine.alloc(length)
        if not self._ranges.add(region.addr, region.nbytes):
            raise InvalidArgument(
                f"{region.nbytes} bytes at {region.addr:#x} overlap registered memory that was "
                "freed; unregister memory before it is freed"
            )
        self._registered.add(region.addr, region)
        return region.addr

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Gives it back."""
        return self.unregister_memory(buffer_addr)

    @_logged(_FAILED)
    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes, length: int) -> int:
        """Copies into registered memory of this process."""
        self._check_host_memory(dest_address, length)
        ctypes.memmove(dest_address, src_ptr, min(length, len(src_ptr)))
        return 0

    @_logged(b"")
    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """A copy of registered memory of this process; empty if it isn't."""
        self._check_host_memory(source_address, length)
        return ctypes.string_at(source_address, length)

    @_logged(0)
    def get_first_buffer_address(self, segment_name: str) -> int:
        """Where the memory begins that a peer registered first; 0 if it can't be asked or has
        none."""
        return self._opened().learn(segment_name).first or 0

    # transfers

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: int,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Moves ``length`` bytes and returns 0 when they are in place, or -1."""
        return self.batch_transfer_sync(
            target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify
        )

    @_logged(_FAILED)
    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: int,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """As :meth:`transfer_sync`, of many ranges at once: 0 if all are in place.

        A peer that has restarted is written to from the second call on: the first returns -1, for
        the addresses may be those of its last incarnation and have to be asked for again.
        """
        here = self._opened()
        note = None if notify is None else _note(notify)
        copies = Copies(_op(opcode), buffers, peer_buffer_addresses, lengths)
        there = move_and_wait(here, self._registered, target_hostname, copies, self._timeout)
        if note is not None:
            here.engine.send(there.peer, note, timeout=self._timeout).wait()
        return 0

    transfer_sync_write = partialmethod(transfer_sync, opcode=TransferOpcode.Write)
    transfer_sync_read = partialmethod(transfer_sync, opcode=TransferOpcode.Read)
    batch_transfer_sync_write = partialmethod(batch_transfer_sync, opcode=TransferOpcode.Write)
    batch_transfer_sync_read = partialmethod(batch_transfer_sync, opcode=TransferOpcode.Read)

    @_logged(0)
    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: int,
        transport_hint: str = "",
    ) -> int:
        """Begins; returns a number to ask by, or 0 if it can't."""
        here = self._opened()
        copies = Copies(_op(opcode), buffers, peer_buffer_addresses, lengths)
        move = Move(here, self._registered, target_hostname, copies, timeout=self._timeout)
        with self._lock:
            number = next(self._numbers)
            self._batches[number] = move
        return number

    batch_transfer_async_write = partialmethod(batch_transfer_async, opcode=TransferOpcode.Write)
    batch_transfer_async_read = partialmethod(batch_transfer_async, opcode=TransferOpcode.Read)

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits for all of them: 0 if they succeeded, -1 if one failed. Forgets them."""
        codes = [self._end(number) for number in batch_ids]
        return _FAILED if any(codes) else 0

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Begins a write; returns a number for :meth:`transfer_check_status`, or 0."""
        return self.batch_transfer_async_write(
            target_hostname, [buffer], [peer_buffer_address], [length]
        )

    def transfer_check_status(self, batch_id: int) -> int:
        """1 when it is done, 0 while it is under way, -1 if it failed, -2 if it took too long. What
        is over is forgotten."""
        with self._lock:
            move = self._batches.get(batch_id)
        if move is not None and not move.done():
            return 0
        return self._end(batch_id) or 1

    # peers

    def get_notifies(self) -> list[TransferNotify]:
        """Those that have come since the last call, as far as they were kept: 65,536, and 64 MiB,
        are the most."""
        return self._notifies.take()

    @_logged(_NO_METADATA)
    def send_probe(self, peer_server_name: str) -> int:
        """0 if the peer answers."""
        # The answer isn't kept: addresses of an ended incarnation end there.
        self._opened().ask(peer_server_name)
        return 0

    def get_engine(self) -> Any:
        """
        Raises:
            Unsupported: Mooncake's store and process group take Mooncake's own engine alone.
        """
        raise Unsupported(
            "Mooncake's store and process group can't run over fabric-ray's engine; let them make "
            "an engine of their own"
        )

    get_engine_ptr = get_engine

    def _opened(self) -> Sessions:
        if self._sessions is None:
            raise InvalidArgument("it is not initialized; call initialize() first")
        return self._sessions

    def _end(self, number: int) -> int:
        """Waits for a transfer and forgets it: 0, or the code of its failure, which is logged."""
        with self._lock:
            move = self._batches.pop(number, None)
        try:
            if move is None:
                raise InvalidArgument("there is none of this number, or it was over before")
            move.finish()
        except FabricError as error:
            _log.error("transfer %s: %s", number, error)
            return _TOO_LATE if isinstance(error, TransferTimeout) else _FAILED
        return 0

    def _check_host_memory(self, address: int, nbytes: int) -> None:
        space = self._registered.space
        [number] = space.find([address], [nbytes], "this process").region
        if space.regions[number].cuda_device is not None:
            raise Unsupported("the memory is on a GPU; copy it with CUDA")


def _options(protocol: str, device_name: str) -> dict[str, Any]:
    """What a protocol's name asks of the engine, where the environment leaves it open."""
    if protocol not in _PROTOCOLS:
        known = ", ".join(name for name in _PROTOCOLS if name)
        raise Unsupported(f"there is no protocol {protocol!r} here; there are {known}")
    options: dict[str, Any] = {}
    if device_name:
        options["nics"] = tuple(name.strip() for name in device_name.split(",") if name.strip())
    if os.environ.get("MC_FORCE_TCP") == "1":
        return dict(_PROTOCOLS["tcp"])
    if not {"FABRIC_RAY_TRANSPORT", "FABRIC_RAY_REQUIRE"} & os.environ.keys():
        options |= _PROTOCOLS[protocol]
    return options


def _op(opcode: int) -> Op:
    if opcode not in (TransferOpcode.Read, TransferOpcode.Write):
        raise InvalidArgument(f"there is no opcode {opcode!r}; give TransferOpcode.Read or Write")
    return "write" if opcode == TransferOpcode.Write else "read"


def _note(notify: TransferNotify) -> bytes:
    note = msgspec.msgpack.encode((notify.name, notify.msg))
    if len(note) > _LONGEST_NOTE:
        raise InvalidArgument(
            f"a notification of {len(note)} bytes is too long; {_LONGEST_NOTE} are the most"
        )
    return note


def _keep_notify(inbox: Inbox[TransferNotify], message: Message) -> None:
    with contextlib.suppress(msgspec.MsgspecError):
        note = TransferNotify(*from_msgpack(message.data, tuple[str, str]))
        inbox.add(note, len(message.data))


__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
