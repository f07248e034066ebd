"""One guest from its start to its end: what it prints, its exit status, its console."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.rdma.guest.cache import Cache
from tests.rdma.guest.control import Share, fill_control, shares
from tests.rdma.guest.options import Options
from tests.rdma.guest.packages import need_qemu
from tests.rdma.guest.qemu import (
    choose_accel,
    die_with_parent,
    folder_arguments,
    machine_arguments,
    port_arguments,
)
from tests.rdma.guest.report import say

# Exit statuses that are not the command's own: those of timeout(1) and of `docker run`.
EXIT_TIMEOUT = 124  # the time limit passed
EXIT_GUEST_FAILED = 125  # no guest, or a guest that ended without a status

_BOOT_SECONDS = {"kvm": 20.0, "tcg": 240.0}
_END_SECONDS = 10.0


def fetch(
    packages: Sequence[str] = (), *, kernel: str | None = None, refresh: bool = False
) -> None:
    """Has all that a guest needs in the cache, so that starting one needs no network.

    Raises:
        GuestError: if it can't be had here.
    """
    need_qemu()
    cache = Cache(refresh=refresh)
    cache.kernel(kernel)
    cache.tools(packages)


class Guest:
    """
    Raises:
        GuestError: if what it needs can't be had, or an option names nothing.
    """

    def __init__(self, options: Options, *, interactive: bool = False) -> None:
        self.times: dict[str, float] = {}
        self.accel = choose_accel(options.accel)
        self._options = options
        self._interactive = interactive
        self._status: int | None = None
        self._failed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._tmp = Path(tempfile.mkdtemp(prefix="rdma-guest-"))
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        options = self._options
        self._qemu = need_qemu()
        cache = Cache()
        self._kernel = cache.kernel(options.kernel)
        tools = cache.tools(options.package)
        self._layers = {"kernel": self._kernel / "root", "tools": tools, "host": Path("/")}
        self._shares: list[Share] = shares(options)
        (self._tmp / "ctl").mkdir()
        fill_control(
            self._tmp / "ctl",
            options,
            self._shares,
            interactive=self._interactive,
            failed=EXIT_GUEST_FAILED,
        )

    def run(self) -> int:
        """Starts the guest, passes its output on, and returns the exit status."""
        limit = self._options.timeout
        deadline = time.monotonic() + limit if limit else None
        status = self._run_once(deadline)
        unusable = status is None and "root" not in self.times and not self._failed
        # A KVM that turns out not to work is no reason to fail.
        if unusable and self.accel == "kvm" and self._options.accel == "auto":
            say("no guest with KVM; trying without")
            self.accel = "tcg"
            status = self._run_once(deadline)
        if status is None:
            self.report_console()
            return EXIT_GUEST_FAILED
        return status

    def report_console(self) -> None:
        for name in ("qemu", "console"):
            path = self._tmp / name
            if not path.exists():
                continue
            text = path.read_bytes().decode(errors="replace")
            lines = [line.rstrip() for line in text.splitlines() if line.strip()]
            if lines:
                say(f"end of the {name} output:")
                print("\n".join(lines[-100:]), file=sys.stderr)

    def close(self) -> None:
        """Ends the guest; all that it had is gone."""
        self._stop()
        if self._options.keep:
            say(f"kept: {self._tmp}")
        else:
            shutil.rmtree(self._tmp, ignore_errors=True)

    def _run_once(self, deadline: float | None) -> int | None:
        self._start = time.monotonic()
        names = ["ctl"] if self._interactive else ["out", "err", "ctl"]
        pipes = {name: os.pipe() for name in names}
        self._launch({name: write for name, (_, write) in pipes.items()})
        for _, write in pipes.values():
            os.close(write)
        try:
            return self._listen({read: name for name, (read, _) in pipes.items()}, deadline)
        finally:
            for read, _ in pipes.values():
                os.close(read)
            self._stop()
            self.times["total"] = time.monotonic() - self._start

    def _launch(self, ports: dict[str, int]) -> None:
        command = [
            self._qemu,
            *machine_arguments(self._options, self.accel, self._kernel, list(self._layers)),
            *("-serial", f"file:{self._tmp / 'console'}"),
            *port_arguments(ports),
        ]
        if self._interactive:
            command += ["-chardev", "stdio,id=tty,signal=off", "-device", "virtconsole,chardev=tty"]
        for tag, path in {**self._layers, "ctl": self._tmp / "ctl"}.items():
            command += folder_arguments(tag, path, writable=False)
        for share in self._shares:
            command += folder_arguments(share.tag, share.path, writable=True)
        command += self._options.qemu_arg
        if self._options.verbose:
            say(shlex.join(command))
        with open(self._tmp / "qemu", "wb") as log:
            self._process = subprocess.Popen(
                command,
                pass_fds=list(ports.values()),
                preexec_fn=die_with_parent,
                stdin=None if self._interactive else subprocess.DEVNULL,
                stdout=None if self._interactive else log,
                stderr=log,
            )

    def _listen(self, readers: dict[int, str], deadline: float | None) -> int | None:
        """Until the guest has ended, or has told its status and does not end."""
        boot = self._start + (self._options.boot_timeout or _BOOT_SECONDS[self.accel])
        sinks = {"out": sys.stdout.fileno(), "err": sys.stderr.fileno()}
        control, over = b"", None
        while readers:
            limits = [deadline, None if "ready" in self.times else boot, over]
            wait = min((limit for limit in limits if limit is not None), default=None)
            left = None if wait is None else wait - time.monotonic()
            if left is not None and left <= 0:
                if over is not None:
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    say(f"time limit of {self._options.timeout:g} s reached")
                    return EXIT_TIMEOUT
                say("the guest did not start in time")
                return None
            for fd in select.select(list(readers), [], [], left)[0]:
                data = os.read(fd, 65536)
                if not data:
                    del readers[fd]
                elif readers[fd] == "ctl":
                    *lines, control = (control + data).split(b"\n")
                    for line in lines:
                        self._hear(line.decode())
                else:
                    _write_all(sinks[readers[fd]], data)
            if self._status is not None and over is None:
                over = time.monotonic() + _END_SECONDS
        return self._status

    def _hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "exit":
            self._status = int(rest)
        elif word == "at":
            self.times[rest] = time.monotonic() - self._start
        elif word == "fail":
            say(f"in the guest: {rest}")
            self._failed = True

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._status is not None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                say("the guest has ended, and QEMU has not; it is killed")
        if process.poll() is None:
            process.kill()
            process.wait()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])
