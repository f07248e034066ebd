"""Contenders that are finished programs: a server and a client that print their own figures."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.cases import Case
from benchmarks.harness.contender import Contender, Effort, Measurement
from fabric_ray.bench.processes import kill, spawn
from fabric_ray.bench.results import ContenderError

_PATIENCE = 60.0
_LISTENING = "0A"


class ProgramContender(Contender):
    """Starts the two programs anew in every turn; a subclass says how and reads the answer."""

    program: str

    def available(self) -> str | None:
        return None if shutil.which(self.program) else f"{self.program} is not installed"

    @abstractmethod
    def command(self, case: Case, port: int, iterations: int, server: bool) -> list[str]:
        """Of the server, or of the client."""

    def environment(self, case: Case) -> dict[str, str]:
        del case
        return {}

    @abstractmethod
    def seconds(self, output: str, case: Case) -> float:
        """Seconds of one operation from the client's output; ValueError if it isn't there."""

    def measure(self, case: Case, effort: Effort) -> Measurement:
        """The program averages over its whole run, so a turn is one sample."""
        iterations = max(10, effort.operations * effort.samples)
        port = free_port()
        env = self.environment(case)
        server, client = (self.command(case, port, iterations, end) for end in (True, False))
        running = [spawn(server, env=env, stderr=subprocess.STDOUT)]
        try:
            _await_listener(port, running[0])
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            running.append(spawn(client, env=env, **pipes))
            output = running[1].communicate(timeout=_PATIENCE)[0].decode(errors="replace")
            return Measurement(seconds=[self.seconds(output, case)])
        except subprocess.TimeoutExpired as error:
            raise ContenderError(f"{self.program} did not end in {_PATIENCE:.0f} s") from error
        except (ValueError, IndexError) as error:
            last = (output.strip().splitlines() or ["it printed nothing"])[-1]
            raise ContenderError(
                f"{self.program}: no figure in its output: {last[:300]}"
            ) from error
        finally:
            for process in reversed(running):
                kill(process, grace=0.2)


def table(output: str) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in output.splitlines()]


def column(rows: Sequence[Sequence[str]], heading: str) -> str:
    """The last row's word under `heading`, in the last table that has it."""
    at = max(index for index, row in enumerate(rows) if heading in row)
    filled = [row for row in rows[at + 1 :] if row]
    return filled[-1][list(rows[at]).index(heading)]


def free_port() -> int:
    # Free on all addresses: other contenders listen on those of other interfaces.
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_listener(port: int, server: subprocess.Popen[bytes]) -> None:
    wanted = f":{port:04X}"
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for family in ("tcp", "tcp6"):
            for _, local, _, state, *_ in table(Path(f"/proc/net/{family}").read_text())[1:]:
                if local.endswith(wanted) and state == _LISTENING:
                    return
        if server.poll() is not None:
            raise ContenderError(f"its server ended at once with status {server.returncode}")
        time.sleep(0.01)
    raise ContenderError(f"its server did not listen on port {port} within 10 s")
