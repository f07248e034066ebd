"""``fabric-ray top`` at a terminal: what it draws while engines work, and how it leaves."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fabric_ray import TransferEngine, observe
from fabric_ray.cli.ending import Code

ROOT = Path(__file__).parents[3]
HOME, LEAVES, CURSOR = b"\x1b[H", b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A terminal of 200 columns with a command in its foreground."""

    def __init__(self, *command: str) -> None:
        self._screen, self._terminal = pty.openpty()
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("4H", 40, 200, 0, 0))
        self.before = termios.tcgetattr(self._terminal)
        self.written = b""
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            env=os.environ | {"TERM": "xterm-256color"},
            start_new_session=True,
            # Ctrl-C goes to the processes of the controlling terminal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    @property
    def settings(self) -> list[object]:
        return list(termios.tcgetattr(self._terminal))

    def press(self, key: bytes) -> None:
        os.write(self._screen, key)

    def until(self, seen: Callable[[str], bool]) -> str:
        """The first frame from now on, the one on the screen included, that is as wanted."""
        end = time.monotonic() + 60
        while not seen(frame := self._frame()):
            assert time.monotonic() < end, f"not seen; the last frame is {frame!r}"
            self._read(0.1)
        return frame

    def ends(self) -> int:
        code = self.process.wait(60)
        while self._read(0.1):
            pass
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._screen)
        os.close(self._terminal)

    def _frame(self) -> str:
        """What was written last, without colours."""
        return re.sub(
            r"\x1b\[[0-9;]*m", "", self.written.rpartition(HOME)[2].decode(errors="replace")
        )

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._screen], [], [], seconds)
        if ready:
            self.written += os.read(self._screen, 1 << 16)
        return bool(ready)


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("FABRIC_RAY_RUN_DIR", str(tmp_path / "run"))
    terminal = Terminal(sys.executable, "-m", "fabric_ray", "top", "--interval", "0.1")
    yield terminal
    terminal.close()
    observe.stop()


def test_a_transfer_is_on_the_screen_for_as_long_as_it_goes_on(
    top: Terminal, pair: tuple[TransferEngine, TransferEngine]
) -> None:
    a, b = pair
    top.until(lambda frame: "no process shows itself" in frame)
    observe.serve()
    idle = top.until(lambda frame: f"pid {os.getpid()}" in frame and "q ends it" in frame)
    assert "send" not in idle
    # No code receives it yet, so it goes on until the test opens the pool.
    with observe.span("request 9"):
        transfer = a.send(a.peer(b.address), b"x" * 5000, timeout=120)
    shown = top.until(lambda frame: "send" in frame and "q ends it" in frame)
    assert "5.00 kB" in shown
    assert "request 9" in shown
    # The way to its peer is up.
    top.until(lambda frame: "send" in frame and re.search(r"\bok\b", frame) is not None)
    b.receive(lambda _: None)
    transfer.wait(30)
    top.until(lambda frame: "send" not in frame and "q ends it" in frame)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(lambda top: top.press(b"q"), Code.DONE, marks=pytest.mark.long),
        (lambda top: top.press(b"\x03"), Code.DONE),
        (lambda top: top.process.terminate(), 128 + signal.SIGTERM),
        pytest.param(
            lambda top: top.process.send_signal(signal.SIGHUP),
            128 + signal.SIGHUP,
            marks=pytest.mark.long,
        ),
    ],
    ids=["q", "Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_it_leaves_the_terminal_as_it_found_it(
    top: Terminal, end: Callable[[Terminal], None], code: int
) -> None:
    top.until(lambda frame: "q ends it" in frame)
    assert top.settings != top.before, "keys come one by one"
    top.press(b"x")
    end(top)
    assert top.ends() == code
    assert top.settings == top.before
    assert top.written.count(LEAVES) == 1
    assert top.written.endswith(CURSOR) or CURSOR in top.written.rpartition(HOME)[2]
    assert b"Traceback" not in top.written


def test_where_no_key_is_heard_it_says_what_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FABRIC_RAY_RUN_DIR", str(tmp_path / "run"))
    command = f"{sys.executable} -m fabric_ray top --interval 0.1 </dev/null"
    terminal = Terminal("/bin/sh", "-c", command)
    try:
        assert "q ends it" not in terminal.until(lambda frame: "Ctrl-C ends it" in frame)
        terminal.press(b"\x03")
        terminal.ends()
    finally:
        terminal.close()


def test_in_a_pipe_it_prints_what_it_sees_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[TransferEngine, TransferEngine]
) -> None:
    monkeypatch.setenv("FABRIC_RAY_RUN_DIR", str(tmp_path / "run"))
    command = [sys.executable, "-m", "fabric_ray", "top", "--interval", "0.1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        late = threading.Timer(60, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            assert "no process shows itself" in process.stdout.readline()
            observe.serve()
            assert any(f"pid {os.getpid()}" in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            assert "\x1b" not in rest
            assert process.wait(60) == Code.DONE
        finally:
            late.cancel()
            process.kill()
            observe.stop()
