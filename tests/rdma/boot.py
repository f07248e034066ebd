"""Guests for tests: what a command did there, and a plain reason where there can be none."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.lacks import lacks
from tests.rdma.guest.machine import EXIT_GUEST_FAILED, EXIT_TIMEOUT, fetch
from tests.rdma.guest.qemu import die_with_parent
from tests.rdma.guest.report import GuestError

ROOT = Path(__file__).resolve().parents[2]

# Beyond the guest's own time limit: QEMU's start and end.
_GRACE = 60.0


@dataclass(frozen=True)
class Outcome:
    """What a command in a guest has left."""

    status: int
    stdout: str
    stderr: str

    def check(self) -> Outcome:
        """Itself, if the command succeeded; else a failed test that says what it printed."""
        if self.status:
            pytest.fail(f"{self.reason}\n{self.stdout[-6000:]}\n{self.stderr[-6000:]}")
        return self

    @property
    def reason(self) -> str:
        if self.status == EXIT_TIMEOUT:
            return "the time limit passed in the guest"
        if self.status == EXIT_GUEST_FAILED:
            return "there was no guest, or it ended without a status"
        return f"status {self.status} in the guest"


def guest_run(
    command: Sequence[str],
    *,
    hosts: int = 2,
    rails: int = 1,
    setup: Path | None = None,
    timeout: float = 120,
    rw: Sequence[Path] = (),
    packages: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Outcome:
    """Runs a command in a fresh guest; its device on host h and rail r is `rxe_h<h>r<r>`.

    Args:
        setup: a shell script that runs in the guest first, for `tc`, `ip` and so on.
        timeout: seconds for all of it, the start of the guest included.
        rw: folders that the guest may write to.
        packages: Debian packages to have in the guest.
        env: set in the guest, beyond what is set here.
        options: others of `python -m tests.rdma.guest run`.

    Skips the test where no guest can be had; fails it if FABRIC_RAY_RDMA is `require`.
    """
    need_guest(*packages)
    arguments = ["--hosts", str(hosts), "--rails", str(rails), "--timeout", str(timeout)]
    if setup is not None:
        arguments += ["--setup", str(setup)]
    for folder in rw:
        arguments += ["--rw", str(folder)]
    for package in packages:
        arguments += ["--package", package]
    done = subprocess.run(
        [sys.executable, "-m", "tests.rdma.guest", "run", *arguments, *options, "--", *command],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        # A test run that is killed takes its guests along.
        preexec_fn=die_with_parent,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout + _GRACE,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def need_guest(*packages: str) -> None:
    """Skips the test if no guest can be had here; fails it if one is required."""
    reason = why_no_guest(*packages)
    if reason is not None:
        lacks("FABRIC_RAY_RDMA", f"there is no soft-RoCE guest: {reason}")


@cache
def why_no_guest(*packages: str) -> str | None:
    """None, and all that a guest needs is in the cache; or why it can't be had."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    try:
        fetch(packages)
    except GuestError as error:
        return str(error)
    except OSError as error:
        return f"its cache can't be used: {error}"
    return None
