"""Processes that are ended for sure, and what they leave behind found and removed.

The harness makes itself the subreaper of everything it starts, so a contender's own helpers
(Ray's daemons, forked servers) come back to it when their parent dies and can be ended too.
Shared-memory files are removed only if a process of ours was seen holding them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_SHM = "/dev/shm/"


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}) failed: {os.strerror(error)}")


def die_with_parent() -> None:
    """Have the kernel end this process when its parent dies, even while it is stopped."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent died."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, tied to the life of this process."""
    guard = shutil.which("setpriv")
    tied = [guard, "--pdeathsig", "KILL", *command] if guard else list(command)
    return subprocess.Popen(
        tied,
        env=None if env is None else {**os.environ, **env},
        pass_fds=pass_fds,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def kill(process: subprocess.Popen[bytes], *, grace: float = 0.0) -> None:
    """End a process and its group; with `grace`, only after giving it that long to leave."""
    if grace > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace)
    signal_group(process, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def descendants(root: int | None = None) -> list[int]:
    """All living processes below a process, this one by default."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            fields = _stat(int(entry.name))
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    open_ends = [os.getpid() if root is None else root]
    while open_ends:
        below = children.get(open_ends.pop(), [])
        found += below
        open_ends += below
    return found


def cpu_seconds(root: int) -> float:
    """CPU time of a process and all below it, also of those that have ended and were waited for.
    The kernel counts in ticks, commonly of 10 ms."""
    ticks = 0
    for pid in (root, *descendants(root)):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _stat(pid)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, the state, on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _held_shm(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if _SHM in line:
                yield line[line.index(_SHM) :].removesuffix(" (deleted)")
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                path = os.readlink(descriptor)
                if path.startswith(_SHM):
                    yield path.removesuffix(" (deleted)")


class Remains:
    """Watches which shared memory our processes hold, and clears what outlives them.

    Children that this process had before are none of its business.
    """

    def __init__(self) -> None:
        self._others = set(descendants())
        self._files: set[str] = set()
        self._pids: set[int] = set()
        self.found: list[str] = []

    def look(self) -> None:
        """Remember what is held now; call while processes are alive."""
        for pid in self._ours():
            self._pids.add(pid)
            self._files.update(_held_shm(pid))

    def clear(self) -> None:
        """End every descendant and remove shared memory of theirs that is still there."""
        self.look()
        for pid in self._ours():
            self.found.append(f"process {pid} ({_name(pid)})")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(self._pids)
        for path in sorted(self._files):
            if os.path.exists(path) and not _held_by_others(path):
                # Its owner may be removing it just now.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                    self.found.append(path)
        self._files.clear()
        for segment in _segments_of(self._pids):
            self.found.append(f"System V segment {segment}")
            subprocess.run(["ipcrm", "-m", str(segment)], check=False, capture_output=True)

    def _ours(self) -> list[int]:
        return [pid for pid in descendants() if pid not in self._others]


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "gone"


def _reap(pids: set[int], limit: float = 5.0) -> None:
    end = time.monotonic() + limit
    left = set(pids)
    while left and time.monotonic() < end:
        for pid in list(left):
            try:
                ended = os.waitpid(pid, os.WNOHANG)[0] == pid
            except ChildProcessError:
                ended = True
            if ended:
                left.discard(pid)
        if left:
            time.sleep(0.01)


def _held_by_others(path: str) -> bool:
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return any(path in _held_shm(pid) for pid in pids)


def _segments_of(pids: set[int]) -> list[int]:
    """Unattached System V segments that one of `pids` made."""
    table = Path("/proc/sysvipc/shm")
    if not table.exists() or not shutil.which("ipcrm"):
        return []
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [int(row[1]) for row in rows if int(row[4]) in pids and int(row[6]) == 0]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit that unwinds: contenders are ended, figures kept."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    numbers: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
