"""What goes wrong from outside: signals, sockets, limits; each at its moment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tests.chaos.draw import Fault
from tests.chaos.process_group import ProcessGroup

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def reset_sockets(pid: int, chance: int, transport: str) -> int:
    """Breaks a connection of another process as the network or the peer's host would; how many.

    tcp: a reset to both ends. shm: the socket that shows that a peer lives ends.
    """
    pidfd = os.pidfd_open(pid)
    try:
        links = sorted(int(fd) for fd in os.listdir(f"/proc/{pid}/fd") if _is_socket(pid, fd))
        # A copy, so that reused numbers have no effect.
        for fd in links[chance % max(1, len(links)) :] + links[: chance % max(1, len(links))]:
            copy = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
            if copy < 0:
                code = ctypes.get_errno()
                if code in (1, 38):  # EPERM, ENOSYS
                    raise PermissionError(code, os.strerror(code))
                continue
            with socket.socket(fileno=copy) as link:
                if _break(link, transport):
                    return 1
        return 0
    finally:
        os.close(pidfd)


def _is_socket(pid: int, fd: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    except OSError:
        return False


def _break(link: socket.socket, transport: str) -> bool:
    wanted = socket.AF_INET if transport == "tcp" else socket.AF_UNIX
    try:
        name = link.getpeername()
        if link.family != wanted:
            return False
        if transport == "tcp":
            # Connecting to nothing: the kernel resets the connection.
            nothing = (ctypes.c_char * 16)()
            return bool(_libc.connect(link.fileno(), nothing, 16) == 0)
        # Links bear their listener's name at one end or the other; no other socket is broken.
        names = (n for n in (name, link.getsockname()) if isinstance(n, bytes))
        if not any(b"fabric-ray/" in n for n in names):
            return False
        link.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


class Stage(Protocol):
    """What the faults of a round follow from."""

    @property
    def faults(self) -> tuple[Fault, ...]: ...


class Faults:
    """The faults of one round, from ``start`` on. All are over when the block ends."""

    def __init__(self, group: ProcessGroup, stage: Stage, start: float) -> None:
        self._group, self._stage = group, stage
        self.notes: list[str] = []
        self.resets = 0
        events: list[tuple[float, int, Callable[[], None]]] = []
        for number, fault in enumerate(stage.faults):
            begin, end = self._of(fault)
            events.append((start + fault.at, number, begin))
            if end is not None:
                events.append((start + fault.at + fault.lasts, number, end))
        self._events = sorted(events, key=lambda e: e[:2])
        self._thread = threading.Thread(target=self._run)

    def _of(self, fault: Fault) -> tuple[Callable[[], None], Callable[[], None] | None]:
        member = self._group.members[fault.victim]
        if fault.kind == "kill":
            return member.kill, None
        if fault.kind in ("freeze", "sleep"):
            return (lambda: member.signal(signal.SIGSTOP)), (lambda: member.signal(signal.SIGCONT))
        if fault.kind == "reset":
            return (lambda: self._reset(fault.victim, int(fault.at * 1e6))), None
        if fault.kind == "no_room":
            # Memory that others map is a file without a name: none can grow beyond the limit.
            hard = resource.prlimit(member.pid, resource.RLIMIT_FSIZE)[1]
            return (lambda: self._limit(member.pid, 4096, hard)), (
                lambda: self._limit(member.pid, hard, hard)
            )
        return (lambda: None), None  # its memory is on a full disk

    def _reset(self, victim: int, chance: int) -> None:
        try:
            self.resets += reset_sockets(
                self._group.members[victim].pid, chance, self._group.transport
            )
        except PermissionError as error:
            self.notes.append(f"no sockets were reset: pidfd_getfd: {error.strerror}")
        except OSError:
            pass  # it has died

    def _limit(self, pid: int, soft: int, hard: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

    def _run(self) -> None:
        for when, _, act in self._events:
            time.sleep(max(0.0, when - time.monotonic()))
            act()

    def __enter__(self) -> Faults:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
