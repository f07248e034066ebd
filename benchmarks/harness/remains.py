"""What contenders leave behind, found and removed.

The harness is the subreaper of everything that it starts (`adopt_orphans`), so a contender's own
helpers (Ray's daemons, forked servers) come back to it when their parent dies and can be ended too.
Shared-memory files are removed only if a process of ours was seen holding them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

_SHM = "/dev/shm/"


def descendants() -> set[psutil.Process]:
    """All living processes below this one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def _held_shm(process: psutil.Process) -> Iterator[str]:
    with contextlib.suppress(psutil.Error, OSError):
        yield from re.findall(f"{_SHM}.*", Path(f"/proc/{process.pid}/maps").read_text())
        yield from (one.path for one in process.open_files() if one.path.startswith(_SHM))


class Remains:
    """Watches which shared memory our processes hold, and clears what outlives them.

    Children that this process had before are none of its business.
    """

    def __init__(self) -> None:
        self._others = descendants()
        self._files: set[str] = set()
        self._seen: set[psutil.Process] = set()
        self.found: list[str] = []

    def look(self) -> None:
        """Remember what is held now; call while processes are alive."""
        for process in descendants() - self._others:
            self._seen.add(process)
            self._files.update(_held_shm(process))

    def clear(self) -> None:
        """End every descendant and remove shared memory of theirs that is still there."""
        self.look()
        for process in descendants() - self._others:
            with contextlib.suppress(psutil.Error):
                self.found.append(f"process {process.pid} ({process.name()})")
                process.kill()
        psutil.wait_procs(self._seen, timeout=5)
        if left := {path for path in self._files if os.path.exists(path)}:
            held = {path for process in psutil.process_iter() for path in _held_shm(process)}
            for path in sorted(left - held):
                # Its owner may be removing it just now.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                    self.found.append(path)
        self._files.clear()
        for segment in _segments_of({process.pid for process in self._seen}):
            self.found.append(f"System V segment {segment}")
            subprocess.run(["ipcrm", "-m", str(segment)], check=False, capture_output=True)


def _segments_of(pids: set[int]) -> list[int]:
    """Unattached System V segments that one of `pids` made."""
    table = Path("/proc/sysvipc/shm")
    if not table.exists() or not shutil.which("ipcrm"):
        return []
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [int(row[1]) for row in rows if int(row[4]) in pids and int(row[6]) == 0]
